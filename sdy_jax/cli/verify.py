"""`sdy-jax verify`: a program, partitioned, beside itself on one device."""

from __future__ import annotations

import argparse

from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.cli import UsageError
from sdy_jax.cli.arguments import explained, parse_mesh
from sdy_jax.cli.partitioned_program import Job, job_of
from sdy_jax.cli.plan import check_sizes
from sdy_jax.cli.run import arguments
from sdy_jax.equivalence.verification import Verification
from sdy_jax.equivalence.verify import known_targets, verify
from sdy_jax.ir.text.modules import SourceError


def run(options: argparse.Namespace) -> int:
    """Prints what was found. Returns the exit status: 1 where something differs."""
    options.chips = None
    meshes = [parse_mesh(text) for text in options.also]
    for name in options.target or ():
        if name not in known_targets():
            raise UsageError(f"--target {name}: expected one of {', '.join(known_targets())}")
    job = job_of(options)
    with explained(job.file), job.settings():
        check_sizes(job)
        found = _verified(job, options, meshes)
    print(found.to_json() if options.json else found)
    if options.reproducer and not found.ok:
        _write(found, options.reproducer)
    return int(not found.ok)


def _verified(job: Job, options: argparse.Namespace, meshes: list) -> Verification:
    if not isinstance(job.function, PartitionedFunction):
        raise UsageError(f"{options.program} is a program on local arrays, which nothing partitions")
    options.random = None
    args, kwargs = arguments(job, options) if options.inputs else (job.args, job.kwargs)
    chosen = {"targets": options.target, "derivatives": options.derivatives, "uneven": options.uneven}
    return verify(job.function, *args, meshes=meshes, seed=options.seed, **chosen, **kwargs)


def _write(found: Verification, file: str) -> None:
    try:
        if not found.write_reproducer(file):
            raise SourceError("nothing is written: no program shows by itself what is wrong", file)
    except OSError as error:
        raise SourceError(error.strerror or str(error), file) from None
