"""The call graph: functions in the order of their calls, one function per call, and functions that are alike again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.operations import body_of, callee_of, calls_in, copied, functions, symbol
from sdy_jax.ir.stored_shardings import function_shardings
from sdy_jax.ir.symbols import references
from sdy_jax.passes.same_computation import computation_of

ORIGINAL_NAME = "sdy.original_func_name"
"""On a function that was made from another one: the other one's name."""
_MANUAL_AXES = "sdy.func_manual_axes"


def call_instead(call: ir.Operation, name: str) -> None:
    """Makes a call call another function."""
    call.attributes["callee"] = ir.FlatSymbolRefAttr.get(name, call.context)


def original_name(function: ir.Operation) -> str:
    """The name of the function of which this one is a copy, or its own."""
    if ORIGINAL_NAME in function.attributes:
        return str(ir.StringAttr(function.attributes[ORIGINAL_NAME]).value)
    return symbol(function)


def is_private(function: ir.Operation) -> bool:
    attributes = function.attributes
    return "sym_visibility" in attributes and ir.StringAttr(attributes["sym_visibility"]).value == "private"


class UniqueNames:
    """New symbols of a module, named as MLIR's symbol tables name them: a taken name gets the next number of all."""

    def __init__(self, module: ir.Operation):
        ops = (op.operation for op in body_of(module).operations)
        self._taken = {symbol(op) for op in ops if "sym_name" in op.attributes}
        self._count = 0

    def new(self, name: str) -> str:
        """`name`, or `name_0`, `name_1`, ... if it is taken."""
        found = name
        while found in self._taken:
            found, self._count = f"{name}_{self._count}", self._count + 1
        self._taken.add(found)
        return found


# Orders.


Functions = Mapping[str, ir.Operation]
"""Functions of a module by symbol."""

Callees = Callable[[ir.Operation], Iterable[str]]


def _called_by(function: ir.Operation) -> list[str]:
    return [callee_of(call) for call in calls_in(function)]


def callees_first(known: Functions, callees: Callees = _called_by) -> list[ir.Operation]:
    """The functions in depth-first post-order of the call graph, beginning at each function in turn.

    Raises:
      ShardingError: a function calls itself, directly or through others.
    """
    done: dict[str, bool] = {}
    return [function for name in known for function in _post_order(name, known, callees, done)]


def _post_order(name: str, known: Functions, callees: Callees, done: dict[str, bool]) -> Iterator[ir.Operation]:
    """`done`: False for a function whose callees are being visited, True after that."""
    if name not in known or done.get(name):
        return
    if name in done:
        raise ShardingError(f"function @{name} calls itself; StableHLO programs may not be recursive")
    done[name] = False
    for callee in callees(known[name]):
        yield from _post_order(callee, known, callees, done)
    done[name] = True
    yield known[name]


def order_functions(module: ir.Operation) -> None:
    """Moves the functions to the end of the module, each before those that it calls."""
    last = next((op.operation for op in reversed(list(body_of(module).operations))), None)
    for function in reversed(callees_first(functions(module))):
        if last is not None and function != last:
            function.move_after(last)
        last = function


# One function per call.


def flatten_call_graph(module: ir.Operation) -> None:
    """Gives every call a function of its own: the second and later calls of a function get a copy of it."""
    copies = FunctionCopies(module)
    called: set[str] = set()
    for function in callees_first(functions(module)):
        for call in calls_in(function):
            if callee_of(call) in called:
                copies.give_own(call)
            called.add(callee_of(call))


class FunctionCopies:
    """Makes copies of functions at the end of a module."""

    def __init__(self, module: ir.Operation):
        self._block, self._names, self._known = body_of(module), UniqueNames(module), functions(module)

    def give_own(self, call: ir.Operation) -> None:
        """Makes a call call a new copy of the function that it called."""
        if callee_of(call) in self._known:
            call_instead(call, self._copy(self._known[callee_of(call)]))

    def _copy(self, function: ir.Operation) -> str:
        """Copies a function, with copies of all functions that it calls. Returns the new name."""
        copy = copied(function)
        for call in calls_in(copy):
            self.give_own(call)
        name = self._names.new(symbol(function))
        copy.attributes["sym_name"] = ir.StringAttr.get(name, copy.context)
        copy.attributes[ORIGINAL_NAME] = ir.StringAttr.get(original_name(function), copy.context)
        ir.InsertionPoint(self._block).insert(copy)
        self._known[name] = copy
        return name


def unflatten_call_graph(module: ir.Operation, *, dedup_functions_fully: bool = False) -> None:
    """Calls of functions that are copies of one another, and sharded alike at their borders, all call the first.

    The others remain, without a caller. With `dedup_functions_fully` the sharding does not matter: they call the copy
    whose sharding is that of most calls.
    """
    known = functions(module)
    calls = [call for call in calls_in(module) if callee_of(call) in known]
    kinds = {name: _kind(function, known) for name, function in known.items()}
    called = [callee_of(call) for call in calls]
    shared = _most_called(called, kinds) if dedup_functions_fully else {}
    first: dict[Hashable, str] = {}
    for call, name in zip(calls, called, strict=True):
        kind = kinds[name]
        call_instead(call, shared.get(kind[:2]) or first.setdefault(kind, name))
    for function in known.values():
        for marker in (ORIGINAL_NAME, _MANUAL_AXES):
            if marker in function.attributes:
                del function.attributes[marker]


def _most_called(called: list[str], kinds: dict[str, tuple[Hashable, ...]]) -> dict[Hashable, str]:
    """For functions of one origin, the one at which its kind took the lead for good when calls are counted in order."""
    counts: Counter[Hashable] = Counter()
    leaders: dict[Hashable, str] = {}
    for name in called:
        kind = kinds[name]
        counts[kind] += 1
        leader = leaders.get(kind[:2])
        if leader is None or counts[kind] > counts[kinds[leader]]:
            leaders[kind[:2]] = name
    return leaders


def _kind(function: ir.Operation, known: dict[str, ir.Operation]) -> tuple[Hashable, ...]:
    """What functions have in common that may stand for one another: origin, manual axes, shardings at the border.

    Named computations of one name may still compute different things, so what they compute is part of their origin.
    """

    def callee_name(call: ir.Operation) -> str:
        name = callee_of(call)
        return original_name(known[name]) if name in known else name

    border = tuple(tuple(function_shardings(function, name)) for name in ("arg_attrs", "res_attrs"))
    origin = (original_name(function), computation_of(function, callee_name))
    return (origin, function.attributes.get(_MANUAL_AXES), border)


# Functions that nothing refers to.


def remove_unused_functions(module: ir.Operation) -> None:
    """Symbol dead-code elimination: private functions to which nothing that stays refers are removed."""
    remove_all_but(module, "")


def remove_all_but(module: ir.Operation, start: str) -> None:
    """Removes private functions, other than the one named `start`, to which nothing that stays refers."""
    known = functions(module)
    waiting = [op.operation for op in body_of(module).operations]
    waiting = [op for op in waiting if op.name != "func.func" or not is_private(op) or symbol(op) == start]
    used = {start}
    while waiting:
        for name in references(waiting.pop()):
            if name in known and name not in used:
                used.add(name)
                waiting.append(known[name])
    for name, function in known.items():
        if is_private(function) and name not in used:
            function.erase()
