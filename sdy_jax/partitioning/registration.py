"""Shardy's passes of partitioning, among the others."""

from __future__ import annotations

from sdy_jax.partitioning.collective_matmul import remove_around_dots
from sdy_jax.partitioning.local import convert_global_to_local
from sdy_jax.partitioning.manual import pad_for_divisibility, partition_per_instruction, resolve_permutation_factors
from sdy_jax.partitioning.reshards import optimize_collectives, reshards_to_collectives
from sdy_jax.partitioning.single_device import resolve_single_device_shardings
from sdy_jax.partitioning.unreduced_values import verify_unreduced_axes
from sdy_jax.passes.registry import PASSES

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
