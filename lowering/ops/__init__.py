"""How ops run on shards: importing this package fills the registries of `registry.py`, one module per family of ops."""

from sdy_jax.lowering.ops import (  # noqa: F401
    access_folds,
    control_flow,
    convolutions,
    custom_calls,
    dynamic_slicing,
    elementwise,
    fourier_transforms,
    gather_scatter,
    index_folds,
    linalg,
    products,
    reductions,
    reshapes,
    slicing,
    sorting,
    windows,
)
from sdy_jax.lowering.ops.collectives import packing, written  # noqa: F401
