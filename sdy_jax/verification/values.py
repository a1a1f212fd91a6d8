"""Where an op stands, and the sharding of one value there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from sdy_jax.ir.graph import function_shardings
from sdy_jax.representation.attributes import (
    manual_axes_from_attribute,
    sharding_from_attribute,
    shardings_from_attribute,
    with_reduction,
)
from sdy_jax.representation.dialect_rules import fail
from sdy_jax.representation.mesh import AxisRef, Mesh
from sdy_jax.representation.sharding import DimensionSharding, TensorSharding
from sdy_jax.representation.verify import verify_sharding
from sdy_jax.verification import strict


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds besides jaxlib's rules: `STRICT_RULES` in partitioned modules, `DOCUMENTED_RULES` in strict checks."""

    partitioned: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Scope:
    """What holds where an op stands: the meshes of its module, and the axes that computations around it are manual on.

    `seen` has the shardings that were found right, each with the types of
    its values: modules repeat them.
    """

    meshes: Mapping[str, Mesh]
    manual: frozenset[str]
    rules: Rules
    seen: set[tuple[ir.Attribute | ir.Type, ...]] = field(default_factory=set)

    def mesh(self, sharding: TensorSharding) -> Mesh:
        return sharding.mesh if isinstance(sharding.mesh, Mesh) else self.meshes[sharding.mesh]


Check = Callable[[ir.Operation, Scope], None]


def verify_value(attribute: ir.Attribute, type_: ir.Type, scope: Scope, where: str) -> TensorSharding:
    """One value's `#sdy.sharding`."""
    try:
        sharding = sharding_from_attribute(attribute)
    except ValueError:
        fail("S9", where, f"its sharding is {attribute}")
    if (attribute, type_) not in scope.seen:
        _verify_sharding(sharding, type_, scope, where)
        scope.seen.add((attribute, type_))
    return sharding


def _verify_sharding(sharding: TensorSharding, type_: ir.Type | None, scope: Scope, where: str) -> None:
    mesh = sharding.mesh if isinstance(sharding.mesh, Mesh) else scope.meshes.get(sharding.mesh)
    on_one_device = mesh is not None and mesh.is_maximal  # then the type does not matter
    shape = None if on_one_device else shape_of(type_, where)
    verify_sharding(sharding, scope.meshes, shape, where)
    if scope.rules.strict:
        strict.check_sharding(sharding, shape, where)
    for axis in _axes(sharding):
        if axis.name in scope.manual:
            fail("S8", where, f"axis {axis} is manual in a computation around it", "use other axes here")


def _axes(sharding: TensorSharding) -> Iterator[AxisRef]:
    for axes in (*sharding.axes, sharding.replicated_axes, sharding.unreduced_axes):
        yield from axes


def shape_of(type_: ir.Type | None, where: str) -> tuple[int, ...] | None:
    """The shape of a value that has a sharding, with -1 for unknown sizes; None for what is no tensor."""
    if isinstance(type_, ir.TupleType):
        if type_.num_types != 1:
            fail("S5", where, f"it is the tuple {type_}")
        type_ = type_.get_type(0)
    if not isinstance(type_, ir.ShapedType):
        return None
    if not type_.has_rank:
        fail("S4", where, f"its type {type_} has no rank")
    return tuple(max(n, -1) for n in type_.shape)


def verify_shardings(
    op: ir.Operation, name: str, types: Sequence[ir.Type], rule: str, scope: Scope, what: str
) -> list[TensorSharding]:
    """An attribute that must be a `#sdy.sharding_per_value` with one entry per value, each of them verified."""
    where = f"{op.name}, {what}s"
    try:
        entries = list(sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings)
    except ValueError:
        fail("S9", where, f"their shardings are {op.attributes[name]}")
    if len(entries) != len(types):
        fail(rule, where, f"{len(entries)} shardings for {len(types)} values")
    return [
        verify_value(e, t, scope, f"{op.name}, {what} {i}") for i, (e, t) in enumerate(zip(entries, types, strict=True))
    ]


def check_own(name: str) -> Check:
    """The sharding that an op of the dialect gives to its only result."""

    def check(op: ir.Operation, scope: Scope) -> None:
        if name in op.attributes:
            verify_value(op.attributes[name], op.results[0].type, scope, op.name)

    return check


def maker_of(value: ir.Value) -> ir.Operation:
    """The op whose result a value is, or in whose region it is an argument."""
    owner = value.owner
    return (owner.owner if isinstance(value, ir.BlockArgument) else owner).operation


def sharding_of(value: ir.Value) -> TensorSharding | None:
    """The sharding that is written for a value, as it is seen where the value is used; None if there is none."""
    maker = maker_of(value)
    if not isinstance(value, ir.BlockArgument):
        return _result_sharding(maker, ir.OpResult(value).result_number)
    number: int = value.arg_number
    if maker.name == "func.func":
        return function_shardings(maker, "arg_attrs", number + 1)[number]
    if "in_shardings" in maker.attributes:
        outer: TensorSharding = shardings_from_attribute(maker.attributes["in_shardings"])[number]
        if "manual_axes" not in maker.attributes:
            return outer
        return _inside(outer, frozenset(manual_axes_from_attribute(maker.attributes["manual_axes"])))
    return _result_sharding(maker, number) if maker.name == "stablehlo.while" else None


def _result_sharding(op: ir.Operation, number: int) -> TensorSharding | None:
    attributes = op.attributes
    for name in ("sharding", "out_sharding"):
        if op.name.startswith("sdy.") and name in attributes:
            return with_reduction(sharding_from_attribute(attributes[name]), attributes)
    for name in ("sdy.sharding", "out_shardings"):
        if name in attributes:
            return with_reduction(shardings_from_attribute(attributes[name])[number], attributes)
    return None


def _inside(sharding: TensorSharding, manual: frozenset[str]) -> TensorSharding:
    """A sharding as the body of a computation sees it that is manual on some axes."""

    def free(axes: tuple[AxisRef, ...]) -> tuple[AxisRef, ...]:
        return tuple(axis for axis in axes if axis.name not in manual)

    dims = tuple(DimensionSharding(free(d.axes), d.is_closed, d.priority) for d in sharding.dimensions)
    lists = free(sharding.replicated_axes), free(sharding.unreduced_axes)
    return replace(sharding, dimensions=dims, replicated_axes=lists[0], unreduced_axes=lists[1])


def location_text(location: ir.Location) -> str | None:
    """A location as MLIR writes it; None where nothing is known."""
    text = str(location).removeprefix("loc(").removesuffix(")")
    return None if text == "unknown" else text
