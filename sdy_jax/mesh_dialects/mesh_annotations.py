"""The pass `import-mesh-annotations`: annotations of the mesh and shard dialects become those of SDY."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.base.errors import ShardingError
from sdy_jax.ir.attributes import mesh_to_attribute, sharding_attributes
from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.operations import defining_op, is_used, module_meshes, module_of, owning_op, pre_order, symbol
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.ir.text.mesh_dialects import GAP
from sdy_jax.mesh_dialects.meshes import (
    DeviceMesh,
    Devices,
    MeshError,
    StatedSharding,
    annotated_meshes,
    defining,
    device_meshes,
    stated_sharding,
)
from sdy_jax.mesh_dialects.semantics.layout import PARTIAL_IN_SDY, Layout, axis_numbers, tensor_sharding
from sdy_jax.mesh_dialects.simplify_mesh import answer_mesh_shape, answer_shard_shape
from sdy_jax.mesh_dialects.verification import verify_ops
from sdy_jax.mesh_dialects.view import SHARDING_TYPES, DialectOp, dialect_ops, fail, function_around, is_dialect_op
from sdy_jax.shardy.passes.calls import inline_functions

# Each annotation of the mesh and shard dialects becomes what SDY has for it; `mesh_annotations` says what that is.

LAYOUT = "sdy_jax.layout"
"""What a constraint was to say that SDY cannot: halos, offsets, a partial average."""

PLACES = ("process_multi_index", "process_linear_index")
"""Ops that query a device's position."""


def replace_annotations(module: ir.Operation, ops: list[DialectOp]) -> None:
    """Replaces all annotations, and ops that ask for sizes.

    Args:
      module: a module whose meshes are those of SDY, too.
      ops: its mesh and shard ops, in order. Those that only say what the others mean are left, without uses.

    Raises:
      RuleError: what an op says cannot be said of whole tensors, or is not known yet.
    """
    _Annotations(module, ops).replace()


class _Annotations:
    """The annotations of one module, whose meshes are resolved.

    What they say is found out before any of them is replaced: `stated` is the sharding that each value of a sharding
    type is, `before` the shard op whose result another one is about.
    """

    def __init__(self, module: ir.Operation, ops: list[DialectOp]):
        self.ops = ops
        self.meshes = module_meshes(module)
        self.stated: dict[ir.Value, StatedSharding] = {}
        for op in self.ops:
            if op.name in ("sharding", "get_sharding") and (stated := self._stated(op)):
                self.stated[op.result] = stated
        self.before = {
            op.result: before for op in self.ops if op.name == "shard" and (before := defining(op["src"], "shard"))
        }

    def replace(self) -> None:
        """Replaces all of them."""
        self._check_places()
        for op in self.ops:
            if op.name == "mesh_shape":
                answer_mesh_shape(op, self._device_mesh(op.dialect, op.mesh))
            elif op.name == "shard_shape":
                stated = self._of(op)
                answer_shard_shape(op, stated.layout, self._mesh(stated))
        for op in self.ops:
            if op.name == "shard":
                self._replace(op)

    def _check_places(self) -> None:
        """Whole tensors have no place."""
        around = {op.operation: function_around(op.operation) for op in self.ops if op.name in (*PLACES, "shard")}
        annotated = {around[op.operation] for op in self.ops if op.name == "shard"} - {None}
        for op in self.ops:
            function = around.get(op.operation)
            if op.name in PLACES and function in annotated:
                op.fail(
                    f"it tells a device where it is, but @{symbol(function)} is annotated with {op.dialect}.shard and "
                    "works on whole tensors; put it in sdy.manual_computation"
                )

    # What they say.

    def _mesh(self, stated: StatedSharding) -> DeviceMesh:
        return self._device_mesh(stated.dialect, stated.mesh)

    def _device_mesh(self, dialect: str, name: str) -> DeviceMesh:
        return DeviceMesh(dialect, name, tuple(axis.size for axis in self.meshes[name].axes))

    def _of(self, op: DialectOp) -> StatedSharding:
        """The sharding that an op is given."""
        given: ir.Value = op["sharding"]
        if given not in self.stated:
            message = f"what sharding {given.get_name()} is, is not known here; state it by {op.dialect}.sharding"
            op.fail(message, given)
        return self.stated[given]

    def _stated(self, op: DialectOp) -> StatedSharding | None:
        """The sharding that an op of a sharding type stands for; None where it is that of a value without one."""
        if op.name == "sharding":
            return stated_sharding(op.result)
        shard = defining(op["source"], "shard")
        return self.stated.get(shard["sharding"]) if shard else self._of_sdy(op)

    def _of_sdy(self, op: DialectOp) -> StatedSharding:
        """The sharding of a value that SDY knows."""
        sharding = sharding_of(op["source"])
        assert sharding is not None  # as the verifier has seen
        if not isinstance(sharding.mesh, str):
            op.fail(f"<{sharding}> names no mesh of the module; run lift-inlined-meshes first")
        try:
            split, kind, partial = axis_numbers(sharding, self.meshes[sharding.mesh], op.dialect)
        except ShardingError as error:
            op.fail(str(error))
        return StatedSharding(op.dialect, sharding.mesh, Layout(split, kind, partial))

    # Replacing them.

    def _replace(self, op: DialectOp) -> None:
        source = op.operation.operands[0]
        given = self._of(op)
        stated = given.normalized(self._mesh(given))
        annotation = _Annotation(
            op.operation, source, self._sharding(stated, source), _layout(stated.layout, op.operation.context)
        )
        is_plain = not op["annotate_for_users"] and not self._reshards(op)
        op.result.replace_all_uses_with(annotation.state() if is_plain else annotation.constrain())
        op.operation.erase()

    def _reshards(self, op: DialectOp) -> bool:
        """Whether a plain shard says something else than the plain one whose result it is about."""
        before = self.before.get(op.result)
        if before is None or before["annotate_for_users"]:
            return False
        stated, first = self._of(op), self._of(before)
        return not stated.means_the_same(first, self._mesh(first))

    def _sharding(self, stated: StatedSharding, value: ir.Value) -> TensorSharding:
        layout = stated.layout
        kind = layout.partial if layout.partial in PARTIAL_IN_SDY else None
        axes = layout.partial_axes if kind else ()
        rank = ir.RankedTensorType(value.type).rank
        return tensor_sharding(layout.split, kind, axes, self.meshes[stated.mesh], rank, stated.mesh)


def _layout(stated: Layout, context: ir.Context) -> ir.Attribute | None:
    """What SDY has no words for."""
    found: dict[str, ir.Attribute] = {}
    for name, sizes in (("halo_sizes", stated.halos), ("sharded_dims_offsets", stated.offsets)):
        if sizes:
            entries = [size if isinstance(size, int) else GAP for size in sizes]
            found[name] = ir.DenseI64ArrayAttr.get(entries, context)
    if stated.partial is not None and stated.partial not in PARTIAL_IN_SDY:
        found["partial_type"] = ir.StringAttr.get(stated.partial, context)
        found["partial_axes"] = ir.DenseI16ArrayAttr.get(list(stated.partial_axes), context)
    return ir.DictAttr.get(found, context) if found else None


class _Annotation:
    """The conversion of one shard op to SDY: the value that it annotates, and the sharding that it states."""

    def __init__(self, op: ir.Operation, value: ir.Value, sharding: TensorSharding, layout: ir.Attribute | None):
        self.op, self.value, self.sharding, self.layout = op, value, sharding, layout

    def constrain(self) -> ir.Value:
        """A value for the users of the op's result."""
        if self.sharding.unreduced_axes and self._is_argument and sharding_of(self.value) is None:
            # It says nothing yet; saying so keeps import from copying the constraint's sharding, terms included.
            set_sharding(self.value, TensorSharding.fully_open(self.sharding.mesh, self.sharding.rank))
        return self._constraint(self.sharding)

    def state(self) -> ir.Value:
        """States the layout of the value itself, and returns the value that users of the op's result are to use."""
        whole = replace(self.sharding, unreduced_axes=(), reduction="sum")
        if whole != self.sharding and self._is_argument:
            self._own(whole)
            return self._constraint(self.sharding)
        if not self._own(self.sharding) or self.layout is not None:
            self._constraint(self.sharding)
        return self.value

    @property
    def _is_argument(self) -> bool:
        """Whether the value is an argument of a function."""
        return isinstance(self.value, ir.BlockArgument) and owning_op(self.value).name == "func.func"

    def _constraint(self, sharding: TensorSharding) -> ir.Value:
        context = self.op.context
        layout = {} if self.layout is None else {LAYOUT: self.layout}
        constraint = ir.Operation.create(
            "sdy.sharding_constraint",
            results=[self.value.type],
            operands=[self.value],
            attributes={**sharding_attributes("sharding", sharding, context), **layout},
            loc=self.op.location,
            ip=ir.InsertionPoint(self.op),
        )
        return constraint.results[0]

    def _own(self, sharding: TensorSharding) -> bool:
        """Gives the value its sharding, where it can have one. Returns whether it had it before."""
        own = sharding_of(self.value)
        if own == sharding:
            return True
        if own is not None and not own.is_fully_replicated_and_open:
            name = self.value.get_name()
            fail(self.op, f"{name} has two different shardings, <{own}> and here <{sharding}>", self.value)
        maker = defining_op(self.value)
        is_result = maker is not None and not maker.name.startswith("sdy.") and not is_dialect_op(maker)
        if is_result or self._is_argument:
            set_sharding(self.value, sharding)
        return False


# Annotations of the mesh and shard dialects become those of SDY: what propagation and partitioning understand.
#
# | mesh | SDY |
# |---|---|
# | `mesh.mesh` | `sdy.mesh` of the same name |
# | `mesh.shard` | an `sdy.sharding_constraint` without uses, and the value's own sharding where it can have one |
# | `mesh.shard .. annotate_for_users` | an `sdy.sharding_constraint` for the uses of the result |
# | `mesh.mesh_shape`, `mesh.shard_shape` | constants, lookups in a table of constants |
# | `mesh.sharding`, `mesh.get_sharding` | nothing: they say what the others mean |
#
# A partial tensor is unreduced. That is about the terms that devices hold, and the value is the value: what comes
# into a function and goes out of it is whole. Halos and offsets are about buffers, which a program on whole tensors
# does not show; they stay at the constraint in the attribute `sdy_jax.layout`. Element-wise ops run on blocks with
# these offsets (`stated_blocks.py`); the plan says by how many ops offsets are kept, and that halos are not.
#
# Ops that communicate, and those that tell where a device is, are of programs on local arrays and stay as they are.
#
# Source: the mesh dialect reference, `mesh.shard` and `mesh.sharding`.


def import_mesh_annotations(
    module: ir.Operation, *, axis_names: str = "", devices: str = "", strict: bool = True
) -> None:
    """The pass: `import_annotations` with options as text.

    Args:
      module: a `builtin.module`, edited in place.
      axis_names: `data,model`: what the axes of meshes with as many axes are called.
      devices: how many there are, for a mesh with a size that is not known.
      strict: whether shards of shards that say something else are refused; else each reshards.
    """
    names = tuple(name.strip() for name in axis_names.split(",") if name.strip())
    if devices and not devices.isdecimal():
        raise ShardingError(f"option devices of import-mesh-annotations is {devices!r}; expected a number")
    import_annotations(module, Devices(axis_names=names, count=int(devices) if devices else None), strict)


def import_annotations(module: ir.Operation, devices: Devices | None = None, strict: bool = True) -> None:
    """Turns the annotations of a module into those of SDY.

    Args:
      module: a `builtin.module`, edited in place: before propagation, or after it, when `get_sharding` knows the
        sharding of every value. Modules that work on local arrays alone are left as they are.
      devices: what meshes are laid over; needed where a size is `?`.
      strict: whether shards of shards that say something else are refused; else each reshards.

    Raises:
      RuleError: an op breaks a rule of its dialect, or says what cannot be said of whole tensors; or a mesh does not
        fit the devices.
    """
    if not module.context.allow_unregistered_dialects:
        return
    modules = [op for op in pre_order(module) if op.name == "builtin.module" and not _is_local(_ops_of(op))]
    for inside in modules:
        inline_functions(inside, _passes_shardings)
        _resolve_meshes(inside, devices or Devices())
    verify_ops(module, strict)
    for inside in modules:
        ops = _ops_of(inside)
        replace_annotations(inside, ops)
        _drop_unused(inside, ops)


def annotated_mesh(module: ir.Operation, devices: Devices) -> tuple[Mesh, str]:
    """The mesh that a module is annotated with, and its symbol: the given one, if it is among them, else that of the
    first sharding. An empty one if there is no sharding, or the mesh's size is not known.

    Raises:
      RuleError: a mesh does not fit the devices.
    """
    ops = _ops_of(module)
    used = next((op.mesh for op in ops if op.name == "sharding"), "")
    meshes = [op for op in ops if op.name == "mesh"]
    is_open = devices.mesh is None and devices.count is None and any(None in op["shape"] for op in meshes)
    if is_open or used not in {op["sym_name"] for op in meshes}:
        return Mesh(()), ""
    resolved = _resolved(module, ops, devices)
    name = next((name for name in (used, *resolved) if resolved[name] == devices.mesh), used)
    return resolved[name], name


def drop_mesh_annotations(module: ir.Operation) -> None:
    """Takes the annotations out of a module. Meshes stay where their sizes are asked for."""
    for inside in [op for op in pre_order(module) if op.name == "builtin.module"]:
        ops = _ops_of(inside)
        for op in (op for op in ops if op.name == "shard"):
            op.result.replace_all_uses_with(op.operation.operands[0])
            op.operation.erase()
        _drop_unused(inside, ops)


def _ops_of(module: ir.Operation) -> list[DialectOp]:
    """The mesh and shard ops of a module; those of modules inside have other meshes."""
    if not module.context.allow_unregistered_dialects:
        return []
    return [op for op in dialect_ops(module) if module_of(op.operation) == module]


def _is_local(ops: list[DialectOp]) -> bool:
    """A program on local arrays: devices communicate, and nothing is annotated."""
    names = {op.name for op in ops}
    return "shard" not in names and any(op.declaration.communicates or op.name in PLACES for op in ops)


def _passes_shardings(function: ir.Operation) -> bool:
    """Whether a function takes or returns a sharding. What it says of its tensors is known where it is called."""
    type_ = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    return any(str(part) in SHARDING_TYPES for part in (*type_.inputs, *type_.results))


# Meshes ---------------------------------------------------------------------------------------------------------------


def _resolve_meshes(module: ir.Operation, devices: Devices) -> None:
    """Writes their sizes into the dialects' meshes, and declares them as meshes of SDY."""
    ops, declared = _ops_of(module), module_meshes(module)
    resolved = _resolved(module, ops, devices)
    for op in (op for op in ops if op.name == "mesh"):
        name, context = op["sym_name"], module.context
        sizes = [axis.size for axis in resolved[name].axes]
        op.operation.attributes["shape"] = ir.DenseI64ArrayAttr.get(sizes, context)
        if name in declared:
            continue
        attributes = {
            "sym_name": ir.StringAttr.get(name, context),
            "mesh": mesh_to_attribute(resolved[name], context),
        }
        ip = ir.InsertionPoint(op.operation)
        ir.Operation.create("sdy.mesh", attributes=attributes, loc=op.operation.location, ip=ip)
        declared[name] = resolved[name]


def _resolved(module: ir.Operation, ops: list[DialectOp], devices: Devices) -> dict[str, Mesh]:
    try:
        return annotated_meshes(device_meshes(module).values(), module_meshes(module), devices)
    except MeshError as error:
        named = [op for op in ops if op.name == "mesh" and op["sym_name"] == error.symbol]
        op = next(iter(named), next(op for op in ops if op.name == "mesh"))
        op.fail(error.message)


def _drop_unused(module: ir.Operation, ops: list[DialectOp]) -> None:
    """Removes shardings that nothing has any more, and the dialects' meshes, except for those that ops are about."""
    for op in reversed(ops):
        if op.name in ("sharding", "get_sharding") and not is_used(op.result):
            op.operation.erase()
    left = _ops_of(module)
    used = {(op.dialect, op.mesh) for op in left if "mesh" in op.values}
    for op in left:
        if op.name == "mesh" and (op.dialect, op["sym_name"]) not in used:
            op.operation.erase()
