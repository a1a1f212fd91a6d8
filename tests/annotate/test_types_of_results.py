"""What stages say of results before anything runs: shapes, stated shardings, layouts in memory, as jit's stages."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = jax.ShapeDtypeStruct((8, 16), np.float32)


LINE = jax.make_mesh((8,), ("z",), axis_types=(AxisType.Auto,))


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2)


def named(*entries, kind=AxisType.Auto, memory="device"):
    return NamedSharding(mesh_of(kind), P(*entries), memory_kind=memory)


STATED = {
    "nothing": None,
    "a spec": P("a"),
    "a longer spec": P("a", None),
    "a sharding": named("a"),
    "of some": (P("a"), None),
    "Explicit axes": named("a", kind=AxisType.Explicit),
    "the host's memory": named("a", memory="pinned_host"),
    "a layout": Format(Layout((1, 0)), named("a")),
}
STAGES = {
    "eval_shape": lambda f, x: f.eval_shape(x),
    "trace": lambda f, x: f.trace(x).out_info,
    "lower": lambda f, x: f.lower(x).out_info,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_as_jit(kind, stated, stage):
    x = X if kind == AxisType.Auto else X.update(sharding=named("b", kind=kind))
    with jax.set_mesh(mesh_of(kind)):
        ours, theirs = (
            STAGES[stage](jit(lambda x: (x * 2, x), out_shardings=STATED[stated]), x)
            for jit in (sdy.partition, jax.jit)
        )
    assert ours == theirs
    assert [y.format for y in ours] == [y.format for y in theirs]


def test_shardings_that_only_partition_takes():
    f = sdy.partition(lambda x: (x, x, x), mesh=mesh_of(), out_shardings=('[{"a"}, {}]', sdy.AUTO, None))
    assert [y.sharding for y in f.eval_shape(X)] == [named("a"), None, None]


def test_a_size_that_is_not_divided_has_the_axes_that_divide():
    f = sdy.partition(lambda x: x * 2, mesh=mesh_of(), out_shardings=P(("a", "b")), on_unknown="ignore")
    x = jax.ShapeDtypeStruct((20, 4), np.float32)
    assert f.lower(x).out_info.sharding == named("a")


def test_a_stated_sharding_that_does_not_fit_is_an_error():
    with pytest.raises(sdy.ShardingError, match=r"out_shardings for `result`: .*rank 2"):
        sdy.partition(lambda x: x, mesh=mesh_of(), out_shardings=P(None, None, "a")).eval_shape(X)


def test_types_of_functions_on_another_mesh_inside():
    mapped = jax.shard_map(lambda x: x, mesh=LINE, in_specs=P("z"), out_specs=P("z"))
    assert sdy.partition(mapped, mesh=mesh_of()).eval_shape(X).shape == (8, 16)


@pytest.mark.parametrize("spec", [P(), P("a"), P("a", None), P(None, None), P(("a", "b")), P(None, "b")], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_have_the_very_sharding_that_is_stated(kind, spec):
    stated = NamedSharding(mesh_of(kind), spec)
    x = jax.device_put(np.ones((8, 16), np.float32), named("a", kind=kind))
    for jit in (sdy.partition, jax.jit):
        f = jit(lambda x: x * 2, out_shardings=stated)
        assert f(x).sharding == f(f(x)).sharding == stated
        assert f.lower(x).compile()(x).sharding == stated
