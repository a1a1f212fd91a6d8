"""Random collectives, custom calls, and ops that have no rule in Shardy."""

from __future__ import annotations

import random

from random_programs.tensors import Case, Tensor, adder, family, i64s, reducer
from sdy_jax.shardy.rules import custom_calls as custom_call_rules
from sdy_jax.shardy.rules.elementwise import ELEMENTWISE
from sdy_jax.shardy.rules.registry import SILENT_TARGETS

GROUPS = "replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>"


@family
def collective(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or 0 in x.shape:
        return None
    count, dim = rng.randint(1, 2), rng.randrange(x.rank)
    same, region = [x], reducer(adder(x.dtype), 1, x.dtype)
    doubled = Tensor((*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 :]), x.dtype)
    target_pairs = "source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>"
    gathered = f"all_gather_dim = {dim} : i64, {GROUPS}"
    scattered = f"scatter_dimension = {dim} : i64, {GROUPS}"
    return rng.choice(
        [
            Case("stablehlo.all_reduce", same * count, same * count, GROUPS, region),
            Case("stablehlo.collective_broadcast", same, same, GROUPS),
            Case("stablehlo.collective_permute", same, same, target_pairs),
            Case("stablehlo.cross-replica-sum", same, same, GROUPS),
            Case("stablehlo.all_gather", same * count, [doubled] * count, gathered),
            Case("stablehlo.reduce_scatter", [doubled], same, scattered, region),
        ]
    )


@family
def all_to_all(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or 0 in x.shape:
        return None
    split, concat = rng.randrange(x.rank), rng.randrange(x.rank)
    operand = list(x.shape)
    operand[split] *= 2
    result = list(operand)
    if split != concat:
        result[split] //= 2
        result[concat] *= 2
    attributes = f"split_dimension = {split} : i64, concat_dimension = {concat} : i64, split_count = 2 : i64, {GROUPS}"
    return Case("stablehlo.all_to_all", [Tensor(tuple(operand), x.dtype)], [Tensor(tuple(result), x.dtype)], attributes)


def call(target: str, operands: list[Tensor], results: list[Tensor]) -> Case:
    return Case("stablehlo.custom_call", operands, results, f'call_target_name = "{target}"')


UNKNOWN_TARGETS = ("Sharding", "mhlo.tan", "GatherTensor", "lapack_spotrf_ffi", *sorted(SILENT_TARGETS))
SHAPE_KEEPING_TARGETS = (*custom_call_rules.ELEMENTWISE_TARGETS, "X64Combine")


@family
def custom_call(rng: random.Random, x: Tensor) -> Case | None:
    return call(rng.choice(SHAPE_KEEPING_TARGETS if rng.random() < 0.8 else UNKNOWN_TARGETS), [x], [x])


@family
def decomposition(rng: random.Random, x: Tensor) -> Case | None:
    if x.rank < 2 or x.dtype != "f32":
        return None
    *batch, m, n = x.shape
    scales = Tensor((*batch, min(m, n)))
    square = Tensor((*batch, n, n))
    return rng.choice(
        [
            call("Eigh", [square], [square, Tensor((*batch, n))]),
            call("Qr", [x], [x, scales]),
            call("QrDecompositionBlock", [x], [x, scales]),
            call("ProductOfElementaryHouseholderReflectors", [x, scales], [x]),
        ]
    )


@family
def largest(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or x.dtype != "f32" or not x.shape[-1]:
        return None
    values = Tensor((*x.shape[:-1], rng.randint(1, x.shape[-1])))
    indices = values.of("i32")
    operands = [x, x.of("i32"), Tensor(()), Tensor((), "i32")]
    return rng.choice(
        [
            call("mhlo.topk", [x], [values, indices]),
            call("ApproxTopK", operands, [values, indices]),
            call("PartialReduce", operands, [values, indices]),
        ]
    )


def chlo_op(name: str, f: Tensor) -> Case:
    """An element-wise op of the chlo dialect on tensors of a shape."""
    x = {"chlo._asin_acos_kernel": f.of("complex<f32>"), "chlo.mulhi": f.of("i32")}.get(name, f)
    result = x.of("i1") if name.startswith("chlo.is_") else x
    attributes = "value = 1.0 : f32" if name == "chlo.constant_like" else ""
    return Case(name, [x] * (2 if name in _BINARY else 1), [result], attributes)


CHLO = tuple(name for name in ELEMENTWISE if name.startswith("chlo."))
_BINARY = {"chlo.mulhi", "chlo.next_after", "chlo.polygamma", "chlo.zeta"}


@family
def higher_level(rng: random.Random, x: Tensor) -> Case | None:
    """Element-wise ops of the chlo dialect."""
    if x.dtype != "f32":
        return None
    return chlo_op(rng.choice(CHLO), x)


@family
def ruleless(rng: random.Random, x: Tensor) -> Case | None:
    if not x.rank or x.dtype != "f32":
        return None
    feature = rng.randrange(x.rank)
    norm = f"epsilon = 1.0e-3 : f32, feature_index = {feature} : i64"
    per_feature = Tensor((x.shape[feature],))
    whole = f"dimensions = {i64s(range(x.rank))}"
    return rng.choice(
        [
            Case("stablehlo.iota", [], [x], f"iota_dimension = {feature} : i64"),
            Case("stablehlo.optimization_barrier", [x], [x]),
            Case("stablehlo.map", [x, x], [x], whole, reducer("add")),
            Case("stablehlo.batch_norm_training", [x, per_feature, per_feature], [x, per_feature, per_feature], norm),
            Case("stablehlo.batch_norm_grad", [x, *[per_feature] * 3, x], [x, per_feature, per_feature], norm),
            Case("stablehlo.get_dimension_size", [x], [Tensor((), "i32")], f"dimension = {feature} : i64"),
            Case("stablehlo.partition_id", [], [Tensor((), "ui32")]),
            Case("stablehlo.replica_id", [], [Tensor((), "ui32")]),
        ]
    )
