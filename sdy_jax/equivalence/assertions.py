"""Assertions of tests: that a partitioned function has the numbers of the plain one, and the plan that was reviewed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from sdy_jax.base.errors import SdyError, with_article
from sdy_jax.base.jax_calls import api_boundary, jit
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.equivalence.comparison import compared
from sdy_jax.equivalence.pytest_plugin import UPDATE_PLANS
from sdy_jax.equivalence.trial import first_wrong_in
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.files import load_plan, save_plan
from sdy_jax.plan.record.record import PlanRecord, reviewed


@api_boundary
def assert_same(
    fun: Callable[..., Any],
    *args: Any,
    mesh: jax.sharding.Mesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    costs: CostModel | None = None,
    on_unknown: str = "ignore",
    layouts: str = "global",
    memory: int | str | None = None,
    combine: bool | int | str | None = None,
    **kwargs: Any,
) -> Plan:
    """Asserts that a function returns the same partitioned over a mesh as it does on one device.

    Integers and booleans must be equal; floating-point results may differ by `rtol` times the largest magnitude of
    their leaf plus `atol`. NaNs and infinities must be at the same places. `sdy.verify` compares more: derivatives,
    further meshes, the costs of other machines.

    Args:
        fun: the plain function; called as `fun(*args, **kwargs)`.
        mesh: by default that of `jax.set_mesh`, or else all devices along one axis named `devices`.
        in_shardings, out_shardings, costs, on_unknown, layouts, memory, combine: as in `sdy.partition`.
        rtol: relative tolerance; by default one that suits the leaf's dtype.
        atol: absolute tolerance, by default 0.

    Returns:
        The plan that was run, for further assertions.

    Raises:
        AssertionError: names the result's path, the largest difference, the plan's collectives, and the first value in
            the program that is wrong.
        TypeError: the function is a partitioned one, which would be compared with itself.
    """
    if isinstance(fun, PartitionedFunction):
        raise TypeError(
            "assert_same got a partitioned function, and would compare it with itself; "
            "to fix: give the plain function, and its mesh and shardings as arguments"
        )
    mesh = mesh or _default_mesh()
    ours = partition(
        fun,
        mesh=mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        costs=costs,
        on_unknown=on_unknown,
        layouts=layouts,
        memory=memory,
        combine=combine,
    )
    plan = ours.plan(*args, **kwargs)
    found, wanted = ours(*args, **kwargs), jit(fun)(*args, **kwargs)
    tree, plain_tree = (_structure(x) for x in (found, wanted))
    assert tree == plain_tree, f"the partitioned function returns the tree {tree}, the plain one {plain_tree}"
    for (path, ours_leaf), (_, plain_leaf) in zip(
        tree_leaves_with_path(found), tree_leaves_with_path(wanted), strict=True
    ):
        difference = compared(_array(ours_leaf), _array(plain_leaf), rtol, atol or 0.0)
        if not difference.ok:
            wrong = first_wrong_in(plan, mesh, (args, kwargs), list(map(_array, jax.tree.leaves(wanted))))
            raise AssertionError(f"result{keystr(path)} {difference.problem}\n{plan}{wrong}")
    return plan


@api_boundary
def assert_plan(plan: Plan | PlanRecord, path: str | os.PathLike[str]) -> None:
    """Asserts that a plan is the one that was reviewed: the arguments, results and collectives of the file at `path`,
    which begins with the plan's page, for the reviewer.

    What changes no plan is no difference: comments, names of variables and arguments, lines that moved, versions of
    jax. `pytest --sdy-update-plans` (or the environment variable `SDY_JAX_UPDATE_PLANS=1`) writes the file where it is
    not there or differs; review its changes like those of code.

    Args:
        plan: what is planned now.
        path: a file of JSON, beside the test.

    Raises:
        AssertionError: the plan differs, or there is no file; the message has the differences and what caused them.
        SdyError: the file is no plan, or is of a newer version.

    Example:
        def test_the_step_sends_what_was_reviewed():
            sdy.testing.assert_plan(step.plan(state, batch), Path(__file__).parent / "plans" / "step.json")
    """
    if not isinstance(plan, (Plan, PlanRecord)):
        raise SdyError(f"assert_plan got {with_article(type(plan))}; expected a plan, as step.plan(...) makes it")
    record, target = plan.record(), Path(path)
    how = f"to accept it: pytest --sdy-update-plans, or {UPDATE_PLANS}=1, and review the changes of the file"
    if os.environ.get(UPDATE_PLANS, "0") not in ("", "0"):
        _update(plan.record(choices=True) if isinstance(plan, Plan) else plan, target)
        return
    if not target.exists():
        raise AssertionError(f"there is no reviewed plan {target}\n{record.headline}\n{how}")
    found = record.diff(load_plan(target))
    if found:  # no `assert`: pytest, which rewrites those of plugins, would take its lines apart
        raise AssertionError(f"the plan is not the one reviewed in {target}\n{found}\n{how}")


def _update(record: PlanRecord, target: Path) -> None:
    """Writes the file, unless it has the plan already: then its lines stay as they were reviewed."""
    try:
        if not record.diff(load_plan(target)):
            return
    except SdyError:
        target.parent.mkdir(parents=True, exist_ok=True)
    save_plan(reviewed(record), target, str(record).splitlines())


def _structure(x: Any) -> Any:
    return jax.tree.structure(x)


def _default_mesh() -> jax.sharding.Mesh:
    current = jax.sharding.get_mesh()
    return jax.sharding.Mesh(np.array(jax.devices()), ("devices",)) if current.empty else current


def _array(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)
