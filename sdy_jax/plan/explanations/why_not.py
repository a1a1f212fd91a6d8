"""Why a value is not split along an axis: what stands between it and the nearest values that are, and who put it
there.
"""

from __future__ import annotations

import difflib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sdy_jax.base.errors import ParseError, SdyError
from sdy_jax.ir.attributes import rule_from_attribute
from sdy_jax.ir.custom_ops import reasons_of, stated_work
from sdy_jax.ir.graph import Op, Value
from sdy_jax.ir.jax_shardings import axis_name, bytes_text, flops_text
from sdy_jax.ir.meshes import AxisRef, contains
from sdy_jax.ir.operations import manual_axes
from sdy_jax.ir.parsers import parse_axis, parse_axis_name
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.plan.explanations.naming import Named, Naming
from sdy_jax.plan.explanations.origins import Annotations, spec_text
from sdy_jax.shardy.propagation.data_flow import is_data_flow
from sdy_jax.shardy.propagation.engine import Engine
from sdy_jax.shardy.propagation.explanations import Blockage, Blockers, Reason, axis_at, has_axis
from sdy_jax.shardy.propagation.worklist import NO_VALUE, WorklistEntry

# Text for one reason why a value does not have an axis: the op, the tensor in the way, and its annotation.

Links = Callable[[int, int, AxisRef], Iterator[str]]
"""The links of an axis (place, dimension, axis) back to its annotation, as text."""


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One reason why a value does not have an axis.

    Attributes:
        reason: the name of a `Reason`, or "PRESENT" (it has the axis), "SCALAR", "MANUAL", "EXPORT", "NO_RULE",
            "NO_SOURCE", "MORE" (there are further ops).
        text: the reason in words.
        because: the origin of what is in the way, as text; may be empty.
        op, line, function: the op at which the axis stops; empty where there is none.
    """

    reason: str
    text: str
    because: tuple[str, ...] = ()
    op: str = ""
    line: str = ""
    function: str = ""

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"  <- {line}" for line in self.because)])


@dataclass(frozen=True, slots=True)
class ObstacleTexts:
    """Writes the blocks of one propagated program, whose mesh axes have these `sizes`, as text."""

    engine: Engine
    blockers: Blockers
    naming: Naming
    annotations: Annotations
    sizes: Mapping[str, int]
    links: Links

    def obstacle(self, block: Blockage, steps: int, axis: AxisRef) -> Obstacle:
        """A block as text; `steps`: the number of ops between it and the value asked for."""
        naming, entry, op = self.naming, block.entry, block.entry.op
        operands = len(self.blockers.rule(entry).operand_mappings)
        site = naming.site_of(op)
        source, target = (naming.role(op, t, operands) for t in (block.source, block.target))
        holder = entry.value_ids[block.source]
        has = f"{source} ({naming.describe(holder, site)}, {naming.type_of(holder)})"
        far = ""
        if steps:
            far = f"nothing next to it has '{axis_name(axis)}'; {steps} op{'s' * (steps > 1)} away, "
        what = self._what(block, axis)
        if block.at != block.target:
            at = naming.role(op, block.at, operands)
            what = f"{at} is in the way: {what}"
        text = f"{far}{naming.op_text(op)}: {has} has it, but does not give it to {target}: {what}{_work_of(op)}"
        return Obstacle(block.reason.name, text, tuple(self._because(block)), op.name, site.line, site.function)

    def _what(self, block: Blockage, axis: AxisRef) -> str:
        """The reason with its axes and sizes."""
        candidate = block.candidate or axis
        name, size = axis_name(candidate), self.blockers.rule(block.entry).factor_sizes[block.factor]
        axes = ", ".join(f"'{axis_name(a)}'" for a in block.axes)
        value_id = block.entry.value_ids[block.at]
        dim = f"dim {block.dim} of {self.naming.type_of(value_id)}" if value_id != NO_VALUE else f"dim {block.dim}"
        first = f"'{name}' has to come first, and " if candidate.name != axis.name else ""
        texts = {
            Reason.MESHES: f"it lies on another mesh, {self._mesh(value_id)}",
            Reason.BLOCKED_FACTOR: "the op's sharding rule lets nothing propagate along this dimension",
            Reason.DIRECTION: f"shardings do not pass the op in this direction{_allowed(block.entry)}",
            Reason.FACTOR_CONFLICT: f"{dim} is split along {axes} instead, and the op's tensors must agree on it",
            Reason.CLOSED: f"{dim} is closed{f', with {axes}' if axes else ''}",
            Reason.REPLICATED: f"'{name}' is explicitly replicated there",
            Reason.UNREDUCED: f"it is unreduced along {axes}",
            Reason.USED: f"{axes} splits {dim} already",
            Reason.OVERFLOW: f"{dim} is split along {axes}, which does not fit its part of size {size}",
            Reason.MAJOR_FIRST: f"{dim} is made of several parts, and one that comes first is not split to its end",
            Reason.INDIVISIBLE: f"'{name}' of size {self._size(candidate)} does not divide the part of size {size} "
            f"of {dim} that the op sees",
            Reason.CONSERVATIVE: f"conservative propagation leaves out parts of axes such as '{name}'",
        }
        return first + texts[block.reason]

    def _size(self, axis: AxisRef) -> int:
        return axis.sub_axis.size if axis.sub_axis else self.sizes[axis.name]

    def _mesh(self, value_id: int) -> str:
        sharding = self.engine.sharding(value_id)
        return f"@{sharding.mesh}" if sharding is not None else "none"

    def _because(self, block: Blockage) -> Iterator[str]:
        """The annotation from which the axes in the way come."""
        value_id = block.entry.value_ids[block.at]
        if value_id == NO_VALUE:
            return
        if block.axes and block.reason in (Reason.FACTOR_CONFLICT, Reason.USED, Reason.OVERFLOW):
            held = axis_at(self.engine.sharding(value_id), block.dim, block.axes[0])
            if held is not None:
                yield from self.links(value_id, block.dim, held)
        elif block.reason in (Reason.CLOSED, Reason.REPLICATED, Reason.UNREDUCED, Reason.MESHES):
            yield from (note.text for note in self.annotations.of(value_id))


def _work_of(op: Op) -> str:
    """What a kernel performs that is not split; nothing of other ops."""
    work = stated_work(op) if op.name == "stablehlo.custom_call" else None
    if work is None:
        return ""
    return f"; whole it performs {flops_text(work.flops)} and moves {bytes_text(work.bytes)} of memory"


def _allowed(entry: WorklistEntry) -> str:
    if entry.op.name != "sdy.propagation_barrier":
        return ""
    return f": the barrier allows {entry.directions[0][0].name}"


# Why a value is not split along an axis: what stands between it and the nearest values that are.

_LIKE = 0.4
"""How alike a name has to be to be offered, for `difflib`. Guessed: with less, axes are offered that nobody meant."""

_MOST = 8
"""The most obstacles that an answer names. Chosen: for a reader."""


@dataclass(frozen=True)
class WhyNot:
    """The answer of `plan.why_not`: iterating over it gives the obstacles of all values asked for."""

    axis: str
    values: tuple[tuple[str, str, tuple[Obstacle, ...]], ...]

    def __iter__(self) -> Iterator[Obstacle]:
        return (obstacle for _, _, obstacles in self.values for obstacle in obstacles)

    def __str__(self) -> str:
        return "\n\n".join(self._value(*entry) for entry in self.values)

    @property
    def _asked(self) -> str:
        return f"axis '{self.axis}'"

    def _value(self, name: str, type_: str, obstacles: Sequence[Obstacle]) -> str:
        lines = [f"{name}  {type_}, {self._asked}"]
        for obstacle in obstacles:
            lines += [f"  {line}" for line in str(obstacle).splitlines()]
        return "\n".join(lines)


class Obstacles:
    """Finds obstacles in the program of `texts`."""

    def __init__(self, texts: ObstacleTexts):
        self._engine, self._blockers, self._naming = texts.engine, texts.blockers, texts.naming
        self._annotations, self._sizes, self._texts = texts.annotations, texts.sizes, texts

    def why_not(self, value: str, axis: str, dim: int | None) -> WhyNot:
        """See `Explanation.why_not`."""
        ref = self._axis(axis)
        entries = []
        for named in self._naming.find(value):
            type_, rank = self._naming.type_of(named.value_id), len(self._naming.shape_of(named.value_id))
            if dim is not None and not (isinstance(dim, int) and 0 <= dim < rank):
                raise SdyError(f"{named.label} is {type_} and has no dim {dim}; its dimensions count from 0")
            dims = tuple(range(rank)) if dim is None else (dim,)
            found = (self._with_annotation(each, named.value_id, ref, dims) for each in self.of(named, ref, dims))
            entries.append((named.label, type_, tuple(found)))
        return WhyNot(axis_name(ref), tuple(dict.fromkeys(entries)))

    def _axis(self, text: str) -> AxisRef:
        plain = str(text).strip()
        if plain in self._sizes:
            return AxisRef(plain)
        try:
            axis = parse_axis(plain) if plain.startswith('"') else parse_axis_name(plain)
        except ParseError:
            axis = AxisRef(plain)
        if axis.name not in self._sizes:
            near = difflib.get_close_matches(axis.name, self._sizes, 3, _LIKE)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            known = ", ".join(f"{name}={size}" for name, size in self._sizes.items())
            raise SdyError(f"no mesh axis is called {text!r}; {hint}The mesh is {known}")
        size, sub = self._sizes[axis.name], axis.sub_axis
        if sub is not None and size % sub.next_pre_size:
            raise SdyError(f"{text!r} is no part of the axis '{axis.name}', whose size is {size}")
        return AxisRef(axis.name) if sub is not None and sub.size == size else axis

    def of(self, named: Named, axis: AxisRef, dims: Sequence[int]) -> Iterator[Obstacle]:
        """What keeps an axis from all of some dimensions of a value."""
        plain = self._without_a_search(named, axis, dims) or self._manual(named.value_id, axis)
        if plain is not None:
            yield plain
            return
        found = list(self._near(named.value_id, axis, dims))
        yield from found[:_MOST]
        if len(found) > _MOST:
            yield Obstacle("MORE", f"and {len(found) - _MOST} more ops")
        if not found:
            yield self._far(named.value_id, axis, dims)

    def _without_a_search(self, named: Named, axis: AxisRef, dims: Sequence[int]) -> Obstacle | None:
        """Reasons that need no look at other values."""
        name, shape = axis_name(axis), self._naming.shape_of(named.value_id)
        if not shape:
            return Obstacle("SCALAR", "a scalar has no dimension to split")
        for dim in dims:
            if has_axis(named.sharding, dim, axis):
                return Obstacle("PRESENT", f"it is split along '{name}' on dim {dim}: `why` tells why")
        for dim in dims:
            if has_axis(self._engine.sharding(named.value_id), dim, axis):
                text = f"propagation gave it '{name}' on dim {dim}, but a boundary value must be split evenly"
                return Obstacle("EXPORT", f"{text}, and {shape[dim]} is not")
        return None

    def _manual(self, value_id: int, axis: AxisRef) -> Obstacle | None:
        where = self._engine.value_ids.values[value_id]
        op = where.owner.parent if isinstance(where, Value) else None
        while op is not None:
            if axis.name in manual_axes(op):
                site = self._naming.site(op)
                text = f"'{axis.name}' is a manual axis inside the manual computation at {site.line}"
                return Obstacle("MANUAL", text, (), op.name, site.line, site.function)
            op = op.parent
        return None

    # The ops next to the value.

    def _near(self, value_id: int, axis: AxisRef, dims: Sequence[int]) -> Iterator[Obstacle]:
        seen = set()
        for dim in dims:
            for block in self._blocks(value_id, dim, axis):
                key = (block.entry.op, block.target, block.reason, block.at, block.dim)
                if key not in seen:
                    seen.add(key)
                    yield self._texts.obstacle(block, 0, axis)
        for op in self._without_rule(value_id, axis):
            yield self._no_rule(op)

    def _blocks(self, value_id: int, dim: int, axis: AxisRef) -> Iterator[Blockage]:
        """What blocks the axis at each op of which another tensor has it along a factor of the dimension."""
        for entry in self._blockers.entries.get(value_id, ()):
            shardings = self._blockers.seen(entry)
            for target in (t for t, p in enumerate(entry.value_ids) if p == value_id):
                for factor, source, there in self._blockers.neighbours(entry, target, dim):
                    held, own = axis_at(shardings[source], there, axis), axis_at(shardings[target], dim, axis)
                    if held is None or (own is not None and contains(own, held)):
                        continue
                    block = self._blockers.block(entry, target, factor, source, held)
                    if block is not None:
                        yield block

    def _without_rule(self, value_id: int, axis: AxisRef) -> Iterator[Op]:
        """Ops next to a value through which nothing propagates, and which have another value that has the axis."""
        where = self._engine.value_ids.values[value_id]
        if not isinstance(where, Value):
            return
        known = {entry.op for entry in self._blockers.entries.get(value_id, ())}
        around = ([where.defining_op] if where.defining_op else []) + [user for user, _ in where.uses]
        for op in dict.fromkeys(around):
            others = [v for v in (*op.operands, *op.results) if v is not where]
            if op in known or not op.results or is_data_flow(op) or op in self._engine.liveness.dead:
                continue
            if any(_dim_with(self._engine.sharding(self._engine.value_ids.of(v)), axis) is not None for v in others):
                yield op

    def _no_rule(self, op: Op) -> Obstacle:
        site = self._naming.site(op)
        text = f"{site}: nothing propagates through {op.name}, which has no sharding rule"
        return Obstacle("NO_RULE", text, (), op.name, site.line, site.function)

    # Further away.

    def _far(self, value_id: int, axis: AxisRef, dims: Sequence[int]) -> Obstacle:
        """Where the axis stops on its way from the nearest value that has it, following dimensions through ops."""
        todo = deque((value_id, dim, 0) for dim in dims)
        seen = {(p, d) for p, d, _ in todo}
        opaque: Op | None = None
        while todo:
            at, dim, steps = todo.popleft()
            block = next(self._blocks(at, dim, axis), None)
            if block is not None:
                return self._texts.obstacle(block, steps, axis)
            opaque = opaque or next(self._without_rule(at, axis), None)
            for following in self._connected(at, dim):
                if following not in seen:
                    seen.add(following)
                    todo.append((*following, steps + 1))
        if opaque is not None:
            return self._no_rule(opaque)
        text = f"no value whose dimensions correspond to its own through the program's ops has '{axis_name(axis)}'"
        present = self._engine.sharding(value_id)
        used = (d for d in range(len(self._naming.shape_of(value_id))) if d not in dims and axis_at(present, d, axis))
        text += "".join(f"; it is split along '{axis_name(axis)}' on dim {d}" for d in used)
        sharding = self._engine.given(value_id)
        closed = sharding is not None and sharding.is_fully_closed
        notes = [f"its dimensions are closed by {n.text}" for n in self._annotations.of(value_id)[-1:] if closed]
        return Obstacle("NO_SOURCE", text, (*notes, *self._whole_in_kernels(value_id, dims)))

    def _whole_in_kernels(self, value_id: int, dims: Sequence[int]) -> Iterator[str]:
        """Which kernels take dimensions of a value whole, and why, where they say so."""
        value = self._engine.value_ids.values[value_id]
        for op, index in value.uses if isinstance(value, Value) else ():
            reasons = reasons_of(op)
            mapping = rule_from_attribute(op.attributes["sdy.sharding_rule"]).operand_mappings[index] if reasons else ()
            for dim in dims if mapping else ():
                for reason in filter(None, map(reasons.__getitem__, mapping[dim])):
                    yield f"`{op.title}` at {self._naming.site(op).line} takes dim {dim} of it whole, as {reason}"

    def _with_annotation(self, obstacle: Obstacle, value_id: int, axis: AxisRef, dims: Sequence[int]) -> Obstacle:
        """With the layout to state where nothing is in the way but that nobody did: the one that the value has, and the
        axis on the first dimension that it divides and that no other splits."""
        if obstacle.reason != "NO_SOURCE":
            return obstacle
        now, shape = self._naming.final(value_id), self._naming.shape_of(value_id)
        axes = now.axes if now is not None else ((),) * len(shape)
        free = (d for d in dims if not axes[d] and shape[d] and not shape[d] % self._sizes[axis.name])
        dim = next(free, None)
        if dim is None or axis.sub_axis is not None or any(axis in each for each in axes):
            return obstacle
        mesh = now.mesh if now is not None else ""
        spec = spec_text(TensorSharding.closed(mesh, [(axis,) if d == dim else each for d, each in enumerate(axes)]))
        hint = f"to split it, state {spec}: asked for that, `why_not` says where, and what it costs"
        return replace(obstacle, text=f"{obstacle.text}; {hint}")

    def _connected(self, value_id: int, dim: int) -> Iterator[tuple[int, int]]:
        for entry in self._blockers.entries.get(value_id, ()):
            for target in (t for t, p in enumerate(entry.value_ids) if p == value_id):
                for _, tensor, there in self._blockers.neighbours(entry, target, dim):
                    if entry.value_ids[tensor] != NO_VALUE:
                        yield entry.value_ids[tensor], there
        for peer in self._engine.peers.get(value_id, ()):
            yield peer, dim


def _dim_with(sharding: TensorSharding | None, axis: AxisRef) -> int | None:
    if sharding is None:
        return None
    return next((dim for dim in range(len(sharding.dimensions)) if axis_at(sharding, dim, axis)), None)
