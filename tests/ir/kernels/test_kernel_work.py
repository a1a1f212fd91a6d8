"""The work of kernels, against figures by hand: what bodies compute, and what blocks move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

from sdy_jax.ir.custom_ops import StatedWork
from sdy_jax.ir.kernels.body import equations_in
from sdy_jax.ir.kernels.work import work_of_call

B, H, T, D = 2, 4, 4096, 128
BF16, I32 = jnp.bfloat16, jnp.int32
PRODUCT = 2.0 * B * H * T * T * D
"""One of the products of attention over all pairs of positions."""


def array(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def works(fun: Callable[..., Any], *arguments: Any, compiler: str = "mosaic", known: Any = ()) -> list[StatedWork]:
    """The work of each kernel of a function, in order."""
    found = equations_in(jax.make_jaxpr(fun)(*arguments))
    return [work_of_call(e.params, compiler, known=known) for e in found if e.primitive.name == "pallas_call"]


def gradient(fun: Callable[..., jax.Array]) -> Callable[..., Any]:
    return jax.grad(lambda *xs: fun(*xs).astype(jnp.float32).sum(), tuple(range(3)))


def below(blocks: int) -> float:
    """The share of the pairs of blocks that a causal mask leaves, those on the diagonal whole."""
    return (blocks + 1) / (2 * blocks)


# JAX's own.

SIZE = 512
BLOCKS = BlockSizes(SIZE, SIZE, SIZE, 1, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE)
QKV = (array(B, H, T, D),) * 3


def flash(causal: bool) -> Callable[..., jax.Array]:
    return lambda q, k, v: flash_attention(q, k, v, causal=causal, block_sizes=BLOCKS)


def test_flash_attention_counts_its_two_products() -> None:
    (work,) = works(flash(causal=False), *QKV)
    assert work.flops == pytest.approx(2 * PRODUCT, rel=0.02)
    assert work.efficiency == 0.6 and work.basis == "counted"
    each, rereads = 2 * B * H * T * D, T // SIZE
    assert work.bytes == 2 * each + 2 * each * rereads  # q and o once, k and v once per block of q


def test_a_causal_mask_leaves_out_half_of_flash_attention() -> None:
    """Although its cost estimate does not."""
    (work,) = works(flash(causal=True), *QKV)
    assert work.flops == pytest.approx(2 * PRODUCT * below(T // SIZE), rel=0.02)
    (whole,) = works(flash(causal=False), *QKV)
    assert 0.5 < work.bytes / whole.bytes < 0.75


def test_the_backward_pass_of_flash_attention_counts_seven_products() -> None:
    """Scores, and the gradients of values, scores and keys; and again scores, and those of scores and queries."""
    forward, keys, queries = works(gradient(flash(causal=True)), *QKV)
    products = [w.flops / (PRODUCT * below(T // SIZE)) for w in (forward, keys, queries)]
    assert products == pytest.approx([2, 4, 3], rel=0.02)


def test_the_last_queries_under_a_causal_mask_are_most_of_the_work() -> None:
    call = next(e for e in equations_in(jax.make_jaxpr(flash(causal=True))(*QKV)) if e.primitive.name == "pallas_call")
    blocks = T // SIZE
    work = work_of_call(call.params, factors=((0, B), (1, H), (2, blocks)))
    ((factor, shares),) = work.uneven
    assert factor == 2 and [count for count, _ in shares] == [2, 4, 8]
    rows = np.arange(1, blocks + 1) / sum(range(1, blocks + 1))
    assert [share for _, share in shares] == pytest.approx([rows[-n:].sum() for n in (4, 2, 1)], rel=0.01)
    (whole,) = works(flash(causal=False), *QKV)
    assert not whole.uneven


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    sizes = splash_attention_kernel.BlockSizes(SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE, SIZE)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((T, T)) for _ in range(H)])
    kernel = splash_attention_kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    return jax.vmap(kernel)(q, k, v)


def test_splash_attention_counts_the_blocks_of_its_mask_where_that_is_known() -> None:
    blocks = T // SIZE
    table = np.tril(np.ones((1, blocks, blocks), np.int8))
    following = np.where(table, np.arange(blocks), 0).astype(np.int8)
    (bound,), (work,) = works(splash, *QKV), works(splash, *QKV, known=(following, table))
    assert bound.flops == pytest.approx(2 * PRODUCT, rel=0.03) and "larger side" in bound.basis
    assert work.flops == pytest.approx(2 * PRODUCT * below(blocks), rel=0.03) and work.basis == "counted"
    assert work.bytes < bound.bytes


@pytest.mark.parametrize("inline", [True, False])
def test_paged_attention_reads_its_pages_and_not_the_pool(inline: bool) -> None:
    """As many as its table of pages has: how long sequences are is known only when it runs."""
    pool, pages, page, heads, batch = 4096, 64, 16, 8, 8

    def attend(*xs: jax.Array) -> jax.Array:
        return paged_attention(*xs, pages_per_compute_block=4, inline_seq_dim=inline)

    cache = array(heads, pool, page, D)
    arguments = array(batch, 2 * heads, D), cache, cache, array(batch, dtype=I32), array(batch, pages, dtype=I32)
    (work,) = works(attend, *arguments)
    read = 2 * batch * heads * pages * page * D * 2
    assert work.bytes == pytest.approx(read, rel=0.02) and work.bytes < cache.size
    assert work.flops == pytest.approx(4 * batch * 2 * heads * pages * page * D, rel=0.1)
    assert "when it runs" in work.basis


def test_ragged_paged_attention_reads_each_page_of_its_table() -> None:
    pages, page, heads, sequences = 64, 16, 8, 8

    def attend(*xs: jax.Array) -> jax.Array:
        return ragged_paged_attention(*xs, num_kv_pages_per_block=4, num_queries_per_block=16)

    integers = [array(n, dtype=I32) for n in (sequences, sequences + 1, 1)]
    table = array(sequences, pages, dtype=I32)
    arguments = array(64, 16, D), array(512, page, 2 * heads, D), integers[0], table, *integers[1:]
    (work,) = works(attend, *arguments)
    assert work.bytes == pytest.approx(2 * sequences * pages * page * 2 * heads * D, rel=0.05)


def test_grouped_products_count_what_they_state() -> None:
    """Which rows belong to which group, and so their grid, is known only when they run."""
    m, k, n, groups = 1024, 512, 256, 8
    sizes = array(groups, dtype=I32)
    (work,) = works(gmm, array(m, k), array(groups, k, n), sizes)
    (transposed,) = works(tgmm, array(k, m), array(m, n), sizes)
    assert work.flops == transposed.flops == 2 * m * k * n
    assert work.efficiency > 0.9 and "cost_estimate" in work.basis


def test_attention_on_gpus_counts_the_trips_of_its_loops() -> None:
    """And each array once: cores share a cache."""
    heads = array(B, T, H, 64, dtype=jnp.float16)

    def attend(*xs: jax.Array) -> jax.Array:
        return attention.mha(*xs, segment_ids=None, causal=True)

    (work,) = works(attend, heads, heads, heads, compiler="triton")
    assert work.flops == pytest.approx(PRODUCT * below(T // 128), rel=0.05)  # two products of half of the width
    assert work.bytes == 4 * 2 * B * T * H * 64


# Of our own.


def product(*tiles: int, **options: Any) -> Callable[..., jax.Array]:
    """A product in blocks, whose grid goes over rows, columns, and what is contracted."""
    rows, columns, deep = tiles

    def body(x: Any, y: Any, out: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            out[...] = jnp.zeros_like(out)

        out[...] += jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
        (m, k), n = x.shape, y.shape[1]
        return pl.pallas_call(
            body,
            grid=(m // rows, n // columns, k // deep),
            in_specs=[
                pl.BlockSpec((rows, deep), lambda i, j, k: (i, k)),
                pl.BlockSpec((deep, columns), lambda i, j, k: (k, j)),
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
            out_shape=array(m, n, dtype=jnp.float32),
            **options,
        )(x, y)

    return multiply


def test_a_block_counts_once_for_each_time_that_it_moves() -> None:
    m, k, n = 512, 256, 384
    (work,) = works(product(128, 128, 64), array(m, k), array(k, n))
    assert work.flops == 2 * m * k * n + m * n * (k // 64)  # and what is added up
    assert work.bytes == 2 * m * k * (n // 128) + 2 * k * n * (m // 128) + 4 * m * n
    assert work.efficiency > 0.9
    (deep,) = works(product(128, 128, 256), array(m, k), array(k, n))
    assert deep.bytes == 2 * m * k + 2 * k * n * (m // 128) + 4 * m * n  # rows stay for all columns


def test_an_exact_count_comes_before_what_a_call_states() -> None:
    estimate = pl.CostEstimate(flops=1, transcendentals=2, bytes_accessed=3)
    (stated,) = works(product(128, 128, 64, cost_estimate=estimate), array(512, 256), array(256, 384))
    (counted,) = works(product(128, 128, 64), array(512, 256), array(256, 384))
    assert stated == counted


def test_under_vmap_a_kernel_does_as_much_for_each_element() -> None:
    one = works(product(128, 128, 64), array(512, 256), array(256, 384))[0]
    many = works(jax.vmap(product(128, 128, 64), (0, None)), array(6, 512, 256), array(256, 384))[0]
    assert many.flops == 6 * one.flops and many.bytes == 6 * one.bytes


def test_a_kernel_without_products_waits_for_its_memory() -> None:
    def double(x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))

        def body(x: Any, out: Any) -> None:
            out[...] = x[...] * 2

        return pl.pallas_call(body, grid=(8,), in_specs=[spec], out_specs=spec, out_shape=x)(x)

    (work,) = works(double, array(64, 128, dtype=jnp.float32))
    assert work == StatedWork(64 * 128, 2 * 4 * 64 * 128, 1.0, "counted")


def looped(bound: Callable[[Any, Any], Any]) -> Callable[..., jax.Array]:
    """A kernel that adds a row as often as a bound says, by its place in a grid of 8 and a table of scalars."""

    def body(table: Any, x: Any, out: Any) -> None:
        def trip(_: Any, sums: Any) -> Any:
            return sums + x[...]

        out[...] = jax.lax.fori_loop(0, bound(pl.program_id(0), table), trip, jnp.zeros_like(x))

    def call(table: jax.Array, x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec((1, 128), lambda i, table: (i, 0))
        grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(8,), in_specs=[spec], out_specs=spec)
        return pl.pallas_call(body, grid_spec=grid, out_shape=x)(table, x)

    return call


@pytest.mark.parametrize(
    ("bound", "known", "trips"),
    [
        (lambda i, table: 5, None, 8 * 5),
        (lambda i, table: i, None, 28),
        (lambda i, table: (i + 3) // 2, None, sum((i + 3) // 2 for i in range(8))),
        (lambda i, table: table[i], np.arange(10, 18), sum(range(10, 18))),
    ],
    ids=["constant", "place", "arithmetic", "table"],
)
def test_loops_count_for_each_step(bound: Any, known: Any, trips: int) -> None:
    (work,) = works(looped(bound), array(8, dtype=I32), array(8, 128, dtype=jnp.float32), known=(known,))
    assert work.flops == trips * 128 and work.basis == "counted"


def test_a_loop_whose_end_nobody_knows_counts_once_and_says_so() -> None:
    (work,) = works(looped(lambda i, table: table[i]), array(8, dtype=I32), array(8, 128, dtype=jnp.float32))
    assert work.flops == 8 * 128 and "one trip counts" in work.basis


def test_a_grid_that_is_too_large_to_list_is_counted_by_a_part_of_it() -> None:
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return flash_attention(q, k, v, causal=True)

    (some,), (many,) = (works(attend, *[array(b, 16, 4096, D)] * 3) for b in (1, 64))
    assert many.flops == 64 * some.flops
    assert many.bytes == pytest.approx(64 * some.bytes, rel=1e-3)
    tokens = 2**17
    (long,) = works(attend, *[array(1, 1, tokens, D)] * 3)  # whose blocks of queries and keys alone are too many
    assert long.flops == pytest.approx(4 * D * tokens**2 * below(tokens // 128), rel=0.04)


def test_a_body_of_an_unknown_form_counts_as_stated_or_its_arrays_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("branches")

    monkeypatch.setattr("sdy_jax.ir.kernels.work.body_work", fail)
    (bare,) = works(product(128, 128, 64), array(512, 256), array(256, 384))
    assert bare.flops == 0 and bare.bytes == 2 * (512 * 256 + 256 * 384) + 4 * 512 * 384
    assert "not counted (KeyError" in bare.basis
    estimate = pl.CostEstimate(flops=1, transcendentals=2, bytes_accessed=3)
    (stated,) = works(product(128, 128, 64, cost_estimate=estimate), array(512, 256), array(256, 384))
    assert (stated.flops, stated.bytes) == (3, 3)


def test_copies_that_a_body_makes_count() -> None:
    """Of arrays that stay in main memory, when they are waited for."""
    n, block = 512, 128

    def body(x: Any, out: Any) -> None:
        def scoped(buffer: Any, sem: Any) -> None:
            def trip(i: Any, _: Any) -> None:
                copy = pltpu.make_async_copy(x.at[pl.ds(i * block, block)], buffer, sem)
                copy.start()
                copy.wait()
                out[...] = out[...] + buffer[...]

            jax.lax.fori_loop(0, n // block, trip, None)

        pl.run_scoped(scoped, pltpu.VMEM((block, 128), jnp.float32), pltpu.SemaphoreType.DMA)

    def call(x: jax.Array) -> jax.Array:
        given = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(body, in_specs=[given], out_shape=array(block, 128, dtype=jnp.float32))(x)

    (work,) = works(call, array(n, 128, dtype=jnp.float32))
    assert work == StatedWork(n * 128, 4 * 128 * (n + block), 1.0, "counted")
