"""How ops run on shards: importing this package fills the registries of `registry.py`, one module per family."""

from . import (  # noqa: F401
    after,
    blocked_linalg,
    callback,
    collective,
    control_flow,
    convolution,
    creation,
    custom_call,
    dot,
    dynamic_slicing,
    elementwise,
    indexing,
    joining,
    layer_updates,
    linalg,
    manual,
    padded_windows,
    pieces,
    reduction,
    reshape,
    rolling,
    rounding,
    scatter,
    shape,
    slicing,
    sorting,
    top_k,
    transforms,
    window,
    written_collective,
    written_windows,
)
from .registry import STRATEGIES, Strategy, strategies_of

__all__ = ["STRATEGIES", "Strategy", "strategies_of"]
