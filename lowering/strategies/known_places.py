"""Windows at places that are known before the program runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sdy_jax.ir.graph import Value
from sdy_jax.lowering.strategies.monoids import known_scalar


def known_integer(value: Value) -> int | None:
    """The number that an integer array consists of, where that is known."""
    known = known_scalar(value)
    return None if known is None else int(known)


def known_integers(values: Sequence[Value]) -> list[int] | None:
    """The numbers that integer arrays consist of; None where one is not known."""
    found = [number for number in map(known_integer, values) if number is not None]
    return found if len(found) == len(values) else None


def clamped_starts(starts: Sequence[int], whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where a window begins of which the ops say that it fits."""
    return [min(max(at, 0), n - size) for at, n, size in zip(starts, whole, part, strict=True)]


def partial_dims(whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """The dimensions of which a window has only a part."""
    return [d for d, (n, size) in enumerate(zip(whole, part, strict=True)) if n != size]


def known_starts(indices: Value, dims: Sequence[int], rank: int) -> list[int] | None:
    """Where the one window of a gather or a scatter begins in each dimension, of which one index vector addresses some;
    None where that is not known."""
    found = [number for number in _components(indices) if number is not None]
    if len(found) != math.prod(indices.shape or ()) or len(found) != len(dims):
        return None
    starts = dict(zip(dims, found, strict=True))
    return [starts.get(dim, 0) for dim in range(rank)]


def _components(indices: Value) -> Iterator[int | None]:
    op = indices.defining_op
    is_joined = op is not None and op.name == "stablehlo.concatenate" and indices.rank == 1
    for part in op.operands if op is not None and is_joined else [indices]:
        yield from [known_integer(part)] * math.prod(part.shape or ())


def is_split_along(value: Value, dims: Sequence[int]) -> bool:
    """Whether a value is split along one of some dimensions."""
    return value.sharding is not None and any(value.sharding.axes[d] for d in dims)
