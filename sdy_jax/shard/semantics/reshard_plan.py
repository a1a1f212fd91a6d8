"""From one layout of a tensor to another on the same grid: the steps, as data.

In order: halos off; uneven dimensions that change are joined; terms are combined; axes move between even dimensions;
the joined dimensions are cut; halos on; new terms are made. Only the joining, the combining, the moves and the filling
of halos communicate. This is the dialect's own plain way: a table of rules, no search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdy_jax.errors import InternalError
from sdy_jax.shard.semantics.grid import Grid
from sdy_jax.shard.semantics.layout import AxisLists, Dimension, Layout, axis_lists, dimensions, normalized


@dataclass(frozen=True, slots=True)
class HalosOff:
    """Keep the cores of the buffers."""

    before: tuple[Dimension, ...]

    def __str__(self) -> str:
        return "halos off"


@dataclass(frozen=True, slots=True)
class Join:
    """Gather a dimension of uneven blocks and leave the padding out."""

    dim: int
    before: Dimension

    def __str__(self) -> str:
        return f"join dimension {self.dim}"


@dataclass(frozen=True, slots=True)
class AllReduce:
    axes: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        return f"all_reduce {list(self.axes)} {self.kind}"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    axes: tuple[int, ...]
    dim: int
    kind: str

    def __str__(self) -> str:
        return f"reduce_scatter {list(self.axes)} axis {self.dim} {self.kind}"


@dataclass(frozen=True, slots=True)
class Permute:
    """Send whole blocks, so that dimensions are split by other axes into as many blocks."""

    before: AxisLists
    after: AxisLists

    def __str__(self) -> str:
        return f"permute to {axis_lists(self.after)}"


@dataclass(frozen=True, slots=True)
class Move:
    axes: tuple[int, ...]
    split: int
    concat: int

    def __str__(self) -> str:
        return f"all_to_all {list(self.axes)} split {self.split} concat {self.concat}"


@dataclass(frozen=True, slots=True)
class Slice:
    axes: tuple[int, ...]
    dim: int

    def __str__(self) -> str:
        return f"all_slice {list(self.axes)} axis {self.dim}"


@dataclass(frozen=True, slots=True)
class Gather:
    axes: tuple[int, ...]
    dim: int

    def __str__(self) -> str:
        return f"all_gather {list(self.axes)} axis {self.dim}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Keep a block of a joined dimension."""

    dim: int
    after: Dimension

    def __str__(self) -> str:
        return f"cut dimension {self.dim}"


@dataclass(frozen=True, slots=True)
class MakeTerms:
    axes: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        return f"terms {list(self.axes)} {self.kind}"


@dataclass(frozen=True, slots=True)
class HalosOn:
    """Put the cores into longer buffers and fill the halos."""

    after: tuple[Dimension, ...]

    def __str__(self) -> str:
        return "halos on"


AxisStep = Permute | Move | Slice | Gather
Step = HalosOff | Join | AllReduce | ReduceScatter | AxisStep | Cut | MakeTerms | HalosOn


def plan(source: Layout, target: Layout, grid: Grid, shape: Sequence[int]) -> list[Step]:
    """The steps from one layout of a tensor of global `shape` to another; none if they mean the same."""
    source, target = normalized(source, grid), normalized(target, grid)
    if source == target:
        return []
    before, after = dimensions(source, grid, shape), dimensions(target, grid, shape)
    rejoined = [dim for dim, pair in enumerate(zip(before, after, strict=True)) if _is_rejoined(*pair)]
    current, wanted = _lists_without(before, rejoined), _lists_without(after, rejoined)
    steps: list[Step] = []
    if source.halos:
        steps.append(HalosOff(before))
    steps += [Join(dim, replace(before[dim], halo=(0, 0))) for dim in rejoined if before[dim].axes]
    combine, make = _terms(source, target)
    if combine:
        steps.append(_combination(source.partial or "sum", combine, current, wanted))
        current = _after_combination(steps[-1], current)
    steps += axis_steps(current, wanted, grid)
    steps += [Cut(dim, replace(after[dim], halo=(0, 0))) for dim in rejoined if after[dim].axes]
    if target.halos:
        steps.append(HalosOn(after))
    if make:
        steps.append(MakeTerms(make, target.partial or "sum"))
    return steps


def _is_rejoined(before: Dimension, after: Dimension) -> bool:
    """Whether blocks of one split are no blocks of blocks of the other."""
    if (before.axes, before.starts) == (after.axes, after.starts):
        return False
    return not (before.is_even and after.is_even)


def _lists_without(found: Sequence[Dimension], left_out: Sequence[int]) -> AxisLists:
    return tuple(() if dim in left_out else dimension.axes for dim, dimension in enumerate(found))


def _terms(source: Layout, target: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes to combine along, and those to make terms along."""
    kept = set(source.partial_axes) & set(target.partial_axes) if source.partial == target.partial else set()
    combine, make = (tuple(axis for axis in layout.partial_axes if axis not in kept) for layout in (source, target))
    return combine, make


def _combination(kind: str, axes: tuple[int, ...], current: AxisLists, wanted: AxisLists) -> Step:
    """A reduce-scatter if the axes are the next ones that a dimension is to be split by."""
    for dim, (has, wants) in enumerate(zip(current, wanted, strict=True)):
        following = wants[len(has) : len(has) + len(axes)]
        if wants[: len(has)] == has and sorted(following) == sorted(axes):
            return ReduceScatter(following, dim, kind)
    return AllReduce(axes, kind)


def _after_combination(step: Step, current: AxisLists) -> AxisLists:
    return _with(current, step.dim, current[step.dim] + step.axes) if isinstance(step, ReduceScatter) else current


def axis_steps(current: AxisLists, wanted: AxisLists, grid: Grid) -> list[AxisStep]:
    """From lists of axes per dimension to others: the first rule that applies, until they are equal.

    Each step leaves every list a list of distinct axes; `wanted` is reached since every step but a reordering makes a
    common prefix longer or a list shorter, and a reordering makes a list a prefix and a rest.
    """
    steps: list[AxisStep] = []
    while current != wanted:
        for rule in _RULES:
            step = rule(current, wanted, grid)
            if step is not None:
                steps.append(step)
                current = after(step, current)
                break
        else:
            raise InternalError(f"no step from {axis_lists(current)} to {axis_lists(wanted)}")
    return steps


def after(step: AxisStep, current: AxisLists) -> AxisLists:
    """The lists of axes after a step."""
    match step:
        case Permute(_, reached):
            return reached
        case Move(axes, split, concat):
            left = _with(current, concat, current[concat][: -len(axes)])
            return _with(left, split, left[split] + axes)
        case Slice(axes, dim):
            return _with(current, dim, current[dim] + axes)
        case Gather(axes, dim):
            return _with(current, dim, current[dim][: -len(axes)])


def _with(lists: AxisLists, dim: int, axes: tuple[int, ...]) -> AxisLists:
    return (*lists[:dim], axes, *lists[dim + 1 :])


def _common(has: Sequence[int], wants: Sequence[int]) -> int:
    """The length of the common prefix."""
    length = 0
    while length < min(len(has), len(wants)) and has[length] == wants[length]:
        length += 1
    return length


def _is_prefix(has: Sequence[int], wants: Sequence[int]) -> bool:
    return _common(has, wants) == len(has)


def _permute(current: AxisLists, wanted: AxisLists, grid: Grid) -> AxisStep | None:
    pairs = zip(current, wanted, strict=True)
    if any(grid.group_size(has) != grid.group_size(wants) for has, wants in pairs):
        return None
    return Permute(current, wanted)


def _move(current: AxisLists, wanted: AxisLists, grid: Grid) -> AxisStep | None:
    """The longest tail of a list that another dimension wants next."""
    best: Move | None = None
    for source, has in enumerate(current):
        free = has[_common(has, wanted[source]) :]
        for target, wants in enumerate(wanted):
            if not _is_prefix(current[target], wants):
                continue
            for count in range(len(free), len(best.axes) if best else 0, -1):
                tail = free[-count:]
                if wants[len(current[target]) :][:count] == tail:
                    best = Move(tail, target, source)
                    break
    return best


def _slice(current: AxisLists, wanted: AxisLists, grid: Grid) -> AxisStep | None:
    used = {axis for axes in current for axis in axes}
    for dim, (has, wants) in enumerate(zip(current, wanted, strict=True)):
        if not _is_prefix(has, wants):
            continue
        count = len(has)
        while count < len(wants) and wants[count] not in used:
            count += 1
        if count > len(has):
            return Slice(wants[len(has) : count], dim)
    return None


def _reorder(current: AxisLists, wanted: AxisLists, grid: Grid) -> AxisStep | None:
    for dim, (has, wants) in enumerate(zip(current, wanted, strict=True)):
        if wants and set(wants) < set(has) and not _is_prefix(wants, has):
            rest = tuple(axis for axis in has if axis not in wants)
            return Permute(current, _with(current, dim, wants + rest))
    return None


def _gather(current: AxisLists, wanted: AxisLists, grid: Grid) -> AxisStep | None:
    for dim, (has, wants) in enumerate(zip(current, wanted, strict=True)):
        if not _is_prefix(has, wants):
            return Gather(has[_common(has, wants) :], dim)
    return None


_RULES = (_permute, _move, _slice, _reorder, _gather)
