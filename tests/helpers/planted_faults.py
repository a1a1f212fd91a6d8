"""Mistakes that are planted in the library, one at a time, each with a program that shows it.

`plant` is what `SDY_JAX_VERIFY_HOOK` names: a process that verifies calls it, and the environment says which mistake.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.collectives import BUCKET
from sdy_jax.lowering.ops import elementwise, gather_scatter, reductions, shards, sorting
from sdy_jax.lowering.ops.collectives import movement, packing
from sdy_jax.lowering.ops.registry import EMITTERS
from sdy_jax.lowering.planner import plan_program as blocking
from sdy_jax.shardy.rules.registry import RULES

NAME = "PLANTED_FAULT"
"""The environment variable that names the mistake."""


@dataclass(frozen=True)
class Planted:
    """A mistake: what plants it, a program on arrays of these shapes, and which op is then found to be wrong."""

    plant: Callable[[], None]
    program: Callable[..., Any]
    op: str
    shapes: tuple[tuple[int, ...], ...] = ((8, 16),)
    specs: Any = field(default_factory=lambda: P("x"))
    out: Any = None
    sizes: tuple[int, ...] = (4,)
    target: str = "cpu"
    dtypes: tuple[str, ...] = ("float32",) * 4
    options: dict[str, Any] = field(default_factory=lambda: {"layouts": "local"})

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(s, d) for s, d in zip(self.shapes, self.dtypes, strict=False)]

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        return jax.sharding.AbstractMesh(self.sizes, tuple("xy"[: len(self.sizes)]))


def plant() -> None:
    """Plants the mistake that the environment names."""
    load_extensions()
    PLANTED[os.environ[NAME]].plant()


def _replaced(holder: Any, name: str, made: Callable[[Any], Any]) -> Callable[[], None]:
    """What puts something made of a function, an entry of a table or a method in its place."""

    def run() -> None:
        if isinstance(holder, dict):
            holder[name] = made(holder[name])
        else:
            setattr(holder, name, made(getattr(holder, name)))

    return run


FAST = sdy.CostModel(latency=1e-7, flop=1e-11, bandwidth={"x": 1e9, "y": 1e9}, memory=1e-13)
"""A machine on which products take about as long as sending what they take."""

_COMBINING, _MOVING = packing._COMBINING, packing._MOVING


def _sum(x):
    return x.sum(0)


def _product(x, w):
    return x @ w


def _cross(x, w):
    return jnp.tanh(x @ w)


def _other_axes(right):
    return lambda x, axes, kind, mesh: right(x, [a for a in mesh.all_atoms if a not in axes], kind, mesh)


def _next_block(right):
    def wrong(x, axes_per_dim, mesh):
        dim = next(d for d, axes in enumerate(axes_per_dim) if axes)
        return jnp.roll(right(x, axes_per_dim, mesh), x.shape[dim], dim)

    return wrong


def _next_part(right):
    def wrong(x, axes_per_dim, *rest):
        dim = next(d for d, axes in enumerate(axes_per_dim) if axes)
        return right(jnp.roll(x, 2, dim), axes_per_dim, *rest)

    return wrong


def _transposed_chunks(right):
    return lambda x, params, mesh: right(jnp.flip(x, params[0][2]), params, mesh)


def _moved_strip(right):
    def wrong(self, operand, strips):
        return right(self, operand, replace(strips, offsets=tuple(max(n - 1, 0) for n in strips.offsets)))

    return wrong


def _next_start(right):
    return lambda local, x, *at: right(local, x, *[(i + 1) % 6 for i in at])


def _one_trip_less(right):
    def wrong(local, *carried):
        condition, body = local.op.blocks
        return list(
            lax.while_loop(
                lambda values: local.evaluation.run_block(condition, local.evaluation.run_block(body, list(values)))[0],
                lambda values: tuple(local.evaluation.run_block(body, list(values))),
                tuple(carried),
            )
        )

    return wrong


def _swapped_operands(right):
    """A rewrite of the program, before layouts are chosen, that turns differences around."""

    def wrong(module, *rest, **named):
        for function in module.regions[0].blocks[0].operations:
            for op in function.operation.regions[0].blocks[0].operations if function.operation.regions else ():
                if op.operation.name == "stablehlo.subtract":
                    op.operation.operands[0], op.operation.operands[1] = (
                        op.operation.operands[1],
                        op.operation.operands[0],
                    )
        return right(module, *rest, **named)

    return wrong


def _scan(x):
    return lax.fori_loop(0, 5, lambda i, carry: carry * 0.5 + x, x)


def _blocks_stay(right):
    return lambda local, x: lax.rev(x, local.op.ints("dimensions"))


PLANTED = {
    "missing reduction": Planted(
        _replaced(_COMBINING, "all_reduce", lambda _: lambda x, *_: x), _sum, "sdy.all_reduce"
    ),
    "max instead of sum": Planted(
        _replaced(_COMBINING, "all_reduce", lambda right: lambda x, axes, kind, mesh: right(x, axes, "max", mesh)),
        _sum,
        "sdy.all_reduce",
    ),
    "swapped group": Planted(_replaced(_COMBINING, "all_reduce", _other_axes), _sum, "sdy.all_reduce", sizes=(2, 2)),
    "gathered in another order": Planted(
        _replaced(_MOVING, "all_gather", _next_block), _cross, "sdy.all_gather", ((8, 16), (16, 8)), (P("x"), P()), P()
    ),
    "scattered to a neighbour": Planted(
        _replaced(_COMBINING, "reduce_scatter", _next_part),
        _product,
        "sdy.reduce_scatter",
        ((8, 16), (16, 8)),
        (P(None, "x"), P("x")),
        P("x"),
    ),
    "wrong part kept": Planted(
        _replaced(_MOVING, "all_slice", _next_part), lambda x: jnp.tanh(x), "sdy.all_slice", specs=P(), out=P("x")
    ),
    "transposed all_to_all": Planted(
        _replaced(packing, "all_to_all", _transposed_chunks),
        lambda x: jnp.tanh(x),
        "sdy.all_to_all",
        specs=P("x"),
        out=P(None, "x"),
    ),
    "nothing permuted": Planted(
        _replaced(movement, "collective_permute", lambda _: lambda x, *_: x),
        lambda x: jnp.tanh(x),
        "sdy.collective_permute",
        specs=P("x", "y"),
        out=P("y", "x"),
        sizes=(2, 2),
    ),
    "strip off by one": Planted(
        _replaced(shards._Blocks, "_strip_of", _moved_strip),
        lambda x: x[1:7] * 2,
        "stablehlo.slice",
    ),
    "wrong halo": Planted(
        _replaced(shards, "redistribute", lambda right: lambda *args: jnp.roll(right(*args), 1, args[2])),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), ((1, 1), (0, 0))),
        "stablehlo.reduce_window",
    ),
    "wrong start of a dynamic slice": Planted(
        _replaced(
            EMITTERS,
            "stablehlo.dynamic_slice",
            lambda right: lambda local, x, *at: right(local, x, *[(i + 1) % 6 for i in at]),
        ),
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 3, 0),
        "stablehlo.dynamic_slice",
        ((8, 16), ()),
        (P(None, "x"), None),
        dtypes=("float32", "int32"),
    ),
    "missing mask": Planted(
        _replaced(reductions, "mask_padding", lambda _: lambda local, operand, x, *_: x),
        lambda x: (x * x + 2).prod(0),
        "stablehlo.reduce",
        ((7, 16),),
    ),
    "wrong identity": Planted(
        _replaced(reductions, "identity", lambda _: lambda kind, dtype: np.float32(0)),
        lambda x: (-jnp.exp(x)).max(0),
        "stablehlo.reduce",
        ((7, 16),),
    ),
    "forgotten scale of a mean": Planted(
        _replaced(EMITTERS, "stablehlo.divide", lambda _: lambda local, x, y: x),
        lambda x: x.mean(0),
        "stablehlo.divide",
    ),
    "totals before a shard forgotten": Planted(
        _replaced(
            reductions, "_gathered", lambda _: lambda local, along, total, neutral: jnp.full_like(total, neutral)
        ),
        lambda x: jnp.cumsum(x, 0),
        "stablehlo.reduce_window",
    ),
    "rows of others not masked": Planted(
        _replaced(gather_scatter, "_masked", lambda _: lambda found, *_: found),
        lambda x, i: x[i],
        "stablehlo.gather",
        ((64,), (5,)),
        (P("x"), None),
        dtypes=("float32", "int32"),
    ),
    "scattered onto every shard's copy": Planted(
        _replaced(gather_scatter, "_leader_keeps", lambda _: lambda local, inputs, axes: list(inputs)),
        lambda x, i, y: x.at[i].add(y),
        "stablehlo.scatter",
        ((4,), (64,), (64,)),
        (P(), P("x"), P("x")),
        dtypes=("float32", "int32", "float32"),
    ),
    "counted from zero on every shard": Planted(
        _replaced(elementwise, "offset", lambda _: lambda *_: np.int32(0)),
        lambda x: lax.broadcasted_iota(jnp.float32, (8, 16), 0) * x,
        "stablehlo.iota",
    ),
    "blocks sorted alone": Planted(
        _replaced(sorting, "_exchanged", lambda _: lambda local, xs, keys: [lax.sort(xs[0], dimension=0)]),
        lambda x: jnp.sort(x, 0),
        "stablehlo.sort",
        ((64,),),
        out=P("x"),
    ),
    "local numbers of the largest": Planted(
        _replaced(sorting, "offset", lambda _: lambda *_: np.int32(0)),
        lambda x: lax.top_k(x, 2),
        "chlo.top_k",
        ((16,),),
    ),
    "blocks not turned around": Planted(
        _replaced(EMITTERS, "stablehlo.reverse", _blocks_stay), lambda x: x[::-1], "stablehlo.reverse"
    ),
    "a trip too few": Planted(_replaced(EMITTERS, "stablehlo.while", _one_trip_less), _scan, "stablehlo.while"),
    "bucket in another order": Planted(
        _replaced(EMITTERS, BUCKET, lambda right: lambda members, xs: right(members, xs)[::-1]),
        lambda x, y: (jnp.tanh(x), jnp.tanh(y)),
        "sdy.all_gather",
        ((8, 4), (8, 4)),
        out=P(),
        options={"combine": "1MiB"},
    ),
    "ring in the wrong direction": Planted(
        _replaced(movement.Ring, "passed", lambda right: lambda self, x, by: right(self, x, -by)),
        lambda x, around, up, down: jnp.tanh(jnp.tanh(x @ around) @ up) @ down @ around,
        "stablehlo.dot_general",
        ((128, 64), (64, 64), (64, 1024), (1024, 64)),
        (P("y"), P(), P(None, "y"), P("y")),
        P("y"),
        sizes=(2, 4),
        target="own",
        options={"costs": FAST},
    ),
    "a sum that is none by its rule": Planted(
        _replaced(
            RULES, "stablehlo.reduce", lambda right: lambda op, conservative: _not_reduced(right(op, conservative))
        ),
        _sum,
        "stablehlo.reduce",
    ),
    "a difference turned around by a pass": Planted(
        _replaced(blocking, "partition_whole", _swapped_operands), lambda x: x - 2 * x * x, "`result`"
    ),
}
"""By what they are called."""


def _not_reduced(rule):
    """A rule without reduction factors: they pass through."""
    return replace(rule, reduction=frozenset())
