"""cuDNN's attention: split by batch and heads, forward and backward, with numbers by jnp on CPU devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_on_cpus import cudnn, on_cpus
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.kernels.libraries import _is_pointwise
from sdy_jax.testing import assert_same

__all__ = ["on_cpus"]

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
B, T, N, H = 8, 16, 8, 8
BOTH, BATCH, HEADS = P("data", None, "model"), P(("data", "model")), P(None, None, ("data", "model"))
BF16 = jnp.bfloat16


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed + sum(shape)), shape).astype(BF16)


Q, K, V = (drawn(B, T, N, H, seed=seed) for seed in range(3))
SHARED = drawn(B, T, 4, H)
"""Of fewer heads than queries have."""


def attention(*args: Any, **options: Any) -> jax.Array:
    return jax.nn.dot_product_attention(*args, implementation="cudnn", **options)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention(q, k, v, is_causal=True)


def heads_first(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    found: jax.Array = cudnn.dot_product_attention(q, k, v, qkv_layout="BNTH")
    return found


def with_lengths(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    return attention(q, k, v, key_value_seq_lengths=lengths, query_seq_lengths=jnp.full_like(lengths, q.shape[1]))


def in_a_window(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention(q, k, v, is_causal=True, local_window_size=(5, 0))


def slopes(fun: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Of arguments that are floats."""

    def loss(floats: Any, *others: Any) -> jax.Array:
        return jnp.sum(fun(*floats, *others).astype(jnp.float32) ** 2)

    def found(*args: Any) -> Any:
        floats = [x for x in args if jnp.issubdtype(x.dtype, jnp.floating)]
        return jax.grad(loss)(floats, *args[len(floats) :])

    return found


class Case(NamedTuple):
    """A call, the layouts of its arguments, and what its gradient sends: partial sums of the bias's."""

    fun: Callable[..., jax.Array]
    args: tuple[Any, ...]
    specs: Any
    sums: int = 0


def biased(*shape: int) -> tuple[Any, ...]:
    return Q, K, V, drawn(*shape)


CASES = {
    "both": Case(causal, (Q, K, V), BOTH),
    "batch": Case(causal, (Q, K, V), BATCH),
    "heads": Case(causal, (Q, K, V), HEADS),
    "no mask": Case(attention, (Q, K, V), BOTH),
    "heads in groups": Case(causal, (Q, SHARED, SHARED), BOTH),
    "one head of keys": Case(causal, (Q, K[:, :, :1], V[:, :, :1]), BATCH),
    "heads before tokens": Case(heads_first, (Q, K, V), P("data", "model")),
    "window": Case(in_a_window, (Q, K, V), BOTH),
    "lengths": Case(with_lengths, (Q, K, V, jnp.arange(B, dtype=jnp.int32) + 3), (*[BOTH] * 3, P("data"))),
    "bias": Case(attention, biased(B, N, T, T), (*[BOTH] * 3, P("data", "model"))),
    "bias that is whole": Case(attention, biased(B, N, T, T), (*[BOTH] * 3, P())),
    "bias of all batches": Case(attention, biased(1, N, T, T), (*[BOTH] * 3, P(None, "model")), 1),
    "bias of all heads": Case(attention, biased(1, 1, T, T), (*[BOTH] * 3, P()), 2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("on_cpus")
def test_batches_and_heads_are_split_and_nothing_is_sent(name: str) -> None:
    case = CASES[name]
    plan = assert_same(case.fun, *case.args, mesh=MESH, in_shardings=case.specs, rtol=1e-2)
    assert plan.wire_bytes == 0 and not plan.notes, plan


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("on_cpus")
def test_gradients_send_only_the_sums_of_a_bias(name: str) -> None:
    case = CASES[name]
    plan = assert_same(slopes(case.fun), *case.args, mesh=MESH, in_shardings=case.specs, rtol=1e-2)
    assert [c.kind for c in plan.collectives if c.wire_bytes] == ["all_reduce"] * case.sums, plan


WHOLE = 4 * B * N * T * T * H
"""The operations of a forward pass without a mask."""


@pytest.mark.parametrize(
    ("fun", "args", "flops"),
    [
        (attention, (Q, K, V), [WHOLE]),
        (causal, (Q, K, V), [WHOLE / 2]),
        (causal, (Q, SHARED, SHARED), [WHOLE / 2]),
        (in_a_window, (Q, K, V), [WHOLE * 6 / T]),
        (slopes(attention), (Q, K, V), [2.5 * WHOLE, WHOLE]),
    ],
)
@pytest.mark.usefixtures("on_cpus")
def test_the_work_of_calls_is_that_of_their_pairs_of_queries_and_keys(fun: Any, args: Any, flops: list[float]) -> None:
    plan = sdy.partition(fun, mesh=MESH, in_shardings=BOTH).plan(*args)
    rows = plan.table("kernels")
    assert sorted(row.flops for row in rows) == sorted(whole / 8 for whole in flops)
    assert all("dot_product_attention" in row.kernel for row in rows)


@pytest.mark.usefixtures("on_cpus")
def test_what_a_call_moves_is_what_it_takes_and_makes() -> None:
    (row,) = sdy.partition(causal, mesh=MESH, in_shardings=BOTH).plan(Q, K, V).table("kernels")
    assert row.bytes == 4 * Q.nbytes / 8


@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.usefixtures("on_cpus")
def test_tokens_and_features_that_are_split_move_to_heads(dim: int) -> None:
    spec = P("data", *[None] * (dim - 1), "model")
    plan = assert_same(causal, Q, K, V, mesh=MESH, in_shardings=spec, out_shardings=spec, rtol=1e-2)
    assert {c.kind for c in plan.collectives} == {"all_to_all"}
    assert "cannot be split along dim" in str(plan.notes[0])


@pytest.mark.usefixtures("on_cpus")
def test_a_layout_of_queries_alone_is_that_of_all() -> None:
    plan = assert_same(causal, Q, K, V, mesh=MESH, in_shardings=(BOTH, P(), P()), rtol=1e-2)
    assert plan.wire_bytes == 0, plan


@pytest.mark.usefixtures("on_cpus")
def test_heads_that_do_not_divide_stay_together() -> None:
    few = drawn(B, T, 2, H)
    plan = assert_same(slopes(causal), Q, few, few, mesh=MESH, in_shardings=(BOTH, P("data"), P("data")), rtol=1e-2)
    assert all(row.flops <= 2.5 * WHOLE / 2 / 2 for row in plan.table("kernels"))


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.usefixtures("on_cpus")
def test_batches_that_do_not_divide(count: int) -> None:
    args = (*(x[:count] for x in (Q, K, V)), jnp.arange(count, dtype=jnp.int32) + 3)
    assert_same(slopes(with_lengths), *args, mesh=MESH, in_shardings=P("data"), rtol=1e-2)


@pytest.mark.usefixtures("on_cpus")
def test_packed_sequences_are_split_by_batch() -> None:
    def packed(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, offsets: jax.Array) -> jax.Array:
        options = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
        return jnp.asarray(cudnn.dot_product_attention(q, k, v, mask_type=cudnn.MaskType.PADDING, **options))

    args = Q, K, V, jax.ShapeDtypeStruct((B, 2), jnp.int32), jax.ShapeDtypeStruct((B, 3), jnp.int32)
    specs = (*[BOTH] * 3, P("data"), P("data"))
    for fun in (packed, slopes(packed)):
        plan = sdy.partition(fun, mesh=MESH, in_shardings=specs).plan(*args)
        assert plan.wire_bytes == 0 and not plan.notes, plan


@pytest.mark.usefixtures("on_cpus")
def test_pages_are_numbered_over_the_whole_batch() -> None:
    pages, table = drawn(B * 2, T, N, H), jax.ShapeDtypeStruct((B, 1, 2, 1), jnp.int32)

    def paged(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> jax.Array:
        options = {"mask_type": cudnn.MaskType.PADDING}
        return jnp.asarray(cudnn.paged_attention(q, k, v, lengths, lengths, table, table, **options))

    args = Q, pages, pages, jax.ShapeDtypeStruct((B,), jnp.int32), table
    by_heads = sdy.partition(paged, mesh=MESH, in_shardings=(*[HEADS] * 3, P(), P())).plan(*args)
    (row,) = by_heads.table("kernels")
    assert by_heads.wire_bytes == 0 and row.flops == 2 * WHOLE / 8
    by_batch = sdy.partition(paged, mesh=MESH, in_shardings=BATCH).plan(*args)
    assert {c.kind for c in by_batch.collectives if c.wire_bytes} <= {"all_to_all", "all_gather"}
    assert "cannot be split along dim 0" in str(by_batch.notes[0])


@pytest.mark.parametrize(
    ("fun", "is_pointwise"),
    [
        (lambda scores, cap: cap * jnp.tanh(scores / cap), True),
        (lambda scores, cap: scores - cap * jax.lax.broadcasted_iota(jnp.float32, scores.shape, 1), False),
        (lambda scores, slopes: scores * slopes[None, :, None, None], False),
    ],
)
def test_functions_of_scores_that_know_their_places_keep_calls_whole(fun: Any, is_pointwise: bool) -> None:
    """Those that newer versions of jax give to cuDNN; they run on blocks."""
    scores = jax.ShapeDtypeStruct((2, 4, 8, 8), jnp.float32)
    takes = jax.ShapeDtypeStruct((4,) if "slopes" in fun.__code__.co_varnames else (), jnp.float32)
    assert _is_pointwise(jax.make_jaxpr(fun)(scores, takes).jaxpr) is is_pointwise


SCALES = {name: jnp.full((1, 1, 1, 1), 1.0) for name in cudnn.fp8_params_keys}


def in_8_bits(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    q, k, v = (jnp.concatenate([x, x], -1).astype(jnp.float8_e4m3fn) for x in (q, k, v))
    return cudnn.dot_product_attention(q, k, v, fp8_params=SCALES, use_fp8=True, scale=0.3)


@pytest.mark.usefixtures("on_cpus")
def test_the_largest_elements_in_8_bits_are_those_of_all_devices() -> None:
    plan = assert_same(in_8_bits, Q, K, V, mesh=MESH, in_shardings=BOTH, rtol=1e-2)
    assert [c.kind for c in plan.collectives] == ["all_reduce"] and plan.wire_bytes <= 16


@pytest.mark.usefixtures("on_cpus")
def test_in_8_bits_nothing_is_sent_for_results_that_nobody_reads() -> None:
    plan = assert_same(lambda *x: in_8_bits(*x)[0], Q, K, V, mesh=MESH, in_shardings=BOTH, rtol=1e-2)
    assert not plan.collectives


@pytest.mark.usefixtures("on_cpus")
def test_gradients_in_8_bits() -> None:
    args = [jax.random.normal(jax.random.key(i), (B, 128, 4, 128)).astype(jnp.float8_e4m3fn) for i in range(3)]

    def loss(q: Any, k: Any, v: Any, scales: Any) -> jax.Array:
        out, *_ = cudnn.dot_product_attention(q, k, v, fp8_params=scales, use_fp8=True, scale=0.1)
        return jnp.sum(out.astype(jnp.float32))

    slope = jax.grad(loss, (0, 1, 2, 3))
    plan = assert_same(slope, *args, SCALES, mesh=MESH, in_shardings=(*[BOTH] * 3, P()), rtol=0.1)
    assert plan.wire_bytes <= 32


@pytest.mark.parametrize("manual", [{"data"}, {"data", "model"}])
@pytest.mark.usefixtures("on_cpus")
def test_in_manual_regions_it_is_split_over_the_other_axes_and_priced(manual: set[str]) -> None:
    spec = P("data", None, "model" if "model" in manual else None)

    def mapped(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        inner = jax.shard_map(causal, mesh=MESH, axis_names=manual, in_specs=spec, out_specs=spec, check_vma=False)
        return jnp.sin(inner(q, k, v))

    run = sdy.partition(mapped, mesh=MESH, in_shardings=BOTH)
    wanted = jnp.sin(causal(Q, K, V))  # jit's own partitioning fails where some axes are manual
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (run(Q, K, V), wanted)), atol=1e-2)
    plan = run.plan(Q, K, V)
    (row,) = plan.table("kernels")
    assert plan.wire_bytes == 0 and row.flops == WHOLE / 2 / 8


@pytest.mark.parametrize("axes", [{"data": 2, "model": 4}, {"fsdp": 8}])
@pytest.mark.usefixtures("on_cpus")
def test_nothing_is_moved_around_attention_in_a_step(axes: dict[str, int]) -> None:
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    batch, *heads = axes
    weights = {"qkv": drawn(2, 3, 64, N, H) / 8, "out": drawn(2, N, H, 64) / 8}
    specs = {"qkv": P(None, None, None, *heads), "out": P(None, *heads)}
    if not heads:
        specs = {"qkv": P(None, None, "fsdp"), "out": P(None, "fsdp")}

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = jnp.einsum("btm,cmnh->cbtnh", x, w["qkv"])
        return x + jnp.einsum("btnh,nhm->btm", causal(q, k, v), w["out"]), None

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            return jnp.sum(jax.lax.scan(layer, x, w)[0].astype(jnp.float32) ** 2)

        return jax.tree.map(lambda a, b: a - 1e-3 * b, w, jax.grad(loss)(w))

    plan = assert_same(step, weights, drawn(B, T, 64), mesh=mesh, in_shardings=(specs, P(batch)), rtol=2e-2)
    rows = plan.table("kernels")
    assert sorted(row.flops for row in rows) == [2 * WHOLE / 2 / 8, 2 * 2.5 * WHOLE / 2 / 8]
    assert not [c for c in plan.collectives if c.cause and "custom_call" in c.cause], plan
