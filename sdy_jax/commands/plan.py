"""`sdy-jax plan`: the report on a program, why a value is sharded as it is, or the module of a stage."""

from __future__ import annotations

import argparse

import jax

from sdy_jax.commands import UsageError
from sdy_jax.commands.demands import Demands, show_saved
from sdy_jax.commands.failures import explained
from sdy_jax.commands.partitioned_program import Job, job_of
from sdy_jax.commands.topology import Topology, compiled_report, prepare
from sdy_jax.errors import SdyError
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.record.files import is_saved_plan
from sdy_jax.representation.type_text import array_text


def run(options: argparse.Namespace) -> int:
    """Prints what is asked for."""
    if is_saved_plan(options.program):
        show_saved(options.program, options)
        return 0
    options.chips = _chips(options)
    demands = Demands(options)
    job = job_of(options)
    with explained(job.file), job.settings():
        check_sizes(job)
        plan = job.plan(job.args, job.kwargs)
        demands.keep(plan)
        if demands.before is not None:
            print(plan.diff(demands.before))
        elif options.why:
            print(plan.why(options.why))
        elif options.table:
            plan.table(options.table).show()
        elif options.fixes:
            print(plan.fixes)
        elif options.stage:
            print(plan.mlir(options.stage), end="")
        elif options.python is not None:
            _write_python(plan, options.python)
        else:
            plan.show()
            if options.chips is not None:
                print(f"\n{compiled_report(job.lower(), options.chips)}")
        demands.check(plan)
    return 0


def _write_python(plan: Plan, file: str) -> None:
    """Writes the program as Python, or prints it where the file is `-`."""
    if file == "-":
        print(plan.to_python(), end="")
    else:
        plan.to_python(file)
        print(f"{file}: {plan.headline}")


def _chips(options: argparse.Namespace) -> Topology | None:
    """The accelerators that `--topology` names."""
    if not options.topology:
        if options.slices != 1:
            raise UsageError("--slices says of how many slices there are to be; name one of them by --topology")
        return None
    prepare()
    return Topology.of(options.topology, options.slices)


def check_sizes(job: Job) -> None:
    """
    Raises:
      SdyError: a size of an argument is symbolic.
    """
    infos = [leaf for leaf in jax.tree.leaves((job.args, job.kwargs)) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not all(isinstance(size, int) for info in infos for size in info.shape):
        raise SdyError(
            f"the program takes {', '.join(map(array_text, infos))}; to fix: give the types with sizes as --args"
        )
