"""What random programs reach: the ops that ran on shards, the strategies that were chosen, the steps of reshards.

with Reached() as reached:
    ...
reached.steps    # {"sdy.all_gather", ...}
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.custom_ops import CALLBACK
from sdy_jax.ir.graph import Op
from sdy_jax.lowering.ops.emit import _Emission
from sdy_jax.lowering.ops.registry import EMITTERS, STRATEGIES, Strategy
from sdy_jax.lowering.planner.placement import decisions as choice
from sdy_jax.lowering.planner.placement.decisions import Decisions
from sdy_jax.lowering.planner.problem.op_problem import Decision, OpProblem

KINDS = ("ops", "strategies", "steps")
_LOCAL = ("mesh.", "shard.", "scf.", "arith.", "tensor.", CALLBACK)
"""Ops of programs on local arrays, and calls with whole values: nothing of them is split."""
_NAMED = re.compile(r'Strategy\(\s*"(\w+)"')


class Reached:
    """Collects while it is entered. Strategies are called by their family: `sorting.merge_blocks`."""

    def __init__(self) -> None:
        self.ops: set[str] = set()
        self.strategies: set[str] = set()
        self.steps: set[str] = set()
        self._patch = pytest.MonkeyPatch()
        self._of: dict[int, Strategy] = {}

    def __enter__(self) -> Reached:
        self._patch.setattr(_Emission, "_compute", self._noting_ops(_Emission._compute))
        self._patch.setattr(choice, "_best", self._noting_chosen(choice._best))
        self._patch.setattr(Decisions, "of", self._noting_strategies(Decisions.of))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def listed(self) -> dict[str, list[str]]:
        return {kind: sorted(getattr(self, kind)) for kind in KINDS}

    def _noting_ops(self, compute: Any) -> Any:
        def noting(emission: _Emission, ops: Sequence[Op]) -> Any:
            op = ops[0]
            if op.name in COLLECTIVE_OPS:
                self.steps.add(op.name)
            elif op.key.startswith(_LOCAL) or any(
                _is_split(emission._shardings.get(value)) for value in (*op.operands, *op.results)
            ):
                self.ops.add(op.key)
            return compute(emission, ops)

        return noting

    def _noting_chosen(self, best: Any) -> Any:
        def noting(problem: OpProblem) -> Any:
            found = best(problem)
            self._of[id(problem.kind)] = found[1].candidate.strategy
            return found

        return noting

    def _noting_strategies(self, of: Any) -> Any:
        def noting(decisions: Decisions, op: Op, planned: Decision | None = None) -> Decision | None:
            found: Decision | None = of(decisions, op, planned)
            if found is not None and (op.key == CALLBACK or any(map(_is_split, found.shardings))):
                chosen = (planned and planned.strategy) or self._of.get(id(found.kind), found.kind.strategies[0])
                self.strategies.add(_listed_as(_family(op.key), chosen.name))
            return found

        return noting


def _is_split(sharding: Any) -> bool:
    return sharding is not None and bool(any(sharding.axes) or sharding.unreduced_axes)


def _family(key: str) -> str:
    return STRATEGIES[key].__module__.rpartition(".")[2] if key in STRATEGIES else "any"


@cache
def _listed_as(family: str, name: str) -> str:
    """A strategy by the module that lists it: calls of libraries have those of other families."""
    named = all_there_is()["strategies"]
    others = [found for found in named if found.endswith(f".{name}")]
    own = f"{family}.{name}"
    return own if own in named or len(others) != 1 else others[0]


def all_there_is() -> dict[str, list[str]]:
    """What could be reached."""
    load_extensions()
    families = sorted({function.__module__ for function in STRATEGIES.values()})
    named = [f"{_family_name(name)}.{found}" for name in families for found in _strategies_in(name)]
    return {
        "ops": sorted({*EMITTERS, *STRATEGIES} - set(COLLECTIVE_OPS)),
        "strategies": sorted({*named, "any.along_factors"}),
        "steps": sorted(COLLECTIVE_OPS),
    }


def _family_name(module: str) -> str:
    return module.rpartition(".")[2]


def _strategies_in(module: str) -> list[str]:
    path = importlib.import_module(module).__file__
    return _NAMED.findall(Path(path or "").read_text())


def missing(reached: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Of each kind what was never reached."""
    return {kind: sorted(set(there) - set(reached.get(kind, ()))) for kind, there in all_there_is().items()}
