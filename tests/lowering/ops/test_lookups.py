"""Look-ups and updates with what follows: uneven tables, tied embeddings, experts; and no more bytes than jit's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE, check
from reshape_programs import run
from uneven_blocks import split

RNG = np.random.default_rng(1)


def floats(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def integers(high, *shape):
    return jnp.asarray(RNG.integers(0, high, shape), jnp.int32)


def table(a, w, *spec, mesh=LINE):
    """A product of integers in padded blocks; of a depth that makes replicating it dear."""
    return split(split(a, *spec[:1], mesh=mesh) @ w, *spec, mesh=mesh)


def parts(x, starts, size):
    return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(x, start, size, 0))(starts)


UNEVEN = {
    "rows": (65, lambda x, i: x[i], integers(65, 5)),
    "more shards than rows": (3, lambda x, i: x[i], integers(3, 5)),
    "outside": (13, lambda x, i: x.at[i].get(mode="fill", fill_value=-1), jnp.array([12, 13, 15, -14, 99, -1])),
    "along": (65, lambda x, i: jnp.take_along_axis(x, i, 0), integers(65, 3, 8)),
    "beside": (13, lambda x, i: jnp.take_along_axis(x, i, 1), integers(8, 13, 2)),
    "parts": (65, lambda x, i: parts(x, i, 4), integers(70, 3)),
    "parts longer than a block": (33, lambda x, i: parts(x, i, 20), integers(33, 3)),
    "booleans": (13, lambda x, i: (x > 0)[i], integers(13, 4)),
    "one-hot": (13, lambda x, i: jax.nn.one_hot(i, 13, dtype=x.dtype) @ x, integers(13, 4)),
    "segment_sum": (65, lambda x, i: jax.ops.segment_sum(x, i, 6), integers(6, 65)),
    "segment_max": (13, lambda x, i: split(jax.ops.segment_max(x, i, 5), "x"), integers(5, 13)),
    "segment_prod": (13, lambda x, i: jax.ops.segment_prod(x, i, 5), integers(5, 13)),
    "overwritten": (65, lambda x, i: x.at[i].set(7), jnp.array([64, 0, 64, 99, -1])),
    "parts added": (13, lambda x, i: x.at[i[:, None] + jnp.arange(3)].add(1), integers(13, 6)),
    "all put elsewhere": (13, lambda x, i: (x[:16] * 0).at[i].set(x, unique_indices=True), jnp.arange(13)[::-1]),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", UNEVEN)
def test_tables_of_uneven_sizes(name, poisoned_padding):
    rows, function, ids = UNEVEN[name]
    args = (integers(9, rows, 256) - 4, integers(9, 256, 8) - 4, ids)
    run(lambda a, w, i: function(table(a, w, "x"), i), args)


def test_a_table_split_in_two_uneven_dimensions(poisoned_padding):
    args = (integers(9, 13, 256) - 4, integers(9, 256, 7) - 4, integers(13, 5), integers(7, 5))
    run(lambda a, w, i, j: table(a, w, "x", "y", mesh=PLANE)[i, j], args, PLANE)


def test_a_table_of_numbers_without_zero_is_exact():
    x = jnp.asarray(RNG.integers(0, 255, (256, 4), dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu))
    ids = jnp.array([3, 255, 0, 999, 7], jnp.int32)

    def function(x, i):
        found = x.at[i].get(mode="clip"), parts(x, i, 3)
        return tuple(y.astype(jnp.float32) for y in found)

    check(function, [x, ids], [P("y"), P()], P(), rtol=0)


def tied(embedding, ids, labels):
    hidden = jnp.tanh(embedding[ids])
    logits = jax.nn.log_softmax(hidden @ embedding.T)
    return -logits[jnp.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("tokens", [96, 512])
def test_the_two_gradients_of_a_tied_table_are_added_before_they_are_reduced(tokens):
    args = floats(128, 16), integers(128, tokens), integers(128, tokens)
    split = [P(), P("x"), P("x")]
    plan = check(jax.grad(tied), args, split, P(), mesh=LINE, layouts="global", rtol=1e-4, atol=1e-6)
    assert [(c.kind, c.shape) for c in plan.collectives if c.wire_bytes] == [("all_reduce", (128, 16))], plan
    assert plan.wire_bytes == 2 * 7 / 8 * 128 * 16 * 4


def test_the_gradients_of_a_tied_table_that_is_split_are_added_first():
    args = floats(128, 16), integers(128, 512), integers(128, 512)
    plan = check(jax.grad(tied), args, [P("y"), P("x"), P("x")], P("y"), rtol=1e-4, atol=1e-6)
    summed = [c for c in plan.collectives if c.kind in ("all_reduce", "reduce_scatter") and '"x"' in c.detail]
    assert [(c.cause, c.shape) for c in summed] == [("stablehlo.add", (128, 16))], plan


def dispatch(tokens, router, up, down):
    """The two best experts of every token, of twice the mean capacity; tokens sorted by expert."""
    count, capacity = up.shape[0], len(tokens) // up.shape[0] * 4
    weights, experts = jax.lax.top_k(jax.nn.softmax(tokens @ router), 2)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token, expert = order // 2, experts.reshape(-1)[order]
    sizes = jnp.bincount(expert, length=count)
    place = jnp.arange(len(order)) - (jnp.cumsum(sizes) - sizes)[expert]
    slots = jnp.zeros((count, capacity, tokens.shape[1])).at[expert, place].set(tokens[token], mode="drop")
    made = jnp.einsum("ecf,efd->ecd", jax.nn.relu(jnp.einsum("ecd,edf->ecf", slots, up)), down)
    back = made.at[expert, place].get(mode="fill", fill_value=0) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(tokens).at[token].add(back)


EXPERTS = floats(256, 32), floats(32, 8), floats(8, 32, 64), floats(8, 64, 32)
SPLIT_EXPERTS = P("x"), P(), P("x"), P("x")


def sent_of(plan, *shapes):
    return sum(c.wire_bytes for c in plan.collectives if c.shape in shapes)


def test_tokens_travel_to_experts_by_columns_and_weights_stay():
    plan = check(dispatch, EXPERTS, SPLIT_EXPERTS, P("x"), mesh=LINE, layouts="global", rtol=1e-4, atol=1e-4)
    assert not sent_of(plan, (8, 32, 64), (8, 64, 32)), plan
    rows, slots = 256 * 32 * 4, 8 * 128 * 32 * 4
    assert sent_of(plan, (256, 32), (8, 128, 32)) <= 7 / 64 * 2 * (rows + slots), plan
    assert {c.kind for c in plan.collectives if c.wire_bytes > 2048} == {"all_to_all"}, plan


def test_gradients_of_experts_stay_with_them():
    gradient = jax.grad(lambda *args: (dispatch(*args) ** 2).mean(), (0, 2, 3))
    specs = P("x"), P("x"), P("x")
    plan = check(gradient, EXPERTS, SPLIT_EXPERTS, specs, mesh=LINE, rtol=1e-3, atol=1e-5)
    assert not [c for c in plan.collectives if c.shape in ((8, 32, 64), (8, 64, 32))], plan


ROWS, ROW_IDS, HALF_ROWS = floats(512, 64), integers(512, 96), floats(96, 64)
AGAINST_JIT = {
    "vocabulary split": (lambda e, i: e[i], (ROWS, ROW_IDS), (P("x"), P()), P(), 43008),
    "vocabulary split, result by rows": (lambda e, i: e[i], (ROWS, ROW_IDS), (P("x"), P("x")), P("x"), 43344),
    "columns split, result by rows": (lambda e, i: e[i], (ROWS, ROW_IDS), (P(None, "x"), P("x")), P("x"), 3024),
    "one-hot product": (
        lambda e, i: jax.nn.one_hot(i, 512) @ e,
        (ROWS, ROW_IDS),
        (P("x"), P()),
        P("x"),
        7 / 8 * 96 * 64 * 4,
    ),
    "segment_max": (
        lambda x, i: jax.ops.segment_max(x, i, 16),
        (HALF_ROWS, integers(16, 96)),
        (P("x"), P("x")),
        P("x"),
        7 / 8 * 16 * 64 * 4,
    ),
    "sums of rows": (
        lambda x, i: jnp.zeros((512, 64)).at[i].add(x),
        (HALF_ROWS, ROW_IDS),
        (P("x"), P("x")),
        P("x"),
        7 / 8 * 96 * 65 * 4,
    ),
    "pairs": (lambda x, i: x[jnp.arange(96), i % 64], (HALF_ROWS, ROW_IDS), (P("x"), P("x")), P("x"), 0),
    "permuted": (
        lambda x, i: x[i],
        (ROWS, jnp.arange(512)[::-1] ^ 5),
        (P("x"), P("x")),
        P("x"),
        7 / 64 * 2**18 + 2**11,
    ),
}


@pytest.mark.parametrize("name", AGAINST_JIT)
def test_no_more_is_sent_than_by_jit_or_by_reducing_where_the_result_is_split(name):
    function, args, specs, result, bound = AGAINST_JIT[name]
    check(function, args, specs, result, mesh=LINE, wire_bytes=bound, rtol=1e-5, atol=1e-5)
