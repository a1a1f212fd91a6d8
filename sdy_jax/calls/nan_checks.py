"""What `jax_debug_nans` and `jax_debug_infs` report of a partitioned function: the op and its line.

jit looks at a program's results, and where it finds such a number runs the function op by op, as if it were not jitted.
Here that is the user's function on whole arrays: of the partitioned program no op is the user's.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sdy_jax.calls.planned_function import PlannedFunction
from sdy_jax.ir.hidden_frames import raising_line
from sdy_jax.ir.locations import short_source
from sdy_jax.jax_internals.contexts import mesh_in_context
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.function_mesh import auto_mesh

_OF_AN_OP = re.compile(r"invalid value \(\w+\) encountered in \S+")
"""How jax names an op."""


def op_by_op(function: PlannedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: AnyMesh) -> Any:
    """The result of the user's function, run op by op on arrays that lie on the mesh.

    Raises:
        FloatingPointError: an op gives NaN or infinity; or the function cannot be run so.
    """
    mesh, name = auto_mesh(mesh), function.name
    own = mesh if function.traced.has_mesh_in_context else None
    try:
        with mesh_in_context(own) if isinstance(own, jax.sharding.Mesh) else nullcontext():
            args, kwargs = jax.tree.map(lambda x: _on_mesh(x, mesh), (args, kwargs))
            return function.fun(*args, **kwargs)
    except (FloatingPointError, ZeroDivisionError) as error:
        raise explained(error, name) from None
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise FloatingPointError(
            f"a result of {name}() has NaN or infinity, and which op makes it is not known, because the plain function "
            f"does not run op by op: {reason}"
        ) from error


def _on_mesh(x: Any, mesh: AnyMesh) -> Any:
    """An argument as the function sees it under jit: an array, on the mesh."""
    if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, (jax.core.Tracer, jax.Ref)):
        return x
    is_there = isinstance(getattr(x, "sharding", None), NamedSharding)
    return x if is_there else jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def explained(error: ArithmeticError, name: str) -> ArithmeticError:
    """What jax raised of the function `name`, with the line of the op."""
    text, line = str(error), raising_line(error)
    if line and _OF_AN_OP.fullmatch(text):
        error.args = (f"{text} at {short_source(line)} in {name}()",)
    elif "de-optimized" in text:
        return FloatingPointError(
            f"a result of {name}() has NaN or infinity, and op by op the plain function gives none: either it returns "
            "a constant that is one, or its compiled program rounds otherwise, or is wrong; to find out which, call "
            f"sdy_jax.verify({name}, ...) with these arguments"
        )
    return error
