"""Rules of kernels as text, read from grids, index maps and bodies, and why dimensions of grids are no factors."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from kernel_splits import call_of, calls_of, pattern, rule_of, why_whole
from library_kernels import LIBRARY, interpreted

from sdy_jax.ir.kernels.grid_rule import PallasCall, grid_rule

ROWS = ((8, 4), (2, 4), lambda i: (i, 0))
ALL = ((8, 4), (8, 4), lambda i: (0, 0))


def copy(x, out):
    out[...] = x[...]


def numbered(x, out):
    out[...] = x[...] + pl.program_id(0)


def ignore(*refs):
    pass


@pytest.fixture
def kernels_interpreted() -> Iterator[None]:
    with interpreted():
        yield


_SPLASH = "([., ., .], [., ., .], "

RULES = {
    "flash": [
        "([i, j, k, .], [i, j, ., .], [i, j, ., .])->([i, j, k, .], [i, j, k, .], [i, j, k, .])"
        " {i=2, j=2, k=2} shifted={k}",
        "([i, j, ., .], [i, j, k, .], [i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, ., .], [i, j, ., .])"
        "->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        "([i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, k, .], [i, j, k, .], [i, j, k, .], [i, j, k, .])"
        "->([i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
    ],
    "flash of segments": [
        "([i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, ., .], [i, k, .], [i, ., .])"
        "->([i, j, k, .], [i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        "([i, j, ., .], [i, j, k, .], [i, j, k, .], [i, j, ., k], [i, ., .], [i, ., k], [i, j, ., .], [i, j, ., .], "
        "[i, j, ., .], [i, j, ., .])->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        "([i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, k, .], [i, k, .], [i, ., .], [i, j, k, .], [i, j, k, .], "
        "[i, j, k, .], [i, j, k, .])->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
    ],
    "splash": [
        _SPLASH + "[i, j, k, .], [i, j, ., .], [i, j, ., .], [k, .])"
        "->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        _SPLASH + "[i, k, ., .], [i, k, j, .], [i, k, j, .], [i, k, ., .], [i, k, ., .], [i, k, ., .], [., .])"
        "->([i, k, j, .], [i, k, j, .]) {i=2, j=2, k=2} shifted={j}",
        _SPLASH + "[i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, ., k], [i, j, k, .], [i, j, ., k], [k, .])"
        "->([i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
    ],
    "splash with one backward kernel": [
        _SPLASH + "[i, j, k, .], [i, j, ., .], [i, j, ., .], [k, .])"
        "->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        _SPLASH + "[i, k, ., .], [i, k, j, .], [i, k, j, .], [i, k, ., .], [i, k, ., .], [i, k, ., .], [., .])"
        "->([i, j, k, ., .], [i, k, j, .], [i, k, j, .]) {i=2, j=2, k=2} shifted={j}",
    ],
    "splash of one kv head": [
        _SPLASH + "[i, j, k, .], [i, ., .], [i, ., .], [k, .])"
        "->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        _SPLASH + "[i, ., ., .], [i, j, .], [i, j, .], [i, ., ., .], [i, ., ., .], [i, ., ., .], [., .])"
        "->([i, j, .], [i, j, .]) {i=2, j=2} shifted={j}",
        _SPLASH + "[i, j, k, .], [i, ., .], [i, ., .], [i, j, ., k], [i, j, k, .], [i, j, ., k], [k, .])"
        "->([i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
    ],
    "splash of groups": [
        _SPLASH + "[i, j, k, .], [i, j, ., .], [i, j, ., .], [k, .])"
        "->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
        _SPLASH + "[i, k, ., .], [i, k, j, .], [i, k, j, .], [i, k, ., .], [i, k, ., .], [i, k, ., .], [., .])"
        "->([i, k, j, .], [i, k, j, .]) {i=2, j=2, k=2} shifted={j, k}",
        _SPLASH + "[i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, ., k], [i, j, k, .], [i, j, ., k], [k, .])"
        "->([i, j, k, .]) {i=2, j=2, k=2} shifted={k}",
    ],
    "splash of unlike heads": [
        _SPLASH + "[., ., .], [i, j, k, .], [i, j, ., .], [i, j, ., .], [., ., .])"
        "->([i, j, k, .], [i, j, k, .]) {i=2, j=2, k=2} shifted={j, k}",
        _SPLASH
        + "[., ., .], [i, k, ., .], [i, k, j, .], [i, k, j, .], [i, k, ., .], [i, k, ., .], [i, k, ., .], [., ., .])"
        "->([i, k, j, .], [i, k, j, .]) {i=2, j=2, k=2} shifted={j, k}",
        _SPLASH
        + "[., ., .], [i, j, k, .], [i, j, ., .], [i, j, ., .], [i, j, ., k], [i, j, k, .], [i, j, ., k], [., ., .])"
        "->([i, j, k, .]) {i=2, j=2, k=2} shifted={j, k}",
    ],
    "paged": [
        "([.], [.], [.], [.], [., ., ., .], [., ., ., .], [., ., ., .])->([., ., ., .], [., ., ., .], [., ., ., .]) {}"
    ],
    "paged on GPUs": [
        "([i, j, ., .], [j, ., ., .], [j, ., ., .], [i, k, .], [i, .])->([i, k, j, ., .], [i, k, j, .], [i, k, j, .])"
        " {i=2, j=2, k=2} shifted={k}"
    ],
    "megablox": [
        "([], [.], [.], [.], [.], [., .], [., ., i])->([., i]) {i=2}",
        "([], [.], [.], [.], [.], [., .], [., ., .])->([., .]) {}",
        "([], [.], [.], [.], [.], [., .], [., i])->([., ., i]) {i=2}",
    ],
    "product": ["([i, .], [., j])->([i, j]) {i=2, j=2}"],
    "mha": [
        "([j, i, k, .], [j, ., k, .], [j, ., k, .])->([j, i, k, .], [j, k, i]) {i=2, j=2, k=2} shifted={i}",
        "([j, i, k, .], [j, i, k, .])->([j, k, i]) {i=2, j=2, k=2}",
        "([i, ., j, .], [i, ., j, .], [i, ., j, .], [i, ., j, .], [i, ., j, .], [i, j, .], [i, j, .])"
        "->([i, k, j, .], [i, k, j, .], [i, k, j, .]) {i=2, j=2, k=2} shifted={k}",
    ],
    "decode of groups": [
        "([i, j, ., .], [i, j, k, ., .], [i, j, k, ., .])->([i, j, k, ., .], [i, j, k, .], [i, j, k, .])"
        " {i=2, j=2, k=2} shifted={k}"
    ],
    "layer norm": [
        "([i, j, .], [.], [.])->([i, j, .], [i, j], [i, j]) {i=2, j=4}",
        "([i, .], [.], [.], [i, .], [i], [i])->([i, .]) {i=8}",
        "([., .], [.], [.], [., .], [.], [.])->([.], [.]) {}",
    ],
    "softmax": ["([i, j, .])->([i, j, .]) {i=2, j=4}"],
}


@pytest.mark.usefixtures("kernels_interpreted")
@pytest.mark.parametrize("name", RULES)
def test_rules_of_library_kernels(name):
    library = LIBRARY[name]
    function = library.make(library.sizes)
    function = library.gradients(function) if library.gradient else function
    found = [pattern(rule_of(call)) for call in calls_of(function, *library.values(library.sizes))]
    if name.startswith("splash"):
        # In jax 0.10 what its scratch holds are results that nothing reads.
        found = [re.sub(r"->\((\[i, \., \.\], )+", "->(", text) for text in found]
    assert found == RULES[name]


def test_the_text_of_a_rule_keeps_blocks_and_all_else_whole():
    found = rule_of(call_of(copy, (4,), [ROWS], [ROWS]))
    assert str(found.rule) == (
        "([ij, k])->([il, m]) {i=4, j=2, k=4, l=2, m=4} need_replication={j, k, l, m} "
        "blocked_propagation={j, k, l, m}, custom"
    )
    assert found.whole == ("", *("blocks of `copy` are whole", "each step of `copy` has all of it") * 2)


def test_steps_that_share_a_block_stay_together():
    """Query heads in groups of four per head of keys, as two kernels in one number them."""
    heads = [((2, 8, 4), (None, 1, 4), lambda b, h: (b, h, 0)), ((2, 2, 4), (None, 1, 4), lambda b, h: (b, h // 4, 0))]
    found = rule_of(call_of(lambda q, k, out: None, (2, 8), heads, heads[:1]))
    assert str(found.rule).startswith("([i, jk, l], [i, j, m])->([i, jn, o]) {i=2, j=2, k=4")
    minor = [((2, 4, 4), (None, 1, 4), lambda b, h: (b, h % 4, 0)), heads[0]]
    assert (
        pattern(rule_of(call_of(ignore, (2, 8), minor, heads[:1]))) == "([i, ., .], [i, j, .])->([i, j, .]) {i=2, j=2}"
    )


def reads_in_a_custom_call(x, out):
    @jax.custom_jvp
    def place(x):
        return x + pl.program_id(0)

    place.defjvps(lambda tangent, out, x: tangent)
    out[...] = place(x[...])


TABLE = ((8, 4), (2, 4), lambda i, table: (table[i], 0))
SCALED = ((8, 4), (2, 4), lambda i, table: (i, 0))
WHOLE = {
    "one step": ((copy, (1,), [ALL], [ALL]), "grid dimension 0 of `copy` has one step"),
    "nothing follows": (
        (copy, (4,), [ALL], [ALL]),
        "nothing follows grid dimension 0 of `copy`",
    ),
    "a partial last block": (
        (copy, (4,), [((7, 4), *ROWS[1:])], [((7, 4), *ROWS[1:])]),
        "nothing follows grid dimension 0 of `copy`",
    ),
    "a diagonal": (
        (copy, (4,), [((8, 8), (2, 2), lambda i: (i, i))], [((8, 2), (2, 2), lambda i: (i, 0))]),
        "operand 0 follows grid dimension 0 of `copy` along several dimensions",
    ),
    "groups that divide each other in no way": (
        (
            ignore,
            (6,),
            [((6, 4), (2, 4), lambda i: (i // 2, 0)), ((4, 4), (2, 4), lambda i: (i // 3, 0))],
            [((12, 4), *ROWS[1:])],
        ),
        "no two parts of grid dimension 0 of `ignore` have blocks of their own",
    ),
    "a body that calls where no number can go": (
        (reads_in_a_custom_call, (4,), [ROWS], [ROWS]),
        "grid dimension 0 of `reads_in_a_custom_call` is read by its body where it can be given no number",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_why_a_dimension_is_whole(name):
    arguments, reason = WHOLE[name]
    equation = call_of(*arguments)
    assert why_whole(equation, 0) == reason
    assert (0 in rule_of(equation).dims) == (not reason)


def test_aliased_operands_and_results_follow_alike():
    other = (8, 4), (8, 4), lambda i: (0, 0)
    alike = call_of(copy, (4,), [ROWS], [ROWS], input_output_aliases={0: 0})
    assert pattern(rule_of(alike)) == "([i, .])->([i, .]) {i=4}"
    unlike = call_of(ignore, (4,), [other, ROWS], [ROWS], input_output_aliases={0: 0})
    reason = "operand 0 and result 0 are one buffer, and do not follow grid dimension 0 of `ignore` alike"
    assert why_whole(unlike, 0) == reason


def test_an_operand_with_a_partial_last_block_is_whole_and_leaves_the_others():
    found = rule_of(call_of(ignore, (4,), [((7, 4), *ROWS[1:]), ROWS], [ROWS]))
    assert pattern(found) == "([., .], [i, .])->([i, .]) {i=4} shifted={i}"


def test_windows_that_overlap_are_chosen_from_the_whole_operand():
    window = (9, 4), (pl.Element(3), 4), lambda i: (i * 2, 0)
    bounded = (9, 4), (pl.BoundedSlice(2), 4), lambda i: (pl.ds(i, 2), 0)
    for operand in (window, bounded):
        equation = call_of(ignore, (4,), [operand], [ROWS])
        assert pattern(rule_of(equation)) == "([., .])->([i, .]) {i=4} shifted={i}"


def test_blocks_chosen_by_tables_or_by_several_dimensions_are_whole():
    assert pattern(rule_of(call_of(ignore, (4,), [TABLE, SCALED], [SCALED], scalars=[(4,)]))) == (
        "([.], [., .], [i, .])->([i, .]) {i=4} shifted={i}"
    )
    causal = (8, 4), (2, 4), lambda i, j: (jnp.where(j < i, j, i), 0)
    rows = (8, 4), (2, 4), lambda i, j: (i, 0)
    found = rule_of(call_of(ignore, (4, 4), [causal, rows], [rows]))
    assert pattern(found) == "([., .], [i, .])->([i, .]) {i=4} shifted={i}"


def test_a_dimension_may_be_followed_and_looked_up_by_two_indices_of_one_block():
    """As of keys of heads that have blocks of their own: (head, table[head, ...])."""
    both = (4, 8, 4), (None, 2, 4), lambda h, table: (h, table[h], 0)
    heads = (4, 2, 4), (None, 2, 4), lambda h, table: (h, 0, 0)
    found = rule_of(call_of(ignore, (4,), [both], [heads], scalars=[(4,)]))
    assert pattern(found) == "([.], [i, ., .])->([i, ., .]) {i=4} shifted={i}"


def test_a_result_that_nothing_reads_may_lack_a_factor():
    still = (2, 4), (2, 4), lambda i: (0, 0)
    found = rule_of(call_of(lambda x, out, other: None, (4,), [ROWS], [ROWS, still]))
    assert pattern(found) == "([i, .])->([i, .], [., .]) {i=4}"


def test_what_a_compiler_cannot_give_keeps_whole_what_needs_it():
    """Triton takes no scalars before its grid; Mosaic for GPUs is given nothing."""
    causal = (8, 4), (2, 4), lambda i: (3 - i, 0)
    reading, choosing = call_of(numbered, (4,), [ROWS], [ROWS]), call_of(ignore, (4,), [causal, ROWS], [ROWS])
    triton = call_of(numbered, (4,), [ROWS], [ROWS], compiler_params=plgpu.CompilerParams())
    assert rule_of(triton).shifted == rule_of(reading).shifted == {0}
    assert rule_of(reading, "cuda").dims == (0,) and not rule_of(choosing, "cuda").dims
    shapes = [x.aval.shape for x in reading.invars]
    assert not grid_rule(PallasCall(reading.params), shapes, False, False).dims


def test_dimensions_of_vmap_are_named_so_and_not_counted():
    def run(x):
        rows = pl.BlockSpec((2, 4), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(numbered, grid=(4,), in_specs=[rows], out_specs=rows, out_shape=shape, interpret=True)(x)

    mapped = jax.vmap(jax.vmap(run, in_axes=1))
    (equation,) = calls_of(mapped, jax.ShapeDtypeStruct((3, 8, 1, 4), jnp.float32))
    assert pattern(rule_of(equation)) == "([i, j, .])->([i, j, .]) {i=3, j=4} shifted={j}"
    (equation,) = calls_of(mapped, jax.ShapeDtypeStruct((3, 8, 5, 4), jnp.float32))
    assert pattern(rule_of(equation)) == "([i, k, j, .])->([i, j, k, .]) {i=3, j=5, k=4} shifted={k}"
    assert PallasCall(equation.params).named(0) == "a dimension of vmap of `numbered`"
    assert PallasCall(equation.params).named(2) == "grid dimension 0 of `numbered`"


def test_index_maps_that_ask_for_program_ids_keep_all_whole():
    asking = (8, 4), (2, 4), lambda i: (pl.program_id(0), 0)
    equation = call_of(ignore, (4,), [asking, ROWS], [ROWS])
    assert why_whole(equation, 0) == "index maps of `ignore` call program_id" and not rule_of(equation).dims


def test_extents_known_only_when_a_kernel_runs_are_whole():
    def run(n, x):
        rows = pl.BlockSpec((2, 4), lambda i, j: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(copy, grid=(4, n), in_specs=[rows], out_specs=rows, out_shape=shape, interpret=True)(x)

    (equation,) = calls_of(run, jnp.int32(2), jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert pattern(rule_of(equation)) == "([], [i, .])->([i, .]) {i=4}"
    assert why_whole(equation, 1) == "the extent of grid dimension 1 of `copy` is known only when it runs"


def test_a_body_of_an_unknown_form_is_whole_and_says_so(monkeypatch):
    def unknown(*args):
        raise KeyError("tree")

    monkeypatch.setattr("sdy_jax.ir.kernels.grid_rule.carrier", unknown)
    equation = call_of(copy, (4,), [ROWS], [ROWS])
    assert why_whole(equation, 0) == "the body of `copy` is of an unknown form (KeyError: 'tree')"
    assert pattern(rule_of(equation)) == "([., .])->([., .]) {}"
