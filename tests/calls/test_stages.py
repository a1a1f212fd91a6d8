"""Every stage of a plan that prints is a program again: it is read, partitioned and gives the same numbers."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from places import HELPERS, ROOT
from stages import STAGES, assert_stages_run

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.ir.text.modules import split_modules

REFERENCE = [text for text in split_modules((HELPERS / "sdy_reference.mlir").read_text()) if "@main" in text]

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
RNG = np.random.default_rng(11)


def normal(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


X, W = normal(8, 16), normal(16, 8)


def module_called(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up(infos):
    """Arguments of these types."""
    rng = np.random.default_rng(5)
    return [
        jnp.asarray(rng.standard_normal(info.shape), info.dtype)
        if jnp.issubdtype(info.dtype, jnp.floating)
        else jnp.asarray(rng.integers(0, 3, info.shape), info.dtype)
        for info in infos
    ]


def layer(x, w):
    y = sdy.reshard(x @ w, '[{"a"}, {}], unreduced={"b"}')
    y = sdy.reduce_scatter(y, [[], ["b"]])
    return jnp.tanh(sdy.all_gather(y, [[], ["b"]]))


def grouped(x, w):
    y, z = sdy.shard_alike(x, w.T)
    y = sdy.sharding_constraint(y, '[{"a", ?}, {"b", ?}p1]')
    return sdy.propagation_barrier(y, "FORWARD") * z


def scanned(x, w):
    return lax.scan(lambda s, _: (jnp.tanh(s @ w @ w.T), s.sum()), x, None, length=3)


def manual(x, w):
    body = jax.shard_map(lambda a, b: lax.psum(a @ b, "b"), mesh=MESH, in_specs=(P("a", "b"), P("b")), out_specs=P("a"))
    return body(x, w) + 1


def branched(x, w):
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: jnp.zeros((8, 8)))


def noisy(x, w):
    key = jax.random.key(0)
    return x @ w + jax.random.normal(key, (8, 8)), key


def closes_over(x, w):
    return x @ w @ jnp.asarray(normal_of_eight())


@functools.cache
def normal_of_eight():
    return normal(8, 8)


def trained(x, w):
    loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
    return loss, w - 0.1 * gradient


FUNCTIONS = [layer, grouped, scanned, manual, branched, noisy, closes_over, trained]


@pytest.mark.dear
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_stages_of_functions(function):
    assert_stages_run(sdy.partition(function, mesh=MESH, in_shardings=(P("a", "b"), P("b"))), X, W)


@pytest.mark.parametrize("number", range(len(REFERENCE)))
def test_stages_of_the_reference(number):
    with jax.enable_x64(True):
        program = sdy.loads(REFERENCE[number])
        if program.mesh.size > jax.device_count():
            pytest.skip(f"the mesh has {program.mesh.size} devices")
        run = sdy.partition(program, mesh=None if program.mesh.axes else MESH)
        # Import puts an edge in front of one that is there, as Shardy does, which reads no such text.
        has_edges = "sdy.data_flow_edge" in REFERENCE[number]
        assert_stages_run(run, *made_up(program.in_info), stages=("traced", "partitioned") if has_edges else STAGES)


@pytest.mark.slow
def test_stages_of_the_example():
    example = module_called(ROOT / "examples" / "train_lm.py")
    job = example.Job(example.Config(layers=1, d_model=16, sequence=8), example.parse_mesh("data=2,model=4"), True, 0)
    step = sdy.partition(job.train_step, mesh=job.mesh, **{**job.keywords, "donate_argnums": None})
    assert_stages_run(step, job.initial_state(), next(job.batches(1)))


ARGUMENT = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a", "b"}, {}]>}) -> tensor<8x16xf32> {
  %0 = COLLECTIVE : tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}
"""
OF_ARGUMENTS = [
    'sdy.all_gather [{"b"}, {}] %x out_sharding=<@mesh, [{"a"}, {}]>',
    'sdy.all_to_all [{"b"}: 0->1] %x out_sharding=<@mesh, [{"a"}, {"b"}]>',
    'sdy.all_slice [{}, {}] %x out_sharding=<@mesh, [{"a", "b"}, {}]>',
    'sdy.collective_permute %x out_sharding=<@mesh, [{"b", "a"}, {}]>',
    'sdy.sharded_to_unreduced [{"b"}, {}] %x out_sharding=<@mesh, [{"a"}, {}], unreduced={"b"}>',
]


@pytest.mark.parametrize("collective", OF_ARGUMENTS, ids=lambda text: text.split()[0])
def test_collectives_of_arguments(collective, tmp_path, monkeypatch, capsys):
    text = ARGUMENT.replace("COLLECTIVE", collective)
    if "unreduced=" in collective:
        text = text.replace(
            "return %0",
            '%1 = sdy.all_reduce {"b"} %0 out_sharding=<@mesh, [{"a"}, {}]> : tensor<8x16xf32>\n  return %1',
        )
    run = sdy.partition(sdy.loads(text))
    np.testing.assert_array_equal(run(X), X)
    assert_stages_run(run, X)
    given_otherwise = sdy.partition(sdy.loads(text), in_shardings=(P(None, "b"),))
    np.testing.assert_array_equal(given_otherwise(X), X)


def test_the_command_line_runs_what_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.savez("in.npz", arg0=X)
    Path("0.mlir").write_text(ARGUMENT.replace("COLLECTIVE", OF_ARGUMENTS[0]))
    for stage in STAGES:
        assert main(["plan", "0.mlir", "--stage", stage]) == 0
        Path(f"{stage}.mlir").write_text(capsys.readouterr().out)
        assert main(["run", f"{stage}.mlir", "--inputs", "in.npz", "--outputs", f"{stage}.npz"]) == 0
        np.testing.assert_array_equal(np.load(f"{stage}.npz")["out0"], X)
