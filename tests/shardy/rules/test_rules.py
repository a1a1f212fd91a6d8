"""Op sharding rules against the ones that jaxlib's own pass computes for the same ops."""

from __future__ import annotations

import random

import jaxlib
import numpy as np
import pytest
from jax.extend.mlir import passmanager
from jax.extend.mlir.dialects import chlo, stablehlo
from jax.sharding import PartitionSpec as P
from partitioned_ops import check
from partitioned_ops import op as function_of_op
from random_programs.calls import chlo_op
from random_programs.indexing import overwrite
from random_programs.tensors import FAMILIES, Case, Family, Shape, Tensor, comparator, reducer, some_shape
from rule_oracle import assert_same_rules, function_of, our_rule, parse, rules_of

from sdy_jax.ir.graph import Graph, Value
from sdy_jax.lowering.ops.registry import EMITTERS, REMATERIALIZABLE, STRATEGIES
from sdy_jax.shardy.propagation.data_flow import edges_of
from sdy_jax.shardy.rules import RuleBook, has_no_rule_silently
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE, is_elementwise
from sdy_jax.shardy.rules.registry import LINEAR, RULES

# --- generated ops ----------------------------------------------------------------------------------------------------

DTYPES = ("f32", "f32", "f32", "i32", "i1", "complex<f32>")


def some_case(rng: random.Random, make: Family) -> Case:
    """A random op of a family."""
    while True:
        case = make(rng, Tensor(some_shape(rng), rng.choice(DTYPES)))
        if case is not None:
            return case


@pytest.mark.parametrize("conservative", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_generated_ops_have_the_oracles_rule(name: str, conservative: bool) -> None:
    rng = random.Random(name)
    assert_same_rules("".join(function_of(some_case(rng, FAMILIES[name]), i) for i in range(60)), conservative)


def test_every_registered_op_is_generated() -> None:
    made = {some_case(random.Random(i), make).name for make in FAMILIES.values() for i in range(2000)}
    in_manual_computations = {name for name in RULES if name.startswith(("mesh.", "shard."))}
    not_on_cpus = {"chlo.ragged_dot"}  # test_ragged_dot.py has it
    assert set(RULES) - made - in_manual_computations == {"sdy.sharding_constraint"} | not_on_cpus


@pytest.mark.parametrize("conservative", [False, True])
def test_ops_without_a_rule_in_shardy_have_none_in_its_terms(conservative: bool) -> None:
    x, shape = Tensor((4, 8)), Tensor((2,), "i64")
    uniform = "rng_distribution = #stablehlo<rng_distribution UNIFORM>"
    dims = "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], lhs_ragged_dimensions = [0]"
    ragged = f"ragged_dot_dimension_numbers = #chlo.ragged_dot<{dims}, rhs_group_dimensions = [0]>"
    cases = [
        Case("stablehlo.rng", [Tensor(()), Tensor(()), shape], [x], uniform),
        Case("stablehlo.dynamic_reshape", [x, shape], [x]),
        Case("stablehlo.dynamic_iota", [shape], [x], "iota_dimension = 0 : i64"),
        Case("stablehlo.real_dynamic_slice", [x, shape, shape, shape], [x]),
        Case("stablehlo.reshape", [Tensor((2, 0))], [Tensor((0, 3))]),
        Case("chlo.ragged_dot", [Tensor((6, 4)), Tensor((2, 4, 3)), shape], [Tensor((6, 3))], ragged),
    ]
    assert_same_rules("".join(map(function_of, cases, range(len(cases)))), conservative)


def test_a_sorted_dimension_may_be_counted_from_the_end() -> None:
    # Shardy takes a negative one for none, and would sort shards.
    first, second = (
        Case("stablehlo.sort", [Tensor((4, 8))], [Tensor((4, 8))], f"dimension = {d} : i64", comparator())
        for d in (-1, 1)
    )
    assert our_rule(function_of(first, 0), first.name) == our_rule(function_of(second, 0), second.name)


# --- worked examples and rules that depend on neighbours --------------------------------------------------------------


def reshaped(source: Shape, to: Shape) -> Case:
    return Case("stablehlo.reshape", [Tensor(source)], [Tensor(to)])


def concatenated(*shapes: Shape, dim: int) -> Case:
    size = sum(x[dim] for x in shapes)
    out = (*shapes[0][:dim], size, *shapes[0][dim + 1 :])
    return Case("stablehlo.concatenate", [Tensor(x) for x in shapes], [Tensor(out)], f"dimension = {dim} : i64")


def convolved(lhs: Shape, rhs: Shape, out: Shape, feature_groups: int = 1, batch_groups: int = 1) -> Case:
    space = ", ".join(map(str, range(len(lhs) - 2)))
    return Case(
        "stablehlo.convolution",
        [Tensor(lhs), Tensor(rhs)],
        [Tensor(out)],
        f"dimension_numbers = #stablehlo.conv<[b, {space}, f]x[{space}, i, o]->[b, {space}, f]>, "
        f"feature_group_count = {feature_groups} : i64, batch_group_count = {batch_groups} : i64",
    )


def scattered(region: str) -> Case:
    numbers = (
        "#stablehlo.scatter<update_window_dims = [1, 2], inserted_window_dims = [0], "
        "scatter_dims_to_operand_dims = [0], index_vector_dim = 1>"
    )
    operands = [Tensor((8, 6, 4)), Tensor((5,), "i32"), Tensor((5, 6, 4))]
    return Case("stablehlo.scatter", operands, [operands[0]], f"scatter_dimension_numbers = {numbers}", region)


def solved(left: bool, transpose: str) -> Case:
    attributes = (
        f"left_side = {str(left).lower()}, lower = true, unit_diagonal = false, "
        f"transpose_a = #stablehlo<transpose {transpose}>"
    )
    b = Tensor((2, 4, 5) if left else (2, 5, 4))
    return Case("stablehlo.triangular_solve", [Tensor((2, 4, 4)), b], [b], attributes)


BROADCAST = Case(
    "stablehlo.broadcast_in_dim", [Tensor((1, 8))], [Tensor((4, 8))], "broadcast_dimensions = array<i64: 0, 1>"
)
DOT_GENERAL = Case(
    "stablehlo.dot_general",
    [Tensor((2, 3, 4)), Tensor((2, 4, 5))],
    [Tensor((2, 3, 5))],
    "dot_dimension_numbers = #stablehlo.dot<lhs_batching_dimensions = [0], rhs_batching_dimensions = [0], "
    "lhs_contracting_dimensions = [2], rhs_contracting_dimensions = [1]>",
)
REDUCE = Case(
    "stablehlo.reduce", [Tensor((8, 6, 4)), Tensor(())], [Tensor((6,))], "dimensions = array<i64: 0, 2>", reducer("add")
)
UPDATE = Case(
    "stablehlo.dynamic_update_slice",
    [Tensor((4, 8)), Tensor((2, 8)), Tensor((), "i32"), Tensor((), "i32")],
    [Tensor((4, 8))],
)
SELECT_AND_SCATTER = Case(
    "stablehlo.select_and_scatter",
    [Tensor((8, 6, 4)), Tensor((4, 6, 4)), Tensor(())],
    [Tensor((8, 6, 4))],
    "window_dimensions = array<i64: 2, 1, 1>, window_strides = array<i64: 2, 1, 1>",
    f"{comparator()}, {reducer('add')}",
)
RANDOM_BITS = Case(
    "stablehlo.rng_bit_generator",
    [Tensor((2,), "ui64")],
    [Tensor((2,), "ui64"), Tensor((4, 6), "ui32")],
    "rng_algorithm = #stablehlo<rng_algorithm THREE_FRY>",
)
GATHER = Case(
    "stablehlo.gather",
    [Tensor((8, 6, 4)), Tensor((5, 2), "i32")],
    [Tensor((5, 6, 2))],
    "dimension_numbers = #stablehlo.gather<offset_dims = [1, 2], collapsed_slice_dims = [0], "
    "start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 6, 2>",
)
BATCHING_GATHER = Case(
    "stablehlo.gather",
    [Tensor((8, 6, 4)), Tensor((8, 5, 1), "i32")],
    [Tensor((8, 5, 4))],
    "dimension_numbers = #stablehlo.gather<offset_dims = [2], collapsed_slice_dims = [1], "
    "operand_batching_dims = [0], start_indices_batching_dims = [0], start_index_map = [1], index_vector_dim = 2>, "
    "slice_sizes = array<i64: 1, 1, 4>",
)

EXAMPLES = [
    (BROADCAST, "([i, k])->([j, k]) {i=1, j=4, k=8}"),
    (DOT_GENERAL, "([i, j, l], [i, l, k])->([i, j, k]) {i=2, j=3, k=5, l=4} reduction={l}"),
    (REDUCE, "([i, j, k], [])->([j]) {i=8, j=6, k=4} reduction={i, k}"),
    (UPDATE, "([i, k], [j, k], [], [])->([i, k]) {i=4, j=2, k=8} need_replication={j}"),
    (SELECT_AND_SCATTER, "([i, j, k], [i, j, k], [])->([i, j, k]) {i=8, j=6, k=4} permutation={i}"),
    (
        solved(True, "NO_TRANSPOSE"),
        "([i, j, l], [i, j, k])->([i, j, k]) {i=2, j=4, k=5, l=4} need_replication={j, l}",
    ),
    (
        solved(False, "TRANSPOSE"),
        "([i, j, l], [i, k, j])->([i, k, j]) {i=2, j=4, k=5, l=4} need_replication={j, l}",
    ),
    (RANDOM_BITS, "([i])->([i], [j, k]) {i=2, j=4, k=6} need_replication={i} blocked_propagation={i}"),
    (reshaped((8,), (2, 4)), "([ij])->([i, j]) {i=2, j=4}"),
    (reshaped((4, 1, 6), (24,)), "([i, j, k])->([ik]) {i=4, j=1, k=6}"),
    (reshaped((24,), (2, 3, 1, 4)), "([ijl])->([i, j, k, l]) {i=2, j=3, k=1, l=4}"),
    (reshaped((2, 3), (3, 2)), "([i, k])->([j, l]) {i=2, j=3, k=3, l=2}"),
    (reshaped((6, 4), (4, 6)), "([ij, mn])->([ik, ln]) {i=2, j=3, k=2, l=3, m=2, n=2}"),
    (reshaped((4, 6, 10), (15, 16)), "([i, kl, no])->([j, mo]) {i=4, j=15, k=3, l=2, m=8, n=5, o=2}"),
    (reshaped((2, 6, 4), (3, 16)), "([i, km, n])->([j, lmn]) {i=2, j=3, k=3, l=2, m=2, n=4}"),
    (reshaped((1, 1), ()), "([i, j])->([]) {i=1, j=1}"),
    (
        convolved((2, 16, 16, 8), (3, 3, 8, 32), (2, 14, 14, 32)),
        "([i, j, l, n], [k, m, n, o])->([i, j, l, o]) {i=2, j=14, k=3, l=14, m=3, n=8, o=32} reduction={n} "
        "need_replication={k, m} permutation={j, l}",
    ),
    (
        convolved((2, 16, 8), (15, 8, 32), (2, 2, 32)),
        "([i, j, l], [j, l, m])->([i, k, m]) {i=2, j=15, k=2, l=8, m=32} reduction={j, l} need_replication={k}",
    ),
    (
        convolved((2, 16, 8), (3, 2, 32), (2, 14, 32), feature_groups=4),
        "([i, j, lm], [k, m, ln])->([i, j, ln]) {i=2, j=14, k=3, l=4, m=2, n=8} reduction={m} need_replication={k} "
        "permutation={j}",
    ),
    (
        GATHER,
        "([l, j, k], [i, m])->([i, j, k]) {i=5, j=6, k=4, l=8, m=2} reduction={l} need_replication={k, m} "
        "blocked_propagation={k}",
    ),
    (
        BATCHING_GATHER,
        "([i, l, k], [i, j, m])->([i, j, k]) {i=8, j=5, k=4, l=6, m=1} reduction={l} need_replication={m}",
    ),
    (
        scattered(reducer("add")),
        "([l, j, k], [i], [i, j, k])->([l, j, k]) {i=5, j=6, k=4, l=8} reduction={i}",
    ),
    (
        scattered(reducer("subtract")),
        "([l, j, k], [i], [i, j, k])->([l, j, k]) {i=5, j=6, k=4, l=8} need_replication={i}",
    ),
    (
        scattered(overwrite("f32")),
        "([l, j, k], [i], [i, j, k])->([l, j, k]) {i=5, j=6, k=4, l=8} need_replication={i}",
    ),
]

UPDATE = Case(
    "stablehlo.dynamic_update_slice",
    [Tensor((4, 8)), Tensor((2, 8)), Tensor((), "i32"), Tensor((), "i32")],
    [Tensor((4, 8))],
)
PAD = Case(
    "stablehlo.pad",
    [Tensor((8, 6)), Tensor(())],
    [Tensor((8, 9))],
    "edge_padding_low = array<i64: 1, 3>, edge_padding_high = array<i64: -1, 0>, interior_padding = array<i64: 0, 0>",
)

SHARDYS_EXAMPLES: list[tuple[Case, str, str]] = [
    (
        SELECT_AND_SCATTER,
        "([j, k, l], [i, k, l], [])->([j, k, l]) {i=4, j=8, k=6, l=4} need_replication={i} permutation={j}",
        "([j, k, l], [i, k, l], [])->([j, k, l]) {i=4, j=8, k=6, l=4} need_replication={i} permutation={j}",
    ),
    (
        convolved((2, 16, 16, 8), (3, 3, 8, 32), (2, 14, 14, 32)),
        "([i, j, k, l], [n, o, l, m])->([i, j, k, m]) {i=2, j=14, k=14, l=8, m=32, n=1, o=1} "
        "reduction={l} permutation={j, k}",
        "([i, j, l, n], [k, m, n, o])->([i, j, l, o]) {i=2, j=14, k=3, l=14, m=3, n=8, o=32} "
        "reduction={n} permutation={j, k, l, m}",
    ),
    (
        convolved((2, 16, 8), (3, 2, 32), (2, 14, 32), feature_groups=4),
        "([i, j, kl], [n, l, km])->([i, j, km]) {i=2, j=14, k=4, l=2, m=8, n=1} reduction={l} permutation={j}",
        "([i, j, lm], [k, m, ln])->([i, j, ln]) {i=2, j=14, k=3, l=4, m=2, n=8} reduction={m} permutation={j, k}",
    ),
    (
        convolved((8, 16, 8), (3, 8, 32), (2, 14, 32), batch_groups=4),
        "([ij, k, l], [n, l, im])->([j, k, im]) {i=4, j=2, k=14, l=8, m=8, n=1} reduction={l} permutation={k}",
        "([ij, k, m], [l, m, in])->([j, k, in]) {i=4, j=2, k=14, l=3, m=8, n=8} reduction={m} permutation={k, l}",
    ),
    (
        reshaped((2, 6, 4), (3, 16)),
        "([i, km, n])->([j, lmn]) {i=2, j=3, k=3, l=2, m=2, n=4}",
        "([i, jl, m])->([i, klm]) {i=2, j=3, k=2, l=2, m=4} need_replication={j, k} permutation={i}",
    ),
    (
        reshaped((8, 1), (2, 1, 4)),
        "([ik, l])->([i, j, k]) {i=2, j=1, k=4, l=1}",
        "([ik, l])->([i, j, k]) {i=2, j=1, k=4, l=1} need_replication={j, l}",
    ),
    (
        UPDATE,
        "([i, k], [j, k], [], [])->([i, k]) {i=4, j=2, k=8} need_replication={j}",
        "([i, k], [j, k], [], [])->([i, k]) {i=4, j=2, k=8} permutation={i, j}",
    ),
    (
        PAD,
        "([i, j], [])->([i, j]) {i=8, j=6} permutation={j}",
        "([i, j], [])->([i, j]) {i=8, j=6} permutation={i, j}",
    ),
]
"""Of ops for which we or newer versions have other rules: with the rules of jaxlib 0.10, and of 0.12."""


@pytest.mark.parametrize(("case", "expected"), EXAMPLES, ids=lambda v: v.name if isinstance(v, Case) else "")
def test_worked_examples(case: Case, expected: str) -> None:
    assert our_rule(function_of(case, 0), case.name) == expected


@pytest.mark.parametrize(
    ("case", "older", "newer"), SHARDYS_EXAMPLES, ids=lambda v: v.name if isinstance(v, Case) else ""
)
def test_worked_examples_of_shardys_rules(case: Case, older: str, newer: str) -> None:
    text = function_of(case, 0)
    _, now, oracles = next(found for found in rules_of(text) if found[0].startswith("%0"))
    assert now == oracles == (newer if jaxlib.version.__version_info__ >= (0, 12) else older)
    assert our_rule(text, case.name, compat="shardy-0.10") == older
    assert our_rule(text, case.name, compat="shardy-0.12") == newer


def test_conservative_concatenation_shares_nothing_along_the_joined_dimension() -> None:
    case = concatenated((8, 6, 4), (8, 6, 4), dim=0)
    expected = "([k, i, j], [l, i, j])->([m, i, j]) {i=6, j=4, k=1, l=1, m=1}"
    assert our_rule(function_of(case, 0), case.name, conservative=True) == expected


def function(body: str, args: str = "%x: tensor<8xf32>, %y: tensor<8xf32>, %i: tensor<i32>") -> str:
    return f"func.func @main({args}) {{\n{body}\n  return\n}}\n"


HEAD = "%head = stablehlo.slice %x [0:3] : (tensor<8xf32>) -> tensor<3xf32>"
TAIL = "%tail = stablehlo.slice %x [3:8] : (tensor<8xf32>) -> tensor<5xf32>"
OTHER = "%other = stablehlo.slice %y [3:8] : (tensor<8xf32>) -> tensor<5xf32>"
AGAIN = "%again = stablehlo.slice %head [1:3] : (tensor<3xf32>) -> tensor<2xf32>"


def joined(*operands: tuple[str, int]) -> str:
    types = ", ".join(f"tensor<{n}xf32>" for _, n in operands)
    values = ", ".join(name for name, _ in operands)
    size = sum(n for _, n in operands)
    return f"%j = stablehlo.concatenate {values}, dim = 0 : ({types}) -> tensor<{size}xf32>"


@pytest.mark.parametrize(
    "body",
    [
        [HEAD, TAIL, joined(("%tail", 5), ("%head", 3))],
        [HEAD, OTHER, joined(("%other", 5), ("%head", 3))],
        [HEAD, joined(("%x", 8), ("%head", 3))],
        [HEAD, joined(("%y", 8), ("%head", 3))],
        [joined(("%x", 8), ("%x", 8))],
        [HEAD, AGAIN, joined(("%x", 8), ("%again", 2))],
        [HEAD, AGAIN, joined(("%head", 3), ("%again", 2))],
        [HEAD, AGAIN, TAIL, joined(("%again", 2), ("%tail", 5))],
    ],
)
@pytest.mark.parametrize("conservative", [False, True])
def test_concatenations_of_slices(body: list[str], conservative: bool) -> None:
    assert_same_rules(function("\n".join(body)), conservative)


@pytest.mark.parametrize("index", ["%c, %c", "%c, %i", "%s, %c", "%n, %c"])
def test_updates_at_constant_places(index: str) -> None:
    body = f"""
    %c = stablehlo.constant dense<1> : tensor<i32>
    %s = sdy.constant dense<1> : tensor<i32>
    %n = stablehlo.negate %c : tensor<i32>
    %a = stablehlo.constant dense<1.0> : tensor<4x8xf32>
    %b = stablehlo.constant dense<1.0> : tensor<2x8xf32>
    %u = stablehlo.dynamic_update_slice %a, %b, {index}
      : (tensor<4x8xf32>, tensor<2x8xf32>, tensor<i32>, tensor<i32>) -> tensor<4x8xf32>"""
    assert_same_rules(function(body), False)


@pytest.mark.parametrize("as_state", [False, True])
def test_combined_words_stay_whole_as_the_state_of_a_random_generator(as_state: bool) -> None:
    body = (
        "%s = stablehlo.custom_call @X64Combine(%a, %b) : (tensor<2xui32>, tensor<2xui32>) -> tensor<2xui64>\n"
        + "%n, %bits = stablehlo.rng_bit_generator %s, algorithm = THREE_FRY "
        ": (tensor<2xui64>) -> (tensor<2xui64>, tensor<4xui32>)" * as_state
    )
    assert_same_rules(function(body, "%a: tensor<2xui32>, %b: tensor<2xui32>"), False)


def test_sharding_constraints_pass_shardings_through() -> None:
    text = 'sdy.mesh @m = <["a"=2]>\n' + function("%c = sdy.sharding_constraint %x <@m, [{?}]> : tensor<8xf32>")
    assert_same_rules(text, False)


def test_an_op_keeps_its_own_rule() -> None:
    own = "([i])->([j]) {i=8, j=8}, custom"
    for op in (
        f"%n = stablehlo.negate %x {{sdy.sharding_rule = #sdy.op_sharding_rule<{own}>}} : tensor<8xf32>",
        "%n = stablehlo.custom_call @mine(%x) "
        f"{{sdy.sharding_rule = #sdy.op_sharding_rule<{own}>}} : (tensor<8xf32>) -> tensor<8xf32>",
    ):
        name = "stablehlo.negate" if "negate" in op else "stablehlo.custom_call"
        assert our_rule(function(op), name) == own


def test_tokens_and_dynamic_shapes_have_no_rule() -> None:
    dynamic = function("%n = stablehlo.negate %x : tensor<?xf32>", "%x: tensor<?xf32>")
    assert our_rule(dynamic, "stablehlo.negate") == "none"
    token = function("%t = stablehlo.after_all %t0 : !stablehlo.token", "%t0: !stablehlo.token")
    assert our_rule(token, "stablehlo.after_all") == "none"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("chlo.erf", [Tensor((4, 8))], [Tensor((4, 8))]), "([i, j])->([i, j]) {i=4, j=8}"),
        (Case("chlo.lgamma", [Tensor((4,))], [Tensor((4,))]), "([i])->([i]) {i=4}"),
        (
            Case("stablehlo.map", [Tensor((4,))] * 2, [Tensor((4,))], "dimensions = array<i64: 0>", reducer("add")),
            "([i], [i])->([i]) {i=4}",
        ),
        (
            Case(
                "stablehlo.batch_norm_training",
                [Tensor((4, 8)), Tensor((8,)), Tensor((8,))],
                [Tensor((4, 8)), Tensor((8,)), Tensor((8,))],
                "epsilon = 1.0e-3 : f32, feature_index = 1 : i64",
            ),
            "([i, j], [j], [j])->([i, j], [j], [j]) {i=4, j=8} need_replication={i}",
        ),
        (
            Case("chlo.top_k", [Tensor((4, 8))], [Tensor((4, 3)), Tensor((4, 3), "i32")], "k = 3 : i64"),
            "([i, j])->([i, k], [i, k]) {i=4, j=8, k=3} need_replication={j, k} blocked_propagation={j, k}",
        ),
    ],
    ids=lambda v: v.name if isinstance(v, Case) else "",
)
def test_extra_rules_are_off_in_shardys_terms(case: Case, expected: str) -> None:
    text = function_of(case, 0)
    assert our_rule(text, case.name) == expected
    assert our_rule(text, case.name, compat="shardy") == "none"


@pytest.mark.parametrize("spec", [P(None, "y"), P("x", None), P("x", "y")])
@pytest.mark.parametrize(("name", "features", "like_input"), [("training", 2, 0), ("grad", 3, 1)])
def test_batch_normalisation_gives_the_same_numbers_on_shards(
    spec: P, name: str, features: int, like_input: int
) -> None:
    rng = np.random.default_rng(0)
    x, f = (8, 8), (8,)
    args = [rng.uniform(1, 2, s).astype(np.float32) for s in (x, *[f] * features, *[x] * like_input)]
    types = ["8x8xf32", *["8xf32"] * features, *["8x8xf32"] * like_input]
    names = ", ".join(f"%{letter}" for letter in "abcdef"[: len(args)])
    text = (
        f'"stablehlo.batch_norm_{name}"({names}) '
        "<{epsilon = 1.0e-3 : f32, feature_index = 1 : i64}> : "
        f"({', '.join(f'tensor<{t}>' for t in types)}) -> (tensor<8x8xf32>, tensor<8xf32>, tensor<8xf32>)"
    )
    function = function_of_op(text, "8x8xf32", "8xf32", "8xf32")
    check(function, args, [spec, *[None] * (len(args) - 1)], rtol=1e-4, atol=1e-4)


def test_equal_ops_share_one_rule_and_unequal_ones_do_not() -> None:
    body = "%a = stablehlo.negate %x : tensor<8xf32>\n%b = stablehlo.negate %y : tensor<8xf32>\n"
    module = parse(function(body + "%c = stablehlo.reverse %x, dims = [0] : tensor<8xf32>"))
    book = RuleBook()
    a, b, c = (book.rule_of(op) for op in Graph(module.operation).ops[1:4])
    assert a is b
    assert str(c) == "([i])->([i]) {i=8} permutation={i}"


def test_a_book_without_overrides_shares_what_the_other_has_computed() -> None:
    own = "{sdy.sharding_rule = #sdy.op_sharding_rule<([i])->([j]) {i=8, j=8}, custom>}"
    module = parse(
        function(f"%a = stablehlo.negate %x : tensor<8xf32>\n%b = stablehlo.negate %x {own} : tensor<8xf32>")
    )
    book = RuleBook()
    a, b = Graph(module.operation).ops[1:3]
    computed = book.rule_of(a)
    assert book.without_overrides().rule_of(a) is book.without_overrides().rule_of(b) is computed
    assert str(book.rule_of(b)) == "([i])->([j]) {i=8, j=8}, custom"


def test_ops_without_a_rule_are_known_or_unknown() -> None:
    assert has_no_rule_silently("stablehlo.iota")
    assert has_no_rule_silently("stablehlo.custom_call", "tpu_custom_call")
    assert not has_no_rule_silently("stablehlo.custom_call", "lapack_spotrf_ffi")
    assert not has_no_rule_silently("stablehlo.composite")


def test_elementwise_ops() -> None:
    body = """
    %a = stablehlo.add %x, %y : tensor<8xf32>
    %b = stablehlo.bitcast_convert %x : (tensor<8xf32>) -> tensor<8xi32>
    %e = chlo.erf %x : tensor<8xf32> -> tensor<8xf32>
    %c = sdy.sharding_constraint %x <@m, [{?}]> : tensor<8xf32>
    %d = stablehlo.bitcast_convert %x : (tensor<8xf32>) -> tensor<8x2xi16>
    %r = stablehlo.reshape %x : (tensor<8xf32>) -> tensor<2x4xf32>
    %p = "stablehlo.collective_permute"(%x) <{source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}>
      : (tensor<8xf32>) -> tensor<8xf32>
    %o = stablehlo.optimization_barrier %x : tensor<8xf32>"""
    module = parse('sdy.mesh @m = <["a"=2]>\n' + function(body))
    ops = Graph(module.operation).ops[1:-1]
    assert [is_elementwise(op) for op in ops] == [True] * 4 + [False] * 4


def test_every_name_in_the_registries_is_that_of_an_op() -> None:
    known = {getattr(op, "OPERATION_NAME", None) for dialect in (chlo, stablehlo) for op in vars(dialect).values()}
    registered = {*RULES, *ELEMENTWISE, *LINEAR, *EMITTERS, *STRATEGIES, *REMATERIALIZABLE}
    assert {name for name in registered if name.startswith(("stablehlo.", "chlo."))} <= known


@pytest.mark.parametrize("name", [*(n for n in ELEMENTWISE if n.startswith("chlo.")), "stablehlo.add", "stablehlo.tan"])
def test_shardy_takes_the_same_ops_for_elementwise(name: str) -> None:
    # Constant splitting copies element-wise ops on constants for each of their users.
    f = Tensor((8,))
    case = chlo_op(name, f) if name.startswith("chlo.") else Case(name, [f] * (2 - name.endswith("tan")), [f])
    x, out = case.operands[0], case.results[0]
    text = function(f"""
    %c = stablehlo.constant dense<1> : tensor<8xi32>
    %a0 = stablehlo.convert %c : (tensor<8xi32>) -> {x}
    %a1 = stablehlo.convert %c : (tensor<8xi32>) -> {x}
    {case.text(["%a0", "%a1"][: len(case.operands)], "%r")}
    %f = stablehlo.optimization_barrier %r#0 : {out}
    %g = stablehlo.optimization_barrier %r#0 : {out}""")
    module, split = parse(text), parse(text)
    with split.context:
        passmanager.PassManager.parse("builtin.module(sdy-constant-or-scalar-splitter)").run(split.operation)
    op = next(op for op in Graph(module.operation).ops if op.name == name)
    copies = sum(other.name == name for other in Graph(split.operation).ops)
    assert is_elementwise(op) == (copies == 2)


# --- data-flow edges --------------------------------------------------------------------------------------------------


def edges_text(text: str, name: str) -> list[tuple[str, list[str], list[str], str]]:
    module = parse(text)
    op = next(op for op in Graph(module.operation).ops if op.name == name)

    def labels(values: tuple[Value, ...]) -> list[str]:
        return [v.mlir.get_name() for v in values]

    return [
        (edge.owner.mlir.get_name(), labels(edge.sources), labels(edge.targets), edge.kind.value)
        for edge in edges_of(op)
    ]


LOOP = """
%r:2 = stablehlo.while(%a = %x, %n = %i) : tensor<8xf32>, tensor<i32>
cond {
  %t = stablehlo.compare LT, %n, %i : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %t : tensor<i1>
} do {
  %s = stablehlo.negate %a : tensor<8xf32>
  stablehlo.return %s, %n : tensor<8xf32>, tensor<i32>
}"""


def test_a_loop_ties_initial_values_body_and_results() -> None:
    # Condition and body name their arguments alike.
    first, second = edges_text(function(LOOP), "stablehlo.while")
    assert first == ("%0#0", ["%arg0", "%1"], ["%0#0", "%iterArg", "%iterArg"], "result")
    assert second == ("%0#1", ["%arg2", "%iterArg_0"], ["%0#1", "%iterArg_0", "%iterArg_0"], "result")


CASE = """
%r = "stablehlo.case"(%i) ({
  stablehlo.return %x : tensor<8xf32>
}, {
  stablehlo.return %y : tensor<8xf32>
}) : (tensor<i32>) -> tensor<8xf32>"""


def test_the_branches_of_a_case_flow_into_its_results() -> None:
    assert edges_text(function(CASE), "stablehlo.case") == [("%0", ["%arg0", "%arg1"], ["%0"], "result")]


def test_if_is_a_data_flow_op() -> None:
    text = function(
        CASE.replace("case", "if").replace("%i)", "%p)").replace("tensor<i32>", "tensor<i1>"),
        "%x: tensor<8xf32>, %y: tensor<8xf32>, %p: tensor<i1>",
    )
    assert edges_text(text, "stablehlo.if") == [("%0", ["%arg0", "%arg1"], ["%0"], "result")]


def test_an_optimization_barrier_passes_each_value_on() -> None:
    text = function("%r:2 = stablehlo.optimization_barrier %x, %i : tensor<8xf32>, tensor<i32>")
    assert edges_text(text, "stablehlo.optimization_barrier") == [
        ("%0#0", ["%arg0"], ["%0#0"], "result"),
        ("%0#1", ["%arg2"], ["%0#1"], "result"),
    ]


def test_tokens_have_no_edge() -> None:
    text = function(
        "%r:2 = stablehlo.optimization_barrier %t, %x : !stablehlo.token, tensor<8xf32>",
        "%t: !stablehlo.token, %x: tensor<8xf32>",
    )
    assert [edge[0] for edge in edges_text(text, "stablehlo.optimization_barrier")] == ["%0#1"]


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("sdy.named_computation", 'sdy.named_computation<"f">(%x)'),
        (
            "sdy.manual_computation",
            "sdy.manual_computation(%x) in_shardings=[<@m, [{?}]>] out_shardings=[<@m, [{?}]>] manual_axes={}",
        ),
    ],
)
def test_computations_tie_arguments_and_results_separately(name: str, head: str) -> None:
    body = f"""
    %r = {head} (%p: tensor<8xf32>) {{
      %n = stablehlo.negate %p : tensor<8xf32>
      sdy.return %n : tensor<8xf32>
    }} : (tensor<8xf32>) -> tensor<8xf32>"""
    argument, result = edges_text('sdy.mesh @m = <["a"=2]>\n' + function(body), name)
    assert (argument[1], argument[3]) == (["%arg0"], "body_argument")
    assert argument[2] == [argument[0]]
    assert result == ("%0", ["%1"], ["%0"], "result")


def test_other_ops_have_no_edges() -> None:
    assert edges_text(function("%n = stablehlo.negate %x : tensor<8xf32>"), "stablehlo.negate") == []
