"""What is verified in this process: programs that only it can run, because they call its Python functions, and the
plans of tests."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.calls.traced_programs import plain_results
from sdy_jax.equivalence.bisection import first_wrong
from sdy_jax.equivalence.comparison import compared
from sdy_jax.equivalence.culprit import fault_of
from sdy_jax.equivalence.job import Job, Outcome
from sdy_jax.equivalence.subject import words_of
from sdy_jax.equivalence.trial import outcomes
from sdy_jax.errors import UnsupportedError
from sdy_jax.plan.plan import Plan
from sdy_jax.representation.named import AnyMesh


def run_here(
    job: Job, function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Outcome]:
    """The outcomes of a job's trials, on devices of this process; those for which there are too few are refused.

    Raises:
        UnsupportedError: there are too few devices for the first.
    """
    here = len(jax.devices())
    if job.trials and job.trials[0].mesh.size > here:
        raise UnsupportedError(
            f"verify: {job.subjects[0].name} calls functions of this process, so it runs here, and its mesh needs "
            f"{job.trials[0].mesh.size} devices; there {'is' if here == 1 else 'are'} {here}. To fix: "
            f"jax.config.update('jax_num_cpu_devices', {job.trials[0].mesh.size}) before jax is used"
        )
    called = _filled(job.subjects[0].values, args, kwargs)
    wanted = [np.asarray(x) for x in plain_results(function, *called)]
    return list(outcomes(job, plain=wanted))


def _filled(
    values: Sequence[np.ndarray], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with what was made up in the place of types. Values are those of what is closed over,
    then of the leaves; static arguments have none, and stand with arrays only."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        pairs = zip(leaves, values[len(values) - len(leaves) :], strict=True)
        leaves = [_like(leaf, value) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf, value in pairs]
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return args, kwargs


def _like(info: jax.ShapeDtypeStruct, value: np.ndarray) -> Any:
    if not jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        return value
    return jax.random.wrap_key_data(jnp.asarray(value), impl=jax.random.key_impl(jnp.empty((), info.dtype)))


def first_wrong_in(plan: Plan, mesh: AnyMesh, called: Any, wanted: Sequence[np.ndarray]) -> str:
    """What is wrong first in a plan whose results are wrong, as lines that begin with a line's end; empty where that
    cannot be found here."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return ""
    values = [words_of(x) for x in (*plan.program.constants, *jax.tree.leaves(called))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = first_wrong(plan, mesh, values, lambda found, number: compared(found, wanted[number]))
        return f"\n{fault_of(wrong, plan)}"
    except Exception:  # the results are wrong all the same, and that is what is to be said
        return ""
