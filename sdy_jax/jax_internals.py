"""The one place where private names of jax are used, each with the reason.

* `use_simplified_jaxpr_constants` with `hoist_constants_as_args`: arrays that a function closes over become arguments
  of the lowered module instead of giant constants in its text. jax has no public switch for either.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import config
from jax.interpreters import mlir


def trace_and_lower(fun: Any, avals: tuple[Any, ...], platform: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """Traces a flat function and lowers it to StableHLO.

    Returns:
        The MLIR module, jax's record of the outputs (`out_info`), and the arrays that the function closes over: they
        are the first arguments of the module's main function.
    """
    with config.use_simplified_jaxpr_constants(True):
        traced = jax.jit(fun, keep_unused=True).trace(*avals)
        lowered = traced.lower(
            lowering_platforms=(platform,),
            _private_parameters=mlir.LoweringParameters(hoist_constants_as_args=True),
        )
    return lowered.compiler_ir("stablehlo"), traced.out_info, tuple(lowered._lowering.const_args)
