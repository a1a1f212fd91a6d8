"""Programs as text, from one line per op."""

from sharding_dump import parse

from sdy_jax.ir.graph import Graph

X = "tensor<16x16xf32>"
"""One KiB."""


def main(body, arguments=f"%x: {X}", results=X):
    return Graph(
        parse(f"""
        sdy.mesh @mesh = <["a"=4, "b"=2]>
        func.func @main({arguments}) -> ({results}) {{
        {body}
        }}""").operation
    )


def product(result, left, right):
    return f"%{result} = stablehlo.dot_general %{left}, %{right}, contracting_dims = [1] x [0] : ({X}, {X}) -> {X}\n"


def elementwise(result, op, *operands):
    return f"%{result} = stablehlo.{op} {', '.join(f'%{o}' for o in operands)} : {X}\n"
