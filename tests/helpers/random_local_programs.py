"""Random programs in text that communicate themselves, and what they compute, op by op on stacks in NumPy.

A value of a program is a stack: what it is on each device, by linear index.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import shard_model as model
from dialect_texts import in_shard

GRIDS = ((2, 4), (2, 2, 2), (4,), (3, 2), (2, 1, 3))
BITS = {"index": 32, "i32": 32, "i8": 8, "i1": 1}
_SIGNED: dict[str, Callable[[Any, Any], Any]] = {
    "addi": np.add,
    "subi": np.subtract,
    "muli": np.multiply,
    "andi": np.bitwise_and,
    "ori": np.bitwise_or,
    "xori": np.bitwise_xor,
    "maxsi": np.maximum,
    "minsi": np.minimum,
}
_UNSIGNED: dict[str, Callable[[Any, Any], Any]] = {"maxui": np.maximum, "minui": np.minimum}
_DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "divsi": lambda a, b: np.sign(a) * np.sign(b) * (abs(a) // abs(b)),
    "remsi": lambda a, b: np.sign(a) * (abs(a) % abs(b)),
    "floordivsi": np.floor_divide,
    "ceildivsi": lambda a, b: -np.floor_divide(-a, b),
}
_UNSIGNED_DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {"divui": np.floor_divide, "remui": np.remainder}
_PREDICATES: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "slt": np.less,
    "sle": np.less_equal,
    "sgt": np.greater,
    "sge": np.greater_equal,
    "ult": np.less,
    "ule": np.less_equal,
    "ugt": np.greater,
    "uge": np.greater_equal,
}
_FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "addf": np.add,
    "subf": np.subtract,
    "mulf": np.multiply,
    "divf": np.divide,
    "maximumf": np.maximum,
    "minimumf": np.minimum,
}

Stack = np.ndarray
Env = dict[str, Stack]


def signed(x: Any, bits: int) -> Any:
    """Integers as what so many bits say in two's complement."""
    x = np.asarray(x, np.int64) & ((1 << bits) - 1)
    return np.where(x >> (bits - 1), x - (1 << bits), x)


def unsigned(x: Any, bits: int) -> Any:
    return np.asarray(x, np.int64) & ((1 << bits) - 1)


@dataclass(frozen=True)
class Step:
    """Lines of a program, and what they do to the values."""

    text: str
    run: Callable[[Env], Any]


@dataclass
class Scope:
    """The values that may be used at a place, with their types, and the steps up to there."""

    types: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def of(self, *types: str) -> list[str]:
        return [name for name, type_ in self.types.items() if type_ in types]

    def tensors(self) -> list[str]:
        return [name for name, type_ in self.types.items() if type_.startswith("tensor") and "index" not in type_]

    @property
    def text(self) -> str:
        return "\n".join(step.text for step in self.steps)

    def run(self, env: Env) -> Env:
        for step in self.steps:
            step.run(env)
        return env


class RandomLocalProgram:
    """A program of the mesh or the shard dialect, its arguments and what it returns: the same for the same seed."""

    def __init__(self, seed: int, steps: int = 24):
        self.rng = random.Random(seed)
        self.sizes, self.dialect = self.rng.choice(GRIDS), self.rng.choice(("mesh", "shard"))
        self.devices = math.prod(self.sizes)
        self._count, self._arrays = 0, np.random.default_rng(seed)
        self.main = Scope()
        self.arguments = self._drawn_arguments()
        for _ in range(steps):
            self.rng.choice(_DRAWN if self.rng.random() < 0.7 else _COMMUNICATING)(self, self.main)
        self.returned = self._returned()

    def text(self) -> str:
        types = self.main.types
        arguments = ", ".join(f"{name}: {types[name]}" for name in self.arguments)
        results = ", ".join(types[name] for name in self.returned)
        text = "\n".join(
            [
                f"mesh.mesh @m(shape = {'x'.join(map(str, self.sizes))})",
                f"func.func @main({arguments}) -> ({results}) {{",
                # So that it is a program on local arrays, whatever else is in it.
                "%communicates = mesh.process_linear_index on @m : index",
                self.main.text,
                f"return {', '.join(self.returned)} : {results}",
                "}",
            ]
        )
        return in_shard(text) if self.dialect == "shard" else text

    def wanted(self) -> list[Stack]:
        with np.errstate(all="ignore"):
            env = self.main.run(dict(self.arguments))
        return [env[name] for name in self.returned]

    def _drawn_arguments(self) -> Env:
        drawn: Env = {}
        shapes = ((4, 3), (8,), (2, 6))
        for at, type_ in enumerate(("index", "index", "i32", "i8", "i1", "f32")):
            name = f"%x{at}"
            self.main.types[name] = type_
            drawn[name] = self._some(type_, ())
        drawn["%x1"] = np.full(self.devices, self.rng.randrange(4), np.int32)  # the same everywhere
        for at, shape in enumerate(shapes):
            dtype, name = self.rng.choice(("i32", "f32", "i8")), f"%t{at}"
            self.main.types[name] = tensor(shape, dtype)
            drawn[name] = self._some(dtype, shape)
        return drawn

    def _some(self, type_: str, shape: Sequence[int]) -> Stack:
        shape = (self.devices, *shape)
        if type_ == "f32":
            return self._arrays.integers(-8, 9, shape).astype(np.float32) / 2
        low, high = {"index": (0, 4), "i32": (-9, 9), "i8": (-128, 128), "i1": (0, 2)}[type_]
        dtype = {"i1": bool, "i8": np.int8}.get(type_, np.int32)
        return self._arrays.integers(low, high, shape).astype(dtype)

    def _returned(self) -> list[str]:
        """The last values of the program, each of a type that arrays have."""
        made = [name for name in self.main.types if name not in self.arguments]
        return made[-12:] or ["%x0"]

    def fresh(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def add(self, scope: Scope, type_: str, text: str, compute: Callable[[Env], Any]) -> str:
        """A step with one result: its text has `{}` for the result's name."""
        name = self.fresh()

        def run(env: Env) -> None:
            env[name] = np.broadcast_to(compute(env), (self.devices, *np.shape(compute(env))[1:]))

        scope.steps.append(Step(text.replace("{}", name), run))
        scope.types[name] = type_
        return name

    def constant(self, scope: Scope, type_: str, value: int) -> str:
        shown = ("false", "true")[value] if type_ == "i1" else value
        text = f"{{}} = arith.constant {shown}" + ("" if type_ == "i1" else f" : {type_}")
        return self.add(scope, type_, text, lambda env: np.array([value]))

    def pick(self, scope: Scope, *types: str) -> str:
        found = scope.of(*types)
        if not found or self.rng.random() < 0.25:
            type_ = self.rng.choice(types)
            return self.constant(scope, type_, self.rng.randrange(2) if type_ == "i1" else self.rng.randint(-5, 6))
        return self.rng.choice(found[-6:] if self.rng.random() < 0.5 else found)

    def index_below(self, scope: Scope, bound: int) -> str:
        """An index that is the same everywhere, smaller than a bound: known before the run, or not."""
        if self.rng.random() < 0.5:
            return self.constant(scope, "index", self.rng.randrange(bound))
        return self.small(scope, "%x1", bound)

    def small(self, scope: Scope, name: str, bound: int) -> str:
        limit = self.constant(scope, "index", bound)
        text = f"{{}} = arith.remui {name}, {limit} : index"
        return self.add(scope, "index", text, lambda env: unsigned(env[name], 32) % bound)


def tensor(shape: Sequence[int], dtype: str) -> str:
    return f"tensor<{''.join(f'{n}x' for n in shape)}{dtype}>"


def parsed(type_: str) -> tuple[list[int], str]:
    *shape, dtype = type_[len("tensor<") : -1].split("x")
    return list(map(int, shape)), dtype


# What a program computes.


def _integers(program: RandomLocalProgram, scope: Scope) -> None:
    type_ = program.rng.choice(tuple(BITS))
    a, b, bits = program.pick(scope, type_), program.pick(scope, type_), BITS[type_]
    name = program.rng.choice((*_SIGNED, *_UNSIGNED))
    compute, view = (_SIGNED[name], signed) if name in _SIGNED else (_UNSIGNED[name], unsigned)
    text = f"{{}} = arith.{name} {a}, {b} : {type_}"
    result = program.add(scope, type_, text, lambda env: signed(compute(view(env[a], bits), view(env[b], bits)), bits))
    if type_ == "index":
        _kept_small(program, scope, result)


def _divisions(program: RandomLocalProgram, scope: Scope) -> None:
    type_ = program.rng.choice(("index", "i32", "i8"))
    a, bits = program.pick(scope, type_), BITS[type_]
    b = program.constant(scope, type_, program.rng.choice((-7, -2, 2, 3, 5)))
    if program.rng.random() < 0.5:
        six, one, any_ = (
            program.constant(scope, type_, 6),
            program.constant(scope, type_, 1),
            program.pick(scope, type_),
        )
        even = program.add(scope, type_, f"{{}} = arith.andi {any_}, {six} : {type_}", lambda env: env[any_] & 6)
        b = program.add(scope, type_, f"{{}} = arith.ori {even}, {one} : {type_}", lambda env: env[even] | 1)
    name = program.rng.choice((*_DIVISIONS, *_UNSIGNED_DIVISIONS))
    known, view = (_DIVISIONS, signed) if name in _DIVISIONS else (_UNSIGNED_DIVISIONS, unsigned)
    text, divided = f"{{}} = arith.{name} {a}, {b} : {type_}", known[name]
    found = program.add(scope, type_, text, lambda env: signed(divided(view(env[a], bits), view(env[b], bits)), bits))
    if type_ == "index":
        _kept_small(program, scope, found)


def _kept_small(program: RandomLocalProgram, scope: Scope, name: str) -> None:
    """An index has more bits before the run than in it."""
    limit = program.constant(scope, "index", 97)
    text = f"{{}} = arith.remsi {name}, {limit} : index"
    program.add(scope, "index", text, lambda env: _DIVISIONS["remsi"](env[name], 97))


def _comparisons(program: RandomLocalProgram, scope: Scope) -> None:
    type_ = program.rng.choice(tuple(BITS))
    a, b, bits = program.pick(scope, type_), program.pick(scope, type_), BITS[type_]
    predicate = program.rng.choice(tuple(_PREDICATES))
    view = unsigned if predicate.startswith("u") else signed
    text = f"{{}} = arith.cmpi {predicate}, {a}, {b} : {type_}"
    program.add(
        scope, "i1", text, lambda env: _PREDICATES[predicate](view(env[a], bits), view(env[b], bits)).astype(np.int64)
    )


def _selections(program: RandomLocalProgram, scope: Scope) -> None:
    type_ = program.rng.choice((*BITS, "f32")) if scope.of("f32") else "i32"
    p = program.pick(scope, "i1")
    a, b = (program.rng.choice(scope.of(type_) or [program.pick(scope, type_)]) for _ in range(2))
    text = f"{{}} = arith.select {p}, {a}, {b} : {type_}"
    program.add(scope, type_, text, lambda env: np.where(unsigned(env[p], 1) == 1, env[a], env[b]))


def _casts(program: RandomLocalProgram, scope: Scope) -> None:
    name, source, target = program.rng.choice(
        [
            *(("extsi", *pair) for pair in (("i8", "i32"), ("i1", "i8"), ("i1", "i32"))),
            *(("extui", *pair) for pair in (("i8", "i32"), ("i1", "i8"), ("i1", "i32"))),
            *(("trunci", *pair) for pair in (("i32", "i8"), ("i32", "i1"), ("i8", "i1"))),
            *((cast, "index", narrow) for cast in ("index_cast", "index_castui") for narrow in ("i8", "i1", "i32")),
            *((cast, narrow, "index") for cast in ("index_cast", "index_castui") for narrow in ("i8", "i1")),
        ]
    )
    a, view = program.pick(scope, source), unsigned if "ui" in name else signed
    text = f"{{}} = arith.{name} {a} : {source} to {target}"
    program.add(scope, target, text, lambda env: signed(view(env[a], BITS[source]), BITS[target]))


def _floats(program: RandomLocalProgram, scope: Scope) -> None:
    a, b = (program.rng.choice(scope.of("f32")) for _ in range(2))
    name = program.rng.choice((*_FLOATS, "negf"))
    if name == "negf":
        program.add(scope, "f32", f"{{}} = arith.negf {a} : f32", lambda env: -env[a])
        return
    compute, text = _FLOATS[name], f"{{}} = arith.{name} {a}, {b} : f32"
    program.add(scope, "f32", text, lambda env: compute(env[a], env[b]).astype(np.float32))


def _float_casts(program: RandomLocalProgram, scope: Scope) -> None:
    i = program.pick(scope, "i8")
    f = program.add(
        scope, "f32", f"{{}} = arith.sitofp {i} : i8 to f32", lambda env: signed(env[i], 8).astype(np.float32)
    )
    half = program.add(scope, "f16", f"{{}} = arith.truncf {f} : f32 to f16", lambda env: env[f].astype(np.float16))
    wide = program.add(scope, "f32", f"{{}} = arith.extf {half} : f16 to f32", lambda env: env[half].astype(np.float32))
    two = program.add(scope, "f32", "{} = arith.constant 2.0 : f32", lambda env: np.array([2.0], np.float32))
    part = program.add(scope, "f32", f"{{}} = arith.divf {wide}, {two} : f32", lambda env: env[wide] / env[two])
    program.add(scope, "i32", f"{{}} = arith.fptosi {part} : f32 to i32", lambda env: np.trunc(env[part]).astype(int))


def _elements(program: RandomLocalProgram, scope: Scope) -> None:
    type_ = program.rng.choice(("index", "i32", "f32"))
    a, b = (program.rng.choice(scope.of(type_)) for _ in range(2))
    made = program.add(
        scope,
        f"tensor<2x{type_}>",
        f"{{}} = tensor.from_elements {a}, {b} : tensor<2x{type_}>",
        lambda env: np.stack([env[a], env[b]], 1),
    )
    place = program.small(scope, program.pick(scope, "index"), 2)
    text = f"{{}} = tensor.extract {made}[{place}] : tensor<2x{type_}>"
    program.add(scope, type_, text, lambda env: env[made][np.arange(program.devices), env[place]])


def _elementwise(program: RandomLocalProgram, scope: Scope) -> None:
    a = program.rng.choice(scope.tensors())
    type_ = scope.types[a]
    b = program.rng.choice(scope.of(type_))
    dtype = parsed(type_)[1]
    if dtype == "f32":
        text = f"{{}} = stablehlo.maximum {a}, {b} : {type_}"
        program.add(scope, type_, text, lambda env: np.maximum(env[a], env[b]))
        return
    name = program.rng.choice(("addi", "subi", "xori"))
    text = f"{{}} = arith.{name} {a}, {b} : {type_}"
    program.add(scope, type_, text, lambda env: signed(_SIGNED[name](env[a], env[b]), BITS[dtype]))


_SCALARS = (_integers, _integers, _divisions, _comparisons, _selections, _casts)


def _region(program: RandomLocalProgram, scope: Scope, **inside: str) -> Scope:
    inner = Scope({**scope.types, **inside})
    for _ in range(program.rng.randrange(1, 4)):
        program.rng.choice(_SCALARS)(program, inner)
    return inner


def _branches(program: RandomLocalProgram, scope: Scope) -> None:
    p, type_ = program.pick(scope, "i1"), program.rng.choice(("index", "i32", "i8", "i1"))
    sides = [_region(program, scope) for _ in range(2)]
    results = [program.pick(side, type_) for side in sides]
    then, other = (f"{side.text}\nscf.yield {name} : {type_}" for side, name in zip(sides, results, strict=True))

    def compute(env: Env) -> Stack:
        found = [side.run(dict(env))[name] for side, name in zip(sides, results, strict=True)]
        return np.where(unsigned(env[p], 1) == 1, *found)

    program.add(scope, type_, f"{{}} = scf.if {p} -> ({type_}) {{\n{then}\n}} else {{\n{other}\n}}", compute)


def _loops(program: RandomLocalProgram, scope: Scope) -> None:
    type_ = program.rng.choice(("i32", "i8"))
    lower, step = (program.constant(scope, "index", n) for n in (program.rng.randrange(2), program.rng.randint(1, 2)))
    upper = program.small(scope, program.pick(scope, "index"), 5)
    first, i, carried = program.pick(scope, type_), program.fresh(), program.fresh()
    body = _region(program, scope, **{i: "index", carried: type_})
    last = program.pick(body, type_)
    text = (
        f"{{}} = scf.for {i} = {lower} to {upper} step {step} iter_args({carried} = {first}) -> ({type_}) {{\n"
        f"{body.text}\nscf.yield {last} : {type_}\n}}"
    )

    def compute(env: Env) -> Stack:
        value, trip = np.broadcast_to(env[first], program.devices), np.array(env[lower])
        while (runs := trip < env[upper]).any():
            found = body.run({**env, i: np.broadcast_to(trip, program.devices), carried: value})[last]
            value, trip = np.where(runs, found, value), trip + env[step]
        return value

    program.add(scope, type_, text, compute)


# What it asks, and how it communicates.


def _axes(program: RandomLocalProgram, least: int = 0) -> list[int]:
    axes = list(range(len(program.sizes)))
    return program.rng.sample(axes, program.rng.randint(least, len(axes)))


def _coordinates(program: RandomLocalProgram, axis: int) -> Stack:
    return np.unravel_index(np.arange(program.devices), program.sizes)[axis]


def _queries(program: RandomLocalProgram, scope: Scope) -> None:
    axis = program.rng.randrange(len(program.sizes))
    choice = program.rng.randrange(3)
    if choice == 0:
        text = "{} = mesh.process_linear_index on @m : index"
        program.add(scope, "index", text, lambda env: np.arange(program.devices))
    elif choice == 1:
        text = f"{{}} = mesh.process_multi_index on @m axes = [{axis}] : index"
        program.add(scope, "index", text, lambda env: _coordinates(program, axis))
    else:
        text = f"{{}} = mesh.mesh_shape @m axes = [{axis}] : index"
        program.add(scope, "index", text, lambda env: np.array([program.sizes[axis]]))


def _neighbours(program: RandomLocalProgram, scope: Scope) -> None:
    """Of this device, or of one that the run computes."""
    axes = _axes(program, 1)
    places = [program.small(scope, program.pick(scope, "index"), size) for size in program.sizes]
    down, up = program.fresh(), program.fresh()

    def run(env: Env) -> None:
        device = [np.broadcast_to(env[place], program.devices).astype(int) for place in places]
        counts = [program.sizes[axis] for axis in axes]
        own = np.ravel_multi_index([device[axis] for axis in axes], counts)
        for name, other in ((down, own - 1), (up, own + 1)):
            there, inside = list(device), (other >= 0) & (other < math.prod(counts))
            for axis, at in zip(axes, np.unravel_index(np.where(inside, other, 0), counts), strict=True):
                there[axis] = at
            env[name] = np.where(inside, np.ravel_multi_index(there, program.sizes), -1)

    text = f"{down}, {up} = mesh.neighbors_linear_indices on @m[{', '.join(places)}] split_axes = {axes} : index, index"
    scope.steps.append(Step(text, run))
    scope.types |= {down: "index", up: "index"}


def _shard_shapes(program: RandomLocalProgram, scope: Scope) -> None:
    axis, many = program.rng.randrange(len(program.sizes)), program.rng.randint(1, 3)
    size = program.sizes[axis]
    sharding, device, first, second = (program.fresh() for _ in range(4))
    dims, at = f"{many * size}x5 {sharding} {device}", "process_linear_index on @m : index"
    if program.dialect == "shard":
        at = f"process_multi_index on @m : {', '.join(['index'] * len(program.sizes))}"
        places = ", ".join(f"{device}#{axis}" for axis in range(len(program.sizes)))
        dims = f"dims = [{many * size}, 5] sharding = {sharding} device = [{places}]"
    text = (
        f"{sharding} = mesh.sharding @m split_axes = [[{axis}], []] : !mesh.sharding\n"
        f"{device}{f':{len(program.sizes)}' if program.dialect == 'shard' else ''} = mesh.{at}\n"
        f"{first}, {second} = mesh.shard_shape {dims} : index, index"
    )
    shapes = {first: np.full(program.devices, many), second: np.full(program.devices, 5)}
    scope.steps.append(Step(text, lambda env: env.update(shapes)))
    scope.types |= {first: "index", second: "index"}


def _collectives(program: RandomLocalProgram, scope: Scope) -> None:
    """One of a tensor that fits it."""
    x = program.rng.choice(scope.tensors())
    shape, dtype = parsed(scope.types[x])
    name, axes, dim = program.rng.choice(_MOVES), _axes(program), program.rng.randrange(len(shape))
    group, result = math.prod(program.sizes[axis] for axis in axes), list(shape)
    said: dict[str, Any] = {}
    if name in ("all_slice", "scatter", "reduce_scatter", "all_to_all"):
        if shape[dim] % group:
            return
        result[dim] //= group
        said[{"all_slice": "slice_axis", "all_to_all": "split_axis"}.get(name, "scatter_axis")] = dim
    if name == "all_to_all":
        said["concat_axis"] = program.rng.randrange(len(shape))
        result[said["concat_axis"]] *= group
    if "gather" in name:
        said["gather_axis"] = dim
        result[dim] *= group
    if "reduce" in name:
        said = {"reduction": program.rng.choice(("sum", "max", "min")), **said}
    if math.prod(result) > 400:
        return
    _added_collective(program, scope, x, (name, axes, said), tensor(result, dtype))


def _added_collective(
    program: RandomLocalProgram, scope: Scope, x: str, called: tuple[str, list[int], dict[str, Any]], made: str
) -> None:
    name, axes, said = called
    roots = [program.index_below(scope, program.sizes[axis]) for axis in axes] if name in _ROOTED else []
    words = " ".join(f"{key} = {f'<{value}>' if key == 'reduction' else value}" for key, value in said.items())
    given = scope.types[x]
    types = f"({', '.join([given, *['index'] * len(roots)])}) -> {made}" if name in _ROOTED else f"{given} -> {made}"
    root = f" root = [{', '.join(roots)}]" if name in _ROOTED else ""

    def compute(env: Env) -> Stack:
        options = dict(said)
        if name in _ROOTED:
            options["root"] = [int(env[root][0]) for root in roots]
        found: Stack = getattr(model, name)(env[x], program.sizes, grid_axes=axes, **options)
        return found

    program.add(scope, made, f"{{}} = mesh.{name} {x} on @m mesh_axes = {axes} {words}{root} : {types}", compute)


def _rings(program: RandomLocalProgram, scope: Scope) -> None:
    """Everyone sends along an axis, to the device that it computes, and waits for the one that does so to it."""
    x, axis = program.rng.choice(scope.tensors()), program.rng.randrange(len(program.sizes))
    size, type_ = program.sizes[axis], scope.types[x]
    me = program.add(
        scope,
        "index",
        f"{{}} = mesh.process_multi_index on @m axes = [{axis}] : index",
        lambda env: _coordinates(program, axis),
    )
    by, ends = program.rng.randrange(size), []
    for offset in (by, size - by):
        far = program.constant(scope, "index", offset)
        text = f"{{}} = arith.addi {me}, {far} : index"
        there = program.add(scope, "index", text, lambda env, far=far: env[me] + env[far])
        ends.append(program.small(scope, there, size))
    head, types = f"on @m mesh_axes = [{axis}]", f"({type_}, index) -> {type_}"
    program.add(scope, type_, f"{{}} = mesh.send {x} {head} destination = [{ends[0]}] : {types}", lambda env: env[x])
    text = f"{{}} = mesh.recv {x} {head} source = [{ends[1]}] : {types}"
    program.add(
        scope,
        type_,
        text,
        lambda env: model.shift(env[x], program.sizes, shift_axis=axis, offset=by, rotate=True, grid_axes=[axis]),
    )


def _shifts(program: RandomLocalProgram, scope: Scope) -> None:
    x, axes = program.rng.choice(scope.tensors()), _axes(program, 1)
    options = {"shift_axis": program.rng.choice(axes), "offset": program.rng.randint(-3, 3)}
    rotate, type_ = bool(program.rng.randrange(2)), scope.types[x]
    said = " ".join(f"{key} = {value}" for key, value in options.items()) + (" rotate" if rotate else "")
    program.add(
        scope,
        type_,
        f"{{}} = mesh.shift {x} on @m mesh_axes = {axes} {said} : {type_} -> {type_}",
        lambda env: model.shift(env[x], program.sizes, rotate=rotate, **options),
    )


def _halos(program: RandomLocalProgram, scope: Scope) -> None:
    """Of one cell around a dimension that is split over an axis."""
    x = program.rng.choice(scope.tensors())
    shape, _ = parsed(scope.types[x])
    axis, below = program.rng.randrange(len(program.sizes)), program.rng.randrange(2)
    if shape[0] < 2 + below or math.prod(shape) > 60:
        return
    split, halos, type_ = [[axis], *[[]] * (len(shape) - 1)], [below, 1], scope.types[x]
    program.add(
        scope,
        type_,
        f"{{}} = mesh.update_halo {x} on @m split_axes = {split} halo_sizes = {halos} : {type_}",
        lambda env: model.update_halo(env[x], program.sizes, split_axes=split, halo_sizes=halos),
    )


_ROOTED = ("broadcast", "gather", "reduce", "scatter")
_MOVES = ("all_gather", "all_reduce", "all_slice", "all_to_all", "reduce_scatter", *_ROOTED)
_DRAWN = (*_SCALARS, _floats, _float_casts, _elements, _elementwise, _branches, _loops)
_COMMUNICATING = (
    _queries,
    _neighbours,
    _shard_shapes,
    _collectives,
    _collectives,
    _collectives,
    _rings,
    _shifts,
    _halos,
)
