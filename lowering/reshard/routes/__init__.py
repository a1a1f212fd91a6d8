"""What reshards cost between all layouts of a tensor at once: shortest paths over single collectives."""

from sdy_jax.lowering.reshard.routes.prices import RoutePrices

__all__ = ["RoutePrices"]
