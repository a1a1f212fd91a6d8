"""`jax_debug_nans` and `jax_debug_infs`: whether results are looked at.

* Their values, which `jax.config` has untyped, and without those of contexts.
* The current trace: where jit finds such a number it calls the function that it has traced once more, outside of its
  own trace, to hear of the op that made it.
"""

from __future__ import annotations

from jax._src import config, core
from jax._src.interpreters.partial_eval import DynamicJaxprTrace


def is_run_for_its_ops() -> bool:
    """Whether jit calls a function to find the op that makes a number which it is to report."""
    is_looked_for = config.debug_nans.value or config.debug_infs.value
    return bool(is_looked_for) and not isinstance(core.trace_ctx.trace, DynamicJaxprTrace)
