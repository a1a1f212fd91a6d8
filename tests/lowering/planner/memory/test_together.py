"""Which all_reduces run as one on TPUs: those of one group of devices of which none waits for another."""

import pytest
from sharding_dump import parse

from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.memory.buffers import run_together

X = "tensor<16x128xf32>"


def reduced(result, operand, axes='"a"'):
    return f"%{result} = sdy.all_reduce {{{axes}}} %{operand} out_sharding=<@mesh, [{{}}, {{}}]> : {X}\n"


def lasts(body, size=1.0):
    """Per all_reduce, in order, the number of the last one that runs with it."""
    text = f"""
        sdy.mesh @mesh = <["a"=4, "b"=2]>
        func.func @main(%x: {X}, %y: {X}) -> {X} {{
        {body} return %x : {X}
        }}"""
    graph = Graph(parse(text).operation)  # whose module lives as long as its ops are read
    found = run_together(graph.main.blocks[0], lambda value: size)
    ops = [op for op in graph.main.blocks[0].ops if op in found]
    return [ops.index(found[op]) for op in ops]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (reduced("r", "x") + reduced("s", "y"), [1, 1]),
        (reduced("r", "x") + reduced("s", "y", '"b"') + reduced("t", "y"), [2, 1, 2]),
        (reduced("r", "x") + f"%n = stablehlo.negate %r : {X}\n" + reduced("s", "n") + reduced("t", "y"), [0, 2, 2]),
        (reduced("r", "x") + reduced("s", "y", '"b"') + reduced("t", "s") + reduced("u", "t"), [2, 1, 2, 3]),
    ],
)
def test_none_waits_for_another_of_its_group(body, found):
    assert lasts(body) == found


def test_so_many_bytes_are_sent_at_once():
    body = "".join(reduced(f"r{i}", "x") for i in range(3))
    assert lasts(body, 60 * 2**20) == [1, 1, 2]


def test_what_regions_take_is_waited_for():
    body = reduced("r", "x") + "%c = stablehlo.constant dense<1> : tensor<i1>\n"
    body += f"""%o = "stablehlo.if"(%c) ({{ stablehlo.return %r : {X} }}, {{ stablehlo.return %x : {X} }}) :
        (tensor<i1>) -> {X}\n"""
    assert lasts(body + reduced("s", "o")) == [0, 1]
