"""The collectives that a per-device function runs, read off its jaxpr."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.lowering.targets.rates import wire_bytes

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "ragged_all_to_all",
    "ppermute": "collective_permute",
}
"""The primitives of lax."""

Sent = Counter[tuple[str, tuple[str, ...]]]
"""Bytes by the kind of collective and its axes."""


def sent_along(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> Sent:
    """The bytes that a device sends in collectives, `sizes` being those of the axes.

    A loop whose trips are not known counts once, of a branch the sum of all cases.
    """
    found: Sent = Counter()
    for eqn in jaxpr.eqns:
        joined = collective_kind(eqn.primitive.name, eqn.params, sizes)
        if joined is not None:
            kind, axes, group = joined
            found[kind, axes] += _sent(eqn, kind, group)  # type: ignore[assignment]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn.params.values()):
            found.update({k: times * n for k, n in sent_along(inner, sizes).items()})
    return found


def collective_kind(
    primitive: str, params: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[str, tuple[str, ...], int] | None:
    """The kind of a primitive that is a collective, its axes, and how many devices it joins; None for others."""
    kind = _KINDS.get(primitive)
    if kind is None:
        return None
    names = params["axes"] if "axes" in params else params["axis_name"]
    names = tuple(n for n in (names if isinstance(names, tuple) else (names,)) if isinstance(n, str))
    groups = params.get("axis_index_groups")
    return kind, names, len(groups[0]) if groups else math.prod(sizes[name] for name in names)


def _inner(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        inner = getattr(value, "jaxpr", value)  # of a closed one, which jax 0.12 no longer tells apart
        if isinstance(inner, Jaxpr):
            yield inner
        elif isinstance(value, (tuple, list)):
            yield from _inner(value)


def _sent(eqn: JaxprEqn, kind: str, group: int) -> float:
    if kind == "collective_permute" and all(sender == receiver for sender, receiver in eqn.params["perm"]):
        return 0.0
    moved = eqn.invars[:1] if kind == "ragged_all_to_all" else eqn.invars  # beside places, and numbers of rows
    before, after = (sum(map(_bytes, ends)) for ends in (moved, eqn.outvars))
    return wire_bytes(kind, group, before, after)


def _bytes(variable: Any) -> float:
    return float(math.prod(variable.aval.shape) * variable.aval.dtype.itemsize)
