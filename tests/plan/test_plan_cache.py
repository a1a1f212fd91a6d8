"""Plans that were made before are found by all that they depend on; what cannot be read is as good as none."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from kept_plans import MESH, SPECS, W, X, noted_searches, partitioned, same
from plan_edits import MLP

import sdy_jax as sdy
from sdy_jax.plan.cache_entry import checked_entry
from sdy_jax.plan.digests import FOLDER, LIMIT, PLAN, Key, cache_folder, program_text


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)


def step(w, x):
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))


def conditional(w, x):
    def body(carry):
        i, h = carry
        return i + 1, jax.lax.cond(i % 2 == 0, lambda h: jnp.tanh(h @ w["up"]) @ w["down"], lambda h: h * 2, h)

    return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]


def scanned(w, x):
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5]), w)
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["up"]) @ w["down"], h.sum()), x, layers)


def printing(w, x):
    h = x @ w["up"]
    jax.debug.print("sum {}", h.sum())
    return h @ w["down"]


def of(fun=step, **options):
    return partitioned(fun, **options)


@pytest.fixture
def searches(monkeypatch):
    """How often something was planned."""
    return noted_searches(monkeypatch)


@pytest.mark.parametrize("fun", [step, loss, conditional, scanned, printing])
@pytest.mark.parametrize("costs", [None, sdy.CostModel.of_machine("tpu v5e", MESH.axis_names)], ids=["bytes", "v5e"])
def test_what_is_found_is_the_plan_that_was_made(folder, searches, fun, costs):
    made, found = (of(fun, costs=costs) for _ in range(2))
    first, again = made.plan(W, X), found.plan(W, X)
    assert searches == [fun.__name__]
    for stage in ("imported", "propagated", "partitioned"):
        assert program_text(again.stages[stage]) == program_text(first.stages[stage])
    assert again.record() == first.record()
    assert again.record(choices=True).choices == first.record(choices=True).choices
    assert str(again) == str(first)
    same(found(W, X), jax.jit(fun)(W, X))


def test_derivatives_are_found_too(folder, searches):
    for _ in range(2):
        same(jax.grad(of(loss))(W, X), jax.grad(loss)(W, X))
    assert searches == ["loss", "loss (forward of the derivative)", "loss (backward)"]


def test_layouts_that_are_left_to_the_planner_are_found(folder, searches):
    made, found = (of(in_shardings=sdy.AUTO, out_shardings=sdy.AUTO, memory="64KiB") for _ in range(2))
    first, again = made.plan(W, X), found.plan(W, X)
    assert searches == ["step"]
    assert again.input_specs == first.input_specs and again.automatic == first.automatic
    same(found(W, X), step(W, X))


def test_what_is_computed_again_is_found(folder, searches):
    def deep(w, x):
        def value(w):
            h = x
            for _ in range(6):
                h = checkpoint_name(jnp.tanh(h @ w["up"]) @ w["down"], "h")
            return h.sum()

        return jax.grad(value)(w)

    x = jnp.tile(X, (64, 1))
    limit = 0.7 * of(deep).plan(W, x).memory.peak
    first, again = (of(deep, memory=limit).plan(W, x) for _ in range(2))
    assert len(searches) == 2
    assert first.recomputed is not None and again.record() == first.record()
    assert again.mlir("recomputed") == first.mlir("recomputed")


@pytest.mark.parametrize(
    "other",
    [
        {"costs": sdy.CostModel(latency=1e-6, bandwidth={"data": 1e9, "model": 1e9})},
        {"layouts": "local"},
        {"constraints": "hints"},
        {"memory": "1MiB"},
        {"combine": True},
        {"recompute": False},
        {"in_shardings": (SPECS[0], P())},
        {"out_shardings": SPECS[0]},
        {"mesh": jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)},
        {"uneven": "replicate"},
        {"donate_argnums": 0},
    ],
    ids=lambda other: next(iter(other)),
)
def test_with_other_options_it_is_planned(folder, searches, other):
    of().plan(W, X)
    plan = of(**other).plan(W, X)
    assert len(searches) == 2
    assert of(**other).plan(W, X).mlir() == plan.mlir()
    assert len(searches) == 2


EDITS = {
    "nothing": (lambda text: text, True),
    "a comment behind": (lambda text: text + "\n# the end\n", True),
    "a comment before": (lambda text: "# what this is\n" + text, True),
    "comments between": (
        lambda text: text.replace("        hidden = jnp", "        # then\n\n        hidden = jnp"),
        True,
    ),
    "another variable": (lambda text: text.replace("hidden", "inner"), True),
    "another name of a function": (lambda text: text.replace("layer(", "block("), True),
    "another scope": (lambda text: text.replace('"first")', '"begin")'), True),
    "another argument": (lambda text: text.replace("params", "weights"), False),
    "a constant": (lambda text: text.replace("jnp.tanh(hidden)", "jnp.tanh(hidden * 0.5)"), False),
    "another op": (lambda text: text.replace("jnp.tanh", "jnp.sin"), False),
    "another width": (lambda text: text + "\ndef arguments():\n    return _wide()\n", False),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_planned_where_the_program_is_another_one(folder, searches, tmp_path, edit):
    change, is_found = EDITS[edit]
    wide = "\n\ndef _wide():\n    w = {'up': jnp.ones((16, 64)), 'down': jnp.ones((64, 16))}\n"
    wide += "    return {'first': w, 'second': w, 'out': w}, jnp.ones((8, 16))\n"
    place = tmp_path / "source"
    place.mkdir()
    (place / "0").mkdir()
    text = MLP + wide
    first = _planned_at(place, text)
    again = _planned_at(place, change(text))
    assert len(searches) == (1 if is_found else 2)
    if not is_found:
        return
    assert again.mlir() == first.mlir()
    os.environ.pop(FOLDER)
    now = _planned_at(place, change(text))
    assert again.record() == now.record()
    assert again.record(choices=True).choices == now.record(choices=True).choices
    assert str(again) == str(now)


def _planned_at(place: Path, text: str) -> sdy.Plan:
    """The plan of a text that always has the same path."""
    import importlib.util

    path = place / "model.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("model", path)
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = before
    w = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
    arguments = getattr(module, "arguments", lambda: ({"first": w, "second": w, "out": w}, jnp.ones((8, 16))))()
    return sdy.partition(module.step, mesh=MESH, in_shardings=module.IN_SHARDINGS).plan(*arguments)


def broken(data):
    yield b""
    yield data[:10]
    yield data[: len(data) // 2]
    yield data[:-1]
    yield data[:40] + bytes([data[40] ^ 1]) + data[41:]
    yield b"something else" * 100
    yield data + b"x"


def kept(folder, suffix=PLAN):
    return sorted(folder.glob(f"*{suffix}"))


@pytest.mark.parametrize("number", range(7))
def test_a_broken_entry_is_as_good_as_none(folder, searches, number):
    first = of().plan(W, X)
    (path,) = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(list(broken(whole))[number])
    again = of()
    assert again.plan(W, X).mlir() == first.mlir()
    same(again(W, X), step(W, X))
    assert len(searches) == 2
    checked_entry(path.stem, path.read_bytes())  # which was written again


def test_an_entry_under_the_name_of_another_program_is_not_taken(folder, searches):
    """As where a file was copied: it has the digest of its own key."""
    of().plan(W, X)
    (path,) = kept(folder)
    of(loss).plan(W, X)
    (other,) = set(kept(folder)) - {path}
    path.write_bytes(other.read_bytes())
    again = of()
    same(again(W, X), step(W, X))
    assert len(searches) == 3


def test_programs_whose_custom_ops_say_how_they_are_split_are_planned(folder, searches):
    def run(w, x):
        return sdy.custom_op(lambda a: a * 2, "([i, j])->([i, j]) {i=16, j=32}")(x) @ w["up"]

    for _ in range(2):
        of(run).plan(W, X)
    assert len(searches) == 2 and not folder.exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file" / "plans"))
    with pytest.warns(UserWarning, match="plans cannot be kept in .*file/plans: Not a directory"):
        of().plan(W, X)


def test_old_plans_go(folder, monkeypatch):
    of().plan(W, X)
    monkeypatch.setenv(LIMIT, "1KB")
    of(loss).plan(W, X)
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setenv(LIMIT, "much")
    with pytest.raises(sdy.SdyError, match="SDY_JAX_CACHE_SIZE=much; expected the bytes"):
        of(loss).plan(W, X)


def test_plans_are_kept_beside_what_jax_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    assert cache_folder() is None
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert cache_folder().path == tmp_path / "sdy_jax_plans"
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
        assert cache_folder() is None
        monkeypatch.setenv(FOLDER, str(tmp_path / "own"))
        assert cache_folder().path == tmp_path / "own"
        monkeypatch.setenv(FOLDER, "0")
        assert cache_folder() is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


PROCESS = """
import sys
import jax, jax.numpy as jnp
import sdy_jax as sdy
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def f(w, x):
    return jnp.tanh(x @ w) @ w.T
print("ready", flush=True)
sys.stdin.readline()
for n in range(int(sys.argv[1])):
    g = sdy.partition(lambda w, x: f(w, x) * n, mesh=mesh, in_shardings=(P(None, "x"), P("x")))
    plan = g.plan(jnp.ones((16, 32)), jnp.ones((8, 16)))
    print(plan.fingerprint(), flush=True)
"""


def started(count: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.more("several processes at once")
def test_processes_share_a_folder(folder):
    processes = [started(3) for _ in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = {process.communicate(timeout=300)[0] for process in processes}
    assert len(printed) == 1 and all(process.returncode == 0 for process in processes)
    assert all(path.suffix == ".plan" for path in folder.iterdir())


@pytest.mark.more("two processes")
def test_entries_are_the_same_bytes_in_every_process(folder, monkeypatch):
    kept = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        monkeypatch.setenv(FOLDER, str(folder / seed))
        started(1).communicate("go\n", timeout=300)
        (path,) = (folder / seed).iterdir()
        kept.append((path.name, path.read_bytes()))
    assert kept[0] == kept[1]


def test_what_is_found_has_the_lines_of_now_without_being_moved_there(folder, monkeypatch):
    of().plan(W, X)
    monkeypatch.setattr("sdy_jax.plan.cache.Relocation", None)
    of().plan(W, X)


def test_keys_are_those_of_programs_without_lines_and_of_all_else():
    def key(fun):
        given = of(fun).plan(W, X)
        return Key.of(given.traced, given.planned_with, given.source, ())

    def scaled(factor):
        return lambda w, x: (x @ w["up"]) * factor

    def lower(w, x):
        return (x @ w["up"]) * np.float32(1)

    same_program = [key(scaled(np.float32(1))), key(lower)]
    assert same_program[0].name == same_program[1].name and same_program[0].lines != same_program[1].lines
    others = [np.float32(1), np.nextafter(np.float32(1), np.float32(2)), np.float32(-1), np.float32("nan"), 1, 2]
    others += [np.float32(0), np.float32(-0.0)]
    names = [key(scaled(factor)).name for factor in others]
    assert names[0] == names[4]  # a Python 1 is the float32 that it meets
    assert len({*names}) == len(others) - 1


@pytest.mark.more("processes that are killed")
def test_a_process_that_is_killed_while_it_writes_leaves_no_broken_entry(folder, searches):
    process = started(10**6)
    process.stdout.readline()
    process.stdin.write("go\n")
    process.stdin.flush()
    process.stdout.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for path in folder.glob("*.plan"):
        checked_entry(path.stem, path.read_bytes())  # raises if it is broken
    of().plan(W, X)
    of().plan(W, X)
    assert len(searches) == 1


def test_nothing_is_kept_unasked(searches, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    assert cache_folder() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of().plan(W, X)
        of().plan(W, X)
    assert len(searches) == 2


def test_the_command_line_tells_and_empties_it(folder, capsys):
    from sdy_jax.cli.main import main

    of().plan(W, X)
    size = sum(os.path.getsize(path) for path in folder.iterdir())
    assert main(["doctor", "--json"]) == 0
    (found,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "plans"]
    assert found["status"] == "ok" and f"in {folder}" in found["detail"] and size
    assert main(["clear"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not list(folder.iterdir())
