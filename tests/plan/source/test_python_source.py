"""Plans as Python modules: they run without us, give the same numbers, and read as people write."""

from __future__ import annotations

import importlib.util
import linecache
import math
import random
import re
import runpy
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_functions as random_programs
import random_texts as random_numbers
import train_lm
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import EmaState
from python_modules import Modules, assert_alike

import sdy_jax as sdy

RUFF = Path(sysconfig.get_path("scripts"), "ruff")
has_ruff = RUFF.exists() or shutil.which("ruff") is not None
needs_ruff = pytest.mark.skipif(not has_ruff, reason="ruff is not installed")


def numbers(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def mlp(x, weights):
    h = jax.nn.gelu(x @ weights["up"])
    return h @ weights["down"]


WEIGHTS = {"up": numbers(16, 32), "down": numbers(32, 16)}
MLP_SPECS = (P("data"), {"up": P(None, "model"), "down": P("model")})


def counted(x):
    def body(i, y):
        return jnp.tanh(y @ x) + i

    return lax.fori_loop(0, 3, body, x)


def until(x):
    return lax.while_loop(lambda c: c[1].sum() < 1000.0, lambda c: (c[0] + 1, c[1] * 1.5 + 1.0), (0, x))


def branched(x):
    y = lax.cond(x.sum() > 0, lambda: x * 2.0, lambda: x @ x)
    return lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, jnp.tanh], y)


def manual(x):
    def on_blocks(block):
        return lax.psum(block, "data") + lax.axis_index("model")

    return jax.shard_map(on_blocks, in_specs=P("data", "model"), out_specs=P(None, "model"))(x) * 2.0


def averaged(state, x):
    return EmaState(state.count + 1, 0.9 * state.ema + x), x.sum()


def convolved(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def looked_up(table, rows, updates):
    return table[rows] + 1, table.at[rows].add(updates), jnp.take_along_axis(table, jnp.argsort(table, 1), 1)


def in_few_bits(x, y):
    product = x.astype(jnp.bfloat16) @ y.astype(jnp.bfloat16)
    return (
        product,
        (x * 100).astype(jnp.int8) // 3,
        x > y,
        lax.complex(x, y) * (2 + 1j),
        (x * 50).astype(jnp.uint8) >> 1,
    )


def solved(x):
    positive = x @ x.T + 16 * jnp.eye(16)
    return jnp.linalg.cholesky(positive), jnp.linalg.solve(positive, x), jnp.fft.fft2(x)


def noise(x):
    key = jax.random.key(7)
    return x + jax.random.normal(key, x.shape), jax.random.randint(key, (5,), 0, 9)


def of_elements(x):
    positive = jnp.abs(x) + 0.1
    smooth = [
        jnp.sin,
        jnp.cos,
        jnp.tan,
        jnp.sinh,
        jnp.cosh,
        jnp.arctan,
        jnp.arcsinh,
        jnp.exp2,
        jnp.expm1,
        lax.erf,
        lax.erfc,
    ]
    rough = [
        jnp.floor,
        jnp.ceil,
        jnp.round,
        jnp.sign,
        jnp.negative,
        jnp.cbrt,
        jnp.square,
        lax.bessel_i1e,
        jax.nn.sigmoid,
    ]
    of_positive = [jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, lax.lgamma, lax.digamma]
    pairs = [jnp.arctan2, jnp.maximum, jnp.minimum, lax.rem, lax.pow, lax.nextafter]
    found = (
        [f(x) for f in smooth + rough] + [f(positive) for f in of_positive] + [f(positive, positive.T) for f in pairs]
    )
    bits = (x * 100).astype(jnp.int32)
    of_bits = [
        bits << 2,
        bits >> 1,
        bits & 7,
        bits | 8,
        ~bits,
        bits ^ 3,
        lax.population_count(bits),
        lax.clz(bits),
        bits % 7,
    ]
    return (
        found,
        of_bits,
        lax.clamp(-0.5, x, 0.5),
        jnp.isfinite(x),
        lax.reduce_precision(x, 8, 4),
        x**3,
        jnp.argmax(x, 1),
    )


def with_nothing(x, unused, empty):
    return x + 1.0, empty * 2.0


X = numbers(16, 16)
GENERATED = (1, 2, 5, 7, 10, 15, 22, 24, 26, 30, 32, 39)
"""Seeds of random modules that have loops, branches, manual computations, scatters, transforms and the like."""
CASES = {
    "mlp": (mlp, MLP_SPECS, (numbers(8, 16), WEIGHTS)),
    "gradient": (jax.grad(lambda *a: (mlp(*a) ** 2).sum(), 1), MLP_SPECS, (numbers(8, 16), WEIGHTS)),
    "uneven": (lambda x: jnp.tanh(jnp.concatenate([x, x[:1]]) @ x.T).sum(1), (P("data", "model"),), (X,)),
    "counted": (counted, (P("data", "model"),), (X,)),
    "until": (until, (P("data", "model"),), (X,)),
    "branched": (branched, (P("data", "model"),), (X,)),
    "manual": (manual, (P("data", "model"),), (X,)),
    "averaged": (averaged, (EmaState(P(), P("data")), P()), (EmaState(np.int32(3), X), X)),
    "convolved": (convolved, (P("data", "model"), P()), (numbers(4, 8, 6, 3), numbers(3, 3, 3, 5))),
    "looked_up": (looked_up, (P("data"), P(), P()), (X, np.array([1, 15, 4]), numbers(3, 16))),
    "in_few_bits": (in_few_bits, (P("data"), P(None, "model")), (X, numbers(16, 16, seed=1))),
    "solved": (solved, (P("data"),), (X,)),
    "noise": (noise, (P("data"),), (X,)),
    "of_elements": (of_elements, (P("data"),), (X,)),
    "with_nothing": (with_nothing, (P("data"), P(), P()), (X, X, np.zeros((0, 4), np.float32))),
    "rolled": (lambda x: jnp.roll(x, 3, 0) + jnp.cumsum(x[::-1], 0), (P("data"),), (X,)),
}
"""Functions, specifications and arguments."""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    return Modules(tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="module")
def texts(modules, mesh):
    found = {}
    for name, (fun, specs, args) in CASES.items():
        plan = sdy.partition(fun, mesh=mesh, in_shardings=specs).plan(*args)
        found[name] = modules.add(name, plan, *args)
    return found


@pytest.fixture(scope="module")
def found(modules, texts):
    return modules.run()


@pytest.mark.dear(cases=8)
@pytest.mark.parametrize("name", CASES)
def test_a_module_alone_gives_the_same_numbers(name, found, mesh):
    fun, _, args = CASES[name]
    alone = sdy.partition(fun, mesh=mesh) if name == "manual" else jax.jit(lambda *xs: fun(*xs))
    wanted = alone(*args)
    assert_alike(found[name], wanted, 2e-2 if name == "in_few_bits" else 1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["mlp", "relaid"])
def test_a_module_runs_whichever_mesh_is_set(name, kind, mesh, tmp_path):
    def relaid(x):
        return lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(None, ("data", "model"))))

    cases = {"mlp": (mlp, MLP_SPECS, (X, WEIGHTS)), "relaid": (relaid, P("data", "model"), (X,))}
    fun, specs, args = cases[name]
    text = sdy.partition(fun, mesh=mesh, in_shardings=specs).plan(*args).to_python(tmp_path / "alone.py")
    assert name == "mlp" or "model.1." in text  # its mesh is of parts of axes
    module = runpy.run_path(str(tmp_path / "alone.py"))
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)):
        found = module[name](*args)
    assert_alike(found, fun(*args))


@needs_ruff
def test_ruff_has_nothing_to_say(modules, texts):
    assert_ruff_is_content(modules.folder)


def assert_ruff_is_content(folder):
    ruff = str(RUFF) if RUFF.exists() else "ruff"
    options = ["--isolated", "--line-length=120", str(folder)]
    for command in (["check", "--select=E,F,I,B,UP,SIM,C4,PIE"], ["format", "--check"]):
        done = subprocess.run([ruff, *command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_it_reads_as_people_write(texts):
    text = texts["mlp"]
    assert re.search(r'# test_python_source.py:\d+: h = jax.nn.gelu\(x @ weights\["up"\]\)', text)
    assert "    product = x @ weights_up  # f32[8@data,32@model]\n" in text
    assert "    h = product * (0.5 * (1.0 + tanh))" in text
    assert "    # all_reduce over model for stablehlo.dot_general: 384 B per device\n" in text
    assert 'lax.psum(h @ weights_down, "model")' in text
    assert 'in_specs=(P("data"), P("model"), P(None, "model"))' in text
    assert '(result,) = run(x, weights["down"], weights["up"])' in text
    assert "sdy_jax" not in text.replace("as sdy_jax planned it", "")


def test_loops_and_branches_are_what_they_are(texts):
    assert re.search(r"lax\.fori_loop\(0, 3, loop, \w+\)", texts["counted"])
    assert "lax.while_loop(goes_on, loop, (" in texts["until"]
    assert re.search(r"lax\.cond\(\w+ > 0\.0, when_true, when_false\)", texts["branched"])


def test_what_is_no_tuple_list_or_dictionary_is_made_like_an_argument(texts, found):
    assert "jax.tree.unflatten(jax.tree.structure(state), [" in texts["averaged"]
    assert isinstance(found["averaged"][0], EmaState)


SMALL = train_lm.Config(layers=1, d_model=16, heads=4, sequence=8, batch=8)
WINDOW = np.arange(72, dtype=np.int32).reshape(8, 9)


@pytest.fixture(scope="module")
def trained():
    """The training state of the examples, what their step makes of it, and the step."""
    step, state = train_lm.make_train_step(SMALL), train_lm.init_state(SMALL, jax.random.key(0))
    return step, state, jax.jit(step)(state, WINDOW)


@pytest.mark.more("the example's step as a module")
def test_the_examples_steps(tmp_path, mesh, trained):
    step, state, wanted = trained
    eight = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("data",))
    given = {"split": (mesh, *train_lm.shardings(SMALL, mesh)), "data": (eight, *train_lm.shardings(SMALL, eight))}
    if importlib.util.find_spec("orbax") is not None:
        import resume_elsewhere

        given["resumed"] = (mesh, resume_elsewhere.layout(SMALL, mesh)[1], NamedSharding(mesh, P("data")))
    modules = Modules(tmp_path)
    for name, (on, specs, tokens) in given.items():
        shardings = {"in_shardings": (specs, tokens), "out_shardings": (specs, None)}
        plan = sdy.partition(step, mesh=on, donate_argnums=0, **shardings).plan(state, WINDOW)
        text = modules.add(name, plan, state, WINDOW)
        assert "@jax.jit(donate_argnums=(0,))\ndef train_step(state, window):" in text
    found = modules.run()
    for name in given:
        assert jax.tree.structure(found[name]) == jax.tree.structure(wanted)
        assert_alike(found[name], wanted, 2e-4)


def test_equal_layers_are_calls_of_one_function(tmp_path, mesh):
    def stacked(x, layers):
        for layer in layers:
            h = jnp.tanh(x @ layer["up"]) * jnp.exp(-((x @ layer["up"]) ** 2))
            h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-3)
            x = jnp.sin(x + h @ layer["down"]) + jnp.cos(h @ layer["down"]) / 3.0
        return x

    layers = [{"up": numbers(64, 128, seed=i) / 32, "down": numbers(128, 64, seed=i) / 32} for i in range(5)]
    specs = P("data"), {"up": P(None, "model"), "down": P("model")}
    modules, x = Modules(tmp_path), numbers(32, 64)
    plan = sdy.partition(stacked, mesh=mesh, in_shardings=(specs[0], [specs[1]] * 5)).plan(x, layers)
    text = modules.add("stacked", plan, x, layers)
    assert (text.count("    def layer("), text.count(" = layer(")) == (
        1,
        4,
    )  # the first `x` is whole
    assert "layers_down" in text[text.index("def layer(") :].partition(")")[0]
    assert (text.count("lax.psum("), sum(c.kind == "all_reduce" for c in plan.collectives)) == (4, 10)
    assert_alike(modules.run()["stacked"], stacked(x, layers), 1e-4)


def test_trees_and_keyword_arguments(tmp_path, mesh):
    def halves(x, *, scale):
        return {"halves": (x[:8], x[8:]), "scaled": [scale["by"] * x, None], "count": jnp.int32(3)}

    modules, scale = Modules(tmp_path), {"by": numbers(16, 16, seed=3)}
    plan = sdy.partition(halves, mesh=mesh, in_shardings=P("data")).plan(X, scale=scale)
    assert "def halves(x, *, scale):" in modules.add("halves", plan, X, scale=scale)
    found, wanted = modules.run()["halves"], halves(X, scale=scale)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_alike(found, wanted)


@pytest.mark.more("a file that changes while the process runs")
def test_names_are_those_of_the_file_as_it_is_now(tmp_path, mesh):
    file, x = tmp_path / "edited.py", numbers(8, 16)
    for name in ("first", "second"):
        file.write_text(f"def f(x):\n    {name} = (x - 1) * 3\n    return {name}\n")
        linecache.checkcache()
        plan = sdy.partition(runpy.run_path(str(file))["f"], mesh=mesh, in_shardings=P("data")).plan(x)
        assert re.search(rf"^ *{name} = ", plan.to_python(), re.M)


def test_large_arrays_that_it_closes_over_are_in_a_file_beside_it(tmp_path, mesh):
    table, few = jnp.asarray(numbers(64, 64), jnp.bfloat16), jnp.asarray(numbers(16))
    modules = Modules(tmp_path)
    plan = sdy.partition(lambda x: (x @ table, x[:, :16] * few), mesh=mesh, in_shardings=P("data")).plan(
        jnp.ones((8, 64), jnp.bfloat16)
    )
    text = modules.add("closed", plan, jnp.ones((8, 64), jnp.bfloat16))
    assert text.count("ARRAYS[") == 1 and (tmp_path / "closed.npz").exists()
    x = jnp.ones((8, 64), jnp.bfloat16)
    assert_alike(modules.run()["closed"], (x @ table, x[:, :16] * few), 2e-2)


def test_keys_go_in_and_out(tmp_path, mesh):
    def split(key, x):
        first, second = jax.random.split(key)
        return second, x + jax.random.uniform(first, x.shape)

    path = tmp_path / "split.py"
    sdy.partition(split, mesh=mesh, in_shardings=(P(), P("data"))).plan(jax.random.key(3), X).to_python(path)
    names = runpy.run_path(str(path))
    key, found = names["split"](jax.random.key(3), X)
    wanted_key, wanted = split(jax.random.key(3), X)
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(wanted_key))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_callbacks_are_refused_by_their_line(mesh):
    def told(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    with pytest.raises(sdy.UnsupportedError, match=r"source.py:\d+ cannot be written in Python: it calls a"):
        sdy.partition(told, mesh=mesh, in_shardings=P("data")).plan(X).to_python()


def test_values_of_an_outer_trace_are_refused(mesh):
    def outer(y):
        partitioned = sdy.partition(lambda x: x + y, mesh=mesh, in_shardings=P("data"))
        with pytest.raises(sdy.UnsupportedError, match="outer trace"):
            partitioned.plan(X).to_python()
        return y

    jax.jit(outer)(X)


def generated_function(seed, mesh):
    """A random program of loops, windows, sorts and uneven sizes, as functions of jax."""
    rng = random.Random(seed)
    size = rng.choice(random_programs.SIZES)
    program = random_programs.random_program(rng, mesh)
    matrices = tuple(np.random.default_rng(seed).standard_normal((3, size, size)))
    with jax.enable_x64(True):
        wanted = jax.jit(lambda *xs: program(*xs))(*matrices)
        token = random_programs.SHARDINGS.set(mesh)
        try:
            plan = sdy.partition(program, mesh=mesh, layouts="local").plan(*matrices)
        finally:
            random_programs.SHARDINGS.reset(token)
    return plan, matrices, wanted


def generated_module(seed):
    """A random StableHLO program: loops, branches, manual computations, convolutions, gathers, scatters."""
    with jax.enable_x64(True):
        program = sdy.loads(random_numbers.text_of(seed))
        sizes = [axis.size for axis in program.mesh.axes]
        devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
        partitioned = sdy.partition(program, mesh=jax.sharding.Mesh(devices, program.mesh.axis_names), layouts="local")
        rng = np.random.default_rng(seed)
        arguments = [random_numbers.some_array(rng, info) for info in program.in_info]
        return partitioned.plan(*arguments), arguments, partitioned(*arguments)


@pytest.mark.filterwarnings("ignore::sdy_jax.PartitionWarning")
@pytest.mark.more("each generated program in a process of its own")
def test_generated_programs_run_alone(tmp_path, mesh):
    modules, wanted = Modules(tmp_path), {}
    made = {f"function_{seed}": generated_function(seed, mesh) for seed in range(6)}
    made |= {f"module_{seed}": generated_module(seed) for seed in GENERATED}
    for name, (plan, arguments, results) in made.items():
        modules.add(name, plan, *arguments, wide=True)
        wanted[name] = results
    if has_ruff:
        assert_ruff_is_content(tmp_path)
    found = modules.run()
    for name, results in wanted.items():
        assert_alike(found[name], results, 1e-7)


def fuzz(seed):
    with tempfile.TemporaryDirectory() as folder:
        modules = Modules(Path(folder))
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple("xyz"))
        plan, arguments, wanted = generated_function(seed, mesh)
        modules.add("function", plan, *arguments, wide=True)
        assert_alike(modules.run()["function"], wanted, 1e-7)
