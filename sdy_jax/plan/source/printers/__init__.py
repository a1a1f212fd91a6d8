"""How each primitive is written in Python, by family. Importing it fills the registry."""

from sdy_jax.plan.source import expressions  # noqa: F401  (each registers its family)
from sdy_jax.plan.source.printers import control_flow, elementwise, reductions  # noqa: F401  (each registers its family)
