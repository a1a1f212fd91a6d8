"""FFI calls under `jax.vmap`.

* `ffi_call_p` with its lowering, and its rule under `vmap`: JAX forgets how many dimensions that put in front of what a
  call takes and makes. From now on calls say so, in a parameter that JAX's own rules pass by.
"""

from __future__ import annotations

from typing import Any

from jax._src import ffi
from jax.extend.core import Primitive
from jax.interpreters import batching

ffi_call_p: Primitive = ffi.ffi_call_p
lower_ffi_call = ffi.ffi_call_lowering

BATCH_DIMENSIONS = "num_batch_dims"
"""The parameter; it is not there where there are none."""

_COUNTED = ("broadcast_all", "expand_dims")
"""The methods by which all operands and results get a dimension in front."""


def _map_and_count(args: Any, dims: Any, **parameters: Any) -> Any:
    if parameters["vmap_method"] in _COUNTED:
        parameters[BATCH_DIMENSIONS] = parameters.get(BATCH_DIMENSIONS, 0) + 1
    return ffi.ffi_batching_rule(ffi_call_p, args, dims, **parameters)


batching.primitive_batchers[ffi_call_p] = _map_and_count
