"""The attributes of sdy collectives: written from a planned step, read back for emission.

`gathering_axes`, `slicing_axes` and the like hold one axis list per dimension, `reduction_axes` a flat list, and
`params` of all_to_all a list of `axes: source dim -> target dim`. The bindings do not expose these attributes, so they
are read from their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from sdy_jax.errors import ParseError
from sdy_jax.lowering.resharding import Collective
from sdy_jax.representation.mesh import AxisRef

AXES_ATTRIBUTE = {
    "all_gather": "gathering_axes",
    "all_slice": "slicing_axes",
    "all_reduce": "reduction_axes",
    "reduce_scatter": "reduce_scatter_axes",
    "replicated_to_unreduced": "axes",
    "sharded_to_unreduced": "axes",
}
"""Kind of collective -> the attribute that holds its axes."""

FLAT = frozenset({"all_reduce", "replicated_to_unreduced"})
"""The kinds whose axes are one list, not one per dimension."""

Axes = tuple[AxisRef, ...]
_AXIS = re.compile(r'"([^"]+)"(?::\((\d+)\)(\d+))?')
_LIST = re.compile(r"\{([^}]*)\}")
_PARAM = re.compile(r"\{([^}]*)\}: (\d+)->(\d+)")


def collective_attributes(step: Collective) -> dict[str, str]:
    """The attributes of a step's op but its out_sharding, as MLIR text; a reduction kind is named unless it is sum."""
    if step.kind == "collective_permute":
        return {}
    if step.kind == "all_to_all":
        params = ", ".join(f"{_list(axes)}: {source}->{target}" for axes, source, target in step.params)
        return {"params": f"#sdy<all_to_all_param_list[{params}]>"}
    if step.kind in FLAT:
        attributes = {AXES_ATTRIBUTE[step.kind]: f"#sdy<axis_ref_list{_list(step.axes)}>"}
    else:
        lists = ", ".join(map(_list, step.axes))
        attributes = {AXES_ATTRIBUTE[step.kind]: f"#sdy<list_of_axis_ref_lists[{lists}]>"}
    if step.kind in ("all_reduce", "reduce_scatter", "replicated_to_unreduced") and step.reduction != "sum":
        attributes["reduction_kind"] = f'"{step.reduction}"'
    return attributes


def axes_of(step: Collective) -> Axes:
    """All axes that a step runs over; none for a permute, which may involve any."""
    if step.kind == "all_to_all":
        return tuple(a for axes, _, _ in step.params for a in axes)
    return tuple(step.axes) if step.kind in FLAT else tuple(a for axes in step.axes for a in axes)


def scope_name(op: str, axes: Iterable[AxisRef], source: str) -> str:
    """What profilers show for a collective: its kind, its axes and the source line that caused it."""
    names = "_".join(f"{a.name}.{a.pre_size}.{a.sub_axis.size}" if a.sub_axis else a.name for a in axes)
    file = source.rsplit("/", 1)[-1].replace('"', "")
    return f"{op}[{names}] {file}"  # XLA cuts a name at "@"


@lru_cache(maxsize=4096)
def parse_axes(text: str) -> Axes:
    """`{"x", "y":(1)2}` as axis references."""
    return tuple(
        AxisRef(n) if not size else AxisRef.sub(n, int(pre), int(size)) for n, pre, size in _AXIS.findall(text)
    )


@lru_cache(maxsize=4096)
def parse_axis_lists(text: str) -> tuple[Axes, ...]:
    """`#sdy<list_of_axis_ref_lists[{"x"}, {}]>` as one axis list per dimension."""
    return tuple(parse_axes(inner) for inner in _LIST.findall(text))


@lru_cache(maxsize=4096)
def parse_params(text: str) -> tuple[tuple[Axes, int, int], ...]:
    """`#sdy<all_to_all_param_list[{"x"}: 0->1]>` as (axes, source dim, target dim)."""
    found = tuple((parse_axes(axes), int(source), int(target)) for axes, source, target in _PARAM.findall(text))
    if not found:
        raise ParseError(f"no all_to_all parameters in {text!r}; expected '{{axes}}: source->target'")
    return found


def _list(axes: Axes) -> str:
    return "{" + ", ".join(map(str, axes)) + "}"
