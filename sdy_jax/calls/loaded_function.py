"""A loaded program as a function of JAX arrays, which `partition` takes like any other function, and its calls."""

from __future__ import annotations

import functools
import inspect
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import jax
from jax.export import DisabledSafetyCheck, Exported
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import mlir

from sdy_jax.annotate.arguments import Leaf, Parameters, Spec, abstracted, argument_leaves, match_prefix
from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import ArgumentError, SdyError, ShardingError, UnsupportedError
from sdy_jax.base.jax_calls import jit, with_module
from sdy_jax.base.jax_tracing import refined
from sdy_jax.calls.load import binary_module, drop_annotations
from sdy_jax.ir.jax_shardings import AnyMesh, array_text, mesh_from_jax
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import (
    body_of,
    copied,
    function_type,
    main_function,
    module_meshes,
    replace_op,
    terminator_of,
)
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import (
    SIDES,
    entries_of,
    function_shardings,
    mesh_of,
    set_entries,
    set_function_shardings,
    used_meshes,
)
from sdy_jax.ir.text.modules import new_context
from sdy_jax.lowering.ops.re_emission import numpy_dtype
from sdy_jax.mesh_dialects.local_program import is_local
from sdy_jax.mesh_dialects.mesh_annotations import annotated_mesh, import_annotations
from sdy_jax.mesh_dialects.meshes import Devices, device_meshes, rename_mesh, symbols
from sdy_jax.mesh_dialects.view import is_dialect_op, view
from sdy_jax.runtime.devices import lowering_platform, mesh_on_devices
from sdy_jax.runtime.evaluation import apart
from sdy_jax.runtime.meshes import checked_mesh
from sdy_jax.shardy.passes.debug_info import remove_propagation_debug_info
from sdy_jax.shardy.passes.explicit_reshards import settle_written_collectives
from sdy_jax.shardy.passes.meshes import drop_border, renumber_devices

# Sizes that a program in text leaves open (`tensor<?x16xf32>`), resolved by the arguments of a call.

_INNER = "main_of_any_size"


def has_open_sizes(module: ir.Operation) -> bool:
    """Whether main takes or returns a tensor with a size that the text does not say."""
    type_ = function_type(main_function(module))
    return any(_is_open(t) for t in (*type_.inputs, *type_.results))


def with_sizes(module: ir.Operation, shapes: Sequence[tuple[int, ...]]) -> ir.Operation:
    """The module for arguments of these shapes.

    Args:
        module: a `builtin.module`, which is not changed.
        shapes: one for each argument of main; they fit its type.

    Raises:
        SdyError: the sizes break a rule of an op, or do not determine all others.
    """
    module = copied(module)
    given = [_sized(t, shape) for t, shape in zip(function_type(main_function(module)).inputs, shapes, strict=True)]
    with module.context, ir.Location.unknown(module.context):
        _wrap(module, given)
        parsed = ir.Module.parse(module.get_asm(enable_debug_info=True), module.context)
    try:
        found = refined(parsed)
    except ValueError as error:
        raise SdyError(f"arguments of {_listed(given)} do not fit the program: {_reason(error)}") from None
    operation = copied(found)
    _erase_conversions(operation)
    return operation


def _wrap(module: ir.Operation, types: Sequence[ir.Type]) -> None:
    """Lets a new main take arguments of the given types, and call the old one."""
    inner = main_function(module)
    wanted = function_type(inner)
    ir.SymbolTable(module).set_symbol_name(inner, _INNER)
    inner.attributes["sym_visibility"] = ir.StringAttr.get("private")
    attributes = {name: inner.attributes[name] for name in ("arg_attrs", "res_attrs") if name in inner.attributes}
    with ir.InsertionPoint(inner):
        outer = func.FuncOp("main", (list(types), wanted.results), visibility="public")
    for name, attribute in attributes.items():
        outer.attributes[name] = attribute
    with ir.InsertionPoint(outer.add_entry_block()):
        pairs = zip(outer.arguments, wanted.inputs, strict=True)
        operands = [x if x.type == t else _converted(x, t) for x, t in pairs]
        func.ReturnOp(func.CallOp(wanted.results, ir.FlatSymbolRefAttr.get(_INNER), operands).results)


def _converted(x: ir.Value, type_: ir.Type) -> ir.Value:
    return ir.Operation.create("stablehlo.convert", results=[type_], operands=[x]).results[0]


def _erase_conversions(module: ir.Operation) -> None:
    """Removes what `_wrap` has put in."""
    for op in [op.operation for op in body_of(main_function(module)).operations]:
        if op.name == "stablehlo.convert" and op.operands[0].type == op.results[0].type:
            replace_op(op, op.operands)


def _is_open(type_: ir.Type) -> bool:
    return isinstance(type_, ir.RankedTensorType) and not type_.has_static_shape


def _sized(type_: ir.Type, shape: tuple[int, ...]) -> ir.Type:
    """An argument's type with the sizes of a call."""
    if not _is_open(type_):
        return type_
    tensor = ir.RankedTensorType(type_)
    with type_.context:
        return ir.RankedTensorType.get(list(shape), tensor.element_type, loc=ir.Location.unknown())


def _listed(types: Sequence[ir.Type]) -> str:
    return ", ".join(map(str, types)) or "no types"


_ERROR = re.compile(r"error: (?:loc\(.*?\): )?(?P<message>[^\n]*)")


def _reason(error: ValueError) -> str:
    """What jaxlib says, in its first line."""
    text = str(error.__cause__ or error)
    found = _ERROR.search(text)
    return found["message"].strip() if found else text.split("\n", 1)[0]


# Calls of loaded programs.
#
# Programs from `jax.export` are called as jax calls them, so that sizes, platforms and derivatives are its own. All
# others are merged into the module that calls them.


def caller_of(program: Program, module: ir.Operation) -> Any:
    if program.exported is None:
        return _merged(program, module)
    return with_module(program.exported, _bytecode(module), functools.partial(_of_derivative, program)).call


def _of_derivative(program: Program, data: bytes) -> bytes:
    """The module of a derivative that comes with a program: as the program's, it leaves the shardings of its arguments
    and results to the caller, and has none where the program has none."""
    module = copied(binary_module(data, new_context(), program.name))
    with module.context, ir.Location.unknown(module.context):
        if not used_meshes(program.module):
            drop_annotations(module)
        settle_written_collectives(module)
        drop_border(main_function(module))
    return _bytecode(module)


def _merged(program: Program, module: ir.Operation) -> Any:
    ir.SymbolTable(module).set_symbol_name(main_function(module), "main")
    foreign, is_open = module.context.allow_unregistered_dialects, has_open_sizes(module)

    @functools.cache
    def made_for(shapes: tuple[tuple[int, ...], ...]) -> tuple[bytes, tuple[Any, ...]]:
        """The module for arguments of these shapes, and the types of its results."""
        sized = with_sizes(module, shapes) if is_open else module
        return _bytecode(sized), tuple(map(_aval, function_type(main_function(sized)).results))

    def call(*arguments: Any) -> Any:
        text, results = made_for(tuple(jax.typeof(x).shape for x in arguments) if is_open else ())
        found = program_p.bind(*arguments, module=text, name=program.name, results=results, foreign=foreign)
        return jax.tree.unflatten(program.out_tree, found)

    return call


def _aval(type_: ir.Type) -> jax.core.ShapedArray:
    tensor = ir.RankedTensorType(type_)
    return jax.core.ShapedArray(tuple(tensor.shape), numpy_dtype(str(tensor.element_type)))


def _bytecode(module: ir.Operation) -> bytes:
    buffer = io.BytesIO()
    module.write_bytecode(buffer)
    return buffer.getvalue()


program_p = Primitive("program")
program_p.multiple_results = True
program_p.def_abstract_eval(lambda *_, results, **__: list(results))


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: ir.Value, module: bytes, name: str, results: Any, foreign: bool
) -> list[ir.Value]:
    context = ctx.module_context
    if _LAPACK in module:
        _initialize_lapack()
    if foreign:  # ops of the mesh and shard dialects
        context.context.allow_unregistered_dialects = True
    merged = ir.Module.parse(module, context.context)
    types = function_type(main_function(merged.operation)).results
    meshes = _meshes_to_add(merged.operation, context.module.operation)
    called = mlir.merge_mlir_modules(context.module, name, merged, context.symbol_table)
    for op in meshes:
        ir.InsertionPoint.at_block_begin(context.module.body).insert(op)
    return list(func.CallOp(types, ir.FlatSymbolRefAttr.get(called), list(operands)).results)


_LAPACK = b"lapack_"
"""How the targets of jaxlib's calls of LAPACK begin."""


@functools.cache
def _initialize_lapack() -> None:
    """jaxlib fetches LAPACK's functions when jax lowers the first call of one; what is called before ends the process
    (0.10 to 0.12)."""
    matrix = jax.ShapeDtypeStruct((1, 1), "float32")
    apart(lambda: jit(jax.lax.linalg.cholesky).trace(matrix).lower(lowering_platforms=("cpu",)))


def _meshes_to_add(module: ir.Operation, caller: ir.Operation) -> list[ir.Operation]:
    """The mesh and shard dialects' meshes of a module that its caller has not, under names that are free there; taken
    out of the module, because jax knows them for no symbols."""
    known, taken, added = device_meshes(caller), symbols(caller), []
    for key, mesh in device_meshes(module).items():
        if mesh.symbol in taken and known.get(key) != mesh:
            used = taken | symbols(module)
            rename_mesh(module, mesh, next(name for n in count(1) if (name := f"{mesh.symbol}_{n}") not in used))
    for op in [op.operation for op in body_of(module).operations if is_dialect_op(op.operation)]:
        op.detach_from_parent()
        call = view(op)
        if (call.dialect, call["sym_name"]) not in known:
            added.append(op)
    return added


mlir.register_lowering(program_p, _lower)


# A loaded program as a function of JAX arrays, which `partition` takes like any other function.


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


# What other dialects say of a program, its arguments and its results. jax traces a call of it as a function of its own,
# whose module has that at the inner function alone.

_OURS = ("sdy", "jax", "tf", "func", "mesh", "shard", "stablehlo")
"""Dialects whose attributes are about how a program is called or partitioned, which tracing says anew."""

_OF_MODULES = ("mhlo.num_partitions", "mhlo.num_replicas", "mhlo.sharding")
"""So are these of another."""


def _is_foreign(name: str) -> bool:
    dialect, dot, _ = name.partition(".")
    return bool(dot) and dialect not in _OURS and name not in _OF_MODULES


def carry_attributes(program: ir.Operation, traced: ir.Operation) -> None:
    """Gives the module that a program was traced to, and its main function, the attributes of other dialects."""
    if program.context.allow_unregistered_dialects:
        traced.context.allow_unregistered_dialects = True
    with traced.context, ir.Location.unknown(traced.context):
        for name in filter(_is_foreign, program.attributes):
            traced.attributes[name] = ir.Attribute.parse(str(program.attributes[name]), traced.context)
        main = main_function(traced)
        calls = [op.operation for op in body_of(main).operations if op.operation.name == "func.call"]
        for call in calls:
            _carry_from(call, traced, main)


def _carry_from(call: ir.Operation, traced: ir.Operation, main: ir.Operation) -> None:
    """Likewise of a function that main calls, and of its arguments and results as far as they are main's."""
    callee = ir.SymbolTable(traced)[ir.FlatSymbolRefAttr(call.attributes["callee"]).value].operation
    for name in filter(_is_foreign, callee.attributes):
        main.attributes[name] = callee.attributes[name]
    returned = terminator_of(body_of(main))
    places = {
        "arg_attrs": (list(call.operands), list(body_of(main).arguments)),
        "res_attrs": (list(call.results), list(returned.operands)),
    }
    for side, (inner, outer) in places.items():
        own, entries = entries_of(callee, side), entries_of(main, side)
        for value, entry in zip(outer, entries, strict=True):
            if value in inner:
                said = own[inner.index(value)]
                entry |= {name: said[name] for name in said if _is_foreign(name)}
        set_entries(main, side, entries)


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

    def carry_attributes(self, traced: Program) -> None:
        """Gives what it was traced to the attributes of other dialects that it has."""
        carry_attributes(self._program.module, traced.module)

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
