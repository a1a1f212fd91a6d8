"""The module of a program at each stage of planning: as propagation takes it, as partitioning takes it with all
that it is planned with, and as files in the directory that `SDY_JAX_DUMP_TO` names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.base.files import explained
from sdy_jax.ir.attributes import shape_and_dtype
from sdy_jax.ir.graph import LOCAL_SORT
from sdy_jax.ir.jax_shardings import has_sub_axes, type_text
from sdy_jax.ir.locations import place_of
from sdy_jax.ir.meshes import AxisRef, Mesh, axes_size
from sdy_jax.ir.operations import body_of, copied, main_function, manual_axes, named, returned_by, terminator_of
from sdy_jax.ir.shardings import DimensionSharding, TensorSharding
from sdy_jax.ir.stored_shardings import function_shardings, set_function_shardings
from sdy_jax.lowering.planner.report import Note
from sdy_jax.lowering.planner.setting import Policy, available
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Target
from sdy_jax.shardy.passes.debug_info import write_module
from sdy_jax.shardy.passes.meshes import declare_finer, mesh_of_whole_axes, put_on_mesh
from sdy_jax.shardy.passes.pipelines import plan_import, run_pipeline
from sdy_jax.shardy.passes.registry import Pass

# Every stage of every plan as a file, in the directory that the environment variable `SDY_JAX_DUMP_TO` names.
#
# Each plan has a folder of its own there, `step.0`, with `00.traced.mlir`, a file per pass and `NN.partitioned.mlir`.
# Each file is written when its stage is reached, so a plan that fails leaves those before its failure.

REWRITTEN = ("blocked", "recomputed", "ordered")
"""The stages of a program that was rewritten before it was partitioned, as its plan is better so; one at most."""


class LocalSort(NamedTuple):
    """A sort of so many rows of which each device sorts its own along some axes, where the program sorts all of them
    together and nobody sees it; and the line of the program's sort."""

    rows: int
    axes: tuple[str, ...]
    line: str


def local_sorts(stages: Mapping[str, ir.Operation]) -> tuple[LocalSort, ...]:
    """Those of a program, from the stages of its plan, in order."""
    written = next((stages[name] for name in REWRITTEN if name in stages), None)
    found = [] if written is None else named(written, "sdy.manual_computation")
    return tuple(
        LocalSort(ir.IntegerAttr(op.attributes[LOCAL_SORT]).value, manual_axes(op), place_of(op.location).line)
        for op in found
        if LOCAL_SORT in op.attributes
    )


VARIABLE = "SDY_JAX_DUMP_TO"

Dump = Callable[[Pass | str, ir.Operation], None]
"""What is called with each stage, a pass or a name, and the module after it."""


def dump_of(plan: str) -> Dump:
    """What writes the stages of a new plan, if that is asked for, into a folder named after its function.

    Raises:
      SdyError: the folder cannot be made.
    """
    directory = os.environ.get(VARIABLE)
    return _Files(directory, plan) if directory else ignore


def ignore(stage: Pass | str, module: ir.Operation) -> None:
    """Nothing is to be written."""


class _Files:
    """The files of one plan, numbered in the order of its stages."""

    def __init__(self, directory: str, plan: str):
        self._numbers = count()
        with _explained(directory):
            self._folder = _new_folder(Path(directory), re.sub(r"[^\w.-]", "_", plan))

    def __call__(self, stage: Pass | str, module: ir.Operation) -> None:
        name = stage.name if isinstance(stage, Pass) else stage
        with _explained(str(self._folder)):
            write_module(module, self._folder / f"{next(self._numbers):02}.{name}.mlir")


def _explained(path: str) -> AbstractContextManager[None]:
    return explained(f"{VARIABLE}: {path} cannot be written", "name a directory that can be")


def _new_folder(directory: Path, name: str) -> Path:
    """The first folder `name.0`, `name.1`, ... that is not there yet; other processes may be making theirs."""
    directory.mkdir(parents=True, exist_ok=True)
    for folder in (directory / f"{name}.{number}" for number in count()):
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


# A traced program as propagation takes it.


def imported(program: Program, dump: Dump = ignore) -> ir.Operation:
    """A copy of a program's module after import; `dump`: is called with the module after each pass."""
    module = copied(program.module)
    run_pipeline(module, plan_import(), after=dump)
    put_on_mesh(module, program.mesh_name)
    return module


def to_whole_axes(program: Program) -> Program:
    """The program on a mesh along whose whole axes all its manual computations are; itself where its own is one.

    Raises:
        UnsupportedError: it has collectives of SDY as well, which are written in the function's axes.
    """
    finer = mesh_of_whole_axes(program.module, program.mesh)
    if finer == program.mesh:
        return program
    module = copied(program.module)
    return replace(program, module=module, mesh=finer, mesh_name=declare_finer(module, finer), uncut=program.mesh)


# Results as jax knows arrays: split by whole axes of the user's mesh, evenly.
#
# An array of 20 elements has no `NamedSharding` over 8 devices, and what is split by a part of an axis has none on
# the user's mesh. So a result keeps the leading axes of each dimension that divide it, and the program is partitioned
# for that; parts of axes remain where `out_shardings` name them.


def put_results_on_whole_axes(module: ir.Operation, traced: Program, source: str) -> list[Note]:
    """Rewrites the shardings of main's results in a propagated module. Returns notes on
    results whose `out_shardings` in the traced program differ; `source` is the line at which these are given."""
    main = main_function(module)
    stated = function_shardings(main_function(traced.module), "res_attrs")
    found = function_shardings(main, "res_attrs")
    changed, notes, mesh = dict[int, TensorSharding](), list[Note](), traced.uncut or traced.mesh
    for i, (value, sharding, given) in enumerate(zip(returned_by(main), found, stated, strict=True)):
        shape, dtype = shape_and_dtype(value.type)
        said = given and traced.on_uncut(given)
        if shape is None or sharding is None or sharding.mesh != traced.mesh_name or (said and has_sub_axes(said)):
            continue
        sharding = traced.on_uncut(sharding)
        whole = _on_whole_axes(sharding, shape, mesh)
        if whole.axes != sharding.axes:
            changed[i] = traced.on_mesh(whole)
        if said is not None and said.mesh == whole.mesh and 0 not in shape and not _keeps(whole, said, mesh):
            notes.append(Note("result", source, _message(traced.outputs[i], dtype, shape, whole, said)))
    set_function_shardings(main, "res_attrs", changed)
    return notes


def _on_whole_axes(sharding: TensorSharding, shape: Sequence[int], mesh: Mesh) -> TensorSharding:
    dims = zip(sharding.dimensions, shape, strict=True)
    return replace(sharding, dimensions=tuple(replace(d, axes=_dividing(d, n, mesh)) for d, n in dims))


def _dividing(dim: DimensionSharding, size: int, mesh: Mesh) -> tuple[AxisRef, ...]:
    """The longest leading list of whole axes that divides the dimension."""
    count = 0
    for axis in dim.axes:
        if axis.sub_axis is not None or not size or size % axes_size(dim.axes[: count + 1], mesh):
            break
        count += 1
    return dim.axes[:count]


def _keeps(sharding: TensorSharding, stated: TensorSharding, mesh: Mesh) -> bool:
    """A result is split by what is stated, and maybe more; axes of size one do not count."""

    def long(axes: Sequence[AxisRef]) -> list[AxisRef]:
        return [axis for axis in axes if axis.size(mesh) > 1]

    pairs = ((long(axes), long(own)) for axes, own in zip(sharding.axes, stated.axes, strict=True))
    return all(axes[: len(own)] == own for axes, own in pairs)


def _message(path: str, dtype: str, shape: Sequence[int], whole: TensorSharding, stated: TensorSharding) -> str:
    wanted = type_text(dtype, shape, stated)
    return (
        f"`{path}` arrives as {type_text(dtype, shape, whole)} instead of {wanted}: an array is split evenly; to fix: "
        "pad it to a multiple of the number of its blocks, or state what divides it"
    )


# What is partitioned: the propagated module, with arguments and results as jax's arrays can be.


@dataclass(frozen=True, slots=True)
class PlannedWith:
    """With what a program was planned: the costs, the user's decisions, the devices, and whether its results stay among
    our own functions."""

    costs: CostModel
    policy: Policy
    target: Target = field(default_factory=Target)
    inner: bool = False

    @property
    def available(self) -> float:
        """The bytes that a device has for the program; 0 where that is not known."""
        return available(self.policy, self.target)


def to_partition(
    propagated: ir.Operation, traced: Program, source: str, inner: bool
) -> tuple[ir.Operation, list[Note]]:
    """A copy of a propagated module, ready to be partitioned, and notes on results that are split less than stated.

    Args:
        propagated: the module.
        traced: the program that was traced.
        source: the line at which the program's shardings are given.
        inner: the results may be split by parts of axes that nobody stated.
    """
    module = copied(propagated)
    _keep_arguments_whole(module, traced)
    notes = [] if inner else put_results_on_whole_axes(module, traced, source)
    _locate_return(module, source)
    return module, notes


def input_names(program: Program) -> list[str]:
    """What the user calls the arguments of a program's main function, those of closed-over arrays first."""
    return [*(f"constant {i}" for i in range(len(program.constants))), *program.inputs]


def _locate_return(module: ir.Operation, source: str) -> None:
    """What moves at the end of a function moves for the shardings of its results; jax says the line of its call."""
    found = location_of_return(source, module.context)
    if found is not None:
        terminator_of(body_of(main_function(module))).location = found


def location_of_return(source: str, context: ir.Context) -> ir.Location | None:
    """The line at which shardings of results are given as a location; None where nothing says it."""
    file, _, line = source.rpartition(":")
    if file and line.isdigit():
        return ir.Location.file(file, int(line), 0, context)
    return ir.Location.name(source, context=context) if source else None


def _keep_arguments_whole(module: ir.Operation, program: Program) -> None:
    """Removes unreduced axes from arguments whose types have none: arrays that are passed are not unreduced.

    Such axes are stated by the user or come from a constraint; the value becomes unreduced inside of the program.
    """
    main = main_function(module)
    whole = {
        i: replace(sharding, unreduced_axes=(), reduction="sum")
        for i, sharding in enumerate(function_shardings(main, "arg_attrs"), -len(program.constants))
        if sharding is not None and sharding.unreduced_axes and i not in program.unreduced_arguments
    }
    set_function_shardings(main, "arg_attrs", {i + len(program.constants): s for i, s in whole.items()})
