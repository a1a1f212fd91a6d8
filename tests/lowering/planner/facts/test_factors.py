"""Dealing axes out to factors and back, for what divides evenly."""

import pytest

from sdy_jax.ir.meshes import Mesh
from sdy_jax.ir.parsers import parse_axis, parse_rule
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.facts.factors import (
    canonical,
    digits,
    dimension_axes,
    dividing_prefix,
    factor_axes,
    is_contiguous,
    split_factors,
)

MESH = Mesh.of(x=4, y=2, t=3)


def axes(text):
    return tuple(parse_axis(part) for part in text.split())


@pytest.mark.parametrize(
    ("size", "given", "kept"),
    [
        (8, '"x" "y"', '"x" "y"'),
        (4, '"x" "y"', '"x"'),
        (6, '"x" "y"', '"x":(1)2'),
        (12, '"x" "t"', '"x" "t"'),
        (3, '"x"', ""),
        (0, '"x"', ""),
        (1, '"y"', ""),
        (8, '"x":(1)2 "x":(2)2', '"x"'),
    ],
)
def test_dividing_prefix(size, given, kept):
    assert dividing_prefix(size, axes(given), MESH) == axes(kept)


def test_neighbouring_digits_merge():
    assert canonical(axes('"x":(1)2 "x":(2)2 "y"'), MESH) == axes('"x" "y"')
    assert canonical(axes('"x":(2)2 "x":(1)2'), MESH) == axes('"x":(2)2 "x":(1)2')


def test_axes_share_a_bit_where_they_overlap():
    bits = digits(axes('"x" "x":(1)2 "x":(2)2 "y" "t"'), MESH)
    whole, major, minor, y, t = bits.values()
    assert whole == major | minor and not major & minor
    assert not y & t and not (y | t) & whole and y and t


def test_a_reshape_deals_an_axis_out_to_two_factors_and_back():
    rule = parse_rule("([ij])->([i, j]) {i=2, j=4}")
    dealt = factor_axes([axes('"x" "y"')], rule.operand_mappings[0], rule.factor_sizes, MESH)
    assert dealt == {0: axes('"x":(1)2'), 1: axes('"x":(2)2 "y"')}
    assert dimension_axes(dealt, rule.operand_mappings[0], MESH) == (axes('"x" "y"'),)
    assert dimension_axes(dealt, rule.result_mappings[0], MESH) == (axes('"x":(1)2'), axes('"x":(2)2 "y"'))


def test_a_minor_factor_gets_nothing_while_its_major_neighbour_is_not_full():
    rule = parse_rule("([ij])->([i, j]) {i=4, j=8}")
    assert factor_axes([axes('"y"')], rule.operand_mappings[0], rule.factor_sizes, MESH) == {0: axes('"y"'), 1: ()}
    assert is_contiguous((axes('"x"'), axes('"y"')), rule, MESH)
    assert not is_contiguous((axes('"y"'), axes('"x"')), rule, MESH)


def test_a_factor_is_split_as_the_tensor_in_most_shards_has_it():
    """What has no sharding, or that of another rank, says nothing; nor do factors that are whole everywhere."""
    rule = parse_rule("([i, k], [k, j])->([i, j]) {i=8, j=8, k=8}")
    lhs, out = (TensorSharding.closed("m", [axes(a), axes(b)]) for a, b in (('"x"', '"y"'), ('"x" "t"', "")))
    found = split_factors(rule, [lhs, None, out], MESH)
    assert found == {0: axes('"x" "t"'), 2: axes('"y"')}
    assert split_factors(rule, [out, None, lhs], MESH)[0] == axes('"x" "t"')
    assert split_factors(rule, [TensorSharding.closed("m", [()]), None, None], MESH) == {}
