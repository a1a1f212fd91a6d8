"""What the body of a kernel does beside reading and writing its blocks.

It may read where in the grid it is, talk to other devices, draw random bits, or carry what one step leaves in scratch
to the next one. A grid dimension along which something is carried cannot be split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal  # type: ignore[attr-defined, unused-ignore]

from sdy_jax.jax_internals.pallas import NDIndexer, Slice
from sdy_jax.kernels.integers import Known, evaluate, value_of

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
class Reads:
    """What a body reads of the grid, and what it does beside: `dims` of the whole grid, those of `vmap` counted."""

    dims: frozenset[int]
    communicates: bool
    draws: bool


def reads_of(body: Any, vmapped: Sequence[int], rank: int) -> Reads:
    """What the body of a kernel reads; its own numbers of grid dimensions leave out those of `vmap`."""
    own = [dim for dim in range(rank) if dim not in set(vmapped)]
    found = list(equations_in(body))
    dims = frozenset(own[e.params["axis"]] for e in found if e.primitive.name in GRID)
    communicates = any(e.primitive.name in _COMMUNICATES or _is_remote(e) for e in found)
    return Reads(dims, communicates, any(e.primitive.name in _RANDOM for e in found))


_NAMES_DEVICE = {"semaphore_signal": 3, "dma_start": -1, "dma_wait": -1}
"""Per primitive, which part of its operands names another device, if one does."""


def _is_remote(equation: Any) -> bool:
    """Whether a copy or a signal names another device."""
    part = _NAMES_DEVICE.get(equation.primitive.name)
    tree = equation.params.get("tree", equation.params.get("args_tree"))
    return part is not None and (tree is None or tree.unflatten(equation.invars)[part] is not None)


class Kept(NamedTuple):
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


def carried(
    body: Any, kept: Sequence[Kept], dim: int, inner: Sequence[int], starts: np.ndarray, vmapped: Sequence[int]
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


def _run(body: Any, kept: Sequence[Kept], places: Mapping[int, np.ndarray]) -> Mapping[Any, _Ref]:
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
