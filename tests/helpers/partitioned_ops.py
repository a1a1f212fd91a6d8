"""Helpers for tests of strategies: single ops on eight devices, their numbers and the collectives of their plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

import sdy_jax as sdy
from sdy_jax.lowering.ops.re_emission import numpy_dtype, stablehlo_op_p
from sdy_jax.plan.plan import Plan
from sdy_jax.testing import assert_same


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    """Eight devices along axes named x, y, z."""
    return jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(sizes), tuple("xyz"[: len(sizes)]))


LINE, PLANE, CUBE = mesh_of(8), mesh_of(2, 4), mesh_of(2, 2, 2)


@contextmanager
def setting(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """A variable has a value inside of a block, and its old one afterwards, whatever happens in it."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def check(
    function: Callable[..., Any],
    args: Sequence[Any],
    in_shardings: Sequence[Any],
    out_shardings: Any = None,
    *,
    mesh: jax.sharding.Mesh = PLANE,
    kinds: str | None = None,
    wire_bytes: float | None = None,
    layouts: str = "local",
    **tolerances: float,
) -> Plan:
    """Asserts that the numbers are the plain function's, and which collectives that send anything are planned: op by op
    unless `layouts` says otherwise.

    How one op runs is decided op by op. The layouts of the whole program may be others, such as those that share the
    op's work out over an axis that nobody named: then its numbers are compared as well.

    Args:
        kinds: their kinds, in any order.
        wire_bytes: what a device sends in all of them, at most.

    Returns:
        The plan.
    """
    options = {"mesh": mesh, "in_shardings": tuple(in_shardings), "out_shardings": out_shardings}
    plan = assert_same(function, *args, **options, layouts=layouts, **tolerances)
    assert wire_bytes is None or plan.wire_bytes <= wire_bytes, plan
    assert kinds is None or sorted(c.kind for c in plan.collectives if c.wire_bytes) == sorted(kinds.split()), plan
    if layouts == "global":
        return plan
    chosen = sdy.partition(function, **options, on_unknown="ignore").plan(*args)
    if chosen.layouts.cost < chosen.layouts.baseline_cost:
        assert_same(function, *args, **options, **tolerances)
    return plan


def op(text: str, *types: str) -> Callable[..., Any]:
    """The function of one op, written in MLIR with its operands as `%a`, `%b`, ..., and its results' tensor types.

    >>> op("stablehlo.negate %a : tensor<2xf32>", "2xf32")(np.ones(2, np.float32))
    """

    tensors = ", ".join(f"tensor<{t}>" for t in types)
    one = len(types) == 1
    returned = "%r" if one else ", ".join(f"%r#{n}" for n in range(len(types)))
    body = f"{'%r' if one else f'%r:{len(types)}'} = {text}\nfunc.return {returned} : {tensors}"

    def run(*operands: Any) -> Any:
        named = ", ".join(f"%{letter}: {_type(x)}" for letter, x in zip("abcdefgh", operands, strict=False))
        module = f"module {{ func.func @main({named}) -> ({tensors}) {{\n{body}\n}} }}"
        found = stablehlo_op_p.bind(*operands, name="op", avals=tuple(map(_aval, types)), text=module)
        return found[0] if one else tuple(found)

    return run


def _aval(type_: str) -> Any:
    *dims, dtype = type_.split("x")
    return jax.core.ShapedArray(tuple(map(int, dims)), numpy_dtype(dtype))


_NAMES = {
    "float32": "f32",
    "bfloat16": "bf16",
    "int32": "i32",
    "int8": "i8",
    "uint32": "ui32",
    "bool": "i1",
    "int4": "i4",
}


def _type(x: jax.Array) -> str:
    return f"tensor<{''.join(f'{n}x' for n in x.shape)}{_NAMES[np.dtype(x.dtype).name]}>"
