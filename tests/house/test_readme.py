"""What README and the guide show is what one gets: programs and commands run, and print what is said there.

Programs share names, as they do for a reader: what an earlier one has made, and what the text takes for granted.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from page_programs import anchors
from places import ROOT
from python_modules import Modules, assert_alike

import sdy_jax as sdy
from sdy_jax.calls.planned_call import PlannedCall
from sdy_jax.cli.main import main

sys.path.insert(0, str(ROOT / "examples"))
import train_lm

README = (ROOT / "README.md").read_text()
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
TEXT = "\n".join([README, *(page.read_text() for page in GUIDE)])
BLOCKS = [
    (language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE))
    for indent, language, text in re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", TEXT, re.DOTALL | re.MULTILINE)
]
FIRST = BLOCKS[0][1]
COMMANDS = re.findall(r"^    (\S.*)$", re.sub(r"^( *)```.*?^ *```$", "", TEXT, flags=re.DOTALL | re.MULTILINE), re.M)
ELSEWHERE = {
    "scripts/": "they are run by hand: the first two are what runs this",
    "pip install": "it needs a network",
    "--inputs": "the options of `run`, which are tried below",
    "--random": "the options of `run`, which are tried below",
}
"""Lines that do not run here, by how they begin, and why."""


def block(beginning: str) -> str:
    (found,) = [text for _, text in BLOCKS if beginning in text]
    return found


def words(text: str) -> str:
    """For texts whose lines are broken to fit."""
    return " ".join(text.split())


def executed(program: str, names: dict[str, Any], name: str, line: int = 1) -> dict[str, Any]:
    """Runs a program as the file `name`, from a line on."""
    exec(compile("\n" * (line - 1) + program, name, "exec", dont_inherit=True), names)
    return names


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the first program makes, but for the devices, which are there already."""
    program = re.sub(r"^jax.config.update.*", "", FIRST, flags=re.MULTILINE)
    return executed(program, {"__name__": "mlp"}, "mlp.py")


CALLS: list[PlannedCall] = []
"""The calls that the programs above the last test have planned."""


@pytest.fixture(autouse=True, scope="module")
def _calls_recorded() -> Iterator[None]:
    planned = PlannedCall.__init__

    def recorded(self: PlannedCall, *args: Any, **kwargs: Any) -> None:
        planned(self, *args, **kwargs)
        CALLS.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlannedCall, "__init__", recorded)
        yield
    CALLS.clear()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def printed(capsys: pytest.CaptureFixture[str], act: Callable[[], Any]) -> str:
    capsys.readouterr()
    act()
    return capsys.readouterr().out


def output_of(program: str, folder: Path, name: str) -> str:
    (folder / name).write_text(program)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, name], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_prints_what_it_says_it_prints(tmp_path):
    (language, program), (_, wanted) = BLOCKS[:2]
    assert language == "python" and output_of(program, tmp_path, "mlp.py") == wanted


def test_its_plan_can_be_asserted_on(names):
    executed(block("assert {c.kind"), names, "mlp.py")


def test_plans_are_kept_compared_and_limited(names, capsys):
    made = dict(names)
    assert (
        printed(capsys, lambda: executed(block("plan.assert_collectives("), made, "mlp.py"))
        == "plan of mlp: no differences\n"
    )
    with pytest.raises(AssertionError, match="all_reduce: 1 per call, expected 4"):
        made["plan"].assert_collectives(all_reduce=4)
    within, arguments = made["mlp_within"], (names["x"], names["weights"])
    np.testing.assert_allclose(within(*arguments), names["y"], rtol=1e-6)
    whole = sdy.partition(names["mlp"], mesh=names["mesh"], budget=made["limits"], out_shardings=P())
    with pytest.raises(sdy.ContractError, match="all_gather is forbidden"):
        whole.plan(*arguments)


def test_a_plan_is_pinned(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = executed(block("pinned = sdy.partition("), dict(names), "scores.py")
    found = made["pinned"](made["tokens"], made["vocabulary"])
    np.testing.assert_allclose(found, made["scores"](made["tokens"], made["vocabulary"]), rtol=1e-6)


@pytest.mark.more("README's call of verify; tests/equivalence has its own")
def test_a_function_is_verified(names, capsys):
    text = printed(capsys, lambda: executed(block("sdy.verify(mlp"), dict(names), "README.md"))
    assert text.startswith("verify of mlp: 12 cases, all the same as the plain function")
    assert "data=2, model=3" in text


def test_a_plan_is_explored(names, tmp_path):
    executed(block("plan.to_html("), {**names, "plan": names["mlp"].plan(names["x"], names["weights"])}, "explore.py")
    assert "<title>mlp: plan</title>" in (tmp_path / "mlp.html").read_text(encoding="utf-8")


def test_moves_at_the_border(names):
    split = NamedSharding(names["mesh"], P(None, "model"))
    plan = names["mlp"].plan(jax.device_put(names["x"], split), names["weights"])
    assert block("moves at the border") in f"{plan}\n"


def test_costs_and_compiled_programs(names, capsys):
    names["mlp_function"], own = names["mlp"].__wrapped__, names["mlp"]
    program = block("of_machine")
    timed = executed(program, dict(names), "mlp.py")["mlp"]
    np.testing.assert_allclose(timed(names["x"], names["weights"]), own(names["x"], names["weights"]), rtol=1e-5)
    assert "all-reduce" in printed(capsys, lambda: executed(block("collectives_in_hlo("), names, "mlp.py"))


def test_layouts_of_the_whole_program(names):
    names["mlp_function"] = names["mlp"].__wrapped__
    executed(block('layouts="local"'), names, "README.md")
    for name in ("frugal", "op_by_op", "propagated"):
        found = names[name](names["x"], names["weights"])
        assert jnp.allclose(found, names["mlp_function"](names["x"], names["weights"]), rtol=1e-4, atol=1e-4)


def test_automatic_layouts(names, capsys):
    names["mlp_function"] = names["mlp"].__wrapped__
    program = block('out_shardings=sdy.AUTO, memory="1MiB"')
    text = printed(capsys, lambda: executed(program, names, "README.md"))
    assert re.search(r"automatic layouts\n *(in_shardings=.*)", text)[1].startswith(program.split("layouts: ")[1][:40])


@pytest.mark.more("README's program on several meshes")
def test_the_best_of_several_meshes(names, capsys):
    known = names | {"mlp_function": names["mlp"].__wrapped__, "y": names["mlp"](names["x"], names["weights"])}
    descended = block('out_shardings=sdy.AUTO, memory="1MiB"').partition("\n\n\n")[0]
    program = f"{descended}\n{block('meshes = [')}"
    assert printed(capsys, lambda: executed(program, known, "README.md")) == block("meshes of descended")


@pytest.mark.more("an output of README")
def test_the_program_as_python(tmp_path):
    output_of(f"{FIRST}\n{block('to_python(')}", tmp_path, "mlp.py")
    assert block("def mlp_on_device") in (tmp_path / "on_devices.py").read_text()


@pytest.mark.more("an output of README")
def test_why(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, mesh = train_lm.Config(layers=1), jax.make_mesh((2, 4), ("data", "model"))
    specs, tokens = train_lm.shardings(config, mesh)
    params = jax.eval_shape(lambda: train_lm.init_params(config, jax.random.key(0)))
    window = jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)
    program = """
def gradients(params, window):
    return jax.grad(train_lm.loss_fn)(params, window, lambda x: x)
plan = sdy.partition(gradients, mesh=mesh, in_shardings=(specs["params"], tokens)).plan(params, window)
"""
    known = {"jax": jax, "sdy": sdy, "train_lm": train_lm, **locals()}
    names = executed(program, known, "train.py", line=9)
    said = printed(capsys, lambda: executed(block("qkv']\"))"), names, "train.py"))
    assert words(said).startswith(words(block("result['layers'][0]['qkv']  f32")))
    assert "chosen for the whole program" in said


def test_why_layouts_were_chosen(names, capsys):
    known = executed(block("def attended"), dict(names), "attention.py")
    said = printed(capsys, lambda: print(known["plan"].why("x").instead[0]))
    assert words(block("chosen for the whole program, with")) == words(said)
    assert block("layouts: chosen") in str(known["plan"])
    assert str(known["plan"]).endswith(block("fix-its\n").rstrip())


def test_why_not(names):
    program = """
@sdy.partition(mesh=mesh, in_shardings=P("data"))
def block(x):
    y = jax.lax.with_sharding_constraint(jnp.tanh(x), P())
    return x + y
"""
    made = executed(program, dict(names), "model.py", line=17)["block"]
    plan = made.plan(jax.ShapeDtypeStruct((64, 128), jnp.float32))
    assert words(str(plan.why_not("%1", "data"))) == words(block("sharding_constraint at model.py:20"))


def test_trees_of_specifications_for_whole_models(names, capsys):
    known = dict(names) | {"mlp_function": lambda x, w: jax.nn.gelu(x @ w["up"]) @ w["down"]}
    program = block("ScaleByAdamState(count").strip()
    assert words(printed(capsys, lambda: executed(block("sdy.tensor_parallel(weights"), known, "step.py"))) == words(
        program.replace("(count=P(),\n    ", "(count=P(), ")
    )
    weights, moments = known["trained"](known["weights"], known["optimizer"].init(known["weights"]), known["x"])
    assert moments[0].mu["up"].sharding.spec == weights["up"].sharding.spec == P("data", "model")


def test_layers_over_a_mesh_axis(names, capsys):
    known = dict(names)
    out = printed(capsys, lambda: executed(block("sdy.pipeline(block, layers"), known, "piped.py"))
    assert out == block("stage 1      F0B0")
    layers, x = known["layers"], known["x"]

    def scanned(layers, x, y):
        step = lambda x, w: (x + jax.nn.gelu(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return jnp.mean((jax.lax.scan(step, x, layers)[0] - y) ** 2)

    wanted = jax.value_and_grad(scanned)(layers, x, x)
    found = known["piped_value"], known["piped_slopes"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)


def test_a_step_is_partitioned_whole(names):
    def loss(weights, x):
        return jnp.sum(names["mlp"].__wrapped__(x, weights))

    specs = {"up": P(None, "model"), "down": P("model")}
    step = executed(block("value_and_grad(loss)"), names | {"loss": loss, "params": specs}, "step.py")["step"]
    found, wanted = (f(names["weights"], names["x"]) for f in (step, jax.value_and_grad(loss)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found, wanted)


def exported(names: dict[str, Any]) -> None:
    program = f"from jax import export\n{FIRST[FIRST.index('def mlp') :].partition('x, weights =')[0]}"
    made = executed(program, {"jax": jax}, "export.py", line=4)
    file = made["export"].export(jax.jit(made["mlp"]))(names["x"], names["weights"]).serialize()
    Path("mlp.bin").write_bytes(file)


def test_programs_from_files(names):
    exported(names)
    before = names["mlp"](names["x"], names["weights"])
    after = executed(block("sdy.load("), dict(names), "load.py")["y"]
    np.testing.assert_allclose(after, before, rtol=1e-6)


def command(beginning: str) -> list[str]:
    (found,) = [line for line in COMMANDS if line.startswith(beginning)]
    return shlex.split(found.partition(" < ")[0])[1:]


def test_the_command_line(names, capsys):
    exported(names)
    arguments = command("sdy-jax plan mlp.bin")
    assert printed(capsys, lambda: main(arguments)) == block("export.py:7")
    run = ["run", *arguments[1:]]
    assert "f32[64,128]" in printed(capsys, lambda: main([*run, "--random", "0"]))
    np.savez(
        "in.npz", arg0=np.ones((64, 128), np.float32), arg1=np.ones((512, 64), np.float32), arg2=np.ones((128, 512))
    )
    assert main([*run, *shlex.split("--inputs in.npz --outputs out.npz")]) == 1
    assert capsys.readouterr().err == block("in.npz: error")


MODEL = """sdy.mesh @mesh = <["x"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}
"""


def test_passes_on_text(capsys, monkeypatch):
    Path("model.mlir").write_text(MODEL)
    Path("many.mlir").write_text(f"{MODEL}// -----\n{MODEL}")
    for line in [line for line in COMMANDS if line.startswith("sdy-jax opt")]:
        monkeypatch.setattr("sys.stdin", open("model.mlir"))  # noqa: SIM115
        assert main(command(line)) == 0 and "func.func @main" in capsys.readouterr().out, line
    Path("model.mlir").write_text(MODEL.replace('["x"=2]', '["a"=2]'))
    assert main(["opt", "model.mlir"]) == 1
    assert capsys.readouterr().err == block("model.mlir:2:1: error")


def test_the_mesh_dialect(names, capsys):
    Path("layer.mlir").write_text(block("%rows = mesh.sharding"))
    assert printed(capsys, lambda: main(["plan", "layer.mlir"])).endswith(block("layer.mlir:5"))
    program = block("sdy.shard.run_local")
    assert str(np.asarray(eval(program.splitlines()[-1], executed(program, names, "local.py")))) in program


def test_the_mesh_dialects_ops_in_python(names, mesh):
    body = executed(block("def body(x)"), dict(names), "body.py")["body"]
    x = jnp.arange(48.0).reshape(4, 12)
    specs = P("data", "model"), P("data", None)
    shifted = jax.shard_map(body, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(x)
    np.testing.assert_array_equal(shifted, jnp.concatenate([jnp.zeros((2, 12)), x[:2]]))


def test_types_that_show_shardings(names, capsys):
    out = printed(capsys, lambda: executed(block("def typed_mlp"), {**names}, "typed.py"))
    assert f"print(jax.typeof(y))  # {out.strip()}" in block("def typed_mlp")


BEFORE = """
import jax, jax.numpy as jnp, sdy_jax as sdy
from jax.sharding import AxisType, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
train_step = sdy.partition(lambda x: jnp.tanh(x @ x.T) @ x, mesh=mesh, in_shardings=P("data", "model"))
state = jnp.eye(64)
"""


@pytest.mark.more("README's loop")
def test_some_of_a_thousand_calls(tmp_path):
    few = block("block_until_ready").replace("range(1000)", "range(20)")
    assert "on the wire per device" in output_of(
        f"{BEFORE}\nprint(train_step.plan(state))\n{few}", tmp_path, "train.py"
    )


@pytest.mark.slow
def test_a_thousand_calls_run_on_virtual_devices_as_it_says_they_do(tmp_path):
    output_of(f"{BEFORE}\n{block('block_until_ready')}", tmp_path, "train.py")


PLANNED_ON_A_POD = "sdy-jax plan train.py:step --mesh data=256,model=256"


def test_a_plan_for_a_pod(tmp_path, capsys):
    (tmp_path / "train.py").write_text("def step(x, w):\n    return x @ w\n")
    (command,) = [line for line in COMMANDS if line.startswith(PLANNED_ON_A_POD)]
    out = printed(capsys, lambda: main(shlex.split(command)[1:]))
    assert out.startswith("plan of step on mesh data=256, model=256 (65536 devices)")


def test_the_front_page_is_short_and_leads_to_all_pages():
    assert len(README.splitlines()) <= 150
    assert not [page.name for page in GUIDE if f"](docs/guide/{page.name})" not in README]


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDE], ids=lambda page: page.stem)
def test_links_lead_to_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_no_other_line_is_shown():
    """A block or command that is new here needs a test above, or a reason not to be run."""
    assert len(BLOCKS) == 38
    assert {
        line
        for line in COMMANDS
        if not line.startswith((*ELSEWHERE, "sdy-jax plan mlp.bin", "sdy-jax opt", PLANNED_ON_A_POD))
    } == set()


def some(info: Any, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if np.issubdtype(info.dtype, np.integer):
        return rng.integers(0, 4, info.shape).astype(info.dtype)
    return np.asarray(rng.standard_normal(info.shape) / 8, info.dtype)


@pytest.mark.more("each program of README in a process")
def test_the_programs_above_run_alone_as_python(tmp_path):
    """What the tests before have planned, as far as they have run in this process."""
    modules, wanted = Modules(tmp_path), {}
    for number, call in enumerate(list(CALLS)):
        plan, program = call.plan, call.plan.program
        if program.mesh.size > 8 or call.outer:
            continue
        leaves = [some(info, number) for info in program.in_info]
        args, kwargs = jax.tree.unflatten(program.in_tree, leaves)
        modules.add(f"program_{number}", plan, *args, **kwargs)
        wanted[f"program_{number}"] = jax.jit(lambda *xs, call=call: call.alone(*xs))(*leaves)
    found = modules.run()
    for name, results in wanted.items():
        assert_alike(found[name], results, 1e-4)
