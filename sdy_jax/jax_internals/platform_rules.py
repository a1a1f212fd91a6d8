"""How jax lowers primitives for another platform than that of the devices.

* `_platform_specific_lowerings`, `_lowerings`: jax's tables of lowering rules, which nothing public gives. A plan for a
  machine on devices that only stand for it is of what jax lowers for the machine: of `chlo.ragged_dot`, where CPUs get
  a dense product of all rows with all matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax._src.interpreters import mlir as _mlir
from jax.extend.core import Primitive
from jax.interpreters import mlir

_OF_ALL = frozenset(("ragged_dot_general", "random_gamma", "select_and_gather_add"))
_OF_GPUS = _OF_ALL | {"cumsum", "fft", "scatter-add", "scatter-sub", "select_and_scatter_add"}

PORTABLE: Mapping[str, frozenset[str]] = {
    "tpu": _OF_ALL | {"cholesky", "select_and_scatter_add", "threefry2x32", "triangular_solve"},
    "cuda": _OF_GPUS,
    "rocm": _OF_GPUS,
}
"""Per platform the primitives of which its rules make ops of StableHLO and CHLO alone, which all devices run. Others
become calls of libraries, of which CPUs have their own."""

Rule = Callable[..., Any]


def rules_for(machine: str, devices: str) -> tuple[tuple[Primitive, Rule], ...]:
    """The lowering rules of a machine's platform for programs that devices of another one run.

    Args:
        machine: the platform of the machine, by which jax lowers for it.
        devices: that of the devices.

    Returns:
        Pairs for `LoweringParameters.override_lowering_rules`.
    """
    if machine == devices or machine not in PORTABLE:
        return ()
    own, others = (_mlir._platform_specific_lowerings[platform] for platform in (machine, devices))
    found = (p for p in dict.fromkeys([*own, *others]) if p.name in PORTABLE[machine])
    rules = ((p, own.get(p) or _mlir._lowerings.get(p)) for p in found)
    return tuple((p, partial(_lowered, entry.rule, machine)) for p, entry in rules if entry is not None)


def _lowered(rule: Rule, platform: str, ctx: mlir.LoweringRuleContext, *xs: Any, **parameters: Any) -> Any:
    there = ctx.module_context.replace(platforms=(platform,))
    return rule(ctx.replace(module_context=there), *xs, **parameters)
