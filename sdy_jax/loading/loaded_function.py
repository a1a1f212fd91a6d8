"""A loaded program as a function of JAX arrays, which `partition` takes like any other function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.extend.mlir import ir

from sdy_jax.annotate.arguments import Leaf, Parameters, Spec, abstracted, argument_leaves, match_prefix
from sdy_jax.annotate.program import Program
from sdy_jax.errors import ArgumentError, SdyError, ShardingError, UnsupportedError
from sdy_jax.ir.operations import copied, main_function, module_meshes
from sdy_jax.ir.stored_shardings import SIDES, function_shardings, mesh_of, set_function_shardings
from sdy_jax.loading.program_calls import caller_of
from sdy_jax.passes.debug_info import remove_propagation_debug_info
from sdy_jax.passes.device_numbers import renumber_devices
from sdy_jax.passes.written_collectives import settle_written_collectives
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.named import AnyMesh, mesh_from_jax
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.representation.type_text import array_text
from sdy_jax.runtime.devices import lowering_platform, mesh_on_devices
from sdy_jax.runtime.function_mesh import checked_mesh
from sdy_jax.shard.annotated_meshes import Devices
from sdy_jax.shard.local_program import is_local
from sdy_jax.shard.passes.mesh_annotations import annotated_mesh, import_annotations


def prepared(
    program: Program, mesh: Any, in_shardings: Spec, out_shardings: Spec
) -> tuple[LoadedFunction, dict[str, Any]]:
    """A loaded program as a function, with the facts that `partition` needs.

    Args:
      program: from `load`.
      mesh: a jax mesh; None: that of the program's shardings, on the first devices.
      in_shardings, out_shardings: as for `partition`; where they leave something open, the program's own hold.

    Raises:
      SdyError: the program's shardings are on another mesh, or it cannot be called from JAX.
    """
    if isinstance(mesh, (list, tuple)):
        raise ShardingError(
            f"mesh= is a list, but {program.name} is a loaded program, which is partitioned on one mesh"
        )
    mesh = None if mesh is None else checked_mesh(mesh)
    program = _with_sdy_annotations(program, mesh)
    if mesh is None and program.mesh.axes:
        mesh = mesh_on_devices(program.mesh)
    program = _with_devices_in_order(program)
    known = program.mesh if mesh is None else mesh_from_jax(mesh)
    if program.mesh.axes and program.mesh.axes != known.axes:
        raise ShardingError(
            f"the shardings of {program.name} are on the mesh {program.mesh}, and it is to be partitioned on {known}; "
            "to fix: partition it on its own mesh, or load it with shardings=False (--drop-shardings)"
        )
    if mesh is not None and program.exported is not None:
        _check_platform(program.exported, lowering_platform(mesh))
    function = LoadedFunction(program, known)
    told = {
        "mesh": mesh,
        "in_shardings": function.arguments(in_shardings),
        "out_shardings": function.results(out_shardings),
    }
    return function, told


def _with_sdy_annotations(program: Program, mesh: AnyMesh | None) -> Program:
    """The program with the annotations of the mesh and shard dialects turned into those of SDY."""
    if is_local(program.module):
        raise UnsupportedError(
            f"{program.name} is a program on local arrays, because it communicates itself; it runs as it is, by "
            "sdy_jax.shard.run_local(program) or `sdy-jax run`"
        )
    known = Mesh(()) if mesh is None else mesh_from_jax(mesh)
    on_devices = Devices(mesh=known) if known.axes else Devices(count=jax.device_count())
    module = copied(program.module)
    own = annotated_mesh(module, on_devices)
    if program.mesh.axes and program.mesh_name in ("", *module_meshes(module)):
        own = program.mesh, program.mesh_name  # one of SDY; what those of annotations are called is known only now
    with module.context, ir.Location.unknown(module.context):
        import_annotations(module, on_devices, strict=False)  # `load` has been as strict as it was to be
    return replace(program, module=module, mesh=own[0], mesh_name=own[1])


def _with_devices_in_order(program: Program) -> Program:
    """The program whose first device is the first one of its mesh: that is what a jax mesh calls them."""
    if not program.mesh.device_ids:
        return program
    module = copied(program.module)
    renumber_devices(module, program.mesh.device_ids)
    return replace(program, module=module, mesh=replace(program.mesh, device_ids=()))


def _check_platform(exported: Exported, platform: str) -> None:
    if platform in exported.platforms or DisabledSafetyCheck.platform() in exported.disabled_safety_checks:
        return
    raise UnsupportedError(
        f"{exported.fun_name} was exported for {', '.join(exported.platforms)}, and the mesh is of {platform} devices; "
        f"to fix: export it with platforms=({platform!r},), or load it with any_platform=True (--any-platform)"
    )


class LoadedFunction:
    """A loaded program's main function, without the shardings that its arguments and results have on `mesh`:
    `arguments` and `results` say these, so that the caller may choose others."""

    def __init__(self, program: Program, mesh: Mesh):
        _check_types(program)
        self._program = program
        self._names = _names(program)
        self.__name__ = program.name
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in self._names])
        module = copied(program.module)
        with module.context, ir.Location.unknown(module.context):
            settle_written_collectives(module)
        self._in, self._out = _take_boundary(program, module, mesh)
        self._call = caller_of(program, module)

    @property
    def has_derivatives(self) -> bool:
        """Whether the program brings derivatives of its own, as files from `jax.export` may."""
        return self._program.exported is not None and self._program.exported.has_vjp()

    def arguments(self, given: Spec) -> Spec:
        """`in_shardings`, with the program's own where nothing is given."""
        arguments, named = jax.tree.unflatten(self._program.in_tree, self._program.in_info)
        leaves = argument_leaves(given, arguments, named, Parameters(self._names, function=self.__name__))
        arguments, named = jax.tree.unflatten(self._program.in_tree, _filled(leaves, self._in))
        return (*arguments, *(named[name] for name in sorted(named)))

    def results(self, given: Spec) -> Spec:
        """`out_shardings`, with the program's own where nothing is given."""
        tree = self._program.out_tree
        leaves = match_prefix(given, jax.tree.unflatten(tree, self._program.out_info), "result", "out_shardings")
        return jax.tree.unflatten(tree, _filled(leaves, self._out))

    def check(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """
        Raises:
          ArgumentError: the arguments are not of the program's number and structure.
        """
        if jax.tree.structure((tuple(args), kwargs)) == self._program.in_tree:
            return
        wanted = ", ".join(map(_typed, self._program.inputs, self._program.in_info)) or "no arguments"
        leaves = [abstracted(leaf, None) for leaf in argument_leaves(None, args, kwargs, self._names)]
        given = ", ".join(_typed(leaf.path, leaf.value) for leaf in leaves) or "none"
        raise ArgumentError(f"{self.__name__}() takes {wanted}; it got {given}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        for path, wanted, value in zip(self._program.inputs, self._program.in_info, leaves, strict=True):
            _check_type(path, wanted, value)
        try:
            return self._call(*args, **kwargs)
        except (TypeError, ValueError) as error:  # what jax says of a call of an exported function
            raise SdyError(f"{self.__name__}: {error}") from None


def _check_types(program: Program) -> None:
    for path, info in zip((*program.inputs, *program.outputs), (*program.in_info, *program.out_info), strict=True):
        if info is None:
            raise UnsupportedError(
                f"`{path}` of {program.name} is no array: a program that is called from Python takes and returns "
                "tensors of known rank"
            )


def _names(program: Program) -> tuple[str, ...]:
    """What the parameters are called; nothing for those that have numbers only."""
    roots = dict.fromkeys(re.split(r"[\[.]", path)[0] for path in program.inputs)
    positional, named = jax.tree.unflatten(program.in_tree, program.in_info)
    return tuple(roots) if len(roots) == len(positional) + len(named) and "args" not in roots else ()


def _filled(leaves: Sequence[Leaf], own: Sequence[TensorSharding | None]) -> list[Spec]:
    return [mine if leaf.spec is None else leaf.spec for leaf, mine in zip(leaves, own, strict=True)]


def _typed(path: str, info: Any) -> str:
    return f"{path}: {array_text(info)}"


def _check_type(path: str, wanted: Any, value: Any) -> None:
    given = jax.typeof(value)
    fits = len(given.shape) == len(wanted.shape) and all(
        a == b for a, b in zip(given.shape, wanted.shape, strict=True) if isinstance(b, int)
    )
    if fits and given.dtype == wanted.dtype:
        return
    too_wide = jax.dtypes.canonicalize_dtype(wanted.dtype) != wanted.dtype
    remedy = "; 64-bit types need jax.config.update('jax_enable_x64', True)" if too_wide else ""
    raise SdyError(f"`{path}` is {array_text(given)}, the program takes {array_text(wanted)}{remedy}")


def _take_boundary(
    program: Program, module: ir.Operation, mesh: Mesh
) -> tuple[list[TensorSharding | None], list[TensorSharding | None]]:
    """Takes the shardings on `mesh` off main's arguments and results, and gives them by leaf."""
    remove_propagation_debug_info(module)  # it may refer to them
    meshes = module_meshes(module)
    main = main_function(module)
    arguments, results = (_take(main, side, meshes, mesh) for side in SIDES)
    if program.exported is None:
        return arguments, results
    # Exported modules take a platform and tokens first, and lack arguments that are not used.
    kept = sorted(program.exported.module_kept_var_idx)
    by_leaf = dict(zip(kept, arguments[len(arguments) - len(kept) :], strict=True))
    count = len(program.out_info)
    return [by_leaf.get(i) for i in range(len(program.in_info))], results[len(results) - count :]


def _take(main: ir.Operation, side: str, meshes: dict[str, Mesh], mesh: Mesh) -> list[TensorSharding | None]:
    def on_mesh(sharding: TensorSharding | None) -> TensorSharding | None:
        if sharding is None:
            return None
        own = mesh_of(meshes, sharding)
        return replace(sharding, mesh=own) if own.axes and own.axes == mesh.axes else None

    found = [on_mesh(sharding) for sharding in function_shardings(main, side)]
    taken = [i for i, sharding in enumerate(found) if sharding is not None]
    set_function_shardings(main, side, dict.fromkeys(taken))
    return found
