"""What ops read from memory where a compiler fuses what computes element by element."""

import pytest
from op_texts import X, elementwise, main, product

from sdy_jax.lowering.planner.facts.fusion import Touches
from sdy_jax.lowering.targets.family import Fusion

ALL = ((0, 0), (1, 1), (2, 2))
"""What a product reads and writes that computes neither operand."""


def last_touches(body, into_products=True):
    """What the last product of a program touches."""
    ops = main(body + f"return %y : {X}").main.blocks[0].ops
    return Touches(Fusion(into_products))(next(op for op in reversed(ops) if op.name == "stablehlo.dot_general"))


def test_a_product_that_alone_reads_a_value_computes_it():
    body = product("h", "x", "x") + elementwise("t", "tanh", "h")
    assert last_touches(body + product("y", "t", "x")) == ALL[1:]
    assert last_touches(body + product("y", "t", "x"), into_products=False) == ALL


@pytest.mark.parametrize("between", ["", elementwise("t", "tanh", "s")])
def test_each_of_two_readers_reads_what_both_compute(between):
    body = product("h", "x", "x") + elementwise("s", "add", "h", "x") + between
    operand = "t" if between else "s"
    assert last_touches(body + product("p", "s", "x") + product("y", operand, "p")) == ALL


def test_what_is_made_of_nothing_large_is_not_read():
    ones = f"""%c = stablehlo.constant dense<1.0> : tensor<f32>
        %o = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> {X}
        """
    assert last_touches(ones + product("p", "o", "x") + product("y", "o", "p")) == ALL[1:]


def test_long_chains_are_followed():
    chain = "".join(elementwise(f"v{n + 1}", "tanh", f"v{n}") for n in range(2000))
    assert last_touches(product("v0", "x", "x") + chain + product("y", "v2000", "x")) == ALL[1:]


def test_an_update_writes_all_of_what_depends_on_no_input():
    zeros = f"""%c = stablehlo.constant dense<0.0> : tensor<f32>
        %o = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> {X}
        """
    assert touches_of_update(zeros) == ((1, 1), (1, 1), (0, 0))
    assert touches_of_update(product("o", "x", "x")) == ((1, 1), (1, 1))


def touches_of_update(made):
    row = "tensor<1x16xf32>"
    body = f"""{made}
        %r = stablehlo.slice %x [0:1, 0:16] : ({X}) -> {row}
        %i = stablehlo.constant dense<3> : tensor<i32>
        %y = stablehlo.dynamic_update_slice %o, %r, %i, %i : ({X}, {row}, tensor<i32>, tensor<i32>) -> {X}
        return %y : {X}"""
    (update,) = (op for op in main(body).main.blocks[0].ops if op.name == "stablehlo.dynamic_update_slice")
    return Touches(Fusion(True))(update)
