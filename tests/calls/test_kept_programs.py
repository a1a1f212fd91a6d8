"""Programs that were emitted before are found beside their plans: the same modules, and right numbers for others."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kept_plans import MESH, SPECS, W, X, partitioned

from sdy_jax.calls import planned_call, program_ops
from sdy_jax.plan.digests import FOLDER, MODULE

AXES = ("data", "model")
TURNED = jax.sharding.Mesh(np.array(jax.devices()[:8])[::-1].reshape(2, 4), AXES)
EXPLICIT = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Explicit,) * 2)


def network(w, x):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def of(fun=network, **options):
    return partitioned(fun, **options)


@pytest.fixture
def emitted(monkeypatch):
    """How often a program was emitted."""
    made, emit = [], planned_call.local_function
    monkeypatch.setattr(planned_call, "local_function", lambda *args: made.append(args) or emit(*args))
    return made


def kept(folder):
    return sorted(folder.glob(f"*{MODULE}"))


def text(fun, *args):
    """What is lowered, without source lines."""
    return fun.lower(*args).compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)


def exactly(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.weak_type == b.weak_type and a.sharding == b.sharding
        np.testing.assert_array_equal(a, b)


def unkept(monkeypatch, run):
    """What `run` gives where nothing is kept."""
    with monkeypatch.context() as patch:
        patch.setenv(FOLDER, "0")
        return run()


def scanned(w, x):
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5]), w)
    return jax.lax.scan(lambda h, w: (network(w, h), h.sum()), x, layers)


def chosen(w, x):
    noise = jax.random.normal(jax.random.key(0), x.shape)
    return jnp.sort(jax.lax.cond(x.sum() > 0, lambda: network(w, x + noise), lambda: x), axis=1)


def converted(w, x):
    return {"int": (x @ w["up"]).astype(jnp.int8), "pair": (x.astype(jnp.bfloat16), 2.0, jnp.fft.fft(x))}


FUNCTIONS = [network, pytest.param(scanned, marks=pytest.mark.more("a loop")), chosen, converted]


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_what_is_found_is_lowered_to_the_same_module(folder, emitted, monkeypatch, fun):
    plain = unkept(monkeypatch, lambda: (text(of(fun), W, X), of(fun)(W, X), jax.make_jaxpr(of(fun))(W, X).out_avals))
    if fun is chosen:  # the constants of random numbers are a part of what is kept
        plain = (text(of(fun), W, X), *plain[1:])
        (path,) = kept(folder)
        path.unlink()
    emitted.clear()
    runs = [of(fun), of(fun)]
    for run in runs:
        assert text(run, W, X) == plain[0]
        exactly(run(W, X), plain[1])
        assert jax.make_jaxpr(run)(W, X).out_avals == plain[2]
        assert len(emitted) == 1 and len(kept(folder)) == 1
    assert runs[0].plan(W, X).record() == runs[1].plan(W, X).record()


def test_a_trace_shows_what_every_device_runs(folder, monkeypatch):
    def traced():
        return str(of().trace(W, X).jaxpr)

    wanted = unkept(monkeypatch, traced)
    assert "psum" in wanted
    of()(W, X)
    assert kept(folder)
    assert re.sub("0x[0-9a-f]*", "", traced()) == re.sub("0x[0-9a-f]*", "", wanted)


def test_names_in_profiles_are_those_of_now(folder):
    found = [of().lower(W, X).as_text(debug_info=True) for _ in range(2)]
    assert found[0] == found[1]
    assert len(kept(folder)) == 1 and "sdy.all_gather" in found[0]


SPECS_OF_MESHES = [(MESH, SPECS), (EXPLICIT, ({"up": P(None, "model"), "down": P()}, P("data")))]


@pytest.mark.parametrize(("mesh", "specs"), SPECS_OF_MESHES, ids=["auto", "explicit"])
def test_transformations_of_what_is_found(folder, mesh, specs):
    def close(found, wanted):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)

    def loss(w, run):
        return (run(w, x) ** 2).sum()

    w, x = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), (W, X), specs)
    for _ in range(2):
        run = of(mesh=mesh, in_shardings=specs if mesh is MESH else None)
        close(jax.jit(lambda w, x, run=run: run(w, x) + 1)(w, x), network(W, X) + 1)
        with jax.set_mesh(mesh):
            slopes = jax.grad(loss)(w, run)
        close(slopes, jax.grad(lambda w: (network(w, X) ** 2).sum())(W))
        if mesh is MESH:
            both = jnp.stack([X, 2 * X])
            close(jax.vmap(run, (None, 0))(W, both), jax.vmap(network, (None, 0))(W, both))
    assert len(kept(folder)) >= 3


def scaled(factor):
    return lambda w, x: network(w, x) * factor


def lower_precision(w, x):
    return jnp.matmul(jnp.matmul(x, w["up"], precision="highest"), w["down"])


def drawn(w, x):
    return x + jax.random.normal(jax.random.key(0), x.shape)


NEARLY_EQUAL = {
    "a constant": [lambda: of(scaled(np.float32(1))), lambda: of(scaled(np.nextafter(np.float32(1), np.float32(2))))],
    "zeros": [lambda: of(lambda w, x: x * np.float32(0)), lambda: of(lambda w, x: x * np.float32(-0.0))],
    "weak types": [lambda: of(lambda w, x: 2.0), lambda: of(lambda w, x: np.float32(2))],
    "types": [lambda: of(lambda w, x: x.astype(jnp.int16)), lambda: of(lambda w, x: x.astype(jnp.uint16))],
    "precisions": [lambda: of(lower_precision), lambda: of()],
    "results": [lambda: of(out_shardings=P("data")), lambda: of(out_shardings=P(None, "data")), lambda: of()],
    "arguments": [lambda: of(in_shardings=(SPECS[0], P("model"))), lambda: of(in_shardings=(SPECS[0], P()))],
    "orders of devices": [lambda: of(), lambda: of(mesh=TURNED)],
    "kinds of axes": [lambda: of(), lambda: of(mesh=EXPLICIT)],
}


@pytest.mark.parametrize("case", NEARLY_EQUAL)
def test_programs_that_are_nearly_equal_are_told_apart(folder, monkeypatch, case):
    wanted = [unkept(monkeypatch, lambda make=make: make()(W, X)) for make in NEARLY_EQUAL[case]]
    for _ in range(2):
        for make, result in zip(NEARLY_EQUAL[case], wanted, strict=True):
            exactly(make()(W, X), result)


SETTINGS = {
    "precision": (network, lambda: jax.default_matmul_precision("highest")),
    "64 bits": (lambda w, x: jnp.cumsum(x.astype(float), 1) + jnp.arange(32), lambda: jax.enable_x64(True)),
    "keys": (drawn, lambda: jax.default_prng_impl("rbg")),
    "partitionable keys": (drawn, lambda: jax.threefry_partitionable(False)),
    "promotion": (network, lambda: jax.numpy_dtype_promotion("strict")),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_jax_are_told_apart(folder, monkeypatch, setting):
    fun, changed = SETTINGS[setting]

    def both():
        found = [(text(of(fun), W, X), of(fun)(W, X))]
        with changed():
            return [*found, (text(of(fun), W, X), of(fun)(W, X))]

    wanted = unkept(monkeypatch, both)
    for _ in range(2):
        for (own, numbers), (other, others) in zip(both(), wanted, strict=True):
            assert own == other or fun is drawn  # whose constants are a part of what is kept
            exactly(numbers, others)


def test_what_is_lowered_with_other_settings_than_it_was_traced_with_is_emitted(folder, emitted):
    for _ in range(2):
        traced = jax.jit(of()).trace(W, X)
        made = len(emitted)
        before = jax.config.jax_hlo_source_file_canonicalization_regex
        jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*")
        try:
            traced.lower().compile()
        finally:
            jax.config.update("jax_hlo_source_file_canonicalization_regex", before)
        assert not kept(folder) and len(emitted) - made <= 1
    of().lower(W, X)
    assert kept(folder)


def test_donated_arguments_are_donated(folder):
    for _ in range(2):
        x = jnp.array(X)
        run = of(lambda w, x: x + network(w, x), donate_argnums=1, out_shardings=P("data"))
        x = jax.device_put(x, NamedSharding(MESH, P("data")))
        kept_alive = of(lambda w, x: x + network(w, x), out_shardings=P("data"))
        np.testing.assert_allclose(kept_alive(W, x), X + network(W, X), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(run(W, x), X + network(W, X), rtol=1e-4, atol=1e-4)
        assert x.is_deleted()


def test_for_other_platforms_it_is_emitted(folder, emitted, monkeypatch):
    def lowered():
        found = []
        for platform in ("cpu", "tpu"):
            found.append(of().trace(W, X).lower(lowering_platforms=(platform,)).as_text())
            exported = jax.export.export(jax.jit(of()), platforms=[platform])(W, X).mlir_module()
            found.append([line.partition(" loc(")[0] for line in exported.splitlines() if line[:4] != "#loc"])
        return found

    wanted = unkept(monkeypatch, lowered)
    for _ in range(2):
        assert lowered() == wanted


def calling_back(w, x):
    h = jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")
    return h @ w["up"]


def printing(w, x):
    jax.debug.print("sum {}", x.sum())
    return x @ w["up"]


@pytest.mark.parametrize("fun", [calling_back, printing])
def test_what_calls_functions_of_a_process_is_not_kept(folder, emitted, fun):
    for _ in range(2):
        of(fun)(W, X)
    assert len(emitted) == 2 and not kept(folder)


def broken(data):
    yield b""
    yield data[: len(data) // 2]
    yield data[:60] + bytes([data[60] ^ 1]) + data[61:]
    yield data + b"x"
    yield b"something else" * 100


@pytest.mark.parametrize("number", range(5))
def test_a_broken_program_is_as_good_as_none(folder, emitted, number):
    wanted = of()(W, X)
    (path,) = kept(folder)
    whole = path.read_bytes()
    path.write_bytes(list(broken(whole))[number])
    exactly(of()(W, X), wanted)
    assert len(emitted) == 2 and path.read_bytes() == whole


def test_a_program_under_the_name_of_another_is_not_taken(folder):
    wanted = of()(W, X)
    (path,) = kept(folder)
    of(scaled(2))(W, X)
    (other,) = set(kept(folder)) - {path}
    path.write_bytes(other.read_bytes())
    exactly(of()(W, X), wanted)


def test_without_its_plan_a_program_is_found_again_once_this_is_made(folder, emitted):
    wanted = of()(W, X)
    for path in set(folder.iterdir()) - {*kept(folder)}:
        path.unlink()
    exactly(of()(W, X), wanted)
    assert len(emitted) == 1
    for path in kept(folder):
        path.unlink()
    exactly(of()(W, X), wanted)
    assert len(emitted) == 2 and len(kept(folder)) == 1


def test_a_folder_that_can_no_longer_be_written_is_said(folder, monkeypatch):
    run = of()
    run.plan(W, X)
    monkeypatch.setattr(program_ops.EmittedEntry, "write", _refuse)
    with pytest.warns(UserWarning, match="programs cannot be kept in .*kept: No space left"):
        found = run(W, X)
    np.testing.assert_allclose(found, network(W, X), rtol=1e-4, atol=1e-4)


def _refuse(entry, program):
    raise OSError(28, "No space left on device")


PROCESS = """
import os, sys
import jax, jax.numpy as jnp
import sdy_jax as sdy
from jax.sharding import PartitionSpec as P
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
def f(w, x):
    return jnp.tanh(x @ w) @ w.T
g = sdy.partition(f, mesh=mesh, in_shardings=(P(None, "x"), P("x")))
print(g(jnp.ones((16, 32)), jnp.ones((8, 16))).sum())
"""


@pytest.mark.more("two processes")
def test_a_second_process_compiles_nothing(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != FOLDER}
    printed, files = [], []
    for _ in range(2):
        command = [sys.executable, "-c", PROCESS, str(tmp_path)]
        printed.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        found = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.endswith("-atime")]
        files.append(sorted(found))
    assert printed[0] == printed[1] and files[0] == files[1]
    assert any(path.name.startswith("jit_f") for path in files[0])
    assert {path.suffix for path in (tmp_path / "sdy_jax_plans").iterdir()} == {".plan", ".module"}
