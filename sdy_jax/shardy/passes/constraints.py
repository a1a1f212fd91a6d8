"""What a module states of shardings: constraints, sharding groups, and rules on ops."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.attributes import rule_from_attribute, rule_to_attribute, sharding_from_attribute, with_reduction
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.locations import source_line, users_stack_level
from sdy_jax.ir.operations import (
    COMPUTATIONS,
    DATA_FLOW_OPS,
    defining_op,
    has_static_shape,
    just_after,
    named,
    owning_op,
    post_order,
    pre_order,
    rank,
    renamed,
    replace_op,
    users,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import list_of, set_sharding, sharding_of, stating
from sdy_jax.shardy.passes.data_flow_edges import EDGE, edge_of
from sdy_jax.shardy.passes.debug_info import Origins, write_constraint_edges
from sdy_jax.shardy.propagation.data_flow import FUNC_EDGE, identity_rule
from sdy_jax.shardy.rules import Compat, RuleBook, has_newer_passes

# Sharding rules written on the ops: `sdy.sharding_rule`.

RULE = "sdy.sharding_rule"


def populate_op_sharding_rules(
    module: ir.Operation, *, conservative_propagation: bool = False, compat: Compat = "shardy"
) -> None:
    """Writes the rule of every op that has one and does not carry one yet.

    Args:
      module: a `builtin.module`, edited in place.
      conservative_propagation: leave out factors along which a result's shard is not one operand's shard.
      compat: `"shardy"` has the rules that Shardy has, `"sdy_jax"` also those that it does not have; see `Compat`.
    """
    write_rules(Graph(module), conservative_propagation, compat)


def write_rules(graph: Graph, conservative: bool, compat: Compat) -> None:
    """Writes the rules of a graph's ops."""
    book = RuleBook(conservative, compat)
    rules = [(op, book.rule_of(op)) for op in graph.ops if RULE not in op.attributes]
    for op, rule in rules:
        if rule is not None:
            op.mlir.attributes[RULE] = rule_to_attribute(rule, graph.context)


def write_identity_rule(op: ir.Operation) -> None:
    """Writes the rule of an op with one operand and a result like it, unless it has a rule or no static shape."""
    value = op.operands[0]
    if has_static_shape(value) and RULE not in op.attributes:
        op.attributes[RULE] = rule_to_attribute(identity_rule(tuple(value.type.shape), 1), op.context)


def drop_sharding_rules(module: ir.Operation) -> None:
    """Removes the rules from all ops, except custom ones."""
    drop_rules(pre_order(module))


def drop_rules(ops: Iterable[ir.Operation]) -> None:
    """Removes the rules from ops, except custom ones."""
    for op in ops:
        if RULE in op.attributes and not rule_from_attribute(op.attributes[RULE]).is_custom:
            del op.attributes[RULE]


# Sharding constraints: copied onto their inputs before propagation, turned into reshards after it.

CONSTRAINT = "sdy.sharding_constraint"
_MANUAL = "sdy.manual_computation"


def apply_sharding_constraints(
    module: ir.Operation,
    *,
    debug_sharding_origins: bool = False,
    debug_propagation_edge_sharding: bool = False,
    compat: Compat = "shardy",
) -> None:
    """Gives a value without a sharding that of the closed constraint, or manual computation, that uses it.

    Args:
      module: a `builtin.module`, edited in place.
      debug_sharding_origins, debug_propagation_edge_sharding: write where each axis came from.
      compat: with Shardy's of jaxlib 0.10, a value that is stated to be open has a sharding, and edges of functions are
        ops as others; see `Compat`.
    """
    applied: list[ir.Operation] = []
    is_new = has_newer_passes(compat)
    says_something = _says_something if is_new else _is_stated
    edges = (EDGE, FUNC_EDGE) if is_new else (EDGE,)
    for op in list(post_order(module)):
        if op.name == CONSTRAINT:
            sharding = _stated_by(op)
            _redirect_to_end_of_chain(op)
            if _applies(sharding, op.operands[0], says_something) and _apply_constraint(op, sharding, edges):
                applied.append(op)
        elif op.name == _MANUAL:
            for number, given in enumerate(list_of(op, "in_shardings")):
                operand = op.operands[number]  # read now: applying an earlier one may have redirected it
                if given is not None and _applies(given, operand, says_something):
                    _apply_manual(op, operand, given, edges)
    if debug_propagation_edge_sharding:
        write_constraint_edges(module, applied)
    if debug_sharding_origins:
        Origins(Graph(module)).write()


def _redirect_to_end_of_chain(first: ir.Operation) -> None:
    """In a chain of constraints x -> first -> ... -> last, later users of x use `last` instead."""
    x = first.operands[0]
    source = defining_op(x)
    if (source is not None and source.name == CONSTRAINT) or current_sharding(x) is not None:
        return
    if any(user.name in (CONSTRAINT, _MANUAL) and user != first for user in users(x)):
        return
    last = _end_of_chain(first)
    if last == first or any(user.name in (CONSTRAINT, _MANUAL) for user in users(last.results[0])):
        return
    for use in list(x.uses):
        user = use.owner.operation
        if user != first and user.name != "func.return" and user.block == last.block and last.is_before_in_block(user):
            user.operands[use.operand_number] = last.results[0]


def _end_of_chain(first: ir.Operation) -> ir.Operation:
    last = first
    while True:
        following = users(last.results[0])
        if len(following) != 1 or following[0].name != CONSTRAINT:
            return last
        last = following[0]


def shardable(value: ir.Value) -> ir.Value | None:
    """The value that owns the sharding of `value`: an edge's result where there is an edge; None: nothing does."""
    op = owning_op(value)
    if isinstance(value, ir.BlockArgument):
        if op.name == "func.func":
            return value
        if op.name == "stablehlo.while":
            value = op.results[value.arg_number]
        elif op.name not in COMPUTATIONS:
            return None
    if op.name not in DATA_FLOW_OPS:
        return value
    edge = edge_of(value)
    return value if edge is None else edge.results[0]


def _owner_of(value: ir.Value) -> ir.Value:
    owner = shardable(value)
    assert owner is not None
    return owner


def current_sharding(value: ir.Value) -> TensorSharding | None:
    owner = shardable(value)
    return None if owner is None else sharding_of(owner)


def _applies(sharding: TensorSharding, x: ir.Value, says_something: Callable[[TensorSharding | None], bool]) -> bool:
    owner = shardable(x)
    if owner is None or not sharding.is_fully_closed or says_something(sharding_of(owner)):
        return False
    return all(other == sharding for use in x.uses for other in _wanted(use.owner.operation, use.operand_number))


def _is_stated(sharding: TensorSharding | None) -> bool:
    return sharding is not None


def _says_something(sharding: TensorSharding | None) -> bool:
    """Whether a sharding is more than that all dimensions are open; that of a scalar is."""
    if sharding is None:
        return False
    return sharding.rank == 0 or sharding != TensorSharding.fully_open(sharding.mesh, sharding.rank)


def _wanted(user: ir.Operation, operand: int) -> list[TensorSharding]:
    """The sharding that a constraint or a manual computation wants its operand to have."""
    if user.name == CONSTRAINT:
        return [_stated_by(user)]
    if user.name == _MANUAL:
        given = list_of(user, "in_shardings")[operand]
        return [given] if given else []
    return []


def _stated_by(constraint: ir.Operation) -> TensorSharding:
    return with_reduction(sharding_from_attribute(constraint.attributes["sharding"]), constraint.attributes)


def _belongs_to_edge(x: ir.Value, edges: tuple[str, ...]) -> bool:
    owner = shardable(x)
    return owner is not None and owning_op(owner).name in edges


def _apply_constraint(constraint: ir.Operation, sharding: TensorSharding, edges: tuple[str, ...]) -> bool:
    """Returns whether the constraint's input got the sharding; the result of an edge does not, it goes through it."""
    x = constraint.operands[0]
    if not _belongs_to_edge(x, edges):
        set_sharding(_owner_of(x), sharding)
        write_identity_rule(constraint)
        return True
    _set_unreduced(x, sharding)
    _move_just_after(constraint, x)
    x.replace_all_uses_except(constraint.results[0], constraint)
    return False


def _move_just_after(op: ir.Operation, x: ir.Value) -> None:
    source = defining_op(x)
    if source is not None:
        op.move_after(source)
        return
    first = x.owner.operations[0].operation
    if first != op:
        op.move_before(first)


def _apply_manual(manual: ir.Operation, x: ir.Value, sharding: TensorSharding, edges: tuple[str, ...]) -> None:
    if not _belongs_to_edge(x, edges):
        set_sharding(_owner_of(x), sharding)
        return
    _set_unreduced(x, sharding)
    constrain_uses(x, sharding, manual.location)


def constrain_uses(value: ir.Value, sharding: TensorSharding, location: ir.Location) -> None:
    """Puts a sharding constraint right after a value, between it and all its users."""
    constraint = stating(CONSTRAINT, value, sharding, location, just_after(value))
    value.replace_all_uses_except(constraint.results[0], constraint)


def _set_unreduced(x: ir.Value, sharding: TensorSharding) -> None:
    owner = shardable(x)
    if owner is None or not sharding.unreduced_axes:
        return
    old = sharding_of(owner) or TensorSharding.fully_open(sharding.mesh, rank(x))
    set_sharding(owner, replace(old, unreduced_axes=sharding.unreduced_axes, reduction=sharding.reduction))


def constraints_to_reshards(module: ir.Operation) -> None:
    """Every `sdy.sharding_constraint` becomes an `sdy.reshard` with the same sharding."""
    for op in named(module, CONSTRAINT):
        replace_op(op, renamed(op, "sdy.reshard").results)


# Sharding groups: values that must be sharded alike. Unified before propagation, removed after it.

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
