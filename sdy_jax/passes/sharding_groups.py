"""Sharding groups: values that must be sharded alike. Unified before propagation, removed after it."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.hidden_frames import users_stack_level
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.operations import named, post_order, rank
from sdy_jax.ir.stored_shardings import set_sharding
from sdy_jax.passes.constraints import constrain_uses, current_sharding, shardable
from sdy_jax.representation.sharding import TensorSharding

GROUP = "sdy.sharding_group"


def group_id(op: ir.Operation) -> int:
    return int(ir.IntegerAttr(op.attributes["group_id"]).value)


def import_sharding_groups(module: ir.Operation) -> None:
    """Unites groups that share a value, numbers them from 0, and keeps one group op per value.

    United groups are represented by the first group of the first value that connects them; numbers follow the order
    in which representatives occur.

    Raises:
      ShardingError: members of one group have different shapes or are in different manual computations.
    """
    ops = named(module, GROUP)
    if not ops:
        return
    _check(ops)
    groups_of: dict[ir.Value, list[ir.Operation]] = {}
    for op in ops:
        groups_of.setdefault(op.operands[0], []).append(op)
    parent: dict[int, int] = {}
    for found in groups_of.values():
        for op in found:
            _unite(parent, group_id(found[0]), group_id(op))
    numbers = {root: i for i, root in enumerate(group for group in parent if parent[group] == group)}
    for first, *others in groups_of.values():
        number = numbers[_root(parent, group_id(first))]
        _note_number(first, number)
        first.attributes["group_id"] = ir.IntegerAttr.get(first.attributes["group_id"].type, number)
        for op in others:
            op.erase()


_NOTED = re.compile(r'"sharding group (-?\d+)"')


def _note_number(op: ir.Operation, number: int) -> None:
    """Keeps in an op's location what the user calls its group, which is to have another number."""
    if group_id(op) != number and not _NOTED.search(str(op.location)):
        op.location = ir.Location.name(f"sharding group {group_id(op)}", op.location, op.context)


def place_of_group(op: ir.Operation) -> ir.Location:
    """An op's location without the note on its group."""
    location = op.location
    return location.child_loc if _NOTED.match(str(location).removeprefix("loc(")) else location


def _own_number(op: ir.Operation) -> int:
    """The number that the user gave to a group; pairs that are to be sharded alike have negative ones."""
    recorded = _NOTED.search(str(op.location))
    return int(recorded[1]) if recorded else group_id(op)


def _root(parent: dict[int, int], group: int) -> int:
    while parent[group] != group:
        group = parent[group]
    return group


def _unite(parent: dict[int, int], a: int, b: int) -> None:
    """What represents a's class represents both."""
    parent.setdefault(a, a)
    parent.setdefault(b, b)
    parent[_root(parent, b)] = _root(parent, a)


def _check(ops: list[ir.Operation]) -> None:
    first: dict[int, ir.Operation] = {}
    for op in ops:
        other = first.setdefault(group_id(op), op)
        where = f"sharding group {group_id(op)}, at {source_line(op.location)}"
        mine, theirs = op.operands[0].type, other.operands[0].type
        if tuple(mine.shape) != tuple(theirs.shape):
            raise ShardingError(
                f"{where}: member of type {mine}, but the group's first member has type {theirs}; "
                "members of one group must have the same shape"
            )
        here, there = _manual_parent(op), _manual_parent(other)
        if not _are_one(here, there):
            raise ShardingError(
                f"{where}: this member lies {_place(here)}, the one at {source_line(other.location)} {_place(there)}; "
                "groups cannot cross the border of a manual computation; to fix: use a group of its own inside of each"
            )


def _manual_parent(op: ir.Operation) -> ir.Operation | None:
    parent = op.parent
    while parent is not None and parent.operation.name != "sdy.manual_computation":
        parent = parent.operation.parent
    return None if parent is None else parent.operation


def _are_one(a: ir.Operation | None, b: ir.Operation | None) -> bool:
    return a is b if a is None or b is None else a == b  # jaxlib compares ops with ops only


def _place(manual: ir.Operation | None) -> str:
    if manual is None:
        return "outside of manual computations"
    return f"in the manual computation at {source_line(manual.location)}"


@dataclass(slots=True)
class _Group:
    ops: list[ir.Operation] = field(default_factory=list)
    given: list[TensorSharding] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    """Where the members are grouped that have the given shardings."""

    def conflict(self) -> str:
        """What to say of members that disagree."""
        numbers = sorted({_own_number(op) for op in self.ops})
        own = ", ".join(map(str, (number for number in numbers if number >= 0)))
        name = f"sharding group {own}" if own else "a pair of shard_alike"
        first = dict(reversed(list(zip(self.given, self.places, strict=True))))
        said = ", ".join(f"<{given}> at {first[given]}" for given in dict.fromkeys(self.given))
        return f"the members of {name} have different shardings: {said}; each keeps its own up to the group"


def synchronize_groups(module: ir.Operation) -> None:
    """Gives all members of a group their common sharding; members that disagree get an open constraint each.

    With such constraints in between, the constraints are the group's members.
    """
    groups: dict[int, _Group] = {}
    for op in post_order(module):
        if op.name != GROUP:
            continue
        group = groups.setdefault(group_id(op), _Group())
        group.ops.append(op)
        sharding = current_sharding(op.operands[0])
        if sharding is not None and not sharding.is_fully_replicated_and_open:
            group.given.append(sharding)
            group.places.append(source_line(op.location))
    for number in sorted(groups):
        group = groups[number]
        if len(group.ops) < 2 or not group.given:
            continue
        if all(s == group.given[0] for s in group.given):
            _set_all(group)
            continue
        warnings.warn(group.conflict(), stacklevel=users_stack_level())
        for op in group.ops:
            member = op.operands[0]
            constrain_uses(member, TensorSharding.fully_open(group.given[0].mesh, rank(member)), op.location)


def _set_all(group: _Group) -> None:
    for op in group.ops:
        owner = shardable(op.operands[0])
        if owner is not None:
            set_sharding(owner, group.given[0])


def remove_sharding_groups(module: ir.Operation) -> None:
    for op in named(module, GROUP):
        op.erase()
