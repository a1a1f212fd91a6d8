"""The user's layer and loss, traced as functions of leaves, and the errors for what a pipeline cannot be asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sdy_jax.annotate.jaxprs import all_equations, line_of
from sdy_jax.annotate.site import taken_of
from sdy_jax.base.errors import ArgumentError, ShardingError, UnsupportedError, with_article
from sdy_jax.pipelines.jaxprs import called
from sdy_jax.pipelines.loops import sum_type
from sdy_jax.pipelines.region import Region, type_entries, type_of

# The types in which layers read weights.
#
# A layer that casts its weights, float32 to bfloat16, would cast them for each microbatch, forward and back. A stage
# casts its whole stack once, and the layer gets what it would make. Sums of gradients have the wide type all the
# same.


def type_read(jaxpr: Any, variable: Any) -> Any:
    """The narrower type to which a function casts an input wherever it reads it, if that loses nothing in sums of
    gradients; else the input's own."""
    own = variable.aval.dtype
    found = set(_types_read(jaxpr, variable))
    read = found.pop() if len(found) == 1 else own
    is_narrower = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(read, jnp.floating) and read != own
    return read if is_narrower and read.itemsize < own.itemsize and sum_type(read) == own else own


def _types_read(jaxpr: Any, variable: Any) -> Iterator[Any]:
    """The types to which it is cast, and its own for each other use."""
    if variable in jaxpr.outvars:
        yield variable.aval.dtype
    for eqn in jaxpr.eqns:
        for index, each in enumerate(eqn.invars):
            if each is not variable:
                continue
            inner = called(eqn)
            if inner is not None:
                yield from _types_read(inner, inner.invars[index])
            else:
                is_cast = eqn.primitive.name == "convert_element_type"
                yield eqn.params["new_dtype"] if is_cast else variable.aval.dtype


# What a pipeline can be asked for, and the errors for all else.


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


class RowSplit(NamedTuple):
    """How the type of an array splits the rows of the batch: its path, the Explicit axes, and into how many parts."""

    path: str
    axes: tuple[str, ...]
    parts: int


def microbatches_of(given: Any, batch: int, path: str, splits: Sequence[RowSplit] = ()) -> int:
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


def _check_microbatches(microbatches: Any, batch: int, path: str, splits: Sequence[RowSplit]) -> None:
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
        if (old.shape, old.dtype, type_entries(old)) != (new.shape, new.dtype, type_entries(new)):
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
        if any(axis in each for each in type_entries(x)):
            raise ShardingError(
                f"pipeline: {name} closes over {text(x)}, and {axis!r} is the axis of the stages; to fix: "
                "jax.sharding.reshard it before the pipeline"
            )
    for eqn in all_equations(traced):
        for v in eqn.outvars:
            if any(axis in each for each in type_entries(v.aval)):
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


# The user's layer and loss, traced as functions of leaves, with what they close over.


@dataclass(frozen=True)
class LeafFunction:
    """A function of leaves.

    Attributes:
        jaxpr: of it.
        constants: what it closes over.
        aux: types of the auxiliary results.
        structure: the tree of these.
    """

    jaxpr: Any
    constants: list[Any]
    aux: list[Any]
    structure: Any

    @property
    def dtype(self) -> Any:
        """Of the first result."""
        return self.jaxpr.outvars[0].aval.dtype

    def call(self, constants: Sequence[Any], *leaves: Any) -> list[Any]:
        """Its results, with other arrays in place of the constants. Leaves may be of other types (`types_read`)."""
        types = [v.aval.dtype for v in self.jaxpr.invars]
        given = [x if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(leaves, types, strict=True)]
        return list(jax.core.eval_jaxpr(self.jaxpr, constants, *given))

    def types_read(self, first: int, count: int) -> list[Any]:
        """The types in which it reads some of its leaves (`type_read`)."""
        return [type_read(self.jaxpr, v) for v in self.jaxpr.invars[first : first + count]]

    def with_aux(self, leaves: Sequence[Any]) -> Any:
        """Auxiliary results in the user's structure."""
        return jax.tree.unflatten(self.structure, leaves)


def trace_layer(
    region: Region, layer: Callable[..., Any], has_aux: bool, x: Any, weights: Any, *rest: Any
) -> LeafFunction:
    """A layer, called with `(weights, x, *rest)`.

    Raises:
        ArgumentError: it makes other activations than it takes.
        ShardingError: it splits something over the axis of the stages.
    """

    def called(x: Any, weights: Any, *rest: Any) -> tuple[Any, Any]:
        made = layer(weights, x, *rest)
        if not has_aux:
            return strong(made), ()
        if not isinstance(made, tuple) or len(made) != 2:
            raise ArgumentError(
                "pipeline: with has_aux=True layer returns a tuple of activations and auxiliary results"
            )
        return strong(made[0]), strong(made[1])

    closed, (y, aux) = _traced(region, "layer", called, (x, weights, *rest))
    check_same_types(x, y)
    return LeafFunction(closed.jaxpr, list(closed.consts), jax.tree.leaves(aux), jax.tree.structure(aux))


def trace_loss(region: Region, loss: Callable[..., Any], has_aux: bool, *args: Any) -> LeafFunction:
    """A loss, called with the last activations and, if there are any, the targets.

    Raises:
        ArgumentError: it is not one number, or has no auxiliary results where it should.
        ShardingError: it splits something over the axis of the stages.
    """

    def called(*args: Any) -> tuple[Any, Any]:
        made = loss(*args)
        if not has_aux:
            return made, ()
        if not isinstance(made, tuple) or len(made) != 2:
            raise ArgumentError(
                "pipeline: with loss_has_aux=True loss returns a tuple of a number and auxiliary results"
            )
        return made[0], strong(made[1])

    closed, (value, aux) = _traced(region, "loss", called, args)
    check_loss(value)
    return LeafFunction(closed.jaxpr, list(closed.consts), jax.tree.leaves(aux), jax.tree.structure(aux))


def strong(tree: Any) -> Any:
    """Arrays whose types are not weak, so that they stay the same from layer to layer."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, jnp.asarray(x).dtype), tree)


def _traced(region: Region, name: str, fun: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A function as a jaxpr of leaves, and the types of its results as a tree."""
    leaves, structure = jax.tree.flatten(args)
    closed, made = region.traced(lambda *xs: fun(*jax.tree.unflatten(structure, xs)), leaves)
    check_not_split(region.axis, closed, name)
    return closed, jax.tree.unflatten(jax.tree.structure(made), closed.out_avals)
