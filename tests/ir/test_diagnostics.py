"""jaxlib's words become the names of rules; words about something else stay as they are."""

from __future__ import annotations

import pytest

from sdy_jax.ir.validity import RULES
from sdy_jax.ir.verification import PATTERNS, explain, rule_of


def test_every_pattern_belongs_to_a_rule_and_every_rule_has_one():
    # jaxlib dies of the one that is missing.
    assert {rule for rule, _ in PATTERNS} == set(RULES) - {"O2a"}


@pytest.mark.parametrize(
    ("diagnostic", "explained"),
    [
        ("'func.func' op arg 2 - unknown axis name: \"x\"", '[A1] func.func, argument 2: unknown axis name: "x"'),
        ("'a.b_c' op result - unknown mesh: @m", "[S2] a.b_c, result: unknown mesh: @m"),
        (
            "'a.b' op operand 1 - mapping rank must match: 1 != 2",
            "[R2] a.b, operand 1: mapping rank must match: 1 != 2",
        ),
        ("'a.b' op index must be less than 3, got: 3", "[R8] a.b: index must be less than 3, got: 3"),
        ("custom op 'sdy.mesh' duplicate axis name: \"a\"", '[M2] sdy.mesh: duplicate axis name: "a"'),
        ("propagation edges have duplicate step index: 1", "[D1] propagation edges have duplicate step index: 1"),
    ],
)
def test_the_rule_comes_first_and_what_is_right_last(diagnostic, explained):
    rule = rule_of(diagnostic)
    assert explain(diagnostic) == f"{explained}; {RULES[rule]}"


@pytest.mark.parametrize("version", ["maximal", "single-device"])
def test_both_versions_of_jaxlib_are_understood(version):
    assert rule_of(f"'f' op arg 0 - a {version} sharding can only have a sharding with rank 0 and no axes.") == "S3"


@pytest.mark.parametrize(
    "diagnostic",
    [
        "'stablehlo.add' op requires compatible types for all operands and results",
        "expected operation name in quotes",
        "use of undeclared SSA value name",
        "duplicate key 'a' in dictionary attribute",
        "number of block arguments must match the number of operands: 2 != 1",
        "'tensor.dim' op the index must be less than 3, got: 3",
    ],
)
def test_other_diagnostics_are_passed_on(diagnostic):
    assert rule_of(diagnostic) is None
    assert explain(diagnostic) == diagnostic


def test_an_axis_bound_twice_is_told_from_one_used_inside():
    bound = 'operates on axis "a" which is already bound by a parent sdy.manual_computation op'
    assert rule_of(f"'sdy.manual_computation' op {bound}") == "O2h"
    assert rule_of(f"'sdy.manual_computation' op operand - {bound}") == "S8"
