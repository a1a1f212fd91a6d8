"""`load` and `loads`: programs from files and text, as they are or without their shardings."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import jax
from jax import export
from jax.extend.mlir import ir

from sdy_jax.annotate.arguments import argument_leaves, match_prefix
from sdy_jax.annotate.program import Program
from sdy_jax.annotate.trees import by_argument
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.calls.loading.artifacts import (
    ArtifactKind,
    binary_module,
    contents,
    damage_noticed,
    exported_of,
    recognise,
)
from sdy_jax.errors import SdyError, ShardingError, UnsupportedError
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.ir.graph import Graph, Value
from sdy_jax.ir.locations import source_line
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    body_of,
    copied,
    functions,
    main_function,
    module_meshes,
    post_order,
    referenced_functions,
    replace_op,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import map_shardings
from sdy_jax.ir.text.modules import new_context, text_module
from sdy_jax.lowering.ops.emission.re_emission import numpy_dtype
from sdy_jax.mesh_dialects.mesh_annotations import annotated_mesh, drop_mesh_annotations
from sdy_jax.mesh_dialects.meshes import Devices
from sdy_jax.shardy.passes.meshes import drop_shardings_and_meshes

# Taking everything out of a module that says how it is to be sharded.

_FORWARDING = frozenset(
    (
        "sdy.sharding_constraint",
        "sdy.reshard",
        "sdy.propagation_barrier",
        "sdy.data_flow_edge",
        *COLLECTIVE_OPS,
    )
)
"""Ops whose result is their operand, sharded otherwise."""


def drop_annotations(module: ir.Operation) -> None:
    """Removes shardings, meshes and what the sdy dialect says about them; what the module computes stays the same.

    Raises:
      ShardingError: a manual computation is left, which is made for its mesh.
    """
    drop_mesh_annotations(module)
    for op in post_order(module):
        if op.name in _FORWARDING:
            replace_op(op, op.operands)
        elif op.name == "sdy.sharding_group":
            op.erase()
        elif op.name == "sdy.named_computation":
            _drop(op, "in_shardings", "out_shardings")
        elif op.name == "sdy.manual_computation":
            raise ShardingError(
                f"the sdy.manual_computation at {source_line(op.location)} computes on the blocks of its mesh; its "
                "shardings cannot be dropped"
            )
        else:
            _drop(op, "sdy.sharding_rule")
    drop_shardings_and_meshes(module)


def _drop(op: ir.Operation, *names: str) -> None:
    for name in names:
        if name in op.attributes:
            del op.attributes[name]


# Programs from files: MLIR text and bytecode, StableHLO portable artifacts, and what `jax.export` serialized.


@api_boundary
def load(
    source: str | os.PathLike[str] | bytes, *, shardings: bool = True, any_platform: bool = False, strict: bool = True
) -> Program:
    """A program from a file: one to look at, to run passes on, and to partition.

    The file holds MLIR text (StableHLO with or without SDY), MLIR bytecode, a StableHLO portable artifact, or what
    `jax.export` serialized; which of them is found out from its bytes. Reading the last kind needs the package
    flatbuffers. Binary files are trusted to come from where they should: jaxlib's reader is not safe against bytes that
    somebody made up.

    Args:
        source: a path, `-` for standard input, or the bytes themselves. For text there is `loads`.
        shardings: keep the shardings and meshes that the program has. Without them it can be partitioned on any mesh.
        any_platform: let a `jax.export` file run on platforms that it was not exported for. Right where it holds
            nothing but StableHLO; calls of a platform's libraries will not be found.
        strict: refuse a `mesh.shard` of what another has annotated in the same way, which the dialect leaves undefined.
            Else it reshards.

    Returns:
        The program. `partition(program, mesh=...)` gives a function of its arguments: of a `jax.export` file those of
        the exported function, trees included, else one array per argument of `@main`, called `arg0`, `arg1`, ... A mesh
        may be left out where the program's shardings name one; shardings of its arguments and results hold where no
        others are given.

    Raises:
        SdyError: the file is none of these, or damaged. Errors in text have the line and column.

    Example:
        >>> program = load(b'''
        ... func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
        ...   %y = stablehlo.tanh %x : tensor<8x4xf32>
        ...   return %y : tensor<8x4xf32>
        ... }''')
        >>> program.inputs
        ('arg0',)

    See also:
        `loads`: of text.
        `partition`: takes what it returns.
    """
    data, file = contents(source)
    kind = recognise(data, file)
    with damage_noticed(file):
        if kind is ArtifactKind.EXPORTED:
            program = _from_exported(exported_of(data, file), file, any_platform)
        else:
            program = _from_module(_module_of(data, kind, file, strict))
    return program if shardings else _without_shardings(program)


@api_boundary
def loads(text: str, *, shardings: bool = True, strict: bool = True) -> Program:
    """A program from MLIR text: `load` for a string that is the program, not the path of one.

    Args:
        text: StableHLO, with or without SDY and the mesh and shard dialects, whose ops may be in the pretty or in the
            generic form.
        shardings, strict: as for `load`.

    Returns:
        The program. One on local arrays, which communicates itself, runs by `sdy_jax.shard.run_local(program)`.

    Raises:
        SdyError: the text is wrong; with its line and column.

    Example:
        >>> program = loads('''
        ... func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
        ...   %y = stablehlo.tanh %x : tensor<8x4xf32>
        ...   return %y : tensor<8x4xf32>
        ... }''')
        >>> program.inputs
        ('arg0',)

    See also:
        `load`: of a file, or bytes of any kind.
    """
    if not isinstance(text, str):
        raise SdyError(
            f"loads got a {type(text).__name__}; expected the text of a program. Bytes and files are read by load"
        )
    with damage_noticed("<text>"):
        program = _from_module(text_module(text, new_context(), "<text>", strict))
    return program if shardings else _without_shardings(program)


def _module_of(data: bytes, kind: ArtifactKind, file: str, strict: bool) -> ir.Module:
    context = new_context()
    if kind is ArtifactKind.TEXT:
        return text_module(data.decode(), context, file, strict)
    return binary_module(data, context, file)


def _without_shardings(program: Program) -> Program:
    module = copied(program.module)
    with module.context, ir.Location.unknown(module.context):
        drop_annotations(module)
    return replace(program, module=module, mesh=Mesh(()), mesh_name="")


def _from_module(module: ir.Module) -> Program:
    # A copy of its own: an operation does not keep its module object alive.
    operation = copied(module)
    graph = Graph(operation)
    results = tuple(map(_type_of, graph.outputs))
    tree = jax.tree.structure(0 if len(results) == 1 else (0,) * len(results))
    return Program(
        operation,
        *_own_mesh(operation),
        constants=(),
        inputs=tuple(f"arg{i}" for i in range(len(graph.arguments))),
        outputs=_paths(tree, "result"),
        in_info=tuple(map(_type_of, graph.arguments)),
        out_info=results,
        in_tree=jax.tree.structure(((0,) * len(graph.arguments), {})),
        out_tree=tree,
        name=_name(operation),
    )


def _type_of(value: Value) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of a value, with `?` for sizes that the text leaves open; None for what jax has no arrays
    of."""
    type_ = value.mlir.type
    if not isinstance(type_, ir.RankedTensorType):
        return None
    sizes: list[Any] = ["?" if type_.is_dynamic_dim(i) else type_.get_dim_size(i) for i in range(type_.rank)]
    try:
        return jax.ShapeDtypeStruct(tuple(sizes), numpy_dtype(str(type_.element_type)))
    except UnsupportedError:
        return None


def _type_of_aval(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _name(module: ir.Operation) -> str:
    """What jax called the function, else the name of the module."""
    name = module.attributes.get("sym_name")
    return "main" if name is None else str(ir.StringAttr(name).value).removeprefix("jit_")


def _from_exported(exported: export.Exported, file: str, any_platform: bool) -> Program:
    if exported.ordered_effects:
        effects = ", ".join(map(str, exported.ordered_effects))
        raise UnsupportedError(
            f"{file}: {exported.fun_name} has ordered effects ({effects}), which cannot be partitioned yet; to fix: "
            "export a function that returns the values, and print them or call back with them outside"
        )
    if any_platform:
        checks = (*exported.disabled_safety_checks, export.DisabledSafetyCheck.platform())
        exported = replace(exported, disabled_safety_checks=checks)
    module = binary_module(exported.mlir_module_serialized, new_context(), file)
    operation = copied(module)
    if 'mhlo.sharding = "{devices=' in operation.get_asm(large_elements_limit=0):
        raise UnsupportedError(
            f"{file}: the program's shardings are in XLA's form (mhlo.sharding), because it was exported with "
            "jax_use_shardy_partitioner=False; export it with Shardy, or without shardings"
        )
    return Program(
        operation,
        *_own_mesh(operation),
        constants=(),
        inputs=_input_paths(exported, operation),
        outputs=_paths(exported.out_tree, "result"),
        in_info=tuple(map(_type_of_aval, exported.in_avals)),
        out_info=tuple(map(_type_of_aval, exported.out_avals)),
        in_tree=exported.in_tree,
        out_tree=exported.out_tree,
        name=exported.fun_name,
        exported=exported,
    )


_NAMED = re.compile(r'^loc\("([A-Za-z_]\w*)[^"]*"\)$')


def _input_paths(exported: export.Exported, module: ir.Operation) -> tuple[str, ...]:
    """The leaves of an exported function's arguments, which are called as the module's locations say, if they do."""
    positional, keyword = by_argument(exported.in_tree)
    leaves = sorted(exported.module_kept_var_idx)
    values = list(body_of(main_function(module)).arguments)
    kept = dict(zip(leaves, values[len(values) - len(leaves) :], strict=True))
    names = []
    for _, which in positional:
        found = {_NAMED.sub(r"\1", str(kept[leaf].location)) for leaf in which if leaf in kept}
        names += [name for name in found if name.isidentifier()] if len(found) == 1 else []
    known = len(names) == len(positional) == len({*names, *keyword}) - len(keyword)
    arguments, named = jax.tree.unflatten(exported.in_tree, [object() for _ in exported.in_avals])
    return tuple(leaf.path for leaf in argument_leaves(None, arguments, named, names if known else ()))


def _paths(tree: Any, root: str) -> tuple[str, ...]:
    whole = jax.tree.unflatten(tree, [object() for _ in range(tree.num_leaves)])
    return tuple(leaf.path for leaf in match_prefix(None, whole, root, ""))


def _keep_reached(module: ir.Operation) -> None:
    """Erases the functions that main does not call, directly or through others."""
    known = functions(module)
    if not known:
        return
    main = main_function(module)
    reached = {main, *referenced_functions(main, module)}
    for function in known.values():
        if function not in reached:
            function.erase()


def _own_mesh(module: ir.Operation) -> tuple[Mesh, str]:
    """The mesh that the shardings of a module are on, and its symbol: the first with axes, or else a declared one.

    What main does not call says nothing of the mesh on which main is.
    """
    meshes, reached = module_meshes(module), copied(module)
    _keep_reached(reached)
    used: dict[str | Mesh, None] = {}

    def seen(sharding: TensorSharding) -> TensorSharding:
        used[sharding.mesh] = None
        return sharding

    map_shardings(reached, seen)

    def named(mesh: str | Mesh) -> tuple[Mesh, str]:
        return (meshes[mesh], mesh) if isinstance(mesh, str) else (mesh, "")

    candidates = (*map(named, used), annotated_mesh(module, Devices()), *map(named, meshes))
    return next((found for found in candidates if found[0].axes), (Mesh(()), ""))
