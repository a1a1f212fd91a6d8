"""The partition that is being traced or lowered: where annotations have effects, and what it leaves to the planner."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from sdy_jax.base.errors import ArgumentError, ShardingError
from sdy_jax.ir.collectives import SdyCollective
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes
from sdy_jax.ir.locations import caller_line
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.new_ops import declare_mesh

# The partition that is being traced or lowered: inside of one annotations have effects, elsewhere they are
# identities.
#
# An annotation is a JAX primitive that computes the identity, or the function it wraps. Its ordinary lowering says
# nothing of shardings. While a partitioned function is lowered, jax is given other rules for these primitives
# (`LoweringParameters.override_lowering_rules`), and those emit sdy ops. So a traced function that jax has cached can
# be used inside a partition and outside, and the primitives' parameters never depend on where they were traced.

Emission = Callable[..., Any]
"""`emission(site, ctx, *values, **parameters)` emits what a primitive says and returns the values of its results."""

EMISSIONS: dict[Primitive, Emission] = {}
AnyEmission = TypeVar("AnyEmission", bound=Emission)

T = TypeVar("T")

_current: ContextVar[Site | None] = ContextVar("sdy_jax_site", default=None)


def emission(primitive: Primitive) -> Callable[[AnyEmission], AnyEmission]:
    """Registers what a primitive emits inside a partition."""

    def register(function: AnyEmission) -> AnyEmission:
        EMISSIONS[primitive] = function
        return function

    return register


class Site:
    """The tracing or lowering of one partition: its mesh, the platform of the machine for which it is planned if its
    devices are of another one, and the state that its annotations share."""

    def __init__(self, mesh: Mesh, jax_mesh: AnyMesh, machine: str = ""):
        self.mesh, self.jax_mesh, self.machine = mesh, jax_mesh, machine
        self.groups: dict[int, tuple[tuple[int, ...], str]] = {}
        """Shape and argument path of the first member of each sharding group."""
        self.unfinished = False
        """Whether something was emitted that `finish` has to complete."""
        self.has_kernels = False
        """Whether there are kernels, whose work is stated once all constants are known."""
        self.unchecked = False
        """Whether checks of `checkify.check` were left out, which mean something only once they are functionalized."""
        self.collectives: list[tuple[SdyCollective, str, str]] = []
        """The collectives that `finish` has to complete, each with its reduction and what errors name."""
        self.notes: dict[Hashable, list[tuple[weakref.ref[Any], Any]]] = defaultdict(list)
        """The statements about arrays recorded while tracing, by subject and the array's `id`."""
        self._known: dict[Hashable, Any] = {}
        self._symbols: dict[Mesh, str] = {}
        self._fresh = 0

    @property
    def is_typed(self) -> bool:
        """Whether types say how values are split, on some axes at least."""
        return bool(explicit_axes(self.jax_mesh))

    @property
    def lowering_rules(self) -> tuple[tuple[Primitive, Callable[..., Any]], ...]:
        """For `LoweringParameters.override_lowering_rules`."""
        return tuple((primitive, partial(emit, self)) for primitive, emit in EMISSIONS.items())

    def symbol(self, ctx: mlir.LoweringRuleContext, mesh: Mesh) -> str:
        """The symbol of a mesh in the module that is being lowered, which declares it if it does not yet."""
        if mesh not in self._symbols:
            module = ctx.module_context
            self._symbols[mesh] = declare_mesh(module.module.operation, mesh, module.symbol_table)
        return self._symbols[mesh]

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when it was first called with this key here: equal calls share what they stand for."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def fresh_group(self) -> int:
        """A group that nobody else has: negative, and so never one that the user numbered."""
        self._fresh -= 1
        return self._fresh

    def record(self, subject: str, x: Any, new: Any) -> Any:
        """Records a statement about an array and a subject, unless there is one; returns the first one."""
        found = self.recorded(subject, x)
        if found is None:
            self.notes[subject, id(x)].append((weakref.ref(x), new))
        return new if found is None else found

    def recorded(self, subject: str, x: Any) -> Any:
        """The statement recorded for an array, or None. An `id` may be that of an array that no longer exists."""
        return next((new for ref, new in self.notes.get((subject, id(x)), ()) if ref() is x), None)

    def join_group(self, group: int, shape: tuple[int, ...], path: str) -> None:
        """Records a member.

        Raises:
            ShardingError: it has another shape than the first member.
        """
        first, where = self.groups.setdefault(group, (shape, path))
        if first != shape:
            raise ShardingError(
                f"sharding_group: `{path}` of shape {shape} is in group {group} with `{where}` of shape {first}; "
                "tensors that are sharded alike have one shape, so give it another group_id"
            )


@contextmanager
def tracing(site: Site) -> Iterator[None]:
    """While this lasts, annotations are checked against the site's mesh as they are traced."""
    token = _current.set(site)
    try:
        yield
    finally:
        _current.reset(token)


def current_site() -> Site | None:
    """The partition that is being traced; None outside."""
    return _current.get()


def current_mesh() -> Mesh | None:
    """The mesh of the partition that is being traced; None outside."""
    site = _current.get()
    return None if site is None else site.mesh


def traced_manual_axes() -> frozenset[str]:
    """The axes that the surrounding `shard_map` bodies are manual on, while tracing."""
    return frozenset(map(str, jax.sharding.get_abstract_mesh().manual_axes))


def lowered_manual_axes(ctx: mlir.LoweringRuleContext) -> frozenset[str]:
    """The axes that the surrounding manual computations are manual on, while lowering."""
    return frozenset(map(str, getattr(ctx.module_context.axis_context, "manual_axes", ())))


def create(name: str, operand: ir.Value, **attributes: ir.Attribute) -> ir.Value:
    """An op with one operand and a result of its type, at the current insertion point."""
    return ir.Operation.create(name, results=[operand.type], operands=[operand], attributes=attributes).results[0]


# What a function leaves to the planner that its trace depends on: it is traced and planned with each of the choices.
#
# A decision is a part of what jit's caches of traces know, so that what is traced inside is traced again with
# another.


class NumberChoice(NamedTuple):
    """What is taken where a line of the user's asks: one of several numbers."""

    line: str
    offered: tuple[int, ...]
    taken: int


Decisions = tuple[NumberChoice, ...]
"""In the order in which a trace asks."""

_FIRST: Decisions = (NumberChoice("", (), 0),)
"""Whatever is asked for, the first that is offered."""

_context = jax.make_user_context(default_value=())


class Undecided(ArgumentError):
    """A choice that was asked for where nothing was decided. Planning catches it; elsewhere it says what to write.

    Attributes:
        line: that asks.
        offered: of what one is to be taken.
    """

    def __init__(self, message: str, line: str, offered: tuple[int, ...]):
        super().__init__(message)
        self.line, self.offered = line, offered


def deciding(decisions: Decisions) -> AbstractContextManager[Any]:
    """Inside, these are decided."""
    return _context(decisions)  # type: ignore[no-any-return]


def taking_first() -> AbstractContextManager[Any]:
    """Inside, the first of what is offered is taken: for traces that ask for something else."""
    return deciding(_FIRST)


def decisions() -> Decisions:
    """Those in context."""
    return _context.value  # type: ignore[no-any-return]


def taken_of(offered: Sequence[int], message: str) -> int:
    """The number that is decided for the user's line that calls this.

    Raises:
        Undecided: with the message; none is.
    """
    line, numbers = caller_line(), tuple(offered)
    if decisions() == _FIRST:
        return numbers[0]
    for each in decisions():
        if (each.line, each.offered) == (line, numbers):
            return each.taken
    raise Undecided(message, line, numbers)


def all_decisions(traced: Callable[[], Any], fixed: Sequence[int] | None = None) -> Iterator[Decisions]:
    """All that may be decided for what a function asks, in the order of what is offered.

    Args:
        traced: traces it.
        fixed: the number to take each time it asks, where that is offered, so that there is one result.
    """
    open_ = [decisions()]
    while open_:
        found = open_.pop(0)
        try:
            with deciding(found):
                traced()
        except Undecided as asked:
            offered = asked.offered
            if fixed is not None:
                wanted = fixed[len(found) : len(found) + 1]
                offered = tuple(n for n in offered if n in wanted) or offered[:1]
            open_[:0] = [(*found, NumberChoice(asked.line, asked.offered, n)) for n in offered]
        else:
            yield found
