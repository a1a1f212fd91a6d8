"""`sdy-jax plan`: the report on a program, why a value is sharded as it is, or the module of a stage."""

from __future__ import annotations

import argparse

import jax

from sdy_jax.commands.failures import explained
from sdy_jax.commands.partitioned_program import Job, job_of
from sdy_jax.errors import SdyError
from sdy_jax.representation.type_text import array_text


def run(options: argparse.Namespace) -> int:
    """Prints what is asked for."""
    job = job_of(options)
    with explained(job.file), job.settings():
        _check_sizes(job)
        plan = job.plan(job.args, job.kwargs)
        if options.why:
            print(plan.why(options.why))
        elif options.stage:
            print(plan.mlir(options.stage), end="")
        else:
            print(plan)
    return 0


def _check_sizes(job: Job) -> None:
    infos = [leaf for leaf in jax.tree.leaves((job.args, job.kwargs)) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not all(isinstance(size, int) for info in infos for size in info.shape):
        raise SdyError(
            f"the program takes {', '.join(map(array_text, infos))}; to fix: give the types with sizes as --args"
        )
