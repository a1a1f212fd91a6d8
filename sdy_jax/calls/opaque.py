"""Programs with effects as one op of jax, which no transformation takes apart.

Linearization inside a `jax.lax.scan` splits functions into what depends on the loop's values and what does not, and
drops branches without results as it does: that in which one device calls the host (jax 0.10 and 0.12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdy_jax.annotate import regions
from sdy_jax.calls.derivatives import Flat
from sdy_jax.errors import UnsupportedError
from sdy_jax.jax_internals import has_ordered


def opaque(run: Flat) -> Flat:
    """The same function as one op. It has no derivative: `differentiable` gives it one."""

    def call(*operands: Any) -> Sequence[Any]:
        traced = regions.trace(run, operands)
        results: Sequence[Any] = opaque_p.bind(*traced.captured, *operands, region=traced.region)
        return results

    return call


def _batched(axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, region: regions.Region) -> Any:
    if all(dim is None for dim in dims):
        return opaque_p.bind(*values, region=region), None
    if has_ordered(region.effects):
        raise UnsupportedError(
            "jax.vmap of a partitioned function with ordered callbacks, which one device runs in their order; to fix: "
            "vmap inside of the function, or make them unordered"
        )
    return opaque_p.bind(*values, region=regions.batched(region, axis_data, dims)), 0


opaque_p = regions.region_primitive("sdy_program", _batched)
"""Parameter: the function as a region."""
