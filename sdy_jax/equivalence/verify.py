"""`verify`: whether a partitioned function computes what the plain one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import fields
from typing import Any

import jax

from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError, ShardingError, with_article
from sdy_jax.base.jax_calls import api_boundary
from sdy_jax.calls.options import Options
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.equivalence.kernels import verified_kernels
from sdy_jax.equivalence.subject import (
    Subjects,
    is_bound_here,
    name_of,
    resized,
    scaled_down,
    size_of_mesh,
    smaller_arguments,
    stated_options,
    subjects_of,
    uneven,
)
from sdy_jax.equivalence.trial import run_here, run_in_child
from sdy_jax.equivalence.verification import Job, Outcome, Trial, Verification, VerifiedCase
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import machine_called, machines, usual_machines
from sdy_jax.runtime.devices import lowered_for

_PLANNING = ("optimize_collectives", "uneven", "layouts", "constraints", "memory", "effort", "recompute", "combine")
"""The options of `partition` that go with a program."""

_SECONDS = 120.0
"""How long a case may take on average. Chosen: planning and compiling a model of some thousand ops takes a minute."""

Sizes = Mapping[str, int] | Mesh | AnyMesh


@api_boundary
def verify(
    fun: Callable[..., Any] | Program,
    *args: Any,
    mesh: AnyMesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    meshes: Sequence[Sizes] | None = None,
    targets: Sequence[str] | None = None,
    derivatives: bool = True,
    uneven: bool = True,
    seed: int = 0,
    rtol: float | None = None,
    atol: float = 0.0,
    timeout: float = _SECONDS,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Verification:
    """Runs a function partitioned, and plain on one device, and compares the numbers; forward and derivatives, on
    several meshes, by the costs of each kind of machine.

    Nothing runs on accelerators: a process of its own has as many virtual CPU devices as the meshes need, so this works
    on any machine. The traced program goes there, as StableHLO with shardings. Where a number differs by more than
    errors of floating-point numbers allow, the first wrong value is looked for: its op, line, layouts and collectives,
    whether it is a mistake of ours or of XLA's, and a Python program that shows it.

    Args:
        fun: a partitioned function, with its own mesh, shardings and options; or a plain one, or a program from `load`.
        *args, **kwargs: its arguments: arrays, or `ShapeDtypeStruct`s, for which values are made up.
        mesh, in_shardings, out_shardings: of a plain function, as in `sdy.partition`.
        meshes: further meshes: sizes for axes of the function's mesh, `{"data": 3}`. Meshes of more than 16 devices are
            scaled down, and the arguments of functions that take other sizes with them.
        targets: by whose costs programs are planned: "cpu", "gpu", "tpu", or names of machines; by default these three,
            and the function's own, if it has some.
        derivatives: compare gradients for random cotangents, too.
        uneven: run on a mesh whose sizes divide few others, too.
        seed: of what is made up.
        rtol, atol: tolerances, relative to the largest magnitude of a result, and absolute; by default what suits the
            dtype, and where that does not do, what the plain program itself is off in float64.
        timeout: seconds per case.
        options: further options of `sdy.partition` for a plain function.

    Returns:
        A `Verification`: true where all is the same; printing it shows a line per case, and the first wrong value.

    Raises:
        SdyError: the arguments do not fit, or the function holds what only its own process can run and there are too
            few devices here.

    Example:
        step = sdy.partition(train_step, mesh=mesh, in_shardings=(None, P("data")))
        sdy.verify(step, state, batch).raise_for_difference()

    See also:
        `sdy_jax.testing.assert_same`: the same as one assertion, on one mesh.
    """
    with jax.enable_x64(True) if isinstance(fun, Program) else nullcontext():  # it says how many bits its types have
        function = _partitioned(fun, mesh, in_shardings, out_shardings, options)
        _check_mesh(function, fun, args, kwargs)
        smaller = smaller_arguments(function, args, kwargs)
        args, kwargs = smaller.args, smaller.kwargs
        with lowered_for("cpu"):  # on a copy: what is traced here is of no use to calls on other devices
            subjects = subjects_of(copy(function), args, kwargs, derivatives, seed)
        if is_bound_here(subjects.program):
            subjects = subjects_of(function, args, kwargs, derivatives, seed)
        trials, notes = _trials(subjects, stated_options(function), meshes, targets, uneven)
        trials = [smaller.trial(trial) for trial in trials]
        is_here = is_bound_here(subjects.program)
        # What is written down for another process cannot call functions of this one.
        job = Job(
            subjects.found, tuple(trials), _planning(stated_options(function)), rtol, atol, reproduces=not is_here
        )
        found = run_here(job, function, args, kwargs) if is_here else run_in_child(job, timeout)
        kernels = verified_kernels(Graph(subjects.program.module), seed, rtol, atol) if is_here else []
    notes = [*notes, *smaller.notes, *subjects.notes]
    return Verification(name_of(function), tuple(_cases(job, found)), tuple(notes), tuple(kernels))


def _partitioned(
    fun: Any, mesh: AnyMesh | None, in_shardings: Any, out_shardings: Any, options: Mapping[str, Any] | None
) -> PartitionedFunction[..., Any]:
    given = {"mesh": mesh, "in_shardings": in_shardings, "out_shardings": out_shardings} | dict(options or {})
    if isinstance(fun, PartitionedFunction):
        said = [name for name, value in given.items() if value is not None]
        if said:
            raise SdyError(f"verify: the function is partitioned already, with its own {said[0]}; leave out {said[0]}=")
        return fun
    if not callable(fun) and not isinstance(fun, Program):
        raise SdyError(f"verify got {with_article(type(fun))}; expected a function, partitioned or plain, or a program")
    made: PartitionedFunction[..., Any] = partition(fun, **{"on_unknown": "ignore"} | given)
    return made


def _check_mesh(function: PartitionedFunction[..., Any], fun: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    """
    Raises:
        ShardingError: a plain function is given, and no mesh is known for it.
    """
    try:
        size_of_mesh(function, args, kwargs)
    except ShardingError:
        if isinstance(fun, (PartitionedFunction, Program)):
            raise
        raise ShardingError(
            f"verify: {name_of(function)} is a plain function, and no mesh is known to partition it on; to fix: "
            f"sdy.verify({name_of(function)}, ..., mesh=mesh, in_shardings=...), or give what sdy.partition makes of it"
        ) from None


def _planning(options: Options) -> dict[str, Any]:
    defaults = {f.name: f.default for f in fields(Options)}
    chosen = {name: getattr(options, name) for name in _PLANNING}
    return {name: value for name, value in chosen.items() if value != defaults[name]}


def _trials(
    subjects: Subjects,
    options: Options,
    meshes: Sequence[Sizes] | None,
    targets: Sequence[str] | None,
    is_uneven: bool,
) -> tuple[list[Trial], list[str]]:
    """What runs, and notes on what does not run as it was said."""
    own = subjects.program.uncut or subjects.program.mesh
    wanted = [own, *(resized(own, _sizes(each)) for each in meshes or ())]
    found = list(dict.fromkeys(map(scaled_down, wanted)))
    large = [each for each in wanted if scaled_down(each).size != each.size]
    notes = [f"the mesh {_axes(each)} is run as {_axes(scaled_down(each))}" for each in large]
    odd = uneven(found[0]) if is_uneven else None
    places = [(each, False) for each in found] + ([(odd, True)] if odd and odd not in found else [])
    trials = [
        Trial(number, each, name, costs, is_odd)
        for each, is_odd in places
        for number in range(len(subjects.found))
        for name, costs in _costs(targets, options, each)
    ]
    return trials, notes


def _sizes(mesh: Sizes) -> Mapping[str, int]:
    if isinstance(mesh, Mesh):
        return mesh.sizes
    return dict(mesh.shape) if isinstance(mesh, AnyMesh) else mesh


def _costs(targets: Sequence[str] | None, options: Options, mesh: Mesh) -> Iterator[tuple[str, CostModel | None]]:
    """The cost models by their names.

    Raises:
        SdyError: no kind of machine, nor machine, is called so.
    """
    usual, own = usual_machines(), ("own",) if options.costs is not None else ()
    for name in (*own, *usual) if targets is None else targets:
        machine = usual.get(name, name)
        if name == "own":
            yield name, options.costs
        elif not machine:
            yield name, None
        elif machine_called(machine):
            yield name, CostModel.of_machine(machine, mesh.axis_names)
        else:
            raise SdyError(f"verify: targets has {name!r}; expected some of {', '.join(known_targets())}")


def known_targets() -> tuple[str, ...]:
    """The names of kinds of machines, and of machines."""
    return (*usual_machines(), *machines())


def _cases(job: Job, outcomes: Sequence[Outcome]) -> Iterator[VerifiedCase]:
    for trial, outcome in zip(job.trials, outcomes, strict=True):
        is_derivative = job.subjects[trial.subject].is_derivative
        yield VerifiedCase(_axes(trial.mesh), trial.target, is_derivative, trial.is_uneven, outcome)


def _axes(mesh: Mesh) -> str:
    return ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes) or "one device"
