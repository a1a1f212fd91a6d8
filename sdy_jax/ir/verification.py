"""Whether a module keeps the rules of the SDY dialect: jaxlib's verifier, with the name of the rule that is broken.

The rules have the names of `validity`. What jaxlib accepts or dies of is checked here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.base.extensions import load_extensions
from sdy_jax.ir.attributes import (
    manual_axes_from_attribute,
    propagation_edges_from_attribute,
    reduction_from_attributes,
    sharding_from_attribute,
    shardings_from_attribute,
)
from sdy_jax.ir.collectives import (
    COLLECTIVE_OPS,
    SdyCollective,
    collective_from_attributes,
    verify_blocks,
    verify_own_attributes,
    verify_reduction,
    verify_strictly,
    verify_useful,
)
from sdy_jax.ir.meshes import AxisRef, Mesh, braces
from sdy_jax.ir.operations import function_type, module_meshes, owning_op
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import sharding_of as stored_sharding_of
from sdy_jax.ir.validity import RULES, RuleError, fail, verify_mesh

# The shardings that are attached to the values of an op.

Meshes = Mapping[str, Mesh]
"""The meshes of a module by symbol."""


def mesh_of(sharding: TensorSharding, meshes: Meshes) -> Mesh | None:
    """The mesh of a sharding, None if the module has none of this name."""
    return sharding.mesh if isinstance(sharding.mesh, Mesh) else meshes.get(sharding.mesh)


@dataclass(frozen=True, slots=True)
class AttachedSharding:
    """A sharding, the type of its value, and what to call that."""

    where: str
    sharding: TensorSharding
    type: ir.Type


def attached_shardings(op: ir.Operation) -> Iterator[AttachedSharding]:
    """The shardings that an op attaches to its operands and results, or a function to its arguments and results.

    What is no sharding at all is left out.
    """
    for attribute, types, where in _lists(op):
        try:
            shardings = shardings_from_attribute(attribute)
        except ValueError:
            continue
        for i, (sharding, type_) in enumerate(zip(shardings, types, strict=False)):
            yield AttachedSharding(f"{op.name}, {where} {i}", sharding, type_)
    for attribute, type_, where in _singles(op):
        try:
            sharding = sharding_from_attribute(attribute)
        except ValueError:
            continue
        yield AttachedSharding(where, sharding, type_)


def _lists(op: ir.Operation) -> Iterator[tuple[ir.Attribute, list[ir.Type], str]]:
    for name, values, where in (
        ("in_shardings", op.operands, "operand"),
        ("out_shardings", op.results, "result"),
        ("sdy.sharding", op.results, "result"),
    ):
        if name in op.attributes:
            yield op.attributes[name], [value.type for value in values], where


def _singles(op: ir.Operation) -> Iterator[tuple[ir.Attribute, ir.Type, str]]:
    if op.name == "func.func":
        yield from _of_function(op)
    if op.name.startswith("sdy."):
        for name in ("sharding", "out_sharding"):
            if name in op.attributes:
                yield op.attributes[name], op.results[0].type, op.name


def _of_function(op: ir.Operation) -> Iterator[tuple[ir.Attribute, ir.Type, str]]:
    name = ir.StringAttr(op.attributes["sym_name"]).value
    function = function_type(op)
    for key, what, types in (("arg_attrs", "argument", function.inputs), ("res_attrs", "result", function.results)):
        entries = ir.ArrayAttr(op.attributes[key]) if key in op.attributes else ()
        for i, (attributes, type_) in enumerate(zip(entries, types, strict=False)):
            if "sdy.sharding" in attributes:
                yield attributes["sdy.sharding"], type_, f"func.func @{name}, {what} {i}"


def shape_or_unknown(type_: ir.Type) -> tuple[int, ...] | None:
    """The shape of a value, with -1 for unknown sizes; None for what is no tensor."""
    if isinstance(type_, ir.TupleType) and type_.num_types == 1:
        type_ = type_.get_type(0)
    return tuple(max(n, -1) for n in type_.shape) if isinstance(type_, ir.ShapedType) and type_.has_rank else None


def written_sharding(value: ir.Value) -> TensorSharding | None:
    """The sharding that is written for a value, as it is seen where the value is used; None if there is none."""
    maker = owning_op(value)
    if isinstance(value, ir.BlockArgument) and maker.name == "stablehlo.while":
        value = maker.results[value.arg_number]
    return stored_sharding_of(value)


def location_text(location: ir.Location) -> str | None:
    """A location as MLIR writes it; None where nothing is known."""
    text = str(location).removeprefix("loc(").removesuffix(")")
    return None if text == "unknown" else text


# What is checked before jaxlib's verifier sees a module: what it takes for right, or dies of, and the process with
# it.
#
# Meshes are verified where text is parsed only. Single-device shardings of manual computations, and records of
# propagation that speak of tensors which are not there, end in a crash.


def check_before_jaxlib(op: ir.Operation, meshes: Meshes) -> None:
    """Raises a RuleError for M1 to M6, O2a, and those mistakes of S2 and D1 that jaxlib does not report."""
    if op.name == "sdy.mesh":
        name = ir.StringAttr(op.attributes["sym_name"]).value
        verify_mesh(meshes[name], f"sdy.mesh @{name}")
    for attached in attached_shardings(op):
        if isinstance(attached.sharding.mesh, Mesh):
            verify_mesh(attached.sharding.mesh, f"{attached.where}, inline mesh")
        if op.name == "sdy.manual_computation":
            _check_devices(attached, meshes)
    if "sdy.propagation_edges" in op.attributes:
        _check_edges(op, meshes)


def _check_devices(attached: AttachedSharding, meshes: Meshes) -> None:
    mesh = mesh_of(attached.sharding, meshes)
    if mesh is not None and mesh.is_maximal and _has_dimensions(attached.type):
        fail("O2a", attached.where, f"its sharding <{attached.sharding}> is on a single device")


def _has_dimensions(type_: ir.Type) -> bool:
    return isinstance(type_, ir.ShapedType) and type_.has_rank and type_.rank > 0


def _check_edges(op: ir.Operation, meshes: Meshes) -> None:
    where, attribute = f"{op.name}, propagation edges", op.attributes["sdy.propagation_edges"]
    if not str(attribute).startswith("#sdy.propagation_edges<"):
        return
    for spread in propagation_edges_from_attribute(attribute).spreads():
        for value in (spread.source, *spread.targets):
            if value.index < 0:
                fail("D1", where, f"{value} is negative")
    for value in (*op.operands, *op.results):
        sharding = written_sharding(value)
        if sharding is not None and mesh_of(sharding, meshes) is None:
            fail("S2", where, f"unknown mesh @{sharding.mesh}")


# The rules that the references document and jaxlib does not enforce: `dialect_rules.DOCUMENTED_RULES`.
#
# M7 is about text alone, where `source_text` checks it: jaxlib's parser leaves such device ids out.


def check_documented(op: ir.Operation, meshes: Meshes) -> None:
    """M8, S10 and O2i to O2k of a valid op."""
    if op.name == "sdy.mesh":
        _check_device_count(ir.StringAttr(op.attributes["sym_name"]).value, meshes)
    for attached in attached_shardings(op):
        _check_split(attached)
    if op.name == "sdy.manual_computation":
        _check_manual(op, meshes)


def _check_device_count(name: str, meshes: Meshes) -> None:
    """A mesh has as many devices as the first one of its module; those without axes do not count."""
    mesh, counted = meshes[name], [(other, m) for other, m in meshes.items() if m.axes]
    if not mesh.axes:
        return
    first, expected = counted[0]
    if mesh.size != expected.size:
        fail("M8", f"sdy.mesh @{name}", f"it has {mesh.size} devices, @{first} {expected.size}")


def _check_split(attached: AttachedSharding) -> None:
    """What is split has elements."""
    for dim, (axes, size) in enumerate(
        zip(attached.sharding.axes, shape_or_unknown(attached.type) or (), strict=False)
    ):
        if axes and size == 0:
            fail("S10", f"{attached.where}, dimension {dim}", f"it has size 0 and is split along {braces(axes)}")


def _check_manual(op: ir.Operation, meshes: Meshes) -> None:
    manual, values = manual_axes_from_attribute(op.attributes["manual_axes"]), list(attached_shardings(op))
    found = (mesh_of(attached.sharding, meshes) for attached in values)
    mesh = next((mesh for mesh in found if mesh is not None and mesh.axes), None)
    if mesh is not None:
        _check_manual_axes(manual, mesh, op.name)
    for attached in values:
        if isinstance(attached.type, ir.ShapedType):  # others name no axes
            _check_manual_value(attached.sharding, manual, attached.where)


def _check_manual_axes(manual: Sequence[str], mesh: Mesh, where: str) -> None:
    """They are in the order of their mesh."""
    ordered = sorted(manual, key=mesh.axis_names.index)
    if list(manual) != ordered:
        said, right = (braces([AxisRef(name) for name in names]) for names in (manual, ordered))
        fail("O2j", where, f"the manual axes are {said}", f"write {right}")


def _check_manual_value(sharding: TensorSharding, manual: Sequence[str], where: str) -> None:
    """A sharding of a manual computation names each manual axis, whole."""
    lists = (*sharding.axes, sharding.replicated_axes, sharding.unreduced_axes)
    named = [axis for axes in lists for axis in axes if axis.name in manual]
    part = next((axis for axis in named if axis.sub_axis), None)
    if part is not None:
        fail("O2k", where, f"<{sharding}> names {part}, a part of a manual axis")
    missing = [axis for axis in manual if axis not in {ref.name for ref in named}]
    if missing:
        fail("O2i", where, f'<{sharding}> does not name the manual axis "{missing[0]}"')


# What sdy collectives have to keep besides what jaxlib verifies: the rules of our own partitioned modules.


def check_all_reduce(op: ir.Operation, meshes: Meshes) -> None:
    """A5 to A8 for the axes of an all_reduce: jaxlib takes any sub-axes there."""
    if op.name == "sdy.all_reduce":
        collective, _, result = _read(op)
        verify_own_attributes(collective, result.rank, _mesh(result, meshes), op.name)


def check_strictly(op: ir.Operation, meshes: Meshes) -> None:
    """V1 to V5 and V10, of a valid collective."""
    if op.name not in COLLECTIVE_OPS:
        return
    collective, operand, result = _read(op)
    before, after = _mesh(operand, meshes), _mesh(result, meshes)
    verify_strictly(collective, operand, result, after, op.name)
    verify_reduction(collective, reduction_from_attributes(op.attributes), operand, op.name)
    verify_useful(collective, operand, result, before == after, op.name)
    shape = shape_or_unknown(op.results[0].type)
    if shape is not None and not after.is_maximal:
        verify_blocks(operand, result, shape, after, op.name)


def _mesh(sharding: TensorSharding, meshes: Meshes) -> Mesh:
    mesh = mesh_of(sharding, meshes)
    assert mesh is not None
    return mesh


def _read(op: ir.Operation) -> tuple[SdyCollective, TensorSharding, TensorSharding]:
    """What a collective says, and the shardings of its operand, replicated where none is written, and its result."""
    after = written_sharding(op.results[0])
    assert after is not None
    before = written_sharding(op.operands[0]) or TensorSharding.replicated(after.mesh, after.rank)
    return collective_from_attributes(op.name, op.attributes), before, after


# What jaxlib's parser and verifiers say about a module, with the name of the dialect's rule that is broken.
#
# The table is the specification: a diagnostic belongs to the first rule one of whose patterns occurs in it. Wordings
# are those of jaxlib 0.10 and 0.12; one that no pattern knows is passed on as it is.

PATTERNS: tuple[tuple[str, str], ...] = (
    ("M1", r"axis size must be at least 1"),
    ("M2", r"duplicate axis name"),
    ("M3", r"device id must be non-negative"),
    ("M4", r"axes is empty and device_ids has more than one element"),
    ("M5", r"product of axis sizes must match total number of device ids"),
    ("M6", r"sorted device ids must be iota"),
    ("A1", r"unknown axis name"),
    ("A2", r"duplicate axis ref"),
    ("A3", r"both sub-axis and full-axis are used"),
    ("A4", r"two consecutive sub-axes can be merged"),
    ("A5", r"sub-axis pre-size must be at least 1"),
    ("A6", r"sub-axis sizes must be greater than 1"),
    ("A7", r"sub-axis next pre-size \d+ doesn't divide"),
    ("A8", r"sub-axis size is equal to the full axis size"),
    ("A9", r"overlapping sub-axes"),
    ("A11", r"replicated axes are not ordered"),
    ("A12", r"unreduced axes are not ordered"),
    ("S1", r"sharding doesn't match tensor rank"),
    ("S1", r"result sharding has rank \d+ but operand sharding has rank"),
    ("S2", r"unknown mesh: "),
    ("S3", r"a (maximal|single-device) sharding can only have a sharding with rank 0"),
    ("S4", r"non-shaped tensors can only have a sharding|only ranked tensors can have a sharding"),
    ("S5", r"only have a sharding for a tuple of size 1"),
    ("S6", r"is empty and closed but has a priority"),
    ("C1", r"collective on operand without sharding"),
    ("C3", r"result mesh (does not match operand mesh|name is different|has different axes)"),
    ("C4", r"result sharding has rank \d+ but collective axes has rank"),
    ("C5", r"(reduction|r2u) axes are not ordered"),
    ("C8", r"can't apply .* axis .* to operand sharding on dimension"),
    ("C9", r"result sharding doesn't match expected|operand and result shardings are not equivalent"),
    ("C9", r"input and output must share the same dimension shardings"),
    ("C10", r"'sdy\.all_to_all' op parameter list is empty|source/target dimensions in all-to-all params"),
    ("C10", r"'sdy\.all_to_all' op (source|target) dimensions? "),
    ("C11", r"sharded size of result doesn't match operand"),
    ("C12", r"reduction axis .* overlaps with"),
    ("C13", r"r2u axes must not be empty|r2u axis .* overlaps with"),
    ("C14", r"out_unreduced_axes should be in_unreduced_axes"),
    ("O1", r"cannot specify `BOTH` as the direction"),
    ("O2b", r"'sdy\.manual_computation' op (operand|result) shardings don't match number of values"),
    ("O2b", r"number of op (operands|results) and region (operands|results) must match"),
    ("O2c", r"must have all manual axes come before free axes"),
    ("O2d", r"is not divisible by the manual axes size"),
    ("O2e", r"corresponding sharding, and region (operand|result) shape at index \d+ must match"),
    ("O2f", r"all in and out shardings must be bound to the same mesh"),
    ("O2g", r"unknown manual axis"),
    ("O2h", r"'sdy\.manual_computation' op operates on axis .* already bound by a parent"),
    ("S8", r"operates on axis .* already bound by a parent"),
    ("O3", r"(in|out)_shardings shardings don't match number of values"),
    ("O3", r"'sdy\.named_computation' op inferred type"),
    ("O3", r"number of block arguments must match the number of operands.*\"sdy\.named_computation\""),
    ("O3", r"expected the type of the \d+'th block argument to match.*\"sdy\.named_computation\""),
    ("O4", r"sdy\.data_flow_edge to have a static-shaped result|input of sdy\.data_flow_edge"),
    ("O5", r"sdy\.func_data_flow_edge to have a static-shaped result|operand of sdy\.func_data_flow_edge"),
    ("S9", r"should have a sharding attribute of type|shardings don't match number of values"),
    ("S9", r"^'func\.func' op expects (argument|result) attribute array to have the same number"),
    ("R1", r"should have a sharding rule attribute of type|number of (operands|results) and mappings must match"),
    ("R1", r"expected '\[', got `\)`.*failed to parse Sdy_OpShardingRule parameter '(operand|result)_mappings'"),
    ("R2", r"mapping rank must match|expected a ranked tensor with a static shape"),
    ("R3", r"dim mapping must have at least one factor"),
    ("R3", r"expected '\]', got `\*`.*failed to parse Sdy_OpShardingRule parameter"),
    ("R4", r"expecting factor indices to be within"),
    ("R5", r"cannot reuse factors for the same tensor value"),
    ("R6", r"can't have a factor of size 1 if there are multiple factors"),
    ("R7", r"isn't used in operand and result mappings"),
    ("R8", r"^'[\w.]+' op index must be (less than|non-negative)|indices of special factors must be (sorted|unique)"),
    ("R9", r"a factor can only be in one of the reduction, need replication, or permutation"),
    ("R10", r"reduction factor cannot be in result mappings"),
    ("R12", r"expecting factor indices to be ordered like an iota"),
    ("D1", r"propagation edges (attr|have)|propagation edges attribute|expected a value ref to have an? "),
    ("D1", r"expected axis ref to be in one of the meshes"),
)

_TABLE = tuple((rule, re.compile(pattern, re.DOTALL)) for rule, pattern in PATTERNS)
_PLACE = re.compile(r"^'([\w.]+)' op (?:(arg|result|operand)(?: (\d+))? - )?")
_CUSTOM = re.compile(r"^custom op '([\w.]+)' ")
_KINDS = {"arg": "argument", "result": "result", "operand": "operand"}


def rule_of(diagnostic: str) -> str | None:
    """The rule that a diagnostic is about; None if it is about something else than the dialect's rules."""
    return next((rule for rule, pattern in _TABLE if pattern.search(diagnostic)), None)


def explain(diagnostic: str, context: str = "") -> str:
    """The diagnostic with the name of its rule before and what would be right after it.

    `context` has the other messages about the same mistake: they help to find the rule.

    >>> print(explain("custom op 'sdy.mesh' duplicate axis name: 'x'"))
    [M2] sdy.mesh: duplicate axis name: 'x'; the axis names of a mesh are unique
    """
    rule = rule_of(f"{diagnostic}\n{context}")
    if rule is None:
        return diagnostic
    problem = _CUSTOM.sub(r"\1: ", _PLACE.sub(_place, diagnostic)).rstrip(".")
    return f"[{rule}] {problem}; {RULES[rule]}"


def _place(match: re.Match[str]) -> str:
    op, kind, number = match.groups()
    if kind is None:
        return f"{op}: "
    return f"{op}, {_KINDS[kind]}{'' if number is None else f' {number}'}: "


# Verifying a module: guards before jaxlib's verifier, its verdict by the rule's name, and what it does not check.

EXTENSIONS: list[Callable[[ir.Operation, bool], None]] = []
"""The verifiers of dialects that jaxlib does not know; each takes the module, and whether annotations of what is
annotated are refused."""

Check = Callable[[ir.Operation, Meshes], None]
"""A check of one op, given the meshes of its module."""


def verify_module(module: ir.Operation, strict: bool = False, *, tolerant: bool = False) -> None:
    """Verifies a `builtin.module` and everything in it.

    Args:
      module: a module, with ops of any known dialect, mesh and shard among them.
      strict: whether the `DOCUMENTED_RULES` hold as well, which jaxlib does not enforce.
      tolerant: whether a mesh or shard annotation of an annotated value, where the dialects leave open what it means,
        is a reshard; else it is an error.

    Raises:
      ShardingError: a rule of the dialect that is broken, by its name, with the op and its location; or else what
        jaxlib's verifier finds, which knows the other dialects too.
    """
    _verify(module, check_all_reduce, *([check_documented] if strict else []))
    _verify_extensions(module, not tolerant)


def verify_collectives_strictly(module: ir.Operation) -> None:
    """Verifies a partitioned module as `verify_module` does, its collectives by V1 to V5 and V10 as well.

    Raises:
      ShardingError: as `verify_module`.
    """
    _verify(module, check_all_reduce, check_strictly)
    _verify_extensions(module, True)


def _verify(module: ir.Operation, *checks: Check) -> None:
    """The guards, jaxlib's verifier, and further checks of what it has found right."""
    malformed: Exception | None = None
    try:
        _check_all(module, check_before_jaxlib)
    except (KeyError, IndexError) as error:  # an op lacks an attribute or a block: jaxlib says which
        malformed = error
    try:
        module.verify()
    except ir.MLIRError as error:
        first = error.error_diagnostics[0]
        raise RuleError(explain(first.message), location_text(first.location)) from None
    if malformed is not None:
        raise malformed
    for check in checks:
        _check_all(module, check)


def _verify_extensions(module: ir.Operation, strict: bool) -> None:
    load_extensions()
    for verify in EXTENSIONS:
        verify(module, strict)


def _check_all(module: ir.Operation, check: Check) -> None:
    """Runs a check on every op; an error says where the op stands."""
    for op, meshes in _walk(module, module_meshes(module)):
        try:
            check(op, meshes)
        except RuleError as error:
            raise RuleError(error.message, location_text(op.location)) from None


def _walk(op: ir.Operation, meshes: Mapping[str, Mesh]) -> Iterator[tuple[ir.Operation, Meshes]]:
    """All ops inside an op, in pre-order, with the meshes of the module that each is in."""
    for region in op.regions:
        for block in region.blocks:
            for inner in (view.operation for view in block.operations):
                yield inner, meshes
                yield from _walk(inner, module_meshes(inner) if inner.name == "builtin.module" else meshes)
