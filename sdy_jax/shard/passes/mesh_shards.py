"""Each annotation of the mesh and shard dialects becomes what SDY has for it; `mesh_annotations` says what that is."""

from __future__ import annotations

from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.errors import ShardingError
from sdy_jax.ir.operations import defining_op, module_meshes, owning_op, symbol
from sdy_jax.ir.stored_shardings import set_sharding, sharding_of
from sdy_jax.representation.attributes import sharding_attributes
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.shard.op_meshes import DeviceMesh
from sdy_jax.shard.passes.mesh_queries import answer_mesh_shape, answer_shard_shape
from sdy_jax.shard.semantics.layout import Layout
from sdy_jax.shard.stated_shardings import StatedSharding, defining, stated_sharding
from sdy_jax.shard.to_sdy import PARTIAL_IN_SDY, axis_numbers, tensor_sharding
from sdy_jax.shard.view import DialectOp, fail, function_around, is_dialect_op
from sdy_jax.text.kinds import GAP

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
