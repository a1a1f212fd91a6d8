"""How each primitive is written in Python, by family. Importing it fills the registry."""

from sdy_jax.python_source.printers import (  # noqa: F401  (each registers its family)
    collectives,
    control_flow,
    elementwise,
    indexing,
    other,
    products,
    reductions,
    shapes,
    stablehlo,
)
