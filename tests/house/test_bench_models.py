"""The models of `scripts/bench_models` at toy sizes on eight devices: partitioned they are the plain functions."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import rows, serving
from models.common import Layout, attention, bf16, f32
from models.deepseek import DeepSeek, trained_deepseek
from models.experts import ByCapacity, Dropless, megablox
from models.gemma import Gemma, trained_gemma
from models.graphs import Weather, trained_weather
from models.kernels import Splash, written_out
from models.llama import Bert, Llama, Lstm, trained, trained_bert, trained_lstm
from models.mamba import Hybrid, Mamba, Mixer, trained_states
from models.measure import Side
from models.report import Result, markdown
from models.retrieval import TwoTowers, trained_towers
from models.serving import RaggedPages, SplitPages, decoded, decoded_from_pages, prefilled
from models.video import VideoTransformer, trained_on_videos
from models.vision import ParallelTransformer, UNet, VisionTransformer, denoised, trained_on_images
from partitioned_ops import mesh_of

from sdy_jax.testing import assert_same

TINY = Llama(2, 16, 4, 2, 8, 32, 64)
MIXED = dataclasses.replace(TINY, experts=4, chosen=2)
SPLASH = Llama(2, 16, 4, 2, 128, 32, 64, attention=Splash(interpret=True))
SPLIT = {"fsdp": 2, "model": 4}
MIXER = Mixer(16, 8, 4, 8, 4, chunk=4)
BY_CAPACITY = dataclasses.replace(MIXED, routing=ByCapacity(1.25))


def both_ways(q, k, v, layout):
    return attention(q, k, v, None)


CASES = {
    "scanned": (TINY, partial(trained, batch=4, sequence=8), SPLIT, rows.MEGATRON),
    "splash attention": (SPLASH, partial(trained, batch=4, sequence=128), {"fsdp": 2, "model": 4}, rows.MEGATRON),
    "splash attention of split queries": (
        SPLASH,
        partial(trained, batch=2, sequence=512),
        {"fsdp": 2, "seq": 4},
        rows.LONG,
    ),
    "splash attention, plainly": (
        dataclasses.replace(SPLASH, attention=Splash(mapped=False, interpret=True)),
        partial(trained, batch=4, sequence=128),
        SPLIT,
        rows.MEGATRON,
    ),
    "unrolled": (
        dataclasses.replace(TINY, scanned=False, checkpointed=False, tied=True),
        partial(trained, batch=8, sequence=8),
        {"fsdp": 8},
        rows.FSDP,
    ),
    "by capacity": (
        BY_CAPACITY,
        partial(trained, batch=8, sequence=8),
        {"fsdp": 2, "expert": 4},
        rows.EXPERTS,
    ),
    "by sorting": (MIXED, partial(trained, batch=8, sequence=8), {"fsdp": 2, "expert": 4}, rows.EXPERTS),
    "dropless": (
        dataclasses.replace(MIXED, routing=Dropless(partial(megablox, interpret=True))),
        partial(trained, batch=8, sequence=8),
        {"fsdp": 8},
        rows.FSDP,
    ),
    "dropless, plainly": (
        dataclasses.replace(MIXED, routing=Dropless(jax.lax.ragged_dot, mapped=False)),
        partial(trained, batch=8, sequence=8),
        {"fsdp": 2, "expert": 4},
        rows.EXPERTS,
    ),
    "pipeline": (
        dataclasses.replace(TINY, layers=4),
        partial(rows.pipelined, batch=16, sequence=8),
        {"stage": 2, "fsdp": 4},
        rows.STAGED,
    ),
    "prefill": (TINY, partial(prefilled, batch=1, sequence=32), {"seq": 4, "model": 2}, rows.SEQUENCE),
    "decode by batch": (TINY, partial(decoded, batch=4, sequence=16), {"data": 4, "model": 2}, rows.BATCH),
    "decode by sequence": (TINY, partial(decoded, batch=4, sequence=16), {"seq": 4, "model": 2}, rows.CACHE),
    "images": (VisionTransformer(2, 16, 4, 32, 4, 16, 8), partial(trained_on_images, batch=4), SPLIT, rows.MEGATRON),
    "u-net": (UNet((8, 16), 16, 4, groups=4, heads=2), partial(denoised, batch=4), {"data": 2, "space": 4}, rows.SPACE),
    "local and global": (
        Gemma(3, 16, 8, 4, 8, 32, 64, window=3, cycle=2),
        partial(trained_gemma, batch=4, sequence=8),
        SPLIT,
        rows.MEGATRON,
    ),
    "latent attention": (
        DeepSeek(2, 16, 4, 8, 8, 4, 2, 32, 16, 8, 2, 64, ByCapacity(1.25), dense=1),
        partial(trained_deepseek, batch=8, sequence=8),
        {"fsdp": 2, "expert": 4},
        rows.EXPERTS,
    ),
    "state space": (Mamba(2, MIXER, 64), partial(trained_states, batch=4, sequence=16), SPLIT, rows.MEGATRON),
    "hybrid": (
        Hybrid(4, MIXER, TINY, BY_CAPACITY, cycle=2, place=1),
        partial(trained_states, batch=8, sequence=8),
        {"fsdp": 2, "expert": 4},
        rows.EXPERTS,
    ),
    "five axes": (
        BY_CAPACITY,
        partial(trained, batch=4, sequence=8),
        {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2, "context": 1},
        rows.FIVE_AXES,
    ),
    "six axes": (
        BY_CAPACITY,
        partial(rows.pipelined, batch=16, sequence=8, scanned=True),
        {"data": 1, "fsdp": 2, "expert": 1, "tensor": 1, "context": 2, "stage": 2},
        rows.SIX_AXES,
    ),
    "parallel layers": (
        ParallelTransformer(2, 16, 4, 32, 4, 16, 8),
        partial(trained_on_images, batch=4),
        SPLIT,
        rows.MEGATRON,
    ),
    "videos": (
        VideoTransformer(2, 16, 4, 32, 2, 4, both_ways, patch=8, text=4),
        partial(trained_on_videos, batch=4),
        {"fsdp": 2, "seq": 4},
        rows.LONG,
    ),
    "two towers": (
        TwoTowers(64, 128, 8, 4, (16, 8)),
        partial(trained_towers, batch=16),
        {"data": 2, "rows": 4},
        rows.ROWS_OF_TABLES,
    ),
    "weather": (
        Weather(2, 24, 10, 32, 16, 40, 6, 4, 16),
        partial(trained_weather, batch=4),
        {"data": 2, "graph": 4},
        rows.GRAPH,
    ),
    "bert": (Bert(2, 16, 4, 32, 66), partial(trained_bert, batch=4, sequence=8), SPLIT, rows.MEGATRON),
    "lstm": (Lstm(2, 16, 32, 64), partial(trained_lstm, batch=4, sequence=8), SPLIT, rows.MEGATRON),
}


def drawn(types):
    """Arguments: small weights, positive second moments, tokens."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 8, leaf.shape), leaf.dtype)
        return jnp.asarray(np.abs(rng.normal(0, 0.2, leaf.shape)), leaf.dtype)

    return jax.tree.map(draw, types)


CONSTRAINED = ("scanned", "by capacity", "pipeline", "u-net", "lstm", "hybrid", "five axes", "weather")
"""Those whose activations are constrained, as those of all models may be; there and elsewhere layouts are chosen."""


@pytest.mark.dear(cases=8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.more("the models of the benchmark, at small sizes")
def test_models_are_the_plain_functions(name):
    model, make, axes, rules = CASES[name]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(tuple(axes.values())), tuple(axes))
    program = make(model, Layout(mesh, rules, name in CONSTRAINED))
    specs = Layout(mesh, rules)
    assert_same(
        program.run,
        *drawn(program.arguments),
        mesh=mesh,
        in_shardings=specs.specs(program.named),
        out_shardings=specs.specs(program.results),
        rtol=3e-2,  # of bfloat16
    )


def exchanged(rows, found, starts, lengths, places, _, *, axis_name):
    """`jax.lax.ragged_all_to_all`, which CPUs do not have, by a gather of everything."""
    me, everyone = jax.lax.axis_index(axis_name), partial(jax.lax.all_gather, axis_name=axis_name)
    sent, starts, lengths, places = map(everyone, (rows, starts, lengths, places))
    for device in range(sent.shape[0]):
        place = jnp.arange(found.shape[0]) - places[device, me]
        taken = jnp.take(sent[device], starts[device, me] + place, axis=0, mode="clip")
        found = jnp.where(((place >= 0) & (place < lengths[device, me]))[:, None], taken, found)
    return found


MEGABLOX = partial(megablox, interpret=True)
FORMS = {
    "splash attention": (SPLASH, dataclasses.replace(SPLASH, attention=written_out), rows.MEGATRON),
    "splash attention of split queries": (SPLASH, dataclasses.replace(SPLASH, attention=written_out), rows.LONG),
    "megablox": (
        dataclasses.replace(MIXED, routing=Dropless(MEGABLOX)),
        dataclasses.replace(MIXED, routing=Dropless(jax.lax.ragged_dot, mapped=False)),
        rows.FSDP,
    ),
    "megablox of experts that are split": (
        dataclasses.replace(MIXED, routing=Dropless(MEGABLOX, room=4.0)),
        dataclasses.replace(MIXED, routing=Dropless(jax.lax.ragged_dot, mapped=False)),
        rows.EXPERTS,
    ),
}


@pytest.mark.dear(cases=2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.more("the models of the benchmark, at small sizes")
def test_kernels_are_what_is_written_out(name, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", exchanged)
    model, plain, rules = FORMS[name]
    axes = {"fsdp": 2, next((axis for axis in ("seq", "expert", "model") if axis in str(rules)), "model"): 4}
    layout = Layout(jax.sharding.Mesh(mesh_of(*axes.values()).devices, tuple(axes)), rules)
    batch, sequence = (2, 512) if model.attention is SPLASH.attention else (8, 8)
    of_kernel, written = (trained(made, layout, batch, sequence) for made in (model, plain))
    weights, moments, *others = drawn(of_kernel.arguments)
    centred = jax.tree.map(lambda w: 0.5 * (w - w.mean()) if w.ndim > 1 else w, weights)
    arguments = centred, jax.tree.map(jnp.zeros_like, moments), *others
    found, expected = (jax.jit(program.run)(*arguments)[1] for program in (of_kernel, written))  # a tenth of gradients

    def assert_near(found, expected):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-2 * np.abs(expected).max())

    jax.tree.map(assert_near, found, expected)


def attended(q, cache, lengths, table, starts, count, *, sm_scale, **sizes):
    """`ragged_paged_attention` of one token of each sequence, whose kernel no CPU runs."""
    of_sequences = cache[table].reshape(table.shape[0], -1, *cache.shape[2:])
    mask = (jnp.arange(of_sequences.shape[1])[None] < lengths[:, None])[:, None, None, None]
    return attention(q[:, None], of_sequences[:, :, 0::2], of_sequences[:, :, 1::2], mask)[:, 0]


@pytest.mark.parametrize("pages", [RaggedPages(), SplitPages(interpret=True)], ids=["together", "by head"])
@pytest.mark.more("the models of the benchmark, at small sizes")
def test_decoding_from_pages_is_decoding(pages, monkeypatch):
    """Four sequences in pages of any order, two on each of two devices, beside those in one array."""
    monkeypatch.setattr(serving, "ragged_paged_attention", attended)
    model, batch, sequence, position = Llama(2, 16, 8, 4, 16, 32, 64), 4, 4 * serving.PAGE, 150
    layout = Layout(jax.sharding.Mesh(mesh_of(2, 4).devices, ("data", "model")), rows.BATCH)
    of_arrays, of_pages = (
        make(model, layout, batch, sequence) for make in (decoded, partial(decoded_from_pages, pages=pages))
    )
    weights, keys, values, _, tokens = drawn(of_arrays.arguments)
    table = jnp.asarray([*map(np.random.default_rng(0).permutation, (8, 8))]).reshape(batch, 4)  # of a device's own

    def paged(keys, values):
        """Their cache of pages."""
        shape = (model.layers, batch, 4, serving.PAGE, model.kv_heads, model.width)
        parts = [jnp.zeros((model.layers, 16, *shape[3:]), bf16) for _ in range(2)]
        places = table + jnp.array([0, 0, 8, 8])[:, None]
        parts = [part.at[:, places].set(x.reshape(shape)) for part, x in zip(parts, (keys, values), strict=True)]
        if isinstance(pages, SplitPages):
            return jnp.stack(parts, 1).transpose(0, 1, 4, 2, 3, 5)
        return jnp.stack(parts, 4).reshape(model.layers, 16, serving.PAGE, -1, model.width)

    cache, lengths = paged(keys, values), jnp.full(batch, position, jnp.int32)
    *expected, tokens_after = jax.jit(of_arrays.run)(weights, keys, values, jnp.int32(position), tokens)
    found = jax.jit(of_pages.run)(weights, cache, table, lengths, tokens)
    np.testing.assert_array_equal(found[1], tokens_after)
    np.testing.assert_allclose(f32(found[0]), f32(paged(*expected)), rtol=3e-2, atol=5e-3)


def test_rows_have_names_of_their_own_and_layouts_that_divide():
    assert len({row.name for row in rows.ROWS}) == len(rows.ROWS)
    for row in rows.ROWS:
        mesh = jax.sharding.AbstractMesh(tuple(row.axes.values()), tuple(row.axes))
        program = row.with_layers(2).make(row.with_layers(2).model, Layout(mesh, row.rules))
        jax.tree.map(
            lambda spec, leaf, mesh=mesh: jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape),
            Layout(mesh, row.rules).specs(program.named),
            program.arguments,
        )


def test_operations_of_models_are_those_that_their_programs_count():
    """But for what is no product, 1.05 at the widths of a real one."""
    model = dataclasses.replace(rows.LLAMA_8B, layers=1, checkpointed=False, scanned=False)
    program = trained(model, Layout(jax.sharding.AbstractMesh((1,), ("fsdp",)), {}), 1, 4096)
    counted = jax.jit(program.run).lower(*program.arguments).cost_analysis()["flops"]
    causal = 12 * model.heads * model.width * 4096**2 / 2  # the half that attention by hand computes, too
    assert 1 <= counted / (program.flops + causal) <= 1.05


def test_goals_that_a_row_misses_are_listed():
    of_kernels, row = (
        next(row for row in rows.ROWS if row.name == f"llama-8b{how} fsdp=256 v5e:16x16") for how in ("", "-by-hand")
    )
    good = Side(planned=3, took=1, available=16, plan_memory=7, memory=7, plan_bytes=40, bytes=40, time=1, compiled=9)
    jit = Side(memory=7, bytes=41, time=1, compiled=9)
    assert not [*Result(row, "free", good, jit).misses()]
    bad = dataclasses.replace(good, planned=31, took=3, plan_memory=9, bytes=50, time=2)
    assert [miss.split()[0] for miss in Result(row, "free", bad, jit).misses()] == [
        "planned", "planning", "memory", "bytes", "bytes", "time",
    ]  # fmt: skip
    assert [miss.split()[0] for miss in Result(of_kernels, "free", good, jit).misses()] == ["bytes", "time", "work"]
    held = dataclasses.replace(good, bytes=28, plan_bytes=28, time=0.9, temporaries=2)
    assert not [*Result(of_kernels, "free", held, dataclasses.replace(jit, temporaries=2)).misses()]
    better = [Side(bytes=41, time=0.95, temporaries=1), Side(error="refused", bytes=1, time=0.1)]
    missed = [*Result(of_kernels, "free", held, jit, better).misses()]
    assert missed == ["temporaries are 2.00 of jit's better program, for 1.0"]
    loose = dataclasses.replace(good, memory=10, packed=7.5)
    assert not [*Result(row, "free", loose, jit).misses()] and "10 (7.5)" in Result(row, "free", loose, jit).cells()
    refused = Result(row, "free", Side(error="out of memory", planned=3, memory=20), jit)
    assert [*refused.misses()] == ["does not compile, jit's does: out of memory"] and "20!" in refused.cells()
    text = markdown([Result(row, "free", Side(error="hangs")), Result(row, "constrained", good, jit)], {"jax": "1"})
    assert "- llama-8b-by-hand fsdp=256 v5e:16x16 free: no plan: hangs" in text and "jax 1" in text
