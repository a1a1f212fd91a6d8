"""Meshes, shardings, rules, shapes and element types from MLIR attributes and types, and attributes from them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from sdy_jax.base.errors import UnsupportedError
from sdy_jax.ir.meshes import AxisRef, Mesh, MeshAxis, quoted
from sdy_jax.ir.parsers import parse_propagation_edges
from sdy_jax.ir.shardings import DimensionSharding, OpShardingRule, PropagationEdges, TensorSharding, per_value

# Memoised functions of what lives in an MLIR context.

P = ParamSpec("P")
T = TypeVar("T")


class _Caches(threading.local):
    """What a thread remembers of each memoised function, and the one context that its entries are of."""

    def __init__(self) -> None:
        self.context: Any = None
        self.clear: list[Callable[[], None]] = []

    def enter(self, context: Any) -> None:
        if context is not self.context:
            for clear in self.clear:
                clear()
            self.context = context


_caches = _Caches()


def cached_in_context(function: Callable[P, T]) -> Callable[P, T]:
    """Memoises a function whose last argument is an attribute, a type or a context.

    An attribute keeps its whole context alive, and with it all modules in there: a thread's entries of a context go as
    soon as it asks for a value of another one. Threads that plan at once are in contexts of their own.
    """

    def in_context(*arguments: Any) -> Any:
        last = arguments[-1]
        _caches.enter(getattr(last, "context", last))
        return function(*arguments)  # type: ignore[call-arg]

    class OfThread(threading.local):
        def __init__(self) -> None:
            self.remembered = lru_cache(maxsize=4096)(in_context)
            _caches.clear.append(self.remembered.cache_clear)

    of_thread = OfThread()

    @wraps(function)
    def found(*arguments: Any) -> Any:
        return of_thread.remembered(*arguments)

    return cast(Callable[P, T], found)


# Between the vocabulary and MLIR attributes.
#
# Reading goes through the dialect's Python bindings and is memoised per attribute (MLIR interns attributes, so equal
# ones are the same object of their context). Writing goes through the textual form, which is the specification.


def mesh_from_attribute(attribute: ir.Attribute) -> Mesh:
    attribute = sdy.MeshAttr(attribute)
    axes = (sdy.MeshAxisAttr(a) for a in attribute.axes)
    return Mesh(tuple(MeshAxis(a.name, a.size) for a in axes), tuple(attribute.device_ids))


@cached_in_context
def axis_from_attribute(attribute: ir.Attribute) -> AxisRef:
    axis = sdy.AxisRefAttr(attribute)
    if axis.sub_axis_info is None:
        return AxisRef(axis.name)
    sub = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return AxisRef.sub(axis.name, sub.pre_size, sub.size)


def _axes(attributes: Any) -> tuple[AxisRef, ...]:
    return tuple(axis_from_attribute(a) for a in attributes)


@cached_in_context
def _dimension(attribute: ir.Attribute) -> DimensionSharding:
    dim = sdy.DimensionShardingAttr(attribute)
    return DimensionSharding(_axes(dim.axes), dim.is_closed, dim.priority)


@cached_in_context
def sharding_from_attribute(attribute: ir.Attribute) -> TensorSharding:
    """A `#sdy.sharding` attribute as a `TensorSharding`."""
    attr = sdy.TensorShardingAttr(attribute)
    ref = attr.mesh_or_ref
    mesh: str | Mesh = (
        ir.FlatSymbolRefAttr(ref).value if isinstance(ref, ir.FlatSymbolRefAttr) else mesh_from_attribute(ref)
    )
    return TensorSharding(
        mesh,
        tuple(_dimension(d) for d in attr.dimension_shardings),
        _axes(attr.replicated_axes),
        _axes(attr.unreduced_axes),
        _reduction(attr),
    )


def _reduction(attr: ir.Attribute) -> str:
    # Only newer dialects can say anything but "sum".
    kind = getattr(attr, "reduction_op", None)
    return "sum" if kind is None else kind.name.lower()


@cached_in_context
def shardings_from_attribute(attribute: ir.Attribute) -> tuple[TensorSharding, ...]:
    """A `#sdy.sharding_per_value` attribute, one entry per value."""
    return tuple(sharding_from_attribute(s) for s in sdy.TensorShardingPerValueAttr(attribute).shardings)


def rule_from_attribute(attribute: ir.Attribute) -> OpShardingRule:
    attr = sdy.OpShardingRuleAttr(attribute)

    def mappings(tensors: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(t).dim_mappings)
            for t in tensors
        )

    return OpShardingRule(
        tuple(attr.factor_sizes),
        mappings(attr.operand_mappings),
        mappings(attr.result_mappings),
        frozenset(attr.reduction_factors),
        frozenset(attr.need_replication_factors),
        frozenset(attr.permutation_factors),
        frozenset(attr.blocked_propagation_factors),
        bool(attr.is_custom),
    )


def propagation_edges_from_attribute(attribute: ir.Attribute) -> PropagationEdges:
    # The bindings do not know this attribute.
    return parse_propagation_edges(str(attribute))


def manual_axes_from_attribute(attribute: ir.Attribute) -> tuple[str, ...]:
    """The names in a `#sdy<manual_axes{...}>` attribute."""
    return tuple(str(name) for name in sdy.ManualAxesAttr(attribute))


@cached_in_context
def attribute_from_text(text: str, context: ir.Context) -> ir.Attribute:
    """What MLIR parses, once per text."""
    return ir.Attribute.parse(text, context)


_REDUCTION_CODES: dict[str, int] = {kind.name.lower(): kind.value for kind in getattr(sdy, "ReductionOp", ())}
"""The dialect's numbers for reductions; dialect version 0.10 has none."""

SAYABLE = ("sum", *(kind for kind in _REDUCTION_CODES if kind != "sum"))
"""The reductions that the text of this jaxlib's dialect can say."""

REDUCTION = "sdy.reduction_kind"
"""An op's attribute that names a reduction which the dialect cannot say: the one by which a collective combines, and
the one of the axes along which its results are unreduced."""


def _portable(sharding: TensorSharding) -> TensorSharding:
    """Without a reduction that the dialect cannot write; it is named beside (`REDUCTION`)."""
    return sharding if sharding.reduction in SAYABLE else replace(sharding, reduction="sum")


def reduction_attributes(op: str, reduction: str) -> dict[str, str]:
    """What names the reduction of a collective, as attributes in MLIR text; nothing for sum.

    It is the dialect's own attribute where the op has one that can say it, else ours.
    """
    if reduction == "sum":
        return {}
    if reduction not in SAYABLE:
        return {REDUCTION: f'"{reduction}"'}
    return {"reduction_op": f"{_REDUCTION_CODES[reduction]} : i32"} if op in ("all_reduce", "reduce_scatter") else {}


def reduction_from_attributes(attributes: Mapping[str, ir.Attribute]) -> str:
    """The reduction of a collective that has one."""
    if REDUCTION in attributes:
        return str(ir.StringAttr(attributes[REDUCTION]).value)
    if "reduction_op" in attributes:
        code = ir.IntegerAttr(attributes["reduction_op"]).value
        return next(name for name, known in _REDUCTION_CODES.items() if known == code)
    return "sum"


def with_reduction(sharding: TensorSharding, attributes: Mapping[str, ir.Attribute]) -> TensorSharding:
    """The sharding of an op's result, read from one of the op's attributes, with the reduction that they name."""
    if sharding.unreduced_axes and REDUCTION in attributes:
        return replace(sharding, reduction=str(ir.StringAttr(attributes[REDUCTION]).value))
    return sharding


def write_reduction(op: ir.Operation, shardings: Iterable[TensorSharding]) -> None:
    """Names the reduction of an op's results where their shardings, which the op has already, cannot.

    Raises:
      UnsupportedError: there are several, of which the dialect cannot say one.
    """
    kinds = sorted({s.reduction for s in shardings if s.unreduced_axes})
    unsaid = [kind for kind in kinds if kind not in SAYABLE]
    if unsaid and len(kinds) > 1:
        sayable = ", ".join(SAYABLE)
        raise UnsupportedError(f"{op.name}: results unreduced by {' and '.join(kinds)}; this jaxlib can say {sayable}")
    if unsaid:
        op.attributes[REDUCTION] = ir.StringAttr.get(unsaid[0], op.context)
    elif kinds and REDUCTION in op.attributes:
        del op.attributes[REDUCTION]


def sharding_attributes(name: str, sharding: TensorSharding, context: ir.Context) -> dict[str, ir.Attribute]:
    """What says the sharding of an op's only result: the attribute `name` and, where that cannot, its reduction."""
    said = {name: sharding_to_attribute(sharding, context)}
    if sharding.unreduced_axes and sharding.reduction not in SAYABLE:
        said[REDUCTION] = ir.StringAttr.get(sharding.reduction, context)
    return said


def mesh_to_attribute(mesh: Mesh, context: ir.Context) -> ir.Attribute:
    return attribute_from_text(f"#sdy.mesh{mesh}", context)


@cached_in_context
def sharding_to_attribute(sharding: TensorSharding, context: ir.Context) -> ir.Attribute:
    return attribute_from_text(f"#sdy.sharding<{_portable(sharding)}>", context)


@cached_in_context
def shardings_to_attribute(shardings: tuple[TensorSharding, ...], context: ir.Context) -> ir.Attribute:
    return attribute_from_text(f"#sdy.sharding_per_value<{per_value(map(_portable, shardings))}>", context)


def rule_to_attribute(rule: OpShardingRule, context: ir.Context) -> ir.Attribute:
    return attribute_from_text(f"#sdy.op_sharding_rule<{rule}>", context)


def propagation_edges_to_attribute(edges: PropagationEdges, context: ir.Context) -> ir.Attribute:
    return attribute_from_text(f"#sdy.propagation_edges<{edges}>", context)


def manual_axes_to_attribute(names: tuple[str, ...], context: ir.Context) -> ir.Attribute:
    return attribute_from_text(f"#sdy<manual_axes{{{', '.join(map(quoted, names))}}}>", context)


# The shapes and element types of values, read off their MLIR types.


def shape_and_dtype(type_: ir.Type) -> tuple[tuple[int, ...] | None, str]:
    """`Value.shape` and `Value.dtype` of values of a type."""
    return tensor_type(type_)[1:]


@cached_in_context
def tensor_type(type_: ir.Type) -> tuple[ir.Type, tuple[int, ...] | None, str]:
    """The type (one object for all equal ones), its shape and its element type's text."""
    if isinstance(type_, ir.RankedTensorType) and type_.has_static_shape:
        return type_, tuple(type_.shape), str(type_.element_type)
    return type_, None, str(type_)


_BITS = re.compile(r"\d+")


@lru_cache(maxsize=256)
def itemsize(dtype: str) -> float:
    """Bytes per element of an MLIR element type (`f32`: 4, `complex<f64>`: 16, `i1`: 1); 0 for what holds no data."""
    match = _BITS.search(dtype)
    if match is None:
        return 0.0
    size = max(1.0, int(match[0]) / 8)
    return 2 * size if dtype.startswith("complex") else size
