"""Programs, and functions traced to them: StableHLO + sdy modules with the user's shardings on their borders."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import Literal
from jax.extend.mlir import ir
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from sdy_jax.annotate import callbacks, jaxprs  # noqa: F401  (register how they are written)
from sdy_jax.annotate.argument_errors import ClosedOverReferences, HoldsTokens, NamesMappedAxes, no_result
from sdy_jax.annotate.arguments import AUTO, Leaf, is_token, match_prefix
from sdy_jax.annotate.callbacks import unordered
from sdy_jax.annotate.completion import (
    argument_type,
    as_seen,
    finish,
    in_stated_type,
    marked,
    settle_types,
    type_of_result,
    with_type,
)
from sdy_jax.annotate.jaxprs import all_equations, line_of, named_axes
from sdy_jax.annotate.kernels import state_work, with_library_functions
from sdy_jax.annotate.site import Site, tracing
from sdy_jax.annotate.specs import padded, resolve
from sdy_jax.annotate.trees import Leaves, stand_ins, with_arguments
from sdy_jax.base.errors import ShardingError
from sdy_jax.base.extensions import Extension
from sdy_jax.base.jax_lowering import rules_for, rules_of_moves
from sdy_jax.base.jax_tracing import trace_and_lower, with_devices_of
from sdy_jax.ir.device_orders import rewritten
from sdy_jax.ir.graph import DERIVED
from sdy_jax.ir.jax_shardings import AnyMesh, explicit_axes, mesh_from_jax, type_elsewhere
from sdy_jax.ir.locations import short_source
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.new_ops import declare_mesh
from sdy_jax.ir.operations import body_of, copied, locate_bodies, main_function, returned_by
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import entries_of, set_entries, set_function_shardings
from sdy_jax.runtime.boundary import is_on_host, states_host
from sdy_jax.runtime.devices import lowering_platform

if TYPE_CHECKING:
    from jax.export import Exported

    from sdy_jax.annotate.arguments import Leaf


# Programs: a StableHLO + sdy module with its mesh, its argument names and the arrays it closes over.

LOADS: Extension[Callable[[str], Program]] = Extension("loads")
RUN_LOCAL: Extension[Callable[[Program, jax.sharding.Mesh | None, Any, Any], Any]] = Extension("run_local")


@dataclass(frozen=True, slots=True)
class Program:
    """A module whose `main` takes the closed-over `constants`, then one argument per input leaf.

    `inputs` and `outputs` are the paths of the leaves (`params['w1']`, `result[0]`); `in_info` and `out_info` have a
    shape and dtype per leaf, with jax's extended dtypes, of which the module only shows the raw words. `in_tree` is the
    structure of positional and keyword arguments.

    The `main` of a program that `sdy.load` found in a `jax.export` file is called as `exported` says; `partition`
    brings it to that form. The mesh of a loaded program is the one that its shardings are on, empty if it has none.

    `jaxpr` is the function that was traced, of the tracers among `constants` and of the input leaves.
    `unreduced_arguments` are the indices of the input leaves that are unreduced by their types (`Leaf.unreduced`),
    `automatic_arguments` and `automatic_results` those of the leaves whose layout the planner chooses (`AUTO`).
    `unchecked` says that checks of `checkify.check` were left out of the module, `is_typed` that the function was
    traced with types that show shardings, which `in_info` and `out_info` have. `host_arguments` and `host_results` are
    the indices of the input leaves and results that are in the memory of the host. `types_elsewhere` has the types of
    results that are on another mesh with Explicit axes, None for all others. `uncut` is the function's mesh, where
    `mesh` cuts the axes of it. `stated_results` are the results as `out_shardings` state them.

    Example:
        program = sdy.load("model.mlir")
        print(sdy.partition(program).plan(*program.in_info))

    See also:
        `load`, `loads`: make it.
        `partition`: takes it like a function.
    """

    module: ir.Operation
    mesh: Mesh
    mesh_name: str
    constants: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_info: tuple[Any, ...]
    out_info: tuple[Any, ...]
    in_tree: PyTreeDef
    out_tree: PyTreeDef
    name: str = "main"
    exported: Exported | None = None
    jaxpr: Any = None
    unreduced_arguments: frozenset[int] = frozenset()
    automatic_arguments: frozenset[int] = frozenset()
    automatic_results: frozenset[int] = frozenset()
    unchecked: bool = False
    is_typed: bool = False
    host_arguments: frozenset[int] = frozenset()
    host_results: frozenset[int] = frozenset()
    uncut: Mesh | None = None
    types_elsewhere: tuple[NamedSharding | None, ...] = ()
    stated_results: tuple[Leaf, ...] = ()

    def on_uncut(self, sharding: TensorSharding) -> TensorSharding:
        """A sharding in axes of the function's mesh."""
        if self.uncut is None or sharding.mesh != self.mesh_name:
            return sharding
        return rewritten(sharding, self.mesh, self.uncut, self.mesh_name)

    def on_mesh(self, sharding: TensorSharding) -> TensorSharding:
        """A sharding that is in axes of the function's mesh in those of the program's."""
        if self.uncut is None or sharding.mesh != self.mesh_name:
            return sharding
        return rewritten(sharding, self.uncut, self.mesh, self.mesh_name)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes of the function's mesh."""
        return (self.uncut or self.mesh).axis_names

    def axis_of_function(self, name: str) -> str:
        """The axis of the function's mesh that an axis of the program's is, or is a part of."""
        return name if self.uncut is None or name in self.uncut.sizes else name.rpartition(":")[0]

    @property
    def is_automatic(self) -> bool:
        """Whether the layouts of some arguments or results are left to the planner."""
        return bool(self.automatic_arguments or self.automatic_results)

    def with_module(self, module: ir.Operation) -> Program:
        """The same program at another stage."""
        return replace(self, module=module)

    def mark_donated(self, leaves: Collection[int]) -> None:
        """Says of argument leaves that results may take over their memory."""
        main = main_function(self.module)
        with self.module.context:
            entries = entries_of(main, "arg_attrs")
            for leaf in leaves:
                entries[len(self.constants) + leaf]["jax.buffer_donor"] = ir.BoolAttr.get(True)
            set_entries(main, "arg_attrs", entries)

    @staticmethod
    def from_text(text: str) -> Program:
        """The program that a string holds, in StableHLO, SDY and the mesh and shard dialects: as `loads`."""
        return LOADS.function(text)

    def run_local(self, mesh: jax.sharding.Mesh | None = None, in_specs: Any = None, out_specs: Any = None) -> Any:
        """A program on local arrays as a function of global ones: as `sdy_jax.shard.run_local`.

        Example:
            >>> total = Program.from_text('''
            ... mesh.mesh @m(shape = 2x4)
            ... func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
            ...   %0 = mesh.all_reduce %x on @m mesh_axes = [0, 1] : tensor<3xf32> -> tensor<3xf32>
            ...   return %0 : tensor<3xf32>
            ... }''').run_local()
            >>> total(jnp.ones((8, 3))).shape
            (8, 3)
        """
        return RUN_LOCAL.function(self, mesh, in_specs, out_specs)


# The meshes of `jax.shard_map`s in a traced function: of the devices of the function's mesh, in its order, as under
# jit, whose program has one order.


def check_mapped_meshes(jaxpr: Any, mesh: AnyMesh) -> None:
    """
    Raises:
        ShardingError: a `jax.shard_map` in a closed jaxpr is on other devices than the mesh, or on these in another
            order.
    """
    if not isinstance(mesh, jax.sharding.Mesh):
        return
    devices = [*mesh.devices.flat]
    for equation in all_equations(jaxpr):
        own = equation.params.get("mesh") if equation.primitive.name == "shard_map" else None
        if not isinstance(own, jax.sharding.Mesh) or [*own.devices.flat] == devices:
            continue
        how = "these devices in another order" if {*own.devices.flat} == {*devices} else "other devices"
        raise ShardingError(
            f"Received incompatible devices: the function is partitioned on the mesh {mesh_from_jax(mesh)}, and a "
            f"jax.shard_map{_at(line_of(equation))} is on {mesh_from_jax(own)}, which has {how}; to fix: give both "
            "meshes the same devices in one order, or partition the function on the other mesh"
        )


def _at(line: str) -> str:
    return f" at {short_source(line)}" if line else ""


# Functions traced to programs, with the users' shardings on arguments and results.


@dataclass(frozen=True, slots=True)
class Border:
    """What a call passes to a function, and what is stated of its results.

    Attributes:
        leaves: the input leaves: paths, `ShapeDtypeStruct`s without sharding, and specifications.
        tree: from these to `(args, kwargs)`.
        out_shardings: a prefix tree of specifications of the results.
    """

    leaves: Sequence[Leaf]
    tree: PyTreeDef
    out_shardings: Any


def from_function(
    fun: Callable[..., Any],
    border: Border,
    jax_mesh: AnyMesh,
    keep_types: bool = False,
    in_context: bool = True,
    machine: str = "",
) -> Program:
    """Traces `fun` to a program, with the users' shardings on its arguments and results.

    Args:
        fun: called as `fun(*args, **kwargs)` with `(args, kwargs)` rebuilt from the border's leaves by its tree. Errors
            of tracing name it, and its arguments, by its name, signature and line.
        border: its arguments, and what is stated of its results.
        jax_mesh: the mesh. On its Explicit axes the function sees types.
        keep_types: whether results have the types that they are computed with, whatever is stated for them.
        in_context: whether the mesh is in context while `fun` is traced, and types on Auto axes show it; else what is
            in context around the call, and types show what those of the arguments do.
        machine: the platform of the machine for which the program is planned, if it is not that of the mesh's devices.
    """
    leaves, tree, out_shardings = border.leaves, border.tree, border.out_shardings
    mesh = mesh_from_jax(jax_mesh)
    avals = tuple(argument_type(leaf, mesh, jax_mesh) for leaf in leaves)

    outputs: list[Leaf] = []

    @functools.wraps(fun)
    def checked(*args: Any, **kwargs: Any) -> Leaves:
        result = _arrays(with_arguments(fun)(*args, **kwargs))
        matched = match_prefix(out_shardings, result, "result", "out_shardings")
        outputs[:] = [replace(leaf, value=None) for leaf in matched]  # no tracer outlives the trace
        found = Leaves.of(result)
        if not keep_types and site.is_typed:
            found.leaves = [in_stated_type(leaf, mesh, jax_mesh) for leaf in matched]
        return found

    site = Site(mesh, jax_mesh, machine)
    context = jax.sharding.use_abstract_mesh(jax_mesh.abstract_mesh) if in_context else nullcontext()
    with context, with_devices_of(jax_mesh), tracing(site):
        platform = lowering_platform(jax_mesh)
        shown = jax_mesh if in_context and not site.is_typed else None
        seen = [as_seen(x, leaf, jax_mesh, shown) for x, leaf in zip(avals, leaves, strict=True)]
        arguments = stand_ins(tree, seen, [leaf.path for leaf in leaves])
        change = functools.partial(_lowered, site)
        rules = (*site.lowering_rules, *rules_for(machine, platform))
        if any(leaf.is_on_host for leaf in leaves):
            rules = (*rules, *rules_of_moves(platform))
        module, jaxpr, results, constants = trace_and_lower(
            checked, arguments, jax_mesh, platform, rules, change, site.is_typed
        )
    if refs := [constant for constant in jaxpr.consts if isinstance(constant, jax.Ref)]:
        raise ClosedOverReferences(refs)
    out_info, out_tree = results.leaves, results.tree
    if site.is_typed:  # jax leaves the types on a mesh with axes of both kinds out
        out_info = [with_type(info, aval) for info, aval in zip(out_info, jaxpr.out_avals, strict=True)]
    outputs = [replace(leaf, value=info) for leaf, info in zip(outputs, out_info, strict=True)]
    with module.context, ir.Location.unknown(module.context):
        if site.is_typed:
            settle_types(module.operation)
        if site.unfinished:
            finish(module.operation, site.collectives)
        locate_bodies(module.operation)
        if site.has_kernels:
            state_work(module.operation, constants)
        mesh_name = declare_mesh(module.operation, mesh)
        # A copy of its own: an operation does not keep the module object alive that jax made.
        program = Program(
            copied(module),
            mesh,
            mesh_name,
            constants,
            tuple(leaf.path for leaf in leaves),
            tuple(leaf.path for leaf in outputs),
            avals,
            tuple(out_info),
            tree,
            out_tree,
            jaxpr=jaxpr,
            unreduced_arguments=frozenset(i for i, leaf in enumerate(leaves) if leaf.unreduced),
            automatic_arguments=_automatic(leaves),
            automatic_results=_automatic(outputs),
            unchecked=site.unchecked,
            is_typed=site.is_typed,
            host_arguments=frozenset(i for i, leaf in enumerate(leaves) if leaf.is_on_host),
            host_results=_on_host(jaxpr.out_avals, outputs),
            types_elsewhere=_types_elsewhere(jaxpr, leaves, outputs, jax_mesh),
            stated_results=tuple(outputs),
        )
        _annotate(program, leaves, outputs, jax_mesh, keep_types)
    return program


def _lowered(site: Site, jaxpr: Any) -> Any:
    """The jaxpr that is lowered.

    Raises:
        ShardingError: a `jax.shard_map` in it is on other devices, or on these in another order.
        NamesMappedAxes: it uses an axis of a `jax.vmap` around the function.
    """
    check_mapped_meshes(jaxpr, site.jax_mesh)
    if axes := named_axes(jaxpr):
        raise NamesMappedAxes(axes)
    lowered = with_library_functions(unordered(jaxpr), site.mesh.size)
    return marked(lowered) if site.is_typed else lowered


def _automatic(leaves: Sequence[Leaf]) -> frozenset[int]:
    return frozenset(i for i, leaf in enumerate(leaves) if leaf.spec is AUTO)


def _on_host(avals: Sequence[Any], outputs: Sequence[Leaf]) -> frozenset[int]:
    pairs = enumerate(zip(avals, outputs, strict=True))
    return frozenset(i for i, (aval, leaf) in pairs if is_on_host(aval) or states_host(leaf.spec))


def _types_elsewhere(
    jaxpr: Any, leaves: Sequence[Leaf], outputs: Sequence[Leaf], mesh: AnyMesh
) -> tuple[NamedSharding | None, ...]:
    """The types on other meshes of results for which nothing is stated: those of arguments that are passed through, and
    those that the function gives them."""
    passed = dict(zip(jaxpr.jaxpr.invars[len(jaxpr.jaxpr.invars) - len(leaves) :], leaves, strict=True))
    found = []
    for variable, leaf in zip(jaxpr.jaxpr.outvars, outputs, strict=True):
        source = None if isinstance(variable, Literal) else passed.get(variable)
        own = type_elsewhere(variable.aval, mesh) if source is None else source.elsewhere
        found.append(own if leaf.spec is None else None)
    return tuple(found)


def _arrays(result: Any) -> Any:
    """The tree itself, if all its leaves are arrays or numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(result):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise no_result(f"result{jax.tree_util.keystr(path)}", leaf) from None
        if is_token(leaf):
            raise HoldsTokens(f"result{jax.tree_util.keystr(path)}")
    return result


def _annotate(
    program: Program, inputs: Sequence[Leaf], outputs: Sequence[Leaf], jax_mesh: AnyMesh, keep_types: bool
) -> None:
    """Writes the specified shardings on main's arguments and results; where they `keep_types`, these come first."""
    main = main_function(program.module)
    first, arguments, returned = len(program.constants), body_of(main).arguments, returned_by(main)
    given = {
        first + i: _resolved(leaf, arguments[first + i].type, program, "in_shardings", jax_mesh)
        for i, leaf in enumerate(inputs)
    }
    set_function_shardings(main, "arg_attrs", given if explicit_axes(jax_mesh) else _without_none(given))
    wanted = {
        i: _resolved(leaf, returned[i].type, program, "out_shardings", jax_mesh) for i, leaf in enumerate(outputs)
    }
    if explicit_axes(jax_mesh):  # where jax has written types
        types = {
            i: type_of_result(leaf, returned[i].type, program.mesh_name, jax_mesh) for i, leaf in enumerate(outputs)
        }
        derived = [i for i, type_ in types.items() if type_ is not None and (keep_types or wanted[i] is None)]
        set_function_shardings(main, "res_attrs", {**wanted, **{i: types[i] for i in derived}})
        return _mark_derived(main, derived)
    set_function_shardings(main, "res_attrs", _without_none(wanted))


def _mark_derived(main: ir.Operation, results: Iterable[int]) -> None:
    """Says of results that nobody stated their shardings, which are those of their types."""
    entries = entries_of(main, "res_attrs")
    for number in results:
        entries[number][DERIVED] = ir.UnitAttr.get(main.context)
    set_entries(main, "res_attrs", entries)


def _resolved(leaf: Leaf, type_: ir.Type, program: Program, where: str, jax_mesh: AnyMesh) -> TensorSharding | None:
    sharding = resolve(leaf, len(leaf.value.shape), program.mesh, program.mesh_name, where, jax_mesh)
    return padded(sharding, ir.RankedTensorType(type_).rank) if sharding is not None else None


def _without_none(shardings: dict[int, TensorSharding | None]) -> dict[int, TensorSharding | None]:
    return {number: sharding for number, sharding in shardings.items() if sharding is not None}
