"""The per-device function of a partitioned program, traced and read into steps, without what tracing leaves
behind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # type: ignore[attr-defined, unused-ignore]

from sdy_jax.base.errors import InternalError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.graph import Value as GlobalValue
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.ops.emit import NotedOp, local_function, noting_ops, used_axes
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.plan.source.steps import (
    LOOKUP,
    LocalValue,
    Step,
    StepBlock,
    captured_by,
    folded,
    is_natural,
    is_one,
    is_within,
    is_zero,
    without_dead_steps,
)
from sdy_jax.runtime.meshes import RefinedMesh, abstract_mesh, in_place_of_context

# What tracing leaves behind and says nothing: slices of everything, negative indices that cannot be, equal scalars.

_ALIASES = frozenset(
    {"convert_element_type", "broadcast_in_dim", "reshape", "copy", "squeeze", "pvary", "reshard", "slice", "pad"}
)
"""Primitives whose result is their operand if the type is the same."""


@dataclass(slots=True)
class Simplifier:
    """What is known of the steps of one block so far, in order."""

    made: dict[LocalValue, Step] = field(default_factory=dict)
    _scalars: dict[tuple[object, ...], LocalValue] = field(default_factory=dict)

    def same(self, step: Step) -> LocalValue | None:
        """The value that a step returns as it is, or that an equal step has made; None if it makes one itself."""
        if len(step.outputs) != 1 or step.blocks:
            return None
        if step.primitive == "stablehlo_op" and step.params["name"] == "stablehlo.convert":
            step.primitive, step.params = "convert_element_type", {}
        if (operand := self._unchanged(step)) is not None:
            return operand
        if step.primitive == "squeeze":
            self._look_up(step)
        known = folded(step)
        return self._equal_scalar(step) if known is None else known

    def note(self, step: Step) -> None:
        """A step that is kept."""
        self.made.update(dict.fromkeys(step.outputs, step))

    def _unchanged(self, step: Step) -> LocalValue | None:
        """The operand that a step returns as it is."""
        name, inputs = step.primitive, step.inputs
        if name in _ALIASES and _changes_nothing(step):
            return inputs[0]
        if name in ("add", "sub") and _changes_nothing(step) and is_zero(inputs[1], self.made):
            return inputs[0]
        if name == "transpose" and (before := self.made.get(inputs[0])) is not None and before.primitive == "transpose":
            order = [before.params["permutation"][d] for d in step.params["permutation"]]
            return before.inputs[0] if order == sorted(order) else None
        if name == "mul" and _changes_nothing(step) and is_one(inputs[1]):
            return inputs[0]
        if name == "clamp" and is_within(inputs[1], inputs[0], inputs[2], self.made):
            return inputs[1]
        return self._index_within(step) if name == "select_n" and len(inputs) == 3 else None

    def _equal_scalar(self, step: Step) -> LocalValue | None:
        """Positions of devices and the like, which each op computes for itself."""
        (result,) = step.outputs
        if result.shape or not np.issubdtype(result.dtype, np.integer):
            return None
        operands = [_key(value) for value in step.inputs]
        key = (step.primitive, str(sorted(step.params.items(), key=str)), result.dtype.name, *operands)
        known = self._scalars.setdefault(key, result)
        return None if known is result else known

    def _look_up(self, step: Step) -> None:
        """Makes an element of a slice of one element a lookup."""
        sliced = self.made.get(step.inputs[0])
        if sliced is None or sliced.primitive != "dynamic_slice" or sliced.outputs[0].shape != (1,):
            return
        table, index = sliced.inputs
        if table.constant is not None and is_natural(index, self.made):
            step.primitive, step.params, step.inputs = LOOKUP, {}, [table, index]

    def _index_within(self, step: Step) -> LocalValue | None:
        """`index` of `where(index < 0, index + size, index)`, if it is not negative, and of
        `where((index < 0) | (index > last), last, index)`, if it is neither."""
        condition, index, other = step.inputs
        asks, adds = self.made.get(condition), self.made.get(other)
        if asks is None:
            return None
        if asks.primitive == "lt" and asks.inputs[0] is index and is_zero(asks.inputs[1], self.made):
            is_from_end = adds is not None and adds.primitive == "add" and index in adds.inputs
            return index if is_from_end and is_natural(index, self.made) else None
        tests = [self.made.get(value) for value in asks.inputs] if asks.primitive == "or" else [None]
        is_of_index = all(test is not None and test.inputs[0] is index for test in tests)
        zero = LocalValue((), index.dtype, np.zeros((), index.dtype))
        return index if is_of_index and is_within(index, zero, other, self.made) else None


def _changes_nothing(step: Step) -> bool:
    operand, result = step.inputs[0], step.outputs[0]
    if (operand.shape, operand.dtype) != (result.shape, result.dtype):
        return False
    return step.primitive != "pad" or all(tuple(each) == (0, 0, 0) for each in step.params["padding_config"])


def _key(value: LocalValue) -> object:
    return id(value) if value.constant is None else (value.dtype.name, value.shape, value.constant.tobytes())


# Functions of blocks that name axes of the user's mesh, in the names of the atoms into which a program cuts these.

Axes = Sequence[tuple[str, int]]
"""The names and sizes of the axes of a mesh."""

ON_USER_AXES = "sdy_whole_axes"
"""The primitive that calls such a function. Its parameters are the function, which has a jaxpr, and the user's mesh."""

_NAMES = ("axis_name", "axes")
"""The parameters by which collectives name axes."""


def on_atoms(jaxpr: Any, atoms: Axes) -> Any:
    """A jaxpr in which collectives of all such functions are over the atoms, the axes of its mesh."""

    def changed(eqn: Any) -> Any:
        if eqn.primitive.name != ON_USER_AXES:
            return eqn
        jaxpr = _renamed(eqn.params["function"].jaxpr, _made_of(eqn, atoms))
        return eqn.replace(params={"jaxpr": jaxpr, "mesh": eqn.params["mesh"]})

    return _rewritten(jaxpr, changed)


def _made_of(eqn: Any, atoms: Axes) -> Mapping[str, tuple[str, ...]]:
    """The atoms of each axis of the user's mesh, major to minor. Both meshes have the devices in one order."""
    found, rest = dict[str, tuple[str, ...]](), list(atoms)
    for axis, size in eqn.params["mesh"].shape.items():
        taken, product = list[str](), 1
        while rest and (product < size or (size == rest[0][1] == 1 and not taken)):
            name, own = rest.pop(0)
            taken.append(name)
            product *= own
        found[axis] = tuple(taken)
    return found


def _renamed(jaxpr: Any, atoms: Mapping[str, tuple[str, ...]]) -> Any:
    def over(names: Any) -> Any:
        listed = names if isinstance(names, tuple | list) else (names,)
        found = tuple(each for name in listed for each in atoms.get(name, (name,)))
        return found[0] if isinstance(names, str) and len(found) == 1 else found

    def changed(eqn: Any) -> Any:
        return eqn.replace(params={k: over(v) if k in _NAMES else v for k, v in eqn.params.items()})

    return _rewritten(jaxpr, changed)


def _rewritten(x: Any, changed: Callable[[Any], Any]) -> Any:
    """A jaxpr, or a parameter that may hold some, with other equations."""
    if isinstance(x, tuple | list) and not hasattr(x, "_fields"):
        return type(x)(_rewritten(each, changed) for each in x)
    if isinstance(x, Jaxpr):
        return x.replace(eqns=[_with_parameters(changed(eqn), changed) for eqn in x.eqns])
    return x.replace(jaxpr=_rewritten(x.jaxpr, changed)) if isinstance(x, ClosedJaxpr) else x


def _with_parameters(eqn: Any, changed: Callable[[Any], Any]) -> Any:
    return eqn.replace(params={name: _rewritten(value, changed) for name, value in eqn.params.items()})


# From a jaxpr to steps: calls inlined, closed-over values found where they are made, constants known.

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    ON_USER_AXES: "jaxpr",
}
"""Primitives that call a function, and the parameter that holds it. What is called here is small, and jax's own."""

_OP = re.compile(r"\bsdy_op_(\d+)\b")


def read_function(jaxpr: Any, inputs: Sequence[LocalValue]) -> StepBlock:
    """A closed jaxpr, or one whose constants are its first arguments, as a block of the given inputs."""
    reader = _Reader()
    outputs = reader.run(jaxpr, inputs, None)
    return StepBlock(list(inputs), reader.steps, outputs)


@dataclass(slots=True)
class _Reader:
    """Reads into one list of steps."""

    steps: list[Step] = field(default_factory=list)
    _simplifier: Simplifier = field(default_factory=Simplifier)

    def run(self, jaxpr: Any, inputs: Sequence[LocalValue], op: int | None) -> list[LocalValue]:
        """Adds the steps of a function, which is part of an op, and returns its results."""
        inner, consts = _opened(jaxpr)
        known = dict(zip(inner.constvars, map(constant, consts), strict=True))
        known.update(zip(inner.invars, inputs, strict=True))

        def of(atom: Any) -> LocalValue:
            return constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in inner.eqns:
            operands = list(map(of, eqn.invars))
            known.update(zip(eqn.outvars, self._step(eqn, operands, _op_of(eqn, op)), strict=True))
        return list(map(of, inner.outvars))

    def _step(self, eqn: JaxprEqn, operands: list[LocalValue], op: int | None) -> list[LocalValue]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS:
            return self.run(params[_CALLS[name]], operands, op)
        outputs = list(map(_value, eqn.outvars))
        step = Step(name, params, operands, outputs, op)
        _REGIONS.get(name, _regions_of_numbers)(step)
        if (same := self._simplifier.same(step)) is not None:
            return [same]
        self.steps.append(step)
        self._simplifier.note(step)
        return outputs


def _opened(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else (jaxpr, ())


def _op_of(eqn: JaxprEqn, around: int | None) -> int | None:
    found = _OP.findall(str(eqn.source_info.name_stack))
    return int(found[-1]) if found else around


def constant(x: Any) -> LocalValue:
    """A value that is known."""
    array = np.asarray(x)
    return LocalValue(array.shape, array.dtype, array)


def new_values(jaxpr: Any) -> list[LocalValue]:
    """Values of the types of a function's arguments."""
    return list(map(_value, _opened(jaxpr)[0].invars))


def _value(variable: Any) -> LocalValue:
    return LocalValue(tuple(variable.aval.shape), variable.aval.dtype)


def _region(step: Step, jaxpr: Any, outer: Sequence[LocalValue]) -> StepBlock:
    """A function whose first arguments are values from outside, as a block of the others."""
    inputs = new_values(jaxpr)[len(outer) :]
    reader = _Reader()
    outputs = reader.run(jaxpr, [*outer, *inputs], step.op)
    return StepBlock(inputs, reader.steps, outputs)


def _while(step: Step) -> None:
    params, operands = step.params, step.inputs
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    step.blocks = [
        _region(step, params["cond_jaxpr"], operands[:first]),
        _region(step, params["body_jaxpr"], operands[first:second]),
    ]
    step.inputs = operands[second:]


def _scan(step: Step) -> None:
    outer = step.params.get("num_consts", 0)
    step.blocks = [_region(step, step.params["jaxpr"], step.inputs[:outer])]
    step.inputs = step.inputs[outer:]


def _cond(step: Step) -> None:
    step.blocks = [_region(step, branch, step.inputs[1:]) for branch in step.params["branches"]]
    step.inputs = [] if step.params.get("branches_platforms") else step.inputs[:1]


def _regions_of_numbers(step: Step) -> None:
    """What a reduction or a scatter does with two elements."""
    inner = step.params.get("jaxpr")
    if isinstance(inner, (Jaxpr, ClosedJaxpr)):
        consts = step.params.get("consts", ())
        step.blocks = [_region(step, inner, list(map(constant, consts)))]


_REGIONS: Mapping[str, Callable[[Step], None]] = {"while": _while, "scan": _scan, "cond": _cond}


# The per-device function of a partitioned program, traced: its steps, and the ops of the program that they are of.


@dataclass(frozen=True, slots=True)
class DeviceFunction:
    """The per-device function.

    Attributes:
        body: of local blocks, one per entry of `taken`, to local blocks, one per entry of `made`.
        ops: the ops of the partitioned program, by the index in `Step.op`.
        mesh: the mesh of the `shard_map`.
        taken, made: the indices of the arguments and results of the program that it takes and makes: those that are
            used, and those that have elements.
    """

    body: StepBlock
    ops: Sequence[NotedOp]
    mesh: RefinedMesh
    taken: tuple[int, ...]
    made: tuple[int, ...]

    def spec(self, sharding: TensorSharding) -> jax.sharding.PartitionSpec:
        return self.mesh.spec(sharding)


def trace(graph: Graph, mesh: Mesh, results: Sequence[TensorSharding]) -> DeviceFunction:
    """Traces the main function of a partitioned module on its mesh; `results` are the shardings of its results."""
    refined = RefinedMesh.of(mesh, used_axes(graph))
    arguments = [v.sharding or TensorSharding.replicated("mesh", len(v.shape or ())) for v in graph.arguments]
    devices = abstract_mesh(refined.shape, refined.axis_names)

    def on_mesh(*xs: jax.Array) -> Any:
        return jax.shard_map(
            local_function(graph, refined),
            mesh=devices,
            in_specs=tuple(map(refined.spec, arguments)),
            out_specs=tuple(map(refined.spec, results)),
            check_vma=False,
        )(*xs)

    with noting_ops() as ops, jax.enable_x64(True), in_place_of_context(devices):
        jaxpr = jax.make_jaxpr(on_mesh)(*map(_type_of, graph.arguments))
    body = _read(jaxpr, refined)
    returned = graph.main.blocks[0].terminator.operands
    made = tuple(i for i, value in enumerate(returned) if math.prod(value.shape or ()))
    body = without_dead_steps(StepBlock(body.inputs, body.steps, [body.outputs[i] for i in made]))
    used = captured_by(StepBlock([], body.steps, body.outputs))
    taken = tuple(i for i, value in enumerate(body.inputs) if value in used)
    return DeviceFunction(
        StepBlock([body.inputs[i] for i in taken], body.steps, body.outputs), ops, refined, taken, made
    )


def _type_of(value: GlobalValue) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape or (), numpy_dtype(value.dtype))


def _read(jaxpr: Any, mesh: RefinedMesh) -> StepBlock:
    """The body of the `shard_map`, and nothing else, of a function that is one."""
    found = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    if len(found) != 1:
        raise InternalError(f"a per-device function is {len(found)} shard_maps, expected one")
    inner = found[0].params["jaxpr"]
    inputs = new_values(inner)
    known = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    given = list(_constants(found[0].invars, known))
    for value, x in zip(inputs, given, strict=True):
        value.constant = x
    block = read_function(on_atoms(inner, [*zip(mesh.axis_names, mesh.shape, strict=True)]), inputs)
    return StepBlock([v for v in inputs if v.constant is None], block.steps, block.outputs)


def _constants(variables: Sequence[Any], known: dict[Any, Any]) -> Iterator[Any]:
    """What `shard_map` closes over, which it takes like arguments."""
    for variable in variables:
        found = known.get(variable) if not hasattr(variable, "val") else variable.val
        yield None if found is None else np.asarray(found)
