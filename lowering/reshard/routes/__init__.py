"""What reshards cost between all layouts of a tensor at once: shortest paths over single collectives.

See docs/explanation/planner.md#prices-of-all-pairs.
"""

from sdy_jax.lowering.reshard.routes.prices import RoutePrices

__all__ = ["RoutePrices"]
