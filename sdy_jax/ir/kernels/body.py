"""The body of a kernel: what it does beside reading and writing its blocks, and the body of a shifted grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import (  # type: ignore[attr-defined, unused-ignore]
    ClosedJaxpr,
    Jaxpr,
    Literal,
    Var,  # type: ignore[attr-defined, unused-ignore]
)

from sdy_jax.base.jax_calls import jit
from sdy_jax.base.jax_primitives import (
    NDIndexer,
    Slice,
    scan_constants,
    traced_with_refs,
    with_constants,
    with_scan_constants,
)
from sdy_jax.ir.kernels.index_arithmetic import Known, evaluate, value_of

# What the body of a kernel does beside reading and writing its blocks.
#
# It may read where in the grid it is, talk to other devices, draw random bits, or carry what one step leaves in
# scratch to the next one. A grid dimension along which something is carried cannot be split.

_COMMUNICATES = frozenset(("get_barrier_semaphore", "axis_index", "psum", "ppermute", "all_gather", "all_to_all"))
_RANDOM = frozenset(("prng_seed", "prng_random_bits"))
UNKNOWN_FORMS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a jaxpr of another form than those that are known ends in: bodies have no public specification, and no
plan fails for that."""
GRID = frozenset(("program_id", "num_programs"))
"""The primitives by which a body reads where in its grid it is."""
_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call"))


def equations_in(x: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of those in it, or of a parameter that may hold some."""
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from equations_in(each)
    elif isinstance(x, (Jaxpr, ClosedJaxpr)):
        for equation in x.eqns:
            yield equation
            yield from equations_in(tuple(equation.params.values()))


@dataclass(frozen=True, slots=True)
class BodyReads:
    """What a body reads of the grid, and what it does beside: `dims` of the whole grid, those of `vmap` counted."""

    dims: frozenset[int]
    communicates: bool
    draws: bool


def reads_of(body: Any, vmapped: Sequence[int], rank: int) -> BodyReads:
    """What the body of a kernel reads; its own numbers of grid dimensions leave out those of `vmap`."""
    own = [dim for dim in range(rank) if dim not in set(vmapped)]
    found = list(equations_in(body))
    dims = frozenset(own[e.params["axis"]] for e in found if e.primitive.name in GRID)
    communicates = any(e.primitive.name in _COMMUNICATES or _is_remote(e) for e in found)
    return BodyReads(dims, communicates, any(e.primitive.name in _RANDOM for e in found))


_NAMES_DEVICE = {"semaphore_signal": 3, "dma_start": -1, "dma_wait": -1}
"""Per primitive, which part of its operands names another device, if one does."""


def _is_remote(equation: Any) -> bool:
    """Whether a copy or a signal names another device."""
    part = _NAMES_DEVICE.get(equation.primitive.name)
    tree = equation.params.get("tree", equation.params.get("args_tree"))
    return part is not None and (tree is None or tree.unflatten(equation.invars)[part] is not None)


class KeptArg(NamedTuple):
    """An argument of a body that keeps what is written to it: scratch, or a block that later steps have again.

    Attributes:
        argument: its index.
        moves: whether steps with one index of the dimension in question have several blocks of it.
    """

    argument: int
    moves: bool


_MOST_ELEMENTS = 1 << 25
"""Of a ref, for each of which it is noted whether it was written. Chosen: the float32 numbers in 128 MiB, the VMEM of
a TPU; a larger ref counts as one element."""


@dataclass(slots=True)
class _Ref:
    """Which elements of a ref a step has written so far, and which it has read before."""

    written: np.ndarray
    read_first: np.ndarray


def carrier(
    body: Any, kept: Sequence[KeptArg], dim: int, inner: Sequence[int], starts: np.ndarray, vmapped: Sequence[int]
) -> int | None:
    """The argument, if there is one, in which a step may find what one with another index of a grid dimension wrote.

    Steps run in the grid's order, so of those with one index the first one is at 0 of all dimensions that are further
    in. Nothing is carried if that one writes, before it reads it, all that it or another one reads before writing it.

    Args:
        body: the kernel's jaxpr.
        kept: its arguments that keep something.
        dim: the grid dimension.
        inner: those that are further in, all of them.
        starts: the indices at which a shard may start.
        vmapped: the dimensions that the body does not count.
    """
    places = {dim: starts, **dict.fromkeys(inner, np.asarray(0))}
    own = (d for d in range(dim + len(inner) + 1) if d not in set(vmapped))
    first_step = {axis: places[d] for axis, d in enumerate(own) if d in places}
    first, any_step = (_run(body, kept, known) for known in (first_step, {}))
    for ref in kept:
        x = body.invars[ref.argument]
        left = any_step[x].read_first & (ref.moves | ~first[x].written)
        if first[x].read_first.any() or left.any():
            return ref.argument
    return None


def _run(body: Any, kept: Sequence[KeptArg], places: Mapping[int, np.ndarray]) -> Mapping[Any, _Ref]:
    """What a step at such places does with the arguments that keep something."""
    refs = {}
    for x in (body.invars[ref.argument] for ref in kept):
        shape = x.aval.shape if math.prod(x.aval.shape) <= _MOST_ELEMENTS else ()
        refs[x] = _Ref(np.zeros(shape, bool), np.zeros(shape, bool))
    _Walk(places).run(body, refs, {})
    return refs


@dataclass(frozen=True, slots=True)
class _Walk:
    """A step of a body, or any at some `places`, per dimension as it counts them."""

    places: Mapping[int, np.ndarray]

    def run(self, jaxpr: Any, refs: Mapping[Any, _Ref], known: Known) -> None:
        used = {x for e in jaxpr.eqns for x in e.invars if not isinstance(x, Literal)}
        used |= {x for x in jaxpr.outvars if not isinstance(x, Literal)}
        for equation in jaxpr.eqns:
            touched = [x for x in equation.invars if not isinstance(x, Literal) and x in refs]
            if equation.primitive.name == "program_id":
                if equation.params["axis"] in self.places:
                    known[equation.outvars[0]] = self.places[equation.params["axis"]]
            elif equation.primitive.name in ("cond", *_CALLS) and touched:
                self._call(equation, refs, known)
            elif touched:
                self._use(equation, refs, touched, used)
            else:
                evaluate(equation, known)

    def _call(self, equation: Any, refs: Mapping[Any, _Ref], known: Known) -> None:
        if equation.primitive.name != "cond":
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            return self._enter(inner, equation.invars, refs, known)
        branches, operands = equation.params["branches"], equation.invars[1:]
        which = value_of(equation.invars[0], known)
        if which is not None and np.unique(which).size == 1:
            number = min(max(int(np.unique(which)[0]), 0), len(branches) - 1)
            return self._enter(branches[number], operands, refs, known)
        before = {x: ref.written.copy() for x, ref in refs.items()}
        after = []
        for branch in branches:
            for x, ref in refs.items():
                ref.written = before[x].copy()
            self._enter(branch, operands, refs, known)
            after.append({x: ref.written for x, ref in refs.items()})
        for x, ref in refs.items():
            ref.written = np.asarray(np.logical_and.reduce([found[x] for found in after]))

    def _enter(self, jaxpr: Any, operands: Sequence[Any], refs: Mapping[Any, _Ref], known: Known) -> None:
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        pairs = list(zip(inner.invars, operands, strict=True))
        inside = {x: refs[y] for x, y in pairs if not isinstance(y, Literal) and y in refs}
        values = {x: value for x, y in pairs if (value := value_of(y, known)) is not None}
        self.run(inner, inside, values)

    def _use(self, equation: Any, refs: Mapping[Any, _Ref], touched: Sequence[Any], used: set[Any]) -> None:
        """Reads or writes a part of a ref; whatever else is done with one counts as reading all of it."""
        name, first = equation.primitive.name, equation.invars[0]
        place = _place_of(equation) if name in ("get", "swap") else None
        if place not in (None, _ALL) and first in refs and refs[first].written.shape != first.aval.shape:
            place = None
        reads = name != "swap" or bool(used.intersection(equation.outvars))
        for each in touched:
            part = place if place is not None and each is first else ...
            if reads:
                refs[each].read_first[part] |= ~refs[each].written[part]
        if name == "swap" and place is not None and first in refs:
            refs[first].written[place] = True


_ALL = (Ellipsis,)


def _place_of(equation: Any) -> tuple[Any, ...] | None:
    """The part of a ref that an equation reads or writes; None where it is not known before the kernel runs."""
    skipped = 1 if equation.primitive.name == "get" else 2
    transforms = equation.params["tree"].unflatten(equation.invars[skipped:])
    if not transforms:
        return _ALL
    if len(transforms) != 1 or not isinstance(transforms[0], NDIndexer):
        return None
    parts: list[Any] = []
    for index in transforms[0].indices:
        if isinstance(index, Slice):
            if not isinstance(index.start, int) or not isinstance(index.size, int):
                return None
            parts.append(slice(index.start, index.start + index.size * index.stride, index.stride))
        else:
            value = index if isinstance(index, int) else value_of(index, {})
            if value is None or np.ndim(value):
                return None
            parts.append(int(value))
    return tuple(parts)


# The body of a kernel whose grid begins at another step: numbers of steps are counted from there.
#
# `program_id` becomes `program_id + first`, and `num_programs` the extent of the whole grid. The first steps are
# scalars that go along into the branches and loops of the body.

_INDEX = ShapedArray((), np.dtype(np.int32))


@dataclass(frozen=True, slots=True)
class Shift:
    """Grid dimensions as a body numbers them, each with the extent of the whole grid."""

    extents: Mapping[int, int]

    def concerns(self, x: Any) -> bool:
        """Whether a jaxpr, or a parameter that may hold some, reads one of these dimensions."""
        return any(e.primitive.name in GRID and e.params["axis"] in self.extents for e in equations_in(x))

    def is_possible(self, body: Any) -> bool:
        """Whether all that reads these dimensions stands in branches and loops into which scalars can go."""
        return all(
            e.primitive.name in GRID or (e.primitive.name in _INTO and self.is_possible_in(e))
            for e in body.eqns
            if e.primitive.name in GRID or self.concerns(tuple(e.params.values()))
        )

    def is_possible_in(self, equation: Any) -> bool:
        """Likewise, of the jaxprs in an equation's parameters."""
        inner = [x for value in equation.params.values() for x in _jaxprs(value)]
        return all(self.is_possible(getattr(x, "jaxpr", x)) for x in inner)

    def of(self, jaxpr: Any, at: int, are_constants: bool = False) -> Any:
        """A jaxpr that takes the first steps, in order of dimensions, as arguments from number `at` on.

        Args:
            jaxpr: open or closed.
            at: behind so many arguments.
            are_constants: whether they are its constants instead, the last ones.
        """
        if not isinstance(jaxpr, Jaxpr):
            return jaxpr.replace(jaxpr=self.of(jaxpr.jaxpr, at, are_constants))
        firsts = [Var(_INDEX) for _ in self.extents]
        equations = self._equations_of(jaxpr, firsts)
        info = jaxpr.debug_info._replace(arg_names=None, result_paths=None)
        if are_constants:
            return with_constants(jaxpr.replace(eqns=equations, debug_info=info), firsts)
        return jaxpr.replace(invars=_inserted(jaxpr.invars, at, firsts), eqns=equations, debug_info=info)

    def of_body(self, body: Any, at: int, ref: Any) -> Any:
        """A kernel's body that reads the first steps from a ref of this type, its argument number `at`."""
        count = len(self.extents)
        reading = traced_with_refs(lambda given: tuple(given[i] for i in range(count)), [ref])
        equations = [*reading.eqns, *self._equations_of(body, reading.outvars)]
        effects = _moved(body.effects, at, 1) | _moved(reading.effects, 0, at)
        info = body.debug_info._replace(arg_names=None, result_paths=None)
        invars = _inserted(body.invars, at, reading.invars)
        return body.replace(invars=invars, eqns=equations, effects=effects, debug_info=info)

    def _equations_of(self, jaxpr: Any, firsts: Sequence[Any]) -> list[Any]:
        return [new for e in jaxpr.eqns for new in self._equations(e, firsts)]

    def _equations(self, equation: Any, firsts: Sequence[Any]) -> list[Any]:
        name, axis = equation.primitive.name, equation.params.get("axis")
        if name in GRID and axis in self.extents:
            (out,) = equation.outvars
            if name == "num_programs":
                whole = [Literal(np.int32(n), _INDEX) for n in (self.extents[axis], 0)]
                return [equation.replace(primitive=lax.add_p, invars=whole, params={})]
            here, first = Var(_INDEX), firsts[list(self.extents).index(axis)]
            return [
                equation.replace(outvars=[here]),
                equation.replace(primitive=lax.add_p, invars=[here, first], outvars=[out], params={}),
            ]
        if self.concerns(tuple(equation.params.values())):
            return [_INTO[name](self, equation, firsts)]
        return [equation]

    def _cond(self, equation: Any, firsts: Sequence[Any]) -> Any:
        branches = tuple(self.of(branch, len(equation.invars) - 1) for branch in equation.params["branches"])
        return _with(equation, [*equation.invars, *firsts], branches=branches)

    def _scan(self, equation: Any, firsts: Sequence[Any]) -> Any:
        count, invars = scan_constants(equation.params), equation.invars
        inner = self.of(equation.params["jaxpr"], count)
        counts = with_scan_constants(equation.params, len(firsts))
        return _with(equation, _inserted(invars, count, firsts), jaxpr=inner, **counts)

    def _while(self, equation: Any, firsts: Sequence[Any]) -> Any:
        of_cond, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        invars = _inserted(_inserted(equation.invars, of_cond + of_body, firsts), of_cond, firsts)
        new = _with(
            equation,
            invars,
            cond_jaxpr=self.of(equation.params["cond_jaxpr"], of_cond),
            body_jaxpr=self.of(equation.params["body_jaxpr"], of_body),
            cond_nconsts=of_cond + len(firsts),
            body_nconsts=of_body + len(firsts),
        )
        return new.replace(effects=_moved(equation.effects, of_cond, len(firsts)))

    def _jit(self, equation: Any, firsts: Sequence[Any]) -> Any:
        count = len(equation.invars)
        per_argument = {name: (*equation.params[name], *of_one * len(firsts)) for name, of_one in _of_one().items()}
        inner = self.of(equation.params["jaxpr"], count)
        return _with(equation, [*equation.invars, *firsts], jaxpr=inner, **per_argument)

    def _run_scoped(self, equation: Any, firsts: Sequence[Any]) -> Any:
        inner = self.of(equation.params["jaxpr"], 0, are_constants=True)
        return _with(equation, [*equation.invars, *firsts], jaxpr=inner)


def own_shift(mapping: Any, extents: Mapping[int, int]) -> Shift:
    """A shift of dimensions of a grid as the body numbers them, which does not count those of `vmap`."""
    return Shift({d - sum(v < d for v in mapping.vmapped_dims): n for d, n in extents.items()})


_INTO = {
    "cond": Shift._cond,
    "scan": Shift._scan,
    "while": Shift._while,
    "jit": Shift._jit,
    "run_scoped": Shift._run_scoped,
}
"""The primitives into whose jaxprs scalars can go."""


@cache
def _of_one() -> Mapping[str, tuple[Any]]:
    """The parameters of `jit` that say something per argument, as they are for one of which nothing is said."""
    (equation,) = jax.make_jaxpr(jit(lambda x: x + 1))(np.int32(0)).eqns
    return {name: equation.params[name] for name in ("in_shardings", "in_layouts", "donated_invars")}


def _with(equation: Any, invars: Sequence[Any], **parameters: Any) -> Any:
    return equation.replace(invars=list(invars), params={**equation.params, **parameters})


def _inserted(values: Sequence[Any], at: int, new: Sequence[Any]) -> list[Any]:
    return [*values[:at], *new, *values[at:]]


def _moved(effects: Iterable[Any], at: int, by: int) -> frozenset[Any]:
    """Effects on arguments, of which those from number `at` on have moved."""
    return frozenset(
        e.replace(input_index=e.input_index + by) if getattr(e, "input_index", -1) >= at else e for e in effects
    )


def _jaxprs(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _jaxprs(each)]
    return [value] if isinstance(value, (Jaxpr, ClosedJaxpr)) else []
