"""The devices that functions of JAX find when they ask for those at hand, while they are traced for others.

* `jax.devices` in some modules of `jax.experimental.pallas.ops`, which take block sizes or types by the kind of the
  first device of the default backend; other kernels ask the mesh in context. A function that is planned for described
  devices is traced on a CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import jax

_ASKING = (
    "jax.experimental.pallas.ops.tpu.ragged_paged_attention.tuned_block_sizes",
    "jax.experimental.pallas.ops.tpu.megablox.common",
    "jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu",
)

_answer: ContextVar[Sequence[Any]] = ContextVar("sdy_jax_asked_devices", default=())


class _Jax(ModuleType):
    """`jax`, as these modules see it: its devices are those of `with_devices_of`, where there are such."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    def devices(self, *backend: Any) -> Sequence[Any]:
        return jax.devices(*backend) if backend else _answer.get() or jax.devices()


_jax = _Jax("jax")


@contextmanager
def with_devices_of(mesh: Any) -> Iterator[None]:
    """While this lasts, and in this context, those modules find the devices of a mesh, or the kind that it names."""
    for module in filter(None, map(sys.modules.get, _ASKING)):
        vars(module)["jax"] = _jax
    kind = getattr(mesh, "abstract_device", None)
    found = list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else [kind] if kind is not None else []
    token = _answer.set(found)
    try:
        yield
    finally:
        _answer.reset(token)
