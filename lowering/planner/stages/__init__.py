"""Shardy's passes of partitioning under their names, from module to module; importing this puts them among the passes.

Shapes stay global up to `sdy-convert-global-to-local`.
"""

from __future__ import annotations

from sdy_jax.lowering.planner.facts.verifier import verify_unreduced_axes
from sdy_jax.lowering.planner.stages.local import convert_global_to_local
from sdy_jax.lowering.planner.stages.manual_computations import (
    pad_for_divisibility,
    partition_per_instruction,
    resolve_permutation_factors,
)
from sdy_jax.lowering.planner.stages.reshards import (
    optimize_collectives,
    remove_around_dots,
    reshards_to_collectives,
    resolve_single_device_shardings,
)
from sdy_jax.shardy.passes.registry import PASSES

PASSES.update(
    {
        "sdy-convert-global-to-local": convert_global_to_local,
        "sdy-optimize-collectives": optimize_collectives,
        "sdy-pad-for-divisibility": pad_for_divisibility,
        "sdy-per-instruction-partitioning": partition_per_instruction,
        "sdy-remove-all-gather-reduce-scatter-for-cmv1": remove_around_dots,
        "sdy-reshard-to-collectives": reshards_to_collectives,
        "sdy-resolve-permutation-factors": resolve_permutation_factors,
        "sdy-resolve-single-device-sharding": resolve_single_device_shardings,
        "sdy-verify-unreduced-axes": verify_unreduced_axes,
    }
)
