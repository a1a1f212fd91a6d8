"""The options of `partition`: as type checkers know them, and as a partitioned function keeps them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

import jax
import numpy as np

from sdy_jax.base.errors import SdyError, with_article
from sdy_jax.calls.meshes import check_meshes, meshes_of
from sdy_jax.ir.jax_shardings import AnyMesh, bytes_of_text, mesh_from_jax
from sdy_jax.lowering.planner.setting import CONSTRAINTS, LAYOUTS, UNEVEN, Combining, Policy
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target
from sdy_jax.plan.contracts import Budget
from sdy_jax.plan.pinning.pinned import ON_CHANGE
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.record import PlanRecord
from sdy_jax.runtime.devices import lowering_platform, lowering_platforms


class Keywords(TypedDict, total=False):
    """The options of `partition`, for type checkers."""

    mesh: AnyMesh | Sequence[AnyMesh] | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    keep_unused: bool
    inline: bool
    compiler_options: dict[str, Any] | None
    costs: CostModel | None
    on_unknown: str
    optimize_collectives: bool
    uneven: str
    layouts: str
    constraints: str
    memory: int | str | None
    effort: int | None
    recompute: bool
    combine: bool | int | str | None
    budget: Budget | None
    strict: str | Sequence[str] | None
    plan: str | os.PathLike[str] | Plan | PlanRecord | None
    on_change: str
    like: str | os.PathLike[str] | Plan | PlanRecord | None
    device: jax.Device | None
    backend: str | None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `partition`, by its names."""

    mesh: AnyMesh | Sequence[AnyMesh] | None = None
    in_shardings: Any = None
    out_shardings: Any = None
    static_argnums: Any = None
    static_argnames: Any = None
    donate_argnums: Any = None
    donate_argnames: Any = None
    keep_unused: bool = False
    inline: bool = False
    compiler_options: Any = None
    costs: Any = None
    on_unknown: str = "warn"
    optimize_collectives: bool = False
    uneven: str = "pad"
    layouts: str = "global"
    constraints: str = "kept"
    memory: int | str | None = None
    effort: int | None = None
    recompute: bool = True
    combine: bool | int | str | None = None
    budget: Budget | None = None
    strict: str | Sequence[str] | None = None
    plan: str | os.PathLike[str] | Plan | PlanRecord | None = None
    on_change: str = "error"
    like: str | os.PathLike[str] | Plan | PlanRecord | None = None
    mesh_in_context: bool = False
    """Whether the function sees the mesh in context, as under `jax.set_mesh`: where `mesh=` states one. jit has no such
    option, and shows a function what is in context around the call."""

    def check(self) -> None:
        """
        Raises:
            SdyError: an option has a value that it cannot have.
        """
        if self.on_unknown not in ("warn", "error", "ignore"):
            raise SdyError(f"on_unknown={self.on_unknown!r}; expected 'warn', 'error' or 'ignore'")
        if self.uneven not in UNEVEN:
            raise SdyError(f"uneven={self.uneven!r}; expected 'pad', 'replicate' or 'error'")
        if self.layouts not in LAYOUTS:
            *others, last = map(repr, LAYOUTS)
            raise SdyError(f"layouts={self.layouts!r}; expected {', '.join(others)} or {last}")
        if self.constraints not in CONSTRAINTS:
            raise SdyError(f"constraints={self.constraints!r}; expected 'kept' or 'hints'")
        if self.constraints == "hints" and self.layouts != "global":
            raise SdyError(f"constraints='hints' needs layouts='global': with {self.layouts!r} they are kept")
        if self.combine is not None and self._combine is None:
            raise SdyError(
                f"combine={self.combine!r}; expected None, True, False, or the bytes of a bucket, such as '4MiB'"
            )
        if self.memory is not None and self._memory is None:
            raise SdyError(f"memory={self.memory!r}; expected a number of bytes per device, or a text such as '16GiB'")
        if self.memory is not None and self.layouts != "global":
            raise SdyError(f"memory= needs layouts='global': the layouts of {self.layouts!r} do not depend on it")
        is_count = isinstance(self.effort, (int, np.integer)) and not isinstance(self.effort, bool)
        if self.effort is not None and not (is_count and self.effort > 0):
            raise SdyError(f"effort={self.effort!r}; expected how many choices of layouts are made at most, 1 or more")
        if self.effort is not None and self.layouts != "global":
            raise SdyError(f"effort= needs layouts='global': {self.layouts!r} makes no choice for the whole program")
        if not isinstance(self.recompute, bool):
            raise SdyError(f"recompute={self.recompute!r}; expected True or False")
        if self.costs is not None and not isinstance(self.costs, CostModel):
            example = (
                f"CostModel.of_machine({self.costs!r}, mesh)"
                if isinstance(self.costs, str)
                else "CostModel.of_mesh(mesh)"
            )
            raise SdyError(f"costs is {with_article(type(self.costs))}; expected a CostModel, such as {example}")
        if self.compiler_options is not None and not isinstance(self.compiler_options, dict):
            given = with_article(type(self.compiler_options))
            raise SdyError(f"compiler_options is {given}; expected a dict of XLA's options")
        check_meshes(meshes_of(self.mesh), (self.in_shardings, self.out_shardings), self.costs)
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise SdyError(
                f"budget is {with_article(type(self.budget))}; expected a sdy_jax.Budget, as Budget(wire_bytes='10MiB')"
            )
        is_several = isinstance(self.strict, (tuple, list)) and all(isinstance(axis, str) for axis in self.strict)
        if self.strict is not None and not isinstance(self.strict, str) and not is_several:
            raise SdyError(f"strict={self.strict!r}; expected the name of a mesh axis, or several")
        for option, plan in (("plan", self.plan), ("like", self.like)):
            if plan is not None and not isinstance(plan, (str, os.PathLike, Plan, PlanRecord)):
                raise SdyError(f"{option} is {with_article(type(plan))}; expected a plan, or the path of its file")
        if self.plan is not None and self.like is not None:
            raise SdyError("plan= says all layouts, and like= those to keep; give one of them")
        if self.on_change not in ON_CHANGE:
            raise SdyError(f"on_change={self.on_change!r}; expected 'error' or 'replan'")

    @property
    def strict_axes(self) -> tuple[str, ...]:
        """The axes along which nothing may move unasked."""
        return (self.strict,) if isinstance(self.strict, str) else tuple(self.strict or ())

    def policy(self, mesh: AnyMesh) -> Policy:
        """Those of the partitioner, for a mesh."""
        return Policy(
            optimize_collectives=self.optimize_collectives,
            uneven=self.uneven,
            layouts=self.layouts,
            constraints=self.constraints,
            memory=self._memory,
            effort=self.effort,
            recompute=self.recompute,
            combine=Combining.of(self._combine, self.target(mesh).compiler.collectives),
        )

    def target(self, mesh: AnyMesh) -> Target:
        """The devices for which plans on a mesh are: its own, or those of the machine whose rates costs are."""
        if self.costs is None or not self.costs.machine:
            return Target.of(mesh)
        return Target.of(mesh, self.costs.machine, self.costs.lines(mesh_from_jax(mesh)))

    def machine_platform(self, mesh: AnyMesh) -> str:
        """The platform by which jax lowers for the machine whose rates costs are; empty where they are of none, or of
        the platform of the mesh's devices."""
        if self.costs is None or not self.costs.machine:
            return ""
        platforms = lowering_platforms(self.target(mesh).family.name)
        return "" if lowering_platform(mesh) in platforms else platforms[0]

    def of_derivatives(self, mesh: AnyMesh) -> Options:
        """Those of the functions of derivatives, on `mesh`: what is said of arguments and left to jit is not theirs."""
        said = ("in_shardings", "out_shardings", "static_argnums", "static_argnames", "plan", "like", *self.of_jit)
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self) if field.name in said}
        return replace(self, mesh=mesh, **defaults)

    def costs_of(self, mesh: AnyMesh) -> CostModel:
        """Those for a mesh: what runs as one, whatever its shape, has its share of latency."""
        costs = self.costs or CostModel.of_mesh(mesh)
        costs.check_axes(mesh_from_jax(mesh))
        if costs.is_default:
            return costs
        combining = self.policy(mesh).combine
        return replace(costs, combines=(*costs.combines, *(combining.kinds - combining.stacked)))

    @property
    def _memory(self) -> float | None:
        return _bytes(self.memory)

    @property
    def _combine(self) -> bool | float | None:
        return self.combine if isinstance(self.combine, bool) else _bytes(self.combine)

    @property
    def of_jit(self) -> dict[str, Any]:
        """Those that are left to jit."""
        names = ("donate_argnums", "donate_argnames", "keep_unused", "inline", "compiler_options")
        return {name: getattr(self, name) for name in names}


def _bytes(given: Any) -> float | None:
    """A positive number of bytes, or the text of one; None for anything else."""
    if isinstance(given, str):
        return bytes_of_text(given)
    is_number = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
    return float(given) if is_number and given > 0 else None
