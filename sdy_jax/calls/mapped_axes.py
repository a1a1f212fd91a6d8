"""`jax.vmap(spmd_axis_name=...)` of a partitioned function: it splits the new dimension along axes of the mesh.

That is right only if the program does not run along them itself. jax checks the shardings at the border; what is inside
it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sdy_jax.errors import ShardingError

checked_p = Primitive("sdy_mapped_axes")
checked_p.multiple_results = True


def checked(operands: Sequence[Any], axes: frozenset[str], name: str) -> list[Any]:
    """The operands of a program that runs along these axes, and is not mapped over any of them."""
    return list(checked_p.bind(*operands, axes=axes, name=name)) if operands and axes else list(operands)


def _batch(
    axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, axes: frozenset[str], name: str
) -> tuple[Any, Any]:
    found = axis_data.spmd_name or ()
    wrong = sorted(axes.intersection([found] if isinstance(found, str) else found))
    if wrong:
        names = ", ".join(map(repr, wrong))
        raise ShardingError(
            f"jax.vmap(spmd_axis_name={names}) of {name}, whose plan splits work along it. To fix: leave "
            "spmd_axis_name out; or plan with layouts='propagated', which uses stated axes only; or vmap inside, "
            "partition(jax.vmap(f), in_shardings=...) with the axis at the new dimension"
        )
    return checked_p.bind(*operands, axes=axes, name=name), dims


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
    return checked_p.bind(*primals, **parameters), list(tangents)


checked_p.def_impl(lambda *operands, **_: list(operands))
checked_p.def_abstract_eval(lambda *types, **_: types)
ad.primitive_jvps[checked_p] = _jvp
batching.fancy_primitive_batchers[checked_p] = _batch
mlir.register_lowering(checked_p, lambda _, *operands, **__: operands)
