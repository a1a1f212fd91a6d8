"""The algebra of axis references: the table of the specification, and the model of digits."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdy_jax.ir.meshes import (
    AxisRef,
    Mesh,
    PrefixStatus,
    add_or_merge,
    axes_size,
    can_coexist,
    can_merge,
    contains,
    merge,
    merge_neighbours,
    mesh_order,
    natural_order,
    overlap,
    overlaps,
    prefix_of,
    prefix_status,
    prefix_without_overlap,
    prefix_without_overlaps,
    set_difference,
    sort_and_merge,
    suffix_of,
    suffix_without_overlap,
    truncate_overlaps,
)
from sdy_jax.ir.parsers import parse_axis

MESH = Mesh.of(z=64, d=64, y=12)
DIGITS = 6


def ref(text):
    name, colon, digits = text.partition(":")
    return parse_axis(f'"{name}"{colon}{digits}')


def refs(text):
    return tuple(ref(item) for item in text.split())


@pytest.mark.parametrize(
    ("a", "b", "contained", "overlapping", "prefix"),
    [
        ("d", "d:(2)2", True, True, "d:(1)2"),
        ("d:(1)4", "d:(2)4", False, True, "d:(1)2"),
        ("d:(2)8", "d:(4)2", True, True, "d:(2)2"),
        ("d:(1)2", "d:(4)2", False, False, "d:(1)2"),
        ("d:(1)2", "d:(1)4", False, True, None),
        ("y:(1)2", "y:(3)2", False, False, None),
        ("y:(1)3", "y:(2)3", False, True, None),
    ],
)
def test_table_of_the_specification(a, b, contained, overlapping, prefix):
    a, b = ref(a), ref(b)
    assert contains(a, b) is contained
    assert overlaps(a, b) is overlapping
    assert prefix_without_overlap(a, b) == (prefix and ref(prefix))


def test_different_axes_share_nothing():
    a, b = ref("d"), ref("z")
    assert not (contains(a, b) or overlaps(a, b) or prefix_of(a, b) or suffix_of(a, b, MESH) or can_merge(a, b))
    assert can_coexist(a, b)
    assert overlap(a, b) is None
    assert prefix_without_overlap(a, b) == suffix_without_overlap(a, b, MESH) == a


# The model: digit i of an axis of 64 = 2 * 2 * ... is its sub-axis `(2^i)2`.


def of_digits(start, stop, name="d"):
    return AxisRef.canonical(name, 2**start, 2 ** (stop - start), MESH)


def digits(axis):
    return set(range(axis.pre_size.bit_length() - 1, axis.next_pre_size(MESH).bit_length() - 1))


def of_run(run):
    return of_digits(min(run), max(run) + 1) if run else None


RUNS = [(i, j) for i, j in itertools.combinations(range(DIGITS + 1), 2)]
ALL = [of_digits(i, j) for i, j in RUNS]
axis_refs = st.sampled_from(ALL)
disjoint_lists = st.lists(st.integers(0, DIGITS - 1), unique=True, max_size=DIGITS).map(
    lambda ds: merge_neighbours((of_digits(d, d + 1) for d in ds), MESH)
)


@pytest.mark.parametrize("a", ALL, ids=str)
def test_pairs_agree_with_sets_of_digits(a):
    for b in ALL:
        first, second = digits(a), digits(b)
        assert contains(a, b) == (first >= second)
        assert overlaps(a, b) == bool(first & second)
        assert prefix_of(a, b) == (first <= second and min(first) == min(second))
        assert suffix_of(a, b, MESH) == (first <= second and max(first) == max(second))
        assert overlap(a, b) == of_run(first & second)
        assert can_coexist(a, b)
        before = {d for d in first if d < min(second)} if first & second else first
        after = {d for d in first if d > max(second)} if first & second else first
        assert prefix_without_overlap(a, b) == of_run(before)
        assert suffix_without_overlap(a, b, MESH) == of_run(after)
        if can_merge(a, b):
            assert digits(merge(a, b, MESH)) == first | second
            assert max(first) + 1 == min(second)


SIZES = [(pre, size) for pre in range(1, 145) for size in range(2, 145) if 144 % (pre * size) == 0 and size < 144]


@given(st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_sub_axes_coexist_when_their_ends_form_one_chain_of_divisors(first, second):
    a, b = AxisRef.sub("n", *first), AxisRef.sub("n", *second)
    ends = sorted({a.pre_size, b.pre_size, a.sub_axis.next_pre_size, b.sub_axis.next_pre_size})
    assert can_coexist(a, b) == all(hi % lo == 0 for lo, hi in itertools.pairwise(ends))
    assert can_coexist(a, b) == can_coexist(b, a)


def test_merging_all_digits_gives_the_full_axis():
    assert merge(ref("d:(1)2"), ref("d:(2)32"), MESH) == AxisRef("d")
    assert merge(ref("d:(2)2"), ref("d:(4)2"), MESH) == ref("d:(2)4")
    assert add_or_merge((), ref("d"), MESH) == refs("d")
    assert add_or_merge(refs("z d:(1)2"), ref("d:(2)2"), MESH) == refs("z d:(1)4")
    assert add_or_merge(refs("d:(2)2"), ref("d:(1)2"), MESH) == refs("d:(2)2 d:(1)2")


def test_orders_of_one_axis_and_of_several():
    expected = refs("d:(1)2 d:(1)4 d d:(2)2 d:(2)4 d:(4)2")
    shuffled = refs("d:(4)2 d d:(1)4 d:(2)4 d:(1)2 d:(2)2")
    for key in (natural_order, lambda axis: mesh_order(MESH, axis)):
        assert tuple(sorted(shuffled, key=key)) == expected
    assert sort_and_merge(refs("y d z"), MESH) == refs("z d y")
    assert tuple(sorted(refs("z y d"), key=natural_order)) == refs("d y z")


@given(disjoint_lists)
def test_sort_and_merge_is_canonical(axes):
    merged = sort_and_merge(axes, MESH)
    assert set().union(*map(digits, merged)) == set().union(*map(digits, axes))
    assert axes_size(merged, MESH) == axes_size(axes, MESH)
    assert not any(can_merge(a, b) for a, b in itertools.pairwise(merged))
    assert sort_and_merge(reversed(merged), MESH) == merged


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("", "", "equal"),
        ("", "d", "strict"),
        ("d", "", "not"),
        ("d", "d", "equal"),
        ("d", "d z", "strict"),
        ("d:(1)2", "d", "strict"),
        ("d:(1)2", "d z", "strict"),
        ("d", "d:(1)2", "not"),
        ("d:(2)2", "d", "not"),
        ("z d:(1)2", "z d:(1)4", "strict"),
        ("d:(1)2 z", "d z", "not"),
        ("d z", "z d", "not"),
    ],
)
def test_prefix_status(first, second, status):
    assert prefix_status(refs(first), refs(second)) is PrefixStatus(status)


@given(st.lists(axis_refs, max_size=3), st.lists(axis_refs, max_size=3))
def test_set_difference_keeps_the_digits_that_are_not_removed(axes, removed):
    gone = set().union(*map(digits, removed))
    expected = []
    for axis in axes:
        left = sorted(digits(axis) - gone)
        runs = [list(g) for _, g in itertools.groupby(left, key=lambda d: d - left.index(d))]
        expected.extend(map(of_run, runs))
    assert set_difference(axes, removed, MESH) == tuple(expected)


def test_set_difference_drops_what_cannot_coexist():
    assert set_difference(refs("y:(1)3"), refs("y:(2)3"), MESH) == ()
    assert set_difference(refs("z d"), refs("d:(2)2 d:(8)2"), MESH) == refs("z d:(1)2 d:(4)2 d:(16)4")


@given(disjoint_lists, st.lists(axis_refs, max_size=3))
def test_truncation_stops_at_the_first_shared_digit(axes, others):
    taken = set().union(*map(digits, others))
    order = [d for axis in axes for d in sorted(digits(axis))]
    kept = list(itertools.takewhile(lambda d: d not in taken, order))
    truncated = truncate_overlaps(axes, others)
    assert [d for axis in truncated for d in sorted(digits(axis))] == kept


def test_truncation_goes_no_further_after_a_part():
    assert truncate_overlaps(refs("z d:(1)8 y"), refs("d:(4)2")) == refs("z d:(1)4")
    assert truncate_overlaps(refs("z d y"), refs("d:(1)2")) == refs("z")


def test_what_cannot_coexist_has_no_overlap():
    assert overlaps(ref("y:(1)3"), ref("y:(2)3"))
    assert overlap(ref("y:(1)3"), ref("y:(2)3")) is None
    assert suffix_without_overlap(ref("y:(2)3"), ref("y:(1)3"), MESH) is None


def test_prefix_without_several():
    assert prefix_without_overlaps(ref("d"), refs("d:(8)2 z d:(4)2")) == ref("d:(1)4")
    assert prefix_without_overlaps(ref("d"), refs("d:(8)2 d:(1)2")) is None
    assert prefix_without_overlaps(ref("d"), ()) == ref("d")
