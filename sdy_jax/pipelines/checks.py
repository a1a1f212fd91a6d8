"""What a pipeline can be asked for, and the errors for all else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.annotate.equations import all_equations, line_of
from sdy_jax.annotate.undecided import taken_of
from sdy_jax.errors import ArgumentError, ShardingError, UnsupportedError, with_article
from sdy_jax.pipelines.explicit_types import entries_of, type_of


def leaves_of(tree: Any, root: str) -> list[tuple[str, Any]]:
    """The arrays of a tree with their paths.

    Raises:
        ArgumentError: a leaf is no array.
    """
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = root + jax.tree_util.keystr(path)
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise ArgumentError(f"pipeline: `{name}` is {with_article(type(leaf))}; expected an array")
        found.append((name, leaf))
    return found


def check_summed(leaves: Sequence[tuple[str, Any]]) -> None:
    """
    Raises:
        UnsupportedError: the type of an array says that it, or its gradient, is to be summed along an axis.
    """
    for name, leaf in leaves:
        spec = type_of(leaf).sharding.spec
        waiting = sorted(map(str, {*spec.unreduced, *spec.reduced}))
        if waiting:
            raise UnsupportedError(
                f"pipeline: `{name}` is {text(type_of(leaf))}, of a sum along {', '.join(waiting)} that waits; to fix: "
                "jax.sharding.reshard it before the pipeline. Plans reduce gradients of all microbatches once where "
                "that costs less"
            )


def check_same_length(leaves: Sequence[tuple[str, Any]], meaning: str) -> int:
    """The size of the first dimension of all arrays.

    Raises:
        ArgumentError: there are none, an array has no dimensions, or sizes differ.
    """
    if not leaves:
        raise ArgumentError(f"pipeline: there is no array whose first dimension is {meaning}")
    for name, leaf in leaves:
        if not np.ndim(leaf):
            raise ArgumentError(f"pipeline: `{name}` is a scalar; its first dimension should be {meaning}")
    (first, leaf), length = leaves[0], np.shape(leaves[0][1])[0]
    for name, other in leaves:
        if np.shape(other)[0] != length:
            raise ArgumentError(
                f"pipeline: `{name}` of shape {np.shape(other)} and `{first}` of shape {np.shape(leaf)} have different "
                f"first dimensions, which are {meaning}"
            )
    if not length:
        raise ArgumentError(f"pipeline: `{first}` of shape {np.shape(leaf)} is empty; its first dimension is {meaning}")
    return int(length)


def check_no_keys(leaves: Sequence[tuple[str, Any]]) -> None:
    """
    Raises:
        ArgumentError: an array holds random keys.
    """
    for name, leaf in leaves:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ArgumentError(
                f"pipeline: `{name}` holds random keys, which no layer changes; to fix: pass them in `extra`, or one "
                "as `key`"
            )


class Split(NamedTuple):
    """How the type of an array splits the rows of the batch: its path, the Explicit axes, and into how many parts."""

    path: str
    axes: tuple[str, ...]
    parts: int


def microbatches_of(given: Any, batch: int, path: str, splits: Sequence[Split] = ()) -> int:
    """The number of microbatches: as given, or of several the one that the planner takes.

    Args:
        given: a number, a sequence of numbers, or a range, of which those count that divide the batch, and leave rows
            that can be split as types say.
        batch: its size.
        path: of an array with this size.
        splits: what types say.

    Raises:
        ArgumentError: it is no number into so many equal parts of which the batch can be cut, or none decides which of
            several is taken.
    """
    if not isinstance(given, range | Sequence | np.ndarray) or isinstance(given, str):
        _check_microbatches(given, batch, path, splits)
        return int(given)
    rows = math.lcm(*(split.parts for split in splits))
    numbers = sorted({n for n in given if n > 0 and batch % (n * rows) == 0}) if isinstance(given, range) else [*given]
    if not numbers:
        batches = f"the batch of {batch} in `{path}`" + f", of which types split rows into {rows}" * (rows > 1)
        what = f"which has no divisor of {batches}" if given else "which is empty"
        raise ArgumentError(f"pipeline: microbatches is {given!r}, {what}")
    for number in numbers:
        _check_microbatches(number, batch, path, splits)
    offered = sorted({int(number) for number in numbers})
    if len(offered) == 1:
        return offered[0]
    return taken_of(
        offered,
        f"pipeline: microbatches is {given!r}, of which a plan takes one, and nothing is planned here; to fix: "
        f"sdy.partition around the function, or microbatches={offered[-1]}",
    )


def _check_microbatches(microbatches: Any, batch: int, path: str, splits: Sequence[Split]) -> None:
    if isinstance(microbatches, bool) or not isinstance(microbatches, int | np.integer) or microbatches < 1:
        raise ArgumentError(f"pipeline: microbatches is {microbatches!r}; expected a positive integer")
    if batch % microbatches:
        divisors = [n for n in range(1, batch + 1) if batch % n == 0]
        near = [*[n for n in divisors if n < microbatches][-1:], *[n for n in divisors if n > microbatches][:1]]
        raise ArgumentError(
            f"pipeline: the batch of {batch} in `{path}` does not divide into {microbatches} microbatches; "
            f"to fix: microbatches={' or '.join(map(str, near))}"
        )
    for split in splits:
        if batch // microbatches % split.parts:
            raise ShardingError(
                f"pipeline: the rows of `{split.path}` are split over {', '.join(split.axes)} into {split.parts}, and "
                f"a microbatch has {batch // microbatches} of them; to fix: fewer microbatches, or an array whose type "
                "says that it is split over fewer devices"
            )


def rounds_of(schedule: str, rounds: Any) -> int:
    """The number of rounds of a schedule.

    Raises:
        ArgumentError: it is no positive integer, or the schedule has no rounds.
    """
    if rounds is None:
        return 2 if schedule == "interleaved" else 1
    if isinstance(rounds, bool) or not isinstance(rounds, int | np.integer) or rounds < 1:
        raise ArgumentError(f"pipeline: rounds is {rounds!r}; expected a positive integer")
    if rounds > 1 and schedule in ("gpipe", "1f1b", "zero_bubble"):
        raise ArgumentError(f"pipeline: rounds is {rounds}, and {schedule!r} has one; to fix: schedule='interleaved'")
    return int(rounds)


def check_same_types(given: Any, made: Any, layer: str = "layer") -> None:
    """
    Raises:
        ArgumentError: what a layer makes of the activations is a tree of another structure, or of other types.
    """
    wanted: Any = jax.tree.structure(given)
    found: Any = jax.tree.structure(made)
    if wanted != found:
        raise ArgumentError(
            f"pipeline: {layer} takes activations of the structure {wanted} and returns {found}; expected the same"
            + (" (with has_aux=True it returns activations and auxiliary results)" if found.num_leaves else "")
        )
    for (path, old), new in zip(jax.tree_util.tree_flatten_with_path(given)[0], jax.tree.leaves(made), strict=True):
        if (old.shape, old.dtype, entries_of(old)) != (new.shape, new.dtype, entries_of(new)):
            name = "x" + jax.tree_util.keystr(path)
            raise ArgumentError(
                f"pipeline: {layer} takes `{name}` as {text(old)} and returns it as {text(new)}, per microbatch; "
                "activations have one type between all layers"
            )


def text(type_: Any) -> str:
    """`f32[8,128]`, or `f32[8@data,128]`, as jax prints it."""
    return str(type_of(type_).str_short(short_dtypes=True))


def check_not_split(axis: str, traced: Any, name: str) -> None:
    """
    Raises:
        ShardingError: a traced function closes over, or makes, what is split over an axis by its type.
        UnsupportedError: it closes over a sum that waits.
    """
    for x in traced.consts:
        check_summed([(f"what {name} closes over", x)])
        if any(axis in each for each in entries_of(x)):
            raise ShardingError(
                f"pipeline: {name} closes over {text(x)}, and {axis!r} is the axis of the stages; to fix: "
                "jax.sharding.reshard it before the pipeline"
            )
    for eqn in all_equations(traced):
        for v in eqn.outvars:
            if any(axis in each for each in entries_of(v.aval)):
                raise ShardingError(
                    f"pipeline: {name} makes {text(v.aval)} at {line_of(eqn)}, and {axis!r} is the axis of the stages"
                )


def check_loss(made: Any) -> None:
    """
    Raises:
        ArgumentError: a loss is no real number.
    """
    leaves = jax.tree.leaves(made)
    if len(leaves) != 1 or leaves[0].shape or not jnp.issubdtype(leaves[0].dtype, jnp.floating):
        types = ", ".join(map(text, leaves)) or "nothing"
        raise ArgumentError(f"pipeline: loss returns {types}; expected one floating-point number")
