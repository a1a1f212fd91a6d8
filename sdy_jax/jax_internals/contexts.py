"""The mesh and the settings in context, which decide what jit traces again.

* `get_concrete_mesh`: the mesh of `jax.set_mesh`; the public `get_mesh` refuses to say it under `jax.jit`.
  `thread_resources`: that of `with mesh:`, which is deprecated, and of which the public API says nothing.
* `_internal_use_concrete_mesh`: `jax.set_mesh` is refused while jax traces.
* `trace_context` and its names: what jit traces a function again for, beside types.
* `_value_holders`: the values of all options as this thread sees them; `jax.config.values` has those of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from jax._src import config
from jax._src.mesh import get_concrete_mesh, thread_resources
from jax._src.sharding_impls import _internal_use_concrete_mesh


def context_mesh() -> jax.sharding.Mesh | None:
    """The mesh of `jax.set_mesh`, under a trace as well, else that of `with mesh:`; empty or None if there is none."""
    mesh = get_concrete_mesh()
    return thread_resources.env.physical_mesh if mesh is None or mesh.empty else mesh


Settings = tuple[tuple[str, Any], ...]
"""Settings and contexts of jax by name, with their values."""

_NOT_SEEN = frozenset({"axis_env_state"})
"""What a function does not see of the trace around it: inside, no axis is mapped."""

_MESH = "abstract_mesh_context_manager"
"""The mesh in context, for which jit traces again. A function that states its own sees that one there."""


def without_mesh(settings: Settings) -> Settings:
    """Settings without the mesh in context."""
    return tuple(pair for pair in settings if pair[0] != _MESH)


def trace_settings() -> Settings:
    """What a trace depends on beside types, as jit's cache of traces knows it: one with others is another trace."""
    pairs = zip(config.trace_context_names(), config.trace_context(), strict=True)
    # Not among jit's: a program may make keys by it.
    own = ("jax_default_prng_impl", jax.config.jax_default_prng_impl)  # type: ignore[attr-defined]
    return (own, *(pair for pair in pairs if pair[0] not in _NOT_SEEN))


_NOT_LOWERED = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_raise_persistent_cache_errors",
    "jax_log_compiles",
    "jax_explain_cache_misses",
    "jax_logging_level",
    "jax_debug_log_modules",
    "jax_dump_ir_to",
    "jax_platforms",
    "jax_platform_name",
    "jax_num_cpu_devices",
    "jax_no_tracing",
    "jax_enable_x64",
)
"""Options that say nothing of what a per-device program is lowered to: it is traced and lowered with 64-bit types
enabled, and its mesh has its devices."""


def lowering_options() -> str:
    """The options of jax, as this thread sees them, on which what is traced and lowered may depend, as a text."""
    holders = jax.config._value_holders  # type: ignore[attr-defined]
    return repr(sorted((name, repr(holder.value)) for name, holder in holders.items() if name not in _NOT_LOWERED))


def trace_state() -> Any:
    """All that a trace depends on beside types, the axes around it that are mapped included; it can be hashed."""
    return config.trace_context()


def with_devices(mesh: Any) -> AbstractContextManager[Any]:
    """Lets a mesh's devices be those of the context that has none: types know no devices, and jax lowers callbacks and
    the like, whose rules are ours, for known devices only."""
    is_known = isinstance(mesh, jax.sharding.Mesh) and get_concrete_mesh().empty
    return _internal_use_concrete_mesh(mesh) if is_known else nullcontext()


@contextmanager
def mesh_in_context(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """As `jax.set_mesh`, also under transformations."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), _internal_use_concrete_mesh(mesh):
        yield
