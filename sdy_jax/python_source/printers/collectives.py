"""Collectives of lax, and where a device is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdy_jax.python_source.expressions import Expr
from sdy_jax.python_source.literals import names_text
from sdy_jax.python_source.printers.registry import Call, printer


@printer("axis_index")
def _position(call: Call) -> Expr:
    return call.result(f"lax.axis_index({names_text(call.params['axis_name'])})")


@printer("psum", "pmax", "pmin")
def _reduced(call: Call) -> Expr:
    options = f"{names_text(call.params['axes'])}{_groups(call)}"
    if len(call.inputs) == 1:
        return call.result(f"lax.{call.step.primitive}({call.array(0).text}, {options})")
    return call.many(f"lax.{call.step.primitive}(({call.arrays()}), {options})")


@printer("all_gather")
def _gathered(call: Call) -> Expr:
    return _moved(call, "all_gather", axis=call.params["all_gather_dimension"])


@printer("reduce_scatter")
def _scattered(call: Call) -> Expr:
    return _moved(call, "psum_scatter", scatter_dimension=call.params["scatter_dimension"])


@printer("all_to_all")
def _exchanged(call: Call) -> Expr:
    return _moved(call, "all_to_all", split_axis=call.params["split_axis"], concat_axis=call.params["concat_axis"])


@printer("ragged_all_to_all")
def _exchanged_rows(call: Call) -> Expr:
    axes = f"axis_name={names_text(call.params['axis_name'])}{_groups(call)}"
    return call.result(f"lax.ragged_all_to_all({call.arrays()}, {axes})")


def _moved(call: Call, function: str, **dimensions: int) -> Expr:
    """A collective of lax along axes, with the dimensions that it says."""
    options = "".join(f"{name}={dimension}, " for name, dimension in dimensions.items())
    axes = f"{names_text(call.params['axis_name'])}{_groups(call)}"
    return call.result(f"lax.{function}({call.array(0).text}, {axes}, {options}tiled={call.params['tiled']})")


@printer("ppermute")
def _permuted(call: Call) -> Expr:
    p = call.params
    return call.result(f"lax.ppermute({call.array(0).text}, {names_text(p['axis_name'])}, {pairs_text(p['perm'])})")


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Senders and receivers, as a formula where they are shifted by as much."""
    pairs = [(int(a), int(b)) for a, b in pairs]
    count = len(pairs)
    senders = [a for a, _ in pairs]
    if count > 3 and senders == list(range(senders[0], senders[0] + count)):
        shift = pairs[0][1] - pairs[0][0]
        span = f"range({count})" if senders[0] == 0 else f"range({senders[0]}, {senders[0] + count})"
        if all(b == a + shift for a, b in pairs):
            return f"[(i, i {'+' if shift >= 0 else '-'} {abs(shift)}) for i in {span}]"
        if all(b == (a + shift) % count for a, b in pairs):
            return f"[(i, (i + {shift % count}) % {count}) for i in {span}]"
    return str(pairs)


def _groups(call: Call) -> str:
    groups: Any = call.params.get("axis_index_groups")
    return f", axis_index_groups={[list(map(int, group)) for group in groups]}" if groups else ""
