"""What a device holds where a compiler runs products later than the program, as those for GPUs do."""

import pytest
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.memory.buffers import SHARE
from sdy_jax.lowering.planner.memory.live_ranges import peak_of
from sdy_jax.lowering.targets.family import Compiler, Family, Order
from sdy_jax.lowering.targets.gpu import GPU
from sdy_jax.lowering.targets.target import CPU, Target

NARROW, WIDE, TALL = "tensor<16x16xf32>", "tensor<16x64xf32>", "tensor<64x16xf32>"
"""One KiB; four."""


def product(result, left, right, types):
    return f"%{result} = stablehlo.dot_general %{left}, %{right}, contracting_dims = [1] x [0] : {types}\n"


WIDENS, NARROWS, KEEPS = (f"({x}, {y}) -> {z}" for x, y, z in [
    (NARROW, WIDE, WIDE),
    (WIDE, TALL, NARROW),
    (NARROW, NARROW, NARROW),
])  # fmt: skip


def kib(body, results, order):
    text = f"""
        sdy.mesh @mesh = <["a"=8]>
        func.func @main(%x: {NARROW}, %w: {WIDE}, %v: {TALL}) -> {results} {{
        {body}
        }}"""
    target = Target(Family("some", compiler=Compiler(order=order)))
    return peak_of(Graph(parse(text).operation), target).bytes / 1024


@pytest.mark.parametrize(("late", "held"), [(False, 4 + 1), (True, 4 + 1 + 1)])
def test_a_product_runs_when_another_one_needs_it(late, held):
    body = (
        product("wide", "x", "w", WIDENS)
        + product("early", "wide", "v", NARROWS)
        + product("other", "x", "x", KEEPS)
        + product("y", "early", "other", KEEPS)
        + f"return %y : {NARROW}"
    )
    assert kib(body, NARROW, Order(multiplies_late=late)) == held


@pytest.mark.parametrize(("late", "held"), [(False, 4 + 1), (True, 4 + 1 + 4 * SHARE)])
def test_what_a_gradient_is_computed_of_is_held_in_part_until_the_end(late, held):
    body = (
        product("wide", "x", "w", WIDENS)
        + product("gradient", "wide", "v", NARROWS)
        + product("again", "x", "w", WIDENS)
        + product("other", "again", "v", NARROWS)
        + product("y", "other", "x", KEEPS)
        + f"return %gradient, %y : {NARROW}, {NARROW}"
    )
    assert kib(body, f"({NARROW}, {NARROW})", Order(multiplies_late=late)) == pytest.approx(held)


def test_gpus_are_such():
    assert GPU.compiler.order.multiplies_late
    assert not CPU.compiler.order.multiplies_late
