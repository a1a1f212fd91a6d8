"""What a `custom_partitioning` function says.

* `custom_partitioning_p` and the conversion of its sharding rules: it is in the parameters of its primitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import custom_partitioning
from jax._src.custom_partitioning_sharding_rule import (
    SdyShardingRule,
    sdy_sharding_rule_to_mlir,
    str_to_sdy_sharding_rule,
)
from jax.extend.core import Primitive
from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError

custom_partitioning_p: Primitive = custom_partitioning.custom_partitioning_p


def sharding_rule_of(
    said: Any, static: Sequence[Any], mesh: Any, operands: Sequence[ir.Type], results: Sequence[ir.Type]
) -> ir.Attribute | None:
    """The rule of a `custom_partitioning` function for these types; it may be stated by a function of them."""
    if said is None:
        return None
    if callable(said):
        said = said(*static, mesh, list(operands), list(results))
        said, options = said if isinstance(said, (list, tuple)) and len(said) == 2 else (said, {})
        said = str_to_sdy_sharding_rule(said, **options) if isinstance(said, str) else said
    if not isinstance(said, SdyShardingRule):
        raise ShardingError(
            f"the sharding_rule of a custom_partitioning gave {said!r}; sharding_rule callable must produce either an "
            "SdyShardingRule object or an Einsum-like notation string."
        )
    return sdy_sharding_rule_to_mlir(said, list(operands), list(results))
