"""Functions and calls: the call graph, one function per call, calls inlined, and calls as named computations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.attributes import shardings_to_attribute
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    CALL,
    body_of,
    callee_of,
    calls_in,
    copied,
    functions,
    main_function,
    module_meshes,
    named,
    post_order,
    pre_order,
    read_attributes,
    references,
    replace_op,
    symbol,
    terminator_of,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import filled, function_shardings, list_of, set_function_shardings, stating
from sdy_jax.shardy.passes.data_flow_edges import add_edges_of, sink_edges_of

# Telling whether two functions compute the same, whatever their shardings.

_OF_SHARDING = ("sharding", "out_sharding", "in_shardings", "out_shardings")
_OF_FUNCTIONS = ("sym_name", "sym_visibility", "arg_attrs", "res_attrs", "callee")


def computation_of(function: ir.Operation, name_of_callee: Callable[[ir.Operation], str]) -> Hashable:
    """A key that functions share if their ops are the same, on the same operands, with shardings left out.

    Args:
      function: a `func.func`.
      name_of_callee: which function a call means; calls of functions with one name count as the same.
    """
    numbers: dict[ir.Value, int] = {}
    return tuple(
        (_key(op, numbers), name_of_callee(op) if op.name == "func.call" else "") for op in pre_order(function)
    )


def _key(op: ir.Operation, numbers: dict[ir.Value, int]) -> Hashable:
    """One op; `numbers` are those of the values so far, and get the values that the op introduces."""
    operands = tuple(numbers[value] for value in op.operands)
    arguments = [a for region in op.regions for block in region.blocks for a in block.arguments]
    introduced = [*op.results, *arguments]
    for value in introduced:
        numbers[value] = len(numbers)
    attributes = tuple(
        (name, attribute)
        for name, attribute in sorted(read_attributes(op).items(), key=lambda item: item[0])
        if not name.startswith("sdy.") and name not in _OF_SHARDING and name not in _OF_FUNCTIONS
    )
    return (op.name, operands, tuple(value.type for value in introduced), attributes)


# The call graph: functions in the order of their calls, one function per call, and functions that are alike again.

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


# Every call and every composite is replaced by the body it stands for; functions that nothing names then are removed.
#
# A function's argument and result shardings mean: the caller's values pass through a sharding constraint there.

_CALLEE = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""The ops that stand for a function's body, and the attribute that names the function."""


def inline_calls(module: ir.Operation) -> None:
    """Inlines all calls, nested ones and those inside regions included. Beside the main function and public ones, what
    other ops name stays, such as the computations of custom calls.

    Raises:
      ShardingError: a function calls itself, directly or through others.
    """
    known = functions(module)
    if len(known) < 2:
        return
    _inline(known, known)
    remove_all_but(module, symbol(main_function(module)))


def inline_functions(module: ir.Operation, chosen: Callable[[ir.Operation], bool]) -> None:
    """Inlines all calls of some of the functions, which are removed then, unless one is the main function.

    Raises:
      ShardingError: one of them calls itself, directly or through others of them.
    """
    known = functions(module)
    inlined = {name: function for name, function in known.items() if chosen(function)}
    if not inlined:
        return
    _inline(known, inlined)
    main = main_function(module)
    for function in inlined.values():
        if function != main:
            function.erase()


def _inline(known: Functions, inlined: Functions) -> None:
    """Inlines the callees first, so that a copied body holds no call of what is to be inlined."""

    def inlined_by(function: ir.Operation) -> list[str]:
        return [name for call in named(function, *_CALLEE) if (name := _called(call)) in inlined]

    for function in callees_first(known, inlined_by):
        for call in named(function, *_CALLEE):
            callee = _called(call)
            if callee not in known:
                raise ShardingError(f"call of @{callee}, which the module does not define (in @{symbol(function)})")
            if callee in inlined:
                _inline_call(call, known[callee])


def _called(call: ir.Operation) -> str:
    return str(ir.FlatSymbolRefAttr(call.attributes[_CALLEE[call.name]]).value)


def _inline_call(call: ir.Operation, callee: ir.Operation) -> None:
    copy = callee.clone(ir.InsertionPoint.after(callee))
    block = body_of(copy)
    for argument, operand, sharding in zip(
        block.arguments, list(call.operands), function_shardings(copy, "arg_attrs"), strict=True
    ):
        argument.replace_all_uses_with(_constrained(operand, sharding, ir.InsertionPoint(call), call.location))
    *body, terminator = [op.operation for op in block.operations]
    for op in body:
        _locate(op, call.location)
        op.move_before(call)
    for result, returned, sharding in zip(
        call.results, list(terminator.operands), _result_shardings(call, callee), strict=True
    ):
        result.replace_all_uses_with(_constrained(returned, sharding, ir.InsertionPoint(call), call.location))
    copy.erase()
    call.erase()


def _locate(op: ir.Operation, caller: ir.Location) -> None:
    """Adds the call's location: lines and scopes in a function that jax lowers once are those inside of it."""
    for inner in pre_order(op):
        inner.location = ir.Location.callsite(inner.location, [caller], caller.context)


def _result_shardings(call: ir.Operation, callee: ir.Operation) -> list[TensorSharding | None]:
    """The call's own shardings, else those of the function it calls."""
    if "sdy.sharding" in call.attributes:
        return list_of(call, "sdy.sharding")
    return function_shardings(callee, "res_attrs")


def _constrained(
    value: ir.Value, sharding: TensorSharding | None, ip: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    if sharding is None:
        return value
    return stating("sdy.sharding_constraint", value, sharding, location, ip).results[0]


# Calls as named computations, through which shardings propagate, and named computations as calls.
#
# `import_func_calls` puts the body of a function in the place of a call; `export_named_computations` makes each body
# a function again.

_NAMED = "sdy.named_computation"
_OF_CALLS = ("callee", "no_inline", "arg_attrs", "res_attrs", "sdy.sharding")
_OF_COMPUTATIONS = ("name", "in_shardings", "out_shardings")


def import_func_calls(module: ir.Operation, *, add_data_flow_edges_on_named_computations: bool = True) -> None:
    """Every call becomes a named computation with the callee's body; the functions that were called are erased.

    A function's argument shardings and a call's result shardings become those of the named computation.

    Args:
      module: a `builtin.module`, edited in place.
      add_data_flow_edges_on_named_computations: also add the data-flow edges of named computations that have none.
    """
    known, meshes = functions(module), module_meshes(module)
    order = [symbol(function) for function in callees_first(known)]
    left = Counter(callee_of(call) for call in calls_in(module))
    for name in order:
        for call in calls_in(known[name]):
            callee = callee_of(call)
            left[callee] -= 1
            if callee in known:
                _import_call(call, known[callee], meshes, is_last=not left[callee])
    for name in left:
        if name in known:
            known[name].erase()
    if add_data_flow_edges_on_named_computations:
        for op in [op for op in post_order(module) if op.name == _NAMED]:
            add_edges_of(op)


def _import_call(call: ir.Operation, callee: ir.Operation, meshes: dict[str, Mesh], is_last: bool) -> None:
    attributes = {n: call.attributes[n] for n in call.attributes if n not in _OF_CALLS}
    attributes["name"] = ir.StringAttr.get(original_name(callee), call.context)
    given = filled(function_shardings(callee, "arg_attrs"), list(call.operands), meshes)
    if given is not None:
        attributes["in_shardings"] = shardings_to_attribute(tuple(given), call.context)
    if "sdy.sharding" in call.attributes:
        attributes["out_shardings"] = call.attributes["sdy.sharding"]
    new = ir.Operation.create(
        _NAMED,
        results=[r.type for r in call.results],
        operands=list(call.operands),
        attributes=attributes,
        regions=1,
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    source = callee if is_last else copied(callee)
    _move_body(source, new, "sdy.return")
    replace_op(call, new.results)


def _move_body(source: ir.Operation, target: ir.Operation, return_name: str) -> None:
    """Moves the only block of `source` into `target`, where a terminator of this name ends it."""
    block = body_of(source)
    block.append_to(target.regions[0])
    old = terminator_of(block)
    ir.Operation.create(return_name, operands=list(old.operands), loc=old.location, ip=ir.InsertionPoint(old))
    old.erase()


def export_named_computations(module: ir.Operation) -> None:
    """Every named computation becomes a call of a new private function of its name, at the end of the module.

    Its data-flow edges go; their shardings become those of the function's arguments and of the call.
    """
    names = UniqueNames(module)
    for op in [op for op in post_order(module) if op.name == _NAMED]:
        sink_edges_of(op)
        _export(op, names, body_of(module))


def _export(op: ir.Operation, names: UniqueNames, functions_block: ir.Block) -> None:
    context, name = op.context, str(ir.StringAttr(op.attributes["name"]).value)
    type_ = ir.FunctionType.get([v.type for v in op.operands], [v.type for v in op.results], context)
    function = ir.Operation.create(
        "func.func",
        attributes={
            "sym_name": ir.StringAttr.get(names.new(name), context),
            "function_type": ir.TypeAttr.get(type_, context),
            "sym_visibility": ir.StringAttr.get("private", context),
            ORIGINAL_NAME: ir.StringAttr.get(name, context),
        },
        regions=1,
        loc=op.location,
        ip=ir.InsertionPoint(functions_block),
    )
    attributes = {n: op.attributes[n] for n in op.attributes if n not in _OF_COMPUTATIONS}
    attributes["callee"] = ir.FlatSymbolRefAttr.get(symbol(function), context)
    if "out_shardings" in op.attributes:
        attributes["sdy.sharding"] = op.attributes["out_shardings"]
    _move_body(op, function, "func.return")
    set_function_shardings(function, "arg_attrs", dict(enumerate(list_of(op, "in_shardings"))))
    call = ir.Operation.create(
        CALL,
        results=[r.type for r in op.results],
        operands=list(op.operands),
        attributes=attributes,
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    replace_op(op, call.results)
