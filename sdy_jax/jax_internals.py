"""The one place where private names of jax are used, each with the reason.

* `use_simplified_jaxpr_constants` with `hoist_constants_as_args`: arrays that a function closes over become arguments
  of the lowered module instead of giant constants in its text. jax has no public switch for either.
* `Traced._consts`: tracers of an outer trace that a function closes over; they are arguments of the module as well.
* `get_concrete_mesh`: the mesh of `jax.set_mesh`; the public `get_mesh` refuses to say it under `jax.jit`.
* `_convert_element_type`: the only way to give a result the weak type that the plain function gives it.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src import config
from jax._src.lax.lax import _convert_element_type
from jax._src.mesh import get_concrete_mesh
from jax.interpreters import mlir


def trace_and_lower(fun: Any, avals: tuple[Any, ...], platform: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """Traces a flat function and lowers it to StableHLO.

    Returns:
        The MLIR module, jax's record of the outputs (`out_info`), and the arrays and tracers that the function closes
        over: they are the first arguments of the module's main function.
    """
    with config.use_simplified_jaxpr_constants(True):
        traced = jax.jit(fun, keep_unused=True).trace(*avals)
        lowered = traced.lower(
            lowering_platforms=(platform,),
            _private_parameters=mlir.LoweringParameters(hoist_constants_as_args=True),
        )
    constants = (*lowered._lowering.const_args, *traced._consts)
    return lowered.compiler_ir("stablehlo"), traced.out_info, constants


def context_mesh() -> jax.sharding.Mesh | None:
    """The mesh of `jax.set_mesh`, under a trace as well; empty or None if there is none."""
    return get_concrete_mesh()


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same array with a weak type, as a Python scalar has."""
    return _convert_element_type(x, weak_type=True)
