"""The programs of a function that are verified, as text with arguments, and the same scaled down to meshes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir

from sdy_jax.annotate.arguments import Leaf
from sdy_jax.annotate.program import Program
from sdy_jax.base.errors import InternalError, ShardingError, UnsupportedError
from sdy_jax.base.jax_calls import jit
from sdy_jax.calls.loaded_function import LoadedFunction
from sdy_jax.calls.options import Options
from sdy_jax.calls.partition import partition
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.equivalence.arrays import drawn_arguments
from sdy_jax.equivalence.verification import Subject, Trial
from sdy_jax.ir.attributes import mesh_from_attribute, mesh_to_attribute
from sdy_jax.ir.custom_ops import Kernel, kept_in
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import Mesh, MeshAxis
from sdy_jax.ir.operations import body_of, copied, named, symbol, top_level
from sdy_jax.ir.stored_shardings import used_meshes
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.shardy.passes.calls import inline_calls

# The programs of a function that are verified, as text with arguments: the function's, and its derivative's.

# The programs of a partitioned function that are not planned here: its own as it is traced, and its derivative's.


def traced_program(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """The program of a call as it is traced, before anything is planned."""
    planned = function._function
    return planned.program(planned.arguments(args, kwargs))


def stated_options(function: PartitionedFunction[..., Any]) -> Options:
    """The options of a partitioned function."""
    return function._function.options


def name_of(function: PartitionedFunction[..., Any]) -> str:
    """What messages call a partitioned function."""
    return function._function.name


def source_of(function: PartitionedFunction[..., Any]) -> str:
    """The line at which a function was partitioned."""
    return function._function.source


def size_of_mesh(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many devices the mesh of a call has; of several the first."""
    planned = function._function
    return int(planned.mesh_of(planned.given(args, kwargs)[0]).size)


def plain_results(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of what the function returns under `jax.jit`; of random keys the words."""
    leaves, run = _of_leaves(function, args, kwargs)
    found = jax.tree.leaves(jit(run)(*(leaf.value for leaf in leaves)))
    return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in found]


def plain_text(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What jax makes of the function without us, as StableHLO for one CPU: its arguments are the leaves of the call.
    Empty for programs from text, which are what they say."""
    if isinstance(function._function.fun, LoadedFunction):
        return ""
    leaves, run = _of_leaves(function, args, kwargs)
    return _lowered(run, [_type_of(leaf) for leaf in leaves])


def _of_leaves(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sequence[Leaf], Callable[..., Any]]:
    """The leaves of a call that are not static, and the plain function of them."""
    planned = function._function
    leaves, tree, statics = planned.given(args, kwargs)

    def run(*given: Any) -> Any:
        positional, named = jax.tree.unflatten(tree, given)
        return planned.fun(*statics.merged(positional), **named, **dict(statics.named))

    return leaves, run


def _lowered(run: Callable[..., Any], types: Sequence[Any]) -> str:
    traced = jit(run, keep_unused=True).trace(*types)
    module = traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    return str(module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True))


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The derivative of a function: its program, and what jax makes of it without us."""

    program: Program
    plain: Callable[[], str]


def transposed(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Transposed | None:
    """The program that takes the leaves of a call and a cotangent for every inexact result, and returns the gradients
    of all inexact leaves, laid out like these; None where there are none, nothing to differentiate, or no derivatives,
    as of programs from text."""
    planned = function._function
    if isinstance(planned.fun, LoadedFunction) and not planned.fun.has_derivatives:
        return None
    call, (_, run) = planned.arguments(args, kwargs), _of_leaves(function, args, kwargs)
    program = planned.program(call)
    results = program.stated_results
    smooth, wanted = _smooth(call.leaves), _smooth(results)
    if not smooth or not wanted:
        return None
    cotangents = [results[i] for i in wanted]
    specs = [leaf.spec for leaf in call.leaves], [leaf.spec for leaf in cotangents]
    backward = _backward(run, smooth, wanted)
    backward.__name__ = f"{planned.name}_backward"
    made = partition(
        backward,
        mesh=call.mesh,
        in_shardings=specs,
        out_shardings=tuple(specs[0][i] for i in smooth),
        **{name: getattr(planned.options, name) for name in _KEPT},
    )
    made._function.traced.is_typed = call.are_typed
    called = [_type_of(leaf) for leaf in call.leaves], [_type_of(leaf) for leaf in cotangents]
    return Transposed(traced_program(made, called, {}), lambda: plain_text(made, called, {}))


def _smooth(leaves: Sequence[Leaf]) -> list[int]:
    """The indices of floating-point and complex leaves."""
    return [i for i, leaf in enumerate(leaves) if jnp.issubdtype(_type_of(leaf).dtype, jnp.inexact)]


def _backward(run: Callable[..., Any], smooth: Sequence[int], wanted: Sequence[int]) -> Callable[..., Any]:
    """The gradients of some leaves that a function takes, from cotangents of some that it returns."""

    def backward(given: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def smooth_results(*xs: Any) -> list[Any]:
            merged = list(given)
            for i, x in zip(smooth, xs, strict=True):
                merged[i] = x
            found = jax.tree.leaves(run(*merged))
            return [found[i] for i in wanted]

        _, pull = jax.vjp(smooth_results, *(given[i] for i in smooth))
        return pull(list(cotangents))

    return backward


_KEPT = ("uneven", "layouts")
"""The options of a function with which its derivative is traced; others are about planning."""


def _type_of(leaf: Leaf) -> jax.ShapeDtypeStruct:
    value = leaf.value if isinstance(leaf.value, jax.ShapeDtypeStruct) else jax.typeof(leaf.value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=getattr(value, "weak_type", False))


# The programs of a function that are verified, as text with arguments: the function's, and its derivative's.


@dataclass(frozen=True)
class Subjects:
    """What is verified of a call.

    Attributes:
        programs: the traced ones, whose contexts keep the functions of this process that they call.
        found: the function's program, and its derivative's.
        notes: what is not compared, and why.
    """

    programs: tuple[Program, ...]
    found: tuple[Subject, ...]
    notes: tuple[str, ...] = ()

    @property
    def program(self) -> Program:
        """That of the function."""
        return self.programs[0]


def subjects_of(
    function: PartitionedFunction[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    derivatives: bool,
    seed: int,
) -> Subjects:
    """The programs of a call.

    Raises:
        UnsupportedError: it closes over values of an outer trace.
    """
    program, leaves = traced_program(function, args, kwargs), jax.tree.leaves((args, kwargs))
    leaves = leaves if len(leaves) == len(program.inputs) else [None] * len(program.inputs)  # some are static
    given = [_array(x) for x in (*program.constants, *leaves)]
    plain, why_traced = _without_us(lambda: plain_text(function, args, kwargs))
    first = _subject(program, plain, source_of(function), given, seed)
    notes = [f"{_TRACED}: {why_traced}"] if why_traced else []
    if not derivatives:
        return Subjects((program,), (first,), tuple(notes))
    if not all(isinstance(each, Kernel) for each in kept_in(program.module.context)):
        return Subjects((program,), (first,), (*notes, f"{_NONE}: it calls functions of this process"))
    backward, why_not = _transposed(function, args, kwargs)
    if backward is None:
        return Subjects((program,), (first,), (*notes, f"{_NONE}: {why_not}"))
    known = first.values[len(program.constants) :]
    more = [None] * (len(backward.program.inputs) - len(known))
    values = [*map(_array, backward.program.constants), *known, *more]
    plain, _ = _without_us(backward.plain)
    second = _subject(backward.program, plain, first.source, values, seed + 1, is_derivative=True)
    return Subjects((program, backward.program), (first, second), tuple(notes))


_NONE = "no derivatives"
_TRACED = "the plain program is the one that is traced, without its meshes, as jax does not lower it for one device"


def is_bound_here(program: Program) -> bool:
    """Whether a program calls functions of this process: callbacks, ops of users, kernels."""
    return bool(kept_in(program.module.context))


def _without_us(lowered: Callable[[], str]) -> tuple[str, str]:
    """The text of what jax makes of a function; empty where it lowers it for a mesh only, and then why."""
    try:
        return lowered(), ""
    except Exception as error:  # of which the traced program is there
        return "", str(error).partition("\n")[0] or type(error).__name__


def _transposed(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Transposed | None, str]:
    """The derivative; where there is none, why: jax does not differentiate every function that it runs."""
    try:
        found = transposed(function, args, kwargs)
    except InternalError:
        raise
    except Exception as error:
        return None, str(error).partition("\n")[0] or type(error).__name__
    return (
        found,
        "" if found is not None else "it is a program from text, or takes or returns no floating-point numbers",
    )


def _subject(
    program: Program,
    plain: str,
    source: str,
    given: Sequence[np.ndarray | None],
    seed: int,
    is_derivative: bool = False,
) -> Subject:
    first = len(program.constants)
    return Subject(
        program.name,
        source,
        program.module.get_asm(enable_debug_info=True),
        "" if "sdy.manual_computation" in plain else plain,
        program.mesh_name,
        tuple(drawn_arguments(_inlined(program), given, seed)),
        program.outputs,
        frozenset(first + i for i in program.automatic_arguments),
        program.automatic_results,
        is_derivative,
    )


def _inlined(program: Program) -> Graph:
    """The program in one function, so that what indexes what is seen."""
    module = copied(program.module)
    with module.context, ir.Location.unknown(module.context):
        inline_calls(module)
    return Graph(module)


def _array(x: Any) -> np.ndarray | None:
    """A value as the module takes it; None for what is only a type."""
    if isinstance(x, jax.core.Tracer):
        raise UnsupportedError("verify: the function closes over values of an outer trace; call it outside of that")
    return None if x is None or isinstance(x, jax.ShapeDtypeStruct) else words_of(x)


def words_of(x: Any) -> np.ndarray:
    """An array on the host, as a module takes it: of random keys the words."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x, jax.typeof(x).dtype)


# The meshes on which a program is verified, and the program on another mesh than its own.

MOST_DEVICES = 16
"""Larger meshes are scaled down. Chosen: virtual devices are threads, of which a machine runs a few at once."""


def scaled_down(mesh: Mesh) -> Mesh:
    """The mesh, or one with as many axes of more than one device, each as small as that allows."""
    if mesh.size <= MOST_DEVICES:
        return replace(mesh, device_ids=())
    return Mesh(tuple(MeshAxis(axis.name, min(axis.size, 2)) for axis in mesh.axes))


def uneven(mesh: Mesh) -> Mesh | None:
    """A mesh of other sizes, which few sizes divide: three devices along the largest axis, two along others, one where
    these would be too many. None where there is no such mesh."""
    if mesh.size < 2:
        return None
    largest = max(range(len(mesh.axes)), key=lambda i: mesh.axes[i].size)
    sizes = [3 if i == largest else min(axis.size, 2) for i, axis in enumerate(mesh.axes)]
    for i in reversed(range(len(sizes))):
        if Mesh(tuple(MeshAxis(str(k), n) for k, n in enumerate(sizes))).size > MOST_DEVICES and i != largest:
            sizes[i] = 1
    found = Mesh(tuple(MeshAxis(axis.name, n) for axis, n in zip(mesh.axes, sizes, strict=True)))
    return found if found.axes != mesh.axes else None


def resized(mesh: Mesh, sizes: Mapping[str, int] | Mesh) -> Mesh:
    """The mesh with other sizes of some axes.

    Raises:
        ShardingError: it has no such axis.
    """
    given = sizes.sizes if isinstance(sizes, Mesh) else dict(sizes)
    unknown = [name for name in given if name not in mesh.sizes]
    if unknown:
        known = ", ".join(mesh.axis_names) or "none"
        raise ShardingError(f"meshes: there is no axis {unknown[0]!r}; the function's mesh has {known}")
    wrong = [name for name, size in given.items() if not isinstance(size, int) or size < 1]
    if wrong:
        raise ShardingError(f"meshes: axis {wrong[0]!r} is {given[wrong[0]]!r}; expected a number of devices")
    return Mesh(tuple(MeshAxis(axis.name, given.get(axis.name, axis.size)) for axis in mesh.axes))


_PART = re.compile(r'":\(\d+\)\d+')


def program_on_mesh(program: Program, name: str, mesh: Mesh) -> Program:
    """A program whose mesh has other sizes.

    Raises:
        UnsupportedError: it is about the sizes of its own mesh: it splits by parts of axes, has blocks of devices as in
            the body of a `jax.shard_map`, or another mesh.
    """
    if program.mesh.axes == mesh.axes:
        return program
    module = copied(program.module)
    meshes = _meshes_in_use(module)
    about = (
        (bool(named(module, "sdy.manual_computation")), "computes on blocks of its own mesh"),
        (bool(_PART.search(module.get_asm(large_elements_limit=0))), "splits by parts of axes"),
        (any(_axes(op) not in ((), program.mesh.axes) for op in meshes), "speaks of several meshes"),
    )
    for is_so, what in about:
        if is_so:
            raise UnsupportedError(f"{program.name} {what}, so that it is of no other mesh")
    own = [op for op in meshes if _axes(op)]
    for op in own:
        op.attributes["mesh"] = mesh_to_attribute(mesh, module.context)
    if not own:
        _declare(module, name, mesh)
    return replace(program, module=module, mesh=mesh, mesh_name=name)


def _meshes_in_use(module: ir.Operation) -> list[ir.Operation]:
    """The meshes that a sharding names; all of them where none does. Others are erased."""
    known, used = {symbol(op): op for op in top_level(module, "sdy.mesh")}, set(used_meshes(module))
    for name in known.keys() - used if known.keys() & used else ():
        known.pop(name).erase()
    return list(known.values())


def _axes(op: ir.Operation) -> tuple[MeshAxis, ...]:
    return mesh_from_attribute(op.attributes["mesh"]).axes


def _declare(module: ir.Operation, name: str, mesh: Mesh) -> None:
    attributes = {"sym_name": ir.StringAttr.get(name, module.context), "mesh": mesh_to_attribute(mesh, module.context)}
    with module.context, ir.Location.unknown(module.context):
        ir.Operation.create("sdy.mesh", [], [], attributes, ip=ir.InsertionPoint.at_block_begin(body_of(module)))


# Arguments that fit a mesh that is scaled down: what is for 256 devices would keep four busy for long.
#
# Sizes shrink one by one, largest first, each wherever arguments have it, as long as the function still takes them: a
# function may say its sizes itself, or that one is a product of two others.

_LEAST = 16
"""Sizes that are not shrunk below this. Chosen: they are still split in several ways."""

_MOST = 1 << 8
"""Sizes from which arguments of large meshes are shrunk. Chosen: products of smaller ones run at once."""


@dataclass(frozen=True)
class Smaller:
    """The arguments of a call, some of whose sizes are smaller: `sizes` has new ones by old ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: dict[int, int]
    share: float = 1.0
    """How many of the elements are left."""

    @property
    def notes(self) -> list[str]:
        """What is to be said of it."""
        said = ", ".join(f"{old} as {new}" for old, new in self.sizes.items())
        return [f"arguments are made up with smaller sizes: {said}"] if said else []

    def trial(self, trial: Trial) -> Trial:
        """The trial by costs that fit: what does not depend on the size of arrays is less by as much as these are."""
        costs = trial.costs
        if costs is None or self.share == 1.0:
            return trial
        return replace(trial, costs=_scaled(costs, self.share))


def smaller_arguments(
    function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Smaller:
    """The arguments of a function, smaller ones if its mesh is large and it takes them; of arrays the first elements,
    or types, where integers may be indices."""
    devices = size_of_mesh(function, args, kwargs)
    found = Smaller(args, kwargs, {})
    if devices <= MOST_DEVICES:
        return found
    leaves, tree = jax.tree.flatten((args, kwargs))
    sizes = sorted({n for leaf in leaves for n in _shape(leaf) if n >= _MOST}, reverse=True)
    for size in sizes:
        other = max(_LEAST, size * MOST_DEVICES // devices)
        changed = [_resized(leaf, size, other) for leaf in jax.tree.leaves((found.args, found.kwargs))]
        new_args, new_kwargs = jax.tree.unflatten(tree, changed)
        if _takes(function, new_args, new_kwargs):
            found = Smaller(new_args, new_kwargs, {**found.sizes, size: other})
    share = _elements(jax.tree.leaves((found.args, found.kwargs))) / max(_elements(leaves), 1)
    return replace(found, share=share)


def _takes(function: PartitionedFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        traced_program(function, args, kwargs)
    except Exception:  # what a function raises for sizes that it does not take is its own
        return False
    return True


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _elements(leaves: Sequence[Any]) -> float:
    return float(sum(np.prod(_shape(leaf)) for leaf in leaves))


def _resized(leaf: Any, size: int, other: int) -> Any:
    shape = _shape(leaf)
    if size not in shape:
        return leaf
    new = tuple(other if n == size else n for n in shape)
    if isinstance(leaf, jax.ShapeDtypeStruct) or not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
        return jax.ShapeDtypeStruct(new, leaf.dtype)
    return np.asarray(leaf)[tuple(slice(0, n) for n in new)]


def _scaled(costs: CostModel, share: float) -> CostModel:
    per_axis = {name: _times(getattr(costs, name), share) for name in ("latency", "start")}
    return replace(costs, launch=costs.launch * share, product_launch=costs.product_launch * share, **per_axis)


def _times(rate: Any, share: float) -> Any:
    return rate * share if isinstance(rate, (int, float)) else {axis: value * share for axis, value in rate}
