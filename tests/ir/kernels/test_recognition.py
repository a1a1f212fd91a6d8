"""Functions of JAX are recognized in traces, with their static arguments; whatever differs from them is not."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention, quantization_utils
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.extend.core import Literal

from sdy_jax.annotate.jaxprs import Rewriting
from sdy_jax.ir.kernels.libraries import LIBRARY, dimensions, sizes_of
from sdy_jax.ir.kernels.recognition import recognized

MEGABLOX = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
FUNCTIONS = [function for functions in LIBRARY.values() for function in functions]
SHARDS = [1, 2, 4, 8]


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def arguments(heads=4, group=2, batch=8, dtype=jnp.float32):
    """Those of paged attention."""
    q = jax.ShapeDtypeStruct((batch, heads * group, 128), dtype)
    pages = jax.ShapeDtypeStruct((heads, 16, 8, 128), dtype)
    return q, pages, pages, ints(batch), ints(batch, 4)


def ragged_arguments(heads=2, group=2, dtype=jnp.float32):
    q = jax.ShapeDtypeStruct((16, heads * group, 128), dtype)
    pages = jax.ShapeDtypeStruct((16, 8, 2 * heads, 128), dtype)
    return q, pages, ints(4), ints(4, 4), ints(5), ints(1)


def seen(fun, *args, shards=SHARDS, **kwargs):
    """What is recognized in a jitted function."""
    traced = fun.trace(*args, **kwargs)
    return recognized(traced.fun_name, traced.jaxpr, shards)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_the_table_names_all_dimensions_of_functions_that_exist(function):
    assert hasattr(sys.modules[function.module], function.name)
    texts = [*function.arrays.values(), function.result]
    names = {name for text in texts for dim in dimensions(text) for name in dim}
    assert names == {*function.split.split(), *function.whole} and not {*function.split.split()} & {*function.whole}


PAGED = [
    {},
    {"inline_seq_dim": False},
    {"megacore_mode": "batch"},
    {"megacore_mode": "kv_head"},
    {"attn_logits_soft_cap": 30.0, "mask_value": -1e9},
    {"inline_seq_dim": False, "megacore_mode": "kv_head", "attn_logits_soft_cap": 0.5},
]


@pytest.mark.parametrize("statics", PAGED, ids=str)
def test_static_arguments_of_paged_attention(statics):
    found = seen(paged_attention, *arguments(), pages_per_compute_block=2, **statics)
    assert found.statics.items() >= {"pages_per_compute_block": 2, **statics}.items()


RAGGED = [
    {},
    {"sm_scale": 0.125, "soft_cap": 50.0},
    {"sliding_window": 5, "mask_value": -1e4},
    {"k_scale": 0.5, "v_scale": 0.25},
    {"v_scale": 0.25, "vmem_limit_bytes": 1 << 20},
]


@pytest.mark.parametrize("statics", RAGGED, ids=str)
def test_static_arguments_of_ragged_paged_attention(statics):
    blocks = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8}
    found = seen(ragged_paged_attention, *ragged_arguments(), **blocks, **statics)
    assert found.statics.items() >= {**blocks, **statics}.items()


def grouped_arguments(transposed=False):
    """Rows, the matrices of four groups, and how many rows these have."""
    matrices = (4, 48, 32) if transposed else (4, 32, 48)
    return jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct(matrices, jnp.float32), ints(4)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tiling", [(16, 16, 16), (32, 128, 64)])
def test_static_arguments_of_grouped_products(tiling, transposed):
    statics = {"tiling": tiling, "transpose_rhs": transposed, "preferred_element_type": jnp.dtype(jnp.bfloat16)}
    found = seen(MEGABLOX.gmm, *grouped_arguments(transposed), **statics)
    assert found.statics.items() >= statics.items() and found.sizes == {"m": 64, "k": 32, "e": 4, "n": 48, "all": 4}
    matrices = "[l, m, k]" if transposed else "[l, k, m]"
    assert str(found.rule().rule).startswith(f"([ij, k], {matrices}, [n])->([ij, m])")
    assert found.rule().rule.reduction == {2, 3} and found.rule().counted == {0: "m", 3: "e"}
    assert found.parts["m"] == tiling[0]


def test_static_arguments_of_grouped_weights():
    args = jax.ShapeDtypeStruct((32, 64), jnp.float32), jax.ShapeDtypeStruct((64, 48), jnp.float32), ints(4)
    found = seen(MEGABLOX.tgmm, *args, tiling=(16, 16, 16), interpret=True)
    assert found.statics["interpret"] and found.statics["num_actual_groups"] is None
    some = seen(MEGABLOX.tgmm, *args, group_offset=ints(), num_actual_groups=2, tiling=(16, 16, 16))
    assert some.statics["num_actual_groups"] == 2 and some.sizes["e"] == 2
    assert str(some.rule().rule).startswith("([i, jk], [jk, l], [m], [])->([n, i, l])")
    assert some.rule().rule.reduction == {1} and some.rule().counted == {1: "m", 5: "e"}


def test_sums_of_what_was_there_before_are_others():
    given = {"existing_out": jax.ShapeDtypeStruct((64, 48), jnp.float32), "tiling": (16, 16, 16)}
    assert seen(MEGABLOX.gmm, *grouped_arguments(), **given) is None


def test_arrays_may_be_given_by_name_and_pages_may_be_quantized():
    q, _, _, lengths, indices = arguments()
    weight, scales = jax.ShapeDtypeStruct((4, 16, 8, 128), jnp.int8), jax.ShapeDtypeStruct((4, 16, 8, 1), jnp.float32)
    pages = quantization_utils.QuantizedTensor(weight, scales)
    given = {"v_pages": pages, "page_indices": indices, "k_pages": pages, "lengths": lengths}
    found = seen(paged_attention, q, pages_per_compute_block=4, **given)
    assert found.names[:3] == ("q", "k_pages.weight", "k_pages.scales")
    assert found.sizes == {"b": 8, "h": 4, "g": 2, "d": 128, "p": 16, "t": 8, "u": 1, "s": 4}


def test_functions_of_the_same_name_are_others():
    @jax.jit
    def paged_attention(q, k_pages, v_pages, lengths, page_indices):
        return original(q, k_pages, v_pages, lengths, page_indices, pages_per_compute_block=2) * 2

    @jax.jit
    def gmm(lhs, rhs, group_sizes):
        copied = pl.pallas_call(lambda x, out: out.__setitem__(..., x[...]), out_shape=lhs)
        return copied(lhs)

    original = sys.modules[FUNCTIONS[0].module].paged_attention
    assert seen(paged_attention, *arguments()) is None
    assert seen(gmm, *grouped_arguments()) is None
    assert seen(jax.jit(jnp.tanh), arguments()[0]) is None


def test_a_kernel_that_was_changed_is_another(monkeypatch):
    module = sys.modules[FUNCTIONS[0].module]
    kernel = module.paged_flash_attention_kernel

    def changed(lengths, *refs, **options):
        kernel(lengths, *refs, **options)
        refs[8][...] += 1.0

    shapes = arguments(batch=6)
    assert seen(paged_attention, *shapes, pages_per_compute_block=2, inline_seq_dim=False) is not None
    monkeypatch.setattr(module, "paged_flash_attention_kernel", changed)
    paged_attention.clear_cache()
    traced = paged_attention.trace(*shapes, pages_per_compute_block=2, inline_seq_dim=False)
    monkeypatch.undo()
    paged_attention.clear_cache()
    assert recognized(traced.fun_name, traced.jaxpr, SHARDS) is None


def literals_changed(jaxpr):
    """As many jaxprs as there are numbers in one, in each of which another one is larger by 1, or 0 if it is large."""

    def with_one(index):
        count = iter(range(1 << 20))

        def changed(equation):
            invars = [
                Literal(0 if x.val == x.val + 1 else x.val + 1, x.aval)
                if isinstance(x, Literal) and next(count) == index
                else x
                for x in equation.invars
            ]
            same = all(a is b for a, b in zip(invars, equation.invars, strict=True))
            return [equation if same else equation.replace(invars=invars)]

        return Rewriting(changed).of(jaxpr)

    index, other = 0, with_one(0)
    while other is not jaxpr:
        yield other
        index, other = index + 1, with_one(index + 1)


@pytest.mark.parametrize(
    ("fun", "args", "statics"),
    [
        (paged_attention, arguments(), {"pages_per_compute_block": 2}),
        (ragged_paged_attention, ragged_arguments(), {"num_kv_pages_per_block": 2, "num_queries_per_block": 8}),
    ],
    ids=["paged", "ragged"],
)
def test_with_any_number_changed_it_is_another_function_or_has_that_number(fun, args, statics):
    traced = fun.trace(*args, **statics)
    plain = recognized(traced.fun_name, traced.jaxpr, [1])
    found = [recognized(traced.fun_name, other, [1]) for other in literals_changed(traced.jaxpr)]
    accepted = [each.statics for each in found if each is not None]
    assert len(found) > 50 and len(accepted) < 3
    assert all(each["mask_value"] != plain.statics["mask_value"] for each in accepted)


def test_mapped_functions_are_others():
    mapped = jax.jit(jax.vmap(functools.partial(paged_attention, pages_per_compute_block=2), (0, None, None, 0, 0)))
    q, k, v, lengths, indices = arguments()
    more = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (q, lengths, indices)]
    (call,) = mapped.trace(more[0], k, v, *more[1:]).jaxpr.eqns
    assert recognized(call.params["name"], call.params["jaxpr"], SHARDS) is None


@pytest.mark.parametrize(
    ("statics", "sizes", "parts"),
    [
        ({}, {}, {"b": 1, "h": 1}),
        ({"megacore_mode": "batch"}, {"batch": 8}, {"b": 2, "h": 1}),
        ({"megacore_mode": "kv_head"}, {"heads": 12}, {"b": 1, "h": 2}),
    ],
)
def test_elements_stay_together_where_the_function_wants_it(statics, sizes, parts):
    assert seen(paged_attention, *arguments(**sizes), pages_per_compute_block=2, **statics).parts == parts


@pytest.mark.parametrize(("heads", "together"), [(8, 1), (24, 8)])
def test_heads_of_ragged_attention_stay_together_in_tiles(heads, together):
    args = ragged_arguments(heads, 1, jnp.bfloat16)
    found = seen(ragged_paged_attention, *args, num_kv_pages_per_block=2, num_queries_per_block=8)
    assert found.parts == {"h": together}


def test_rules_say_what_may_be_split_and_why_the_rest_is_whole():
    found = seen(paged_attention, *arguments(), pages_per_compute_block=2).rule()
    rule, whole = found.rule, found.whole
    assert str(rule) == (
        "([i, jk, l], [j, m, n, l], [j, m, n, l], [i], [i, o])->([i, jk, l]) {i=8, j=4, k=2, l=128, m=16, n=8, o=4} "
        "need_replication={k, l, m, n, o} blocked_propagation={k, l, m, n, o}, custom"
    )
    assert whole[:2] == ("", "") and whole[4] == "in `paged_attention` a sequence may have any page"
    ragged = seen(ragged_paged_attention, *ragged_arguments(), num_kv_pages_per_block=2, num_queries_per_block=8)
    assert str(ragged.rule().rule).startswith("([i, jk, l], [m, n, jo, l], [p], [p, q], [r], [s])->([i, jk, l])")


def test_sizes_do_not_fit_shapes_that_no_function_takes():
    (function,) = LIBRARY["paged_attention"]
    assert sizes_of(function, {"q": (4, 16, 128), "k_pages": (3, 64, 32, 128)}) is None
    assert sizes_of(function, {"q": (4, 16, 128), "k_pages": (4, 64, 32, 64)}) is None
    assert sizes_of(function, {"q": (4, 16)}) is None


@pytest.mark.parametrize(("fun", "args"), [(paged_attention, arguments(2, 4, 8)), (ragged_paged_attention, None)])
def test_work_is_that_of_as_many_tokens_as_pages_hold(fun, args):
    """By hand: two products per query, head and token; pages of keys and values once, queries and results."""
    is_ragged = args is None
    blocks = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8} if is_ragged else {"pages_per_compute_block": 2}
    found = seen(fun, *(ragged_arguments() if is_ragged else args), **blocks)
    work = found.function.work(found.sizes, dict.fromkeys(found.names, 4))
    queries, sequences, heads = (16 * 4, 4, 2) if is_ragged else (8 * 8, 8, 2)
    assert work.flops == 4 * queries * 32 * 128
    assert work.bytes == 4 * (sequences * 32 * 2 * heads * 128 + 2 * queries * 128)
