"""The collectives that a per-device function runs, read off its jaxpr."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from sdy_jax.lowering.reshard.cost import wire_bytes

_KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}
"""The primitives of lax."""

KINDS = tuple(dict.fromkeys(_KINDS.values()))


def sent_by_kind(jaxpr: Jaxpr, sizes: Mapping[str, int]) -> Counter[str]:
    """The bytes that a device sends by each kind of collective, `sizes` being those of the axes.

    A loop whose trips are not known counts once, of a branch the sum of all cases.
    """
    found: Counter[str] = Counter()
    for eqn in jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        if kind is not None:
            found[kind] += _sent(eqn, kind, sizes)  # type: ignore[assignment]
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in _inner(eqn.params.values()):
            found.update({k: times * n for k, n in sent_by_kind(inner, sizes).items()})
    return found


def _inner(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        inner = getattr(value, "jaxpr", value)  # of a closed one, which jax 0.12 no longer tells apart
        if isinstance(inner, Jaxpr):
            yield inner
        elif isinstance(value, (tuple, list)):
            yield from _inner(value)


def _sent(eqn: JaxprEqn, kind: str, sizes: Mapping[str, int]) -> float:
    if kind == "collective_permute" and all(sender == receiver for sender, receiver in eqn.params["perm"]):
        return 0.0
    names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
    names = names if isinstance(names, tuple) else (names,)
    groups = eqn.params.get("axis_index_groups")
    group = len(groups[0]) if groups else math.prod(sizes[name] for name in names if isinstance(name, str))
    before, after = (sum(map(_bytes, ends)) for ends in (eqn.invars, eqn.outvars))
    return wire_bytes(kind, group, before, after)


def _bytes(variable: Any) -> float:
    return float(math.prod(variable.aval.shape) * variable.aval.dtype.itemsize)
