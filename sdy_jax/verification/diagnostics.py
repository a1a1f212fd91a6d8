"""What jaxlib's parser and verifiers say about a module, with the name of the dialect's rule that is broken.

The table is the specification: a diagnostic belongs to the first rule one of whose patterns occurs in it. Wordings are
those of jaxlib 0.10 and 0.12; one that no pattern knows is passed on as it is.
"""

from __future__ import annotations

import re

from sdy_jax.representation.dialect_rules import RULES

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
