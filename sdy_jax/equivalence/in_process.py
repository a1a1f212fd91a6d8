"""Programs that only the process that traced them can run, because they call its Python functions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from sdy_jax.annotate.program import Program
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.calls.traced_programs import plain_results
from sdy_jax.equivalence.job import Job, Outcome
from sdy_jax.equivalence.trial import outcomes
from sdy_jax.errors import UnsupportedError
from sdy_jax.ir.custom_ops import kept_in


def is_bound_here(program: Program) -> bool:
    """Whether a program calls functions of this process: callbacks, ops of users, kernels."""
    return bool(kept_in(program.module.context))


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
    first, leaves = job.subjects[0], jax.tree.leaves((args, kwargs))
    drawn = first.values[len(first.values) - len(leaves) :]
    pairs = zip(leaves, drawn, strict=True)
    given = [value if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf, value in pairs]
    wanted = [
        np.asarray(x) for x in plain_results(function, *jax.tree.unflatten(jax.tree.structure((args, kwargs)), given))
    ]
    return list(outcomes(job, plain=wanted))
