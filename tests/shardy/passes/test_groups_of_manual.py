"""Sharding groups end at the border of a manual computation: jaxlib refuses others, and so do we, by name and place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from sdy_oracle import Oracle

import sdy_jax as sdy
from sdy_jax import passes
from sdy_jax.errors import ShardingError

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

MANUAL = """
  %N = sdy.manual_computation(%x) in_shardings=[<@mesh, [{}, {}]>] out_shardings=[<@mesh, [{}, {}]>]
      manual_axes={"a"} (%y: tensor<8x16xf32>) {
    %z = stablehlo.negate %y : tensor<8x16xf32>
    sdy.sharding_group %z group_id=7 : tensor<8x16xf32>
    sdy.return %y : tensor<8x16xf32>
  } : (tensor<8x16xf32>) -> tensor<8x16xf32>"""
OUTSIDE = "\n  sdy.sharding_group %x group_id=7 : tensor<8x16xf32>"


def module(*parts):
    body = "".join(part.replace("%N", f"%{i}") for i, part in enumerate(parts))
    return (
        'sdy.mesh @mesh = <["a"=2, "b"=4]>\nfunc.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {'
        f"{body}\n  return %x : tensor<8x16xf32>\n}}"
    )


ACROSS = {
    "outside first": (module(OUTSIDE, MANUAL), r"in the manual computation at \S+:4, .* \S+:3 outside of manual"),
    "inside first": (module(MANUAL, OUTSIDE), r"lies outside of manual computations, .* in the manual .* \S+:3;"),
    "two computations": (module(MANUAL, MANUAL), r"in the manual computation at \S+:9, .* in the manual .* \S+:3;"),
}


@pytest.mark.parametrize("how", ACROSS)
def test_groups_across_the_border_are_refused(how):
    text, message = ACROSS[how]
    with Oracle() as oracle:
        assert oracle.run(text, "sdy-sharding-group-import") is None
        assert "cannot cross ManualComputationOp boundaries" in oracle.error
    for refused in (
        lambda: passes.run(text, "sdy-sharding-group-import"),
        lambda: passes.run(text, "propagation-pipeline"),
        lambda: sdy.partition(sdy.loads(text)).plan(jnp.ones((8, 16))),
    ):
        with pytest.raises(ShardingError, match=r"sharding group 7, at \S+:\d+: this member") as caught:
            refused()
        assert re.search(message, str(caught.value)), caught.value
        assert "cannot cross the border" in str(caught.value)


def test_groups_within_one_computation_are_fine():
    text = module(MANUAL.replace("%z group", "%y group"))
    assert "sdy.sharding_group" in passes.run(text, "sdy-sharding-group-import")


def test_python_names_both_lines():
    def body(x):
        return sdy.sharding_group(x * 2, 5)

    def function(x):
        y = sdy.sharding_group(x + 1, 5)
        inner = jax.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P(), axis_names={"a"}, check_vma=False)
        return inner(x) + y

    line = body.__code__.co_firstlineno + 1
    with pytest.raises(ShardingError, match=rf"sharding group 5, at \S*{__file__[-20:]}:{line}: this member") as caught:
        sdy.partition(function, mesh=MESH).plan(jnp.ones((8, 16)))
    assert f":{line + 3} outside of manual computations" in str(caught.value)
