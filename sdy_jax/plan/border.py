"""Arguments and results of a partitioned program: their layouts, their specs as text, the moves of arguments that
are passed otherwise, and what the planner says of those that were left to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import flatten_one_level_with_keys

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.program import Program
from sdy_jax.annotate.specs import resolve
from sdy_jax.ir.attributes import shape_and_dtype
from sdy_jax.ir.jax_shardings import AnyMesh, array_text, bytes_text, mesh_from_jax, to_partition_spec, type_text
from sdy_jax.ir.operations import function_type, main_function
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.runtime.boundary import as_specification, layout_of, named_sharding_of
from sdy_jax.runtime.meshes import is_whole_elsewhere

# The arguments and results of a partitioned program.


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """An argument or a result: its path, its type with axes, and its sharding."""

    path: str
    type: str
    sharding: TensorSharding


class BoundaryValues(NamedTuple):
    """All of them, in order; `constants` are the arrays that a function closes over."""

    arguments: tuple[BoundaryValue, ...]
    constants: tuple[BoundaryValue, ...]
    results: tuple[BoundaryValue, ...]


def boundary_values(program: Program) -> BoundaryValues:
    """The arguments, closed-over arrays and results of a partitioned program."""
    main = main_function(program.module)
    type_ = function_type(main)
    paths = [*(f"constant {i}" for i in range(len(program.constants))), *program.inputs]
    given = _boundary(paths, type_.inputs, function_shardings(main, "arg_attrs"), program)
    results = _boundary(program.outputs, type_.results, function_shardings(main, "res_attrs"), program)
    count = len(program.constants)
    return BoundaryValues(tuple(given[count:]), tuple(given[:count]), tuple(results))


def _boundary(
    paths: Sequence[str], types: Sequence[ir.Type], shardings: Sequence[TensorSharding | None], program: Program
) -> list[BoundaryValue]:
    found = []
    for path, type_, stated in zip(paths, types, shardings, strict=True):
        shape, dtype = shape_and_dtype(type_)
        sharding = stated or TensorSharding.replicated(program.mesh_name, len(shape or ()))
        found.append(BoundaryValue(path, type_text(dtype, shape, sharding), sharding))
    return found


# The shardings of a plan's arguments and results as trees of `PartitionSpec`s, and as text that can be pasted.

_WIDTH = 100
"""Columns up to which a tree is written in one line. Chosen: it is indented where it is pasted."""


def specs_of(tree: Any, values: Iterable[tuple[str, TensorSharding]]) -> Any:
    """A tree of specifications.

    Args:
        tree: its structure.
        values: path and sharding of each leaf.

    Raises:
        UnsupportedError: a leaf is split by a part of an axis.
    """
    return jax.tree.unflatten(tree, [_short(to_partition_spec(sharding, path)) for path, sharding in values])


def _short(spec: PartitionSpec) -> PartitionSpec:
    """The specification without unsplit dimensions at its end."""
    entries = list(spec.partitions)
    while entries and entries[-1] is None:
        entries.pop()
    return spec.update(partitions=entries)  # type: ignore[no-any-return, no-untyped-call]


def pasted(specs: Any, indent: int = 0) -> str:
    """The text of a prefix tree that says the same as a tree of specifications: one for all leaves that are alike."""
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    if leaves and all(leaf == leaves[0] for leaf in leaves):
        return _text(leaves[0])
    opening, closing, entries = _entries(specs)
    inner = indent + 4
    texts = [name + pasted(child, inner) for name, child in entries]
    line = opening + ", ".join(texts) + ("," if opening == "(" and len(texts) == 1 else "") + closing
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    return "\n".join([opening, *(" " * inner + text + "," for text in texts), " " * indent + closing])


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _text(spec: PartitionSpec) -> str:
    entries = ", ".join(map(repr, spec.partitions))
    if spec.unreduced:
        entries += f"{', ' if entries else ''}unreduced={{{', '.join(map(repr, sorted(spec.unreduced)))}}}"
    return f"P({entries})"


def _entries(tree: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """How a node of a tree is written: what opens and closes it, and its children with what stands before them."""
    if isinstance(tree, Mapping):
        return "{", "}", [(f"{key!r}: ", child) for key, child in tree.items()]
    if isinstance(tree, list):
        return "[", "]", [("", child) for child in tree]
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return "(", ")", [("", child) for child in tree]
    if tree is None:
        return "None", "", []
    children, _ = flatten_one_level_with_keys(tree)
    names = getattr(tree, "_fields", None) or [getattr(key, "name", "") for key, _ in children]
    named = zip(names, (child for _, child in children), strict=True)
    return f"{type(tree).__name__}(", ")", [(f"{name}=" if name else "", child) for name, child in named]


# Moves at the border: arguments whose layout is not the one the program takes. XLA moves them before it starts.


@dataclass(frozen=True, slots=True)
class BorderMove:
    """An argument that is moved on entry: its path, its types before and after, and the bytes that a device receives
    (the most that one device has not yet; XLA, which moves it, may send more). They are no part of `Plan.wire_bytes`,
    which counts our own collectives."""

    path: str
    before: str
    after: str
    bytes: int
    is_elsewhere: bool = False
    """Whether it lies on other devices than the mesh's, so that it has to be moved."""

    def message(self, function: str) -> str:
        """A warning with the move and how to avoid it."""
        remedy = "" if self.is_elsewhere else ", or leave its entry of in_shardings None to take it as it lies"
        return (
            f"`{self.path}` lies as {self.before}, {function} takes it as {self.after}: each call moves it first "
            f"({bytes_text(self.bytes)} to a device, at least); to fix: pass it as it is taken, by jax.device_put"
            f"{remedy}"
        )


def moves_at_border(
    leaves: Iterable[Leaf], entering: Iterable[TensorSharding], mesh: AnyMesh
) -> tuple[BorderMove, ...]:
    """The moves of a call.

    Args:
        leaves: the arguments' leaves as they were given.
        entering: the shardings in which the program takes them, on `mesh`.
    """
    found = (_move(leaf, sharding, mesh) for leaf, sharding in zip(leaves, entering, strict=True))
    return tuple(move for move in found if move is not None)


def _move(leaf: Leaf, entering: TensorSharding, mesh: AnyMesh) -> BorderMove | None:
    if leaf.spec is not None and is_whole_elsewhere(leaf.value, mesh):
        return _from_elsewhere(leaf, entering, mesh)
    own = layout_of(leaf.value)
    if own is None or not isinstance(own.mesh, jax.sharding.Mesh) or own.device_set != {*mesh.devices.flat}:
        return None  # nothing is known, or jit will not take it
    # The layout of an unreduced value is that of its partial sums; memory of the host is in no plan.
    own = NamedSharding(own.mesh, PartitionSpec(*own.spec.partitions))
    shape, dtype = leaf.value.shape, leaf.value.dtype
    if not _divides(own, shape):
        return None  # no array is split unevenly
    target = _named(entering, shape, mesh)
    if own.is_equivalent_to(target, len(shape)):
        return None
    plain = array_text(leaf.value)
    return BorderMove(
        leaf.path,
        _type(plain, leaf, own, mesh),
        _with_axes(plain, shape, entering),
        _received(own, target, shape) * dtype.itemsize,
    )


def _named(entering: TensorSharding, shape: Sequence[int], mesh: AnyMesh) -> NamedSharding:
    return named_sharding_of(TensorSharding(entering.mesh, entering.dimensions[: len(shape)]), mesh)


def _from_elsewhere(leaf: Leaf, entering: TensorSharding, mesh: AnyMesh) -> BorderMove:
    """The move of an array that other devices than the mesh's have, all of it each."""
    plain, shape, count = array_text(leaf.value), leaf.value.shape, leaf.value.sharding.num_devices
    where = "a single device" if count == 1 else f"{count} other devices"
    received = math.prod(_named(entering, shape, mesh).shard_shape(shape)) * leaf.value.dtype.itemsize
    after = _with_axes(plain, shape, entering)
    return BorderMove(leaf.path, f"{plain} on {where}", after, received, is_elsewhere=True)


def _type(plain: str, leaf: Leaf, own: NamedSharding, mesh: AnyMesh) -> str:
    spec = as_specification(own, mesh)
    if spec is None:
        return f"{plain} as {own.spec} on {mesh_from_jax(own.mesh)}"
    base = mesh_from_jax(mesh)
    rank = len(leaf.value.shape)
    return _with_axes(plain, leaf.value.shape, resolve(Leaf(leaf.path, None, spec), rank, base, "", "arguments", mesh))


def _with_axes(plain: str, shape: Sequence[int], sharding: TensorSharding | None) -> str:
    """The type `f32[8,4]` with axes."""
    if sharding is None:
        return plain
    return type_text(plain.partition("[")[0], shape, TensorSharding("", sharding.dimensions[: len(shape)]))


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _received(own: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> int:
    """The most elements that one device receives: those of its block after the move that it did not have before."""
    before, after = own.devices_indices_map(shape), target.devices_indices_map(shape)
    return max(_missing(before[device], block, shape) for device, block in after.items())


def _missing(held: Any, wanted: Any, shape: tuple[int, ...]) -> int:
    bounds = [(w.indices(n)[:2], h.indices(n)[:2]) for w, h, n in zip(wanted, held, shape, strict=True)]
    size = math.prod(stop - start for (start, stop), _ in bounds)
    kept = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in bounds)
    return int(size - kept)


# What a plan says of the arguments and results that were left to the planner.


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan takes in all beside what is hidden, what it sends, in bytes or in time, and the bytes that a device
    holds, as it says them itself."""

    cost: float
    sent: float
    peak: float


@dataclass(frozen=True, slots=True)
class AutomaticLayouts:
    """What the planner chose for the border.

    Attributes:
        arguments, results: the paths of those that were left to it.
        chosen: what the plan takes.
        usual: what plans with the usual layouts take, by their names, whatever memory that needs; along whole axes.
        limit: the bytes that a device may hold; infinite where nobody says.
    """

    arguments: frozenset[str]
    results: frozenset[str]
    chosen: Measured
    usual: dict[str, Measured]
    limit: float
