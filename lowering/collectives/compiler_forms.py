"""What some compilers compile better in another form (`runtime/forms.py`).

XLA for CPUs has no all_to_all of an array: it makes a slice for each device of the group, and fuses each with all the
element-wise ops before it. Every such fusion is compiled for itself. In a chain of all_to_alls among eight devices with
a multiplication between two of them, each took 165 ms of compilation, and 75 ms where the operand was computed apart,
by one fusion (2026-11, jaxlib 0.10.2).

A gather or scatter along another dimension than the first is copied into a layout in which that one comes first, and
back. One over several dimensions is therefore a single collective along a new first dimension, and one copy: scanned
layers with weights split over both axes of 2 x 4 have 95 collectives, not 160, in 0.87 of the compiler's time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata

from sdy_jax.jax_internals.jit import jit
from sdy_jax.lowering.targets.platform_branches import where_forms
from sdy_jax.runtime.forms import Forms


def computed_apart(x: jax.Array, forms: Forms) -> jax.Array:
    """The array, where forms say so computed once for all its parts. XLA drops `optimization_barrier` before it fuses,
    so a function that it may not inline stands in between."""
    if not forms.apart:
        return x
    with set_xla_metadata(inlineable="false"):
        return _as_it_is(x)


_as_it_is = jit(jax.lax.optimization_barrier)


def row_major(x: jax.Array) -> jax.Array:
    """What is transformed along its last dimensions, on CPUs with these in memory: XLA lays a transform's operand out
    like its result, and cannot transform what an all_gather wants there. Other devices lay it out themselves; libtpu
    (0.0.52) compiles no such constraint on complex numbers."""
    return where_forms(lambda forms: forms.in_rows, x, then=_in_rows, otherwise=_unchanged)


def _in_rows(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def looked_up(rows: jax.Array) -> jax.Array:
    """Rows for an array of indices. Compilers for TPUs look them up along one dimension, and see through the change of
    shape: a sum of such rows and other values is then kept, and computed once more for some of its readers, so that
    what it is computed of is kept as well. Behind a barrier rows are an array like any other (GPT in Megatron's layout
    on eight chips of v5e: temporary memory 24.9 to 22.8 MB, libtpu 0.0.52, 2026-11)."""
    barrier = jax.lax.optimization_barrier
    return where_forms(lambda forms: forms.looked_up_apart, rows, then=barrier, otherwise=_unchanged)


def _unchanged(x: jax.Array) -> jax.Array:
    return x


def not_before(x: jax.Array, *awaited: jax.Array, otherwise: Callable[..., jax.Array]) -> jax.Array:
    """An array that is not taken for what it was before others were there: on TPUs behind XLA's own barrier, which is
    dropped after equal ops are joined, but before ops get their order."""
    return where_forms(lambda forms: forms.barriers_last, x, *awaited, then=_behind_barrier, otherwise=otherwise)


def _behind_barrier(x: jax.Array, *awaited: jax.Array) -> jax.Array:
    kept: jax.Array = jax.lax.optimization_barrier((x, *awaited))[0]
    return kept
