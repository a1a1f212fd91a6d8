"""`sdy-jax run`: a program on devices, arrays in and out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import jax

from sdy_jax.commands import array_files
from sdy_jax.commands.failures import explained
from sdy_jax.commands.partitioned_program import Job, job_of
from sdy_jax.errors import SdyError
from sdy_jax.representation.type_text import array_text


def run(options: argparse.Namespace) -> int:
    """Runs the program, and writes the results or prints a summary."""
    job = job_of(options)
    with explained(job.file), job.settings():
        args, kwargs = arguments(job, options)
        headline = job.headline(args, kwargs)
        results = [array_files.to_numpy(leaf) for leaf in jax.tree.leaves(job.function(*args, **kwargs))]
    if options.outputs:
        array_files.write_outputs(options.outputs, results)
    else:
        print(headline)
        print(array_files.summary(results))
    return 0


def arguments(job: Job, options: argparse.Namespace) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments, as the options say; numbers among the types of a function's arguments are as they are."""
    leaves, tree = jax.tree.flatten((job.args, job.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    infos = [leaves[i] for i in places]
    if options.inputs:
        arrays = array_files.read_inputs(options.inputs, [job.paths[i] for i in places], infos)
    elif options.random is not None:
        arrays = array_files.random_inputs(options.random, infos)
    elif infos:
        wanted = ", ".join(f"arg{i}: {array_text(info)}" for i, info in enumerate(infos))
        raise SdyError(f"the program takes {wanted}; to fix: give --inputs FILE.npz, or --random SEED to make them up")
    else:
        arrays = []
    for place, array in zip(places, arrays, strict=True):
        leaves[place] = array
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return args, kwargs
