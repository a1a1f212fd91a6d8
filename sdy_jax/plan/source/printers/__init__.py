"""How each primitive is written in Python, by family. Importing it fills the registry."""

from sdy_jax.plan.source.printers import control_flow, elementwise, reductions, registry, shapes, stablehlo  # noqa: F401  (each registers its family)
