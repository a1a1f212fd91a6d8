"""The program that a command line names, partitioned as its options say."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.mlir import ir

from sdy_jax.annotate.arguments import Parameters, argument_leaves
from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import SdyError
from sdy_jax.calls.load import load
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.cli import UsageError, devices
from sdy_jax.cli.arguments import (
    UserModules,
    check_no_python,
    explained,
    given_arguments,
    module_and_name,
    parse_mesh,
    parse_shardings,
)
from sdy_jax.ir import locations
from sdy_jax.ir.graph import Value
from sdy_jax.ir.jax_shardings import AnyMesh
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.lowering.targets.target import Hosts
from sdy_jax.mesh_dialects.emitters import dtype_of
from sdy_jax.mesh_dialects.local_program import LocalProgram, is_local, run_local
from sdy_jax.mesh_dialects.mesh_annotations import annotated_mesh
from sdy_jax.mesh_dialects.meshes import DeviceMesh, Devices, mesh_of, resolved_sizes
from sdy_jax.mesh_dialects.resolution import program_mesh
from sdy_jax.plan.plan import Plan

_CHOICES = ("optimize_collectives", "layouts", "constraints", "memory", "effort")
_PARTITIONING = ("in_shardings", "out_shardings", "pin", "machine", *_CHOICES)
"""The options that are those of `partition`, by its names; `_CHOICES` are given to it as they are."""

_OF_PLAIN_FUNCTIONS = ("mesh", "topology", "donate", *_PARTITIONING)
"""The options that a function which is partitioned already has no use for."""


@dataclass(frozen=True)
class UserProgram:
    """A function that runs on devices, and the types of its arguments: positional ones, and those by keyword.

    It is partitioned, or that of a local program: then `mesh` says on which devices it runs.
    """

    function: PartitionedFunction | LocalProgram
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    file: str
    program: Program | None = None
    mesh: jax.sharding.Mesh | None = None

    def plan(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan:
        """The plan for arguments like these."""
        return self.function.plan(*args, **kwargs)

    def lower(self) -> jax.stages.Lowered:
        """What a compiler is given for arguments of these types."""
        assert isinstance(self.function, PartitionedFunction)
        return self.function.lower(*self.args, **self.kwargs)

    def headline(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """What runs, in a few lines."""
        return self.plan(args, kwargs).summary()

    @property
    def paths(self) -> list[str]:
        """What the arguments' leaves are called."""
        leaves = argument_leaves(None, self.args, self.kwargs, Parameters.of(self.function))
        return list(self.program.inputs) if self.program else [leaf.path for leaf in leaves]

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Files say how many bits their types have, so that jax need not guard against 64."""
        with jax.enable_x64(True) if self.program else nullcontext():
            yield


def job_of(options: argparse.Namespace) -> UserProgram:
    """What the options ask for.

    Raises:
      SdyError: the program cannot be read or found, or the options do not fit it.
    """
    function = module_and_name(options.program)
    return _function_job(*function, options) if function else _file_job(options)


def _file_job(options: argparse.Namespace) -> UserProgram:
    with explained(_file_name(options)):
        check_no_python(options.program)
        said = {"function": options.function, "any_platform": options.any_platform}
        program = load(options.program, shardings=not options.drop_shardings, **said)
    if is_local(program.module):
        return _local_job(program, options)
    mesh = _mesh(options, program)
    _request(options, options.devices or mesh.size)
    with jax.enable_x64(True), explained(_file_name(options)):
        function = _partitioned(program, [mesh], options)
        args, kwargs = jax.tree.unflatten(program.in_tree, program.in_info)
    if (given := given_arguments(options, UserModules())) is not None:
        args, kwargs = given, {}
    return UserProgram(function, args, kwargs, _file_name(options), program)


def _local_job(program: Program, options: argparse.Namespace) -> UserProgram:
    """Arguments and results have a leading dimension, with an entry for every device."""
    for option in _PARTITIONING:
        if getattr(options, option, None):
            raise UsageError(f"{_flag(option)} is not for programs on local arrays, as {options.program} is")
    with explained(_file_name(options)):
        named = program_mesh(program.module)
        given = _only_mesh(options)
        sizes = resolved_sizes(named, given.size if given else _count(named, options))
        mesh = given or mesh_of(sizes)
        devices.request(options.devices or mesh.size)
        on_devices = devices.mesh_on(mesh, options.devices or mesh.size)
        with jax.enable_x64(True):
            function = run_local(program, on_devices)
        infos = tuple(_stacked(value, mesh.size) for value in function.arguments)
    infos = given_arguments(options, UserModules()) or infos
    return UserProgram(function, infos, {}, _file_name(options), program, on_devices)


def _count(mesh: DeviceMesh, options: argparse.Namespace) -> int:
    sizes = [size for size in mesh.shape if size is not None]
    if len(sizes) == mesh.rank:
        return math.prod(sizes)
    if not options.devices:
        raise UsageError(f"the mesh @{mesh.symbol} = {mesh} has a size that is not known; say how large by --devices N")
    return int(options.devices)


def _stacked(value: Value, count: int) -> jax.ShapeDtypeStruct:
    """The type of one argument for all devices; sizes that the text leaves open are `?`."""
    type_ = value.type
    shape: tuple[Any, ...] = ()
    if isinstance(type_, ir.RankedTensorType):
        shape = tuple("?" if type_.is_dynamic_dim(i) else type_.get_dim_size(i) for i in range(type_.rank))
    return jax.ShapeDtypeStruct((count, *shape), dtype_of(value))


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _file_name(options: argparse.Namespace) -> str:
    return "<stdin>" if options.program == "-" else str(options.program)


def _request(options: argparse.Namespace, count: int) -> None:
    (devices.request if options.command == "run" else devices.request_for_plan)(count)


def _mesh_on(options: argparse.Namespace) -> Callable[[Mesh, int], AnyMesh]:
    if options.command == "run":
        return devices.mesh_on
    chips = options.chips
    return devices.mesh_for_plan if chips is None else lambda mesh, _: chips.mesh(mesh)


def _only_mesh(options: argparse.Namespace) -> Mesh | None:
    """The mesh that the options name, one at most."""
    if len(options.mesh or ()) > 1:
        raise UsageError(f"--mesh may be given several times for functions only, and {options.program} is a file")
    return parse_mesh(options.mesh[0]) if options.mesh else None


def _mesh(options: argparse.Namespace, program: Program | None = None) -> Mesh:
    given = _only_mesh(options)
    if given is not None:
        return given
    own = program.mesh if program else Mesh(())
    if program and not own.axes:  # annotated, if at all, on a mesh whose size the devices decide
        own, _ = annotated_mesh(program.module, Devices(count=options.devices or jax.device_count()))
    if own.axes:
        return own
    chips = getattr(options, "chips", None)
    return Mesh.of(devices=options.devices or (len(chips.devices) if chips else 1))


def _partitioned(fun: Any, meshes: Sequence[Mesh], options: argparse.Namespace) -> PartitionedFunction:
    given = {
        name: parse_shardings(text, option)
        for name, option, text in (
            ("in_shardings", "--in-shardings", options.in_shardings),
            ("out_shardings", "--out-shardings", options.out_shardings),
        )
        if text
    }
    chosen = {name: value for name in _CHOICES if (value := getattr(options, name))}
    chosen |= {} if options.recompute else {"recompute": False}
    chosen |= {"plan": options.pin} if getattr(options, "pin", None) else {}
    chosen |= _donated(getattr(options, "donate", None))
    chosen |= {"costs": machine_costs(options.machine, meshes)} if getattr(options, "machine", None) else {}
    on_devices = [_mesh_on(options)(mesh, options.devices or mesh.size) for mesh in meshes]
    with locations.called_from("the command line" if given else _file_name(options)):
        found: PartitionedFunction = partition(
            fun, mesh=on_devices if len(meshes) > 1 else on_devices[0], on_unknown="ignore", **given, **chosen
        )
    return found


def machine_costs(name: str, meshes: Sequence[Mesh]) -> CostModel:
    """The costs of the machines that `--machine` names, on a mesh, or on several of which the best one is taken.

    Raises:
        UsageError: there are no such machines, or the meshes are not of so many, or several run over hosts.
    """
    try:
        hosts = Hosts.of(name).usual(max(mesh.size for mesh in meshes))
        if len(meshes) == 1:
            return CostModel.of_machine(str(hosts), meshes[0])
        if hosts.count == 1:
            return CostModel.of_machine(str(hosts), {axis: None for mesh in meshes for axis in mesh.axis_names})
    except SdyError as error:
        raise UsageError(f"--machine {name}: {error}") from None
    raise UsageError(f"--machine {name}: other axes run over '{hosts}' in each --mesh; to fix: plan them one by one")


def _donated(text: str | None) -> dict[str, Any]:
    """`0,state`: the arguments whose memory results may take, as the options of `partition`."""
    said = [part.strip() for part in text.split(",")] if text else []
    numbers, names = [int(part) for part in said if part.isdigit()], [part for part in said if not part.isdigit()]
    return ({"donate_argnums": numbers} if numbers else {}) | ({"donate_argnames": names} if names else {})


# Functions ------------------------------------------------------------------------------------------------------------


def _function_job(module: str, name: str, options: argparse.Namespace) -> UserProgram:
    if options.function:
        raise UsageError(f"--function is for files with MLIR, and {options.program} names its function itself")
    meshes = [parse_mesh(text) for text in options.mesh or ()]
    sizes = [mesh.size for mesh in meshes]
    _request(options, max(options.devices or 1, *sizes, 1))  # before the module makes arrays
    modules = UserModules()
    with explained(options.program):
        function = modules.function(module, name)
    if not isinstance(function, PartitionedFunction):
        function = _partitioned(function, meshes or [_mesh(options)], options)
    elif any(getattr(options, name, None) for name in _OF_PLAIN_FUNCTIONS):
        *others, last = map(_flag, _OF_PLAIN_FUNCTIONS)
        raise UsageError(f"{options.program} is partitioned already; leave out {', '.join(others)} and {last}")
    args = given_arguments(options, modules)
    if args is None:
        raise UsageError(
            f'{options.program} needs the types of its arguments: --args "f32[64,128], i32[]", or --args-from '
            f"{module}:NAME, a function that returns them"
        )
    return UserProgram(function, args, {}, options.program)
