"""`verify` runs custom ops on blocks along every factor of their rules, beside their references or themselves."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE

import sdy_jax as sdy
from sdy_jax.errors import VerificationError

ONCE = {"targets": ["cpu"], "uneven": False}


def normal(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def verified(fun, *args, specs=None):
    return sdy.verify(sdy.partition(lambda *xs: fun(*xs), mesh=PLANE, in_shardings=specs), *args, **ONCE)


def only(found):
    (kernel,) = found.kernels
    return kernel


def attention(q, k, v):
    return jax.nn.softmax(q @ k.mT, -1) @ v


def test_a_kernel_beside_its_reference():
    fun = sdy.partition_like(jax.jit(attention), attention)
    found = verified(fun, normal(4, 6, 5), normal(4, 7, 5), normal(4, 7, 8), specs=(P("x"), P("x"), P("x")))
    assert found and only(found).status == "same" and only(found).is_referred
    assert "1 case and 1 kernel, all the same as the plain function" in found.headline
    assert "on blocks by ([i, j, l], [i, m, n], [i, o, k])->([i, j, k])" in str(found)
    assert "kernel `attention` at tests/equivalence/test_verified_kernels.py:" in str(found)
    assert json.loads(found.to_json())["kernels"][0]["ok"]


WRONG = {
    "no factor may be split": (lambda x: x - x.mean(0), "([i, j])->([i, j]) {i=8, j=6}", "i=8 in 2 parts"),
    "the second is a sum": (lambda x: x.sum(1), "([i, j])->([i]) {i=8, j=6}", "j=6 in 2 parts"),
    "the kind of the reduction": (lambda x: x.max(1), "([i, j])->([i]) {i=8, j=6} reduction={j}", "j=6 in 2 parts"),
    "it looks behind its end": (lambda x: x + x[-1:], "([i, j])->([i, j]) {i=8, j=6} need_replication={j}", "i=8"),
    "a block is no block": (lambda x: x.reshape(2, 4, 6), "([ij, k])->([i, j, k]) {i=2, j=4, k=6}", "i=2 in 2 parts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found_whatever_the_plan_is(name):
    run, rule, factor = WRONG[name]
    found = verified(sdy.custom_op(run, rule), normal(8, 6))
    kernel = only(found)
    assert not found and kernel.status == "different" and kernel.factor.startswith(f"factor {factor}"), found
    assert not kernel.is_referred and "differs from itself on whole arrays along factor" in str(kernel)
    assert "1 wrong" in found.headline
    with pytest.raises(VerificationError, match="differs from itself on whole arrays along factor"):
        found.raise_for_difference()


RIGHT = {
    "rows": (lambda x: x - x.mean(1, keepdims=True), "([i, j])->([i, j]) {i=7, j=6} need_replication={j}"),
    "a sum": (lambda x: x.sum(0), "([i, j])->([j]) {i=7, j=6} reduction={i}"),
    "merged dimensions": (lambda x: x.reshape(-1), "([i, j])->([ij]) {i=7, j=6}"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rules_are_right(name):
    assert verified(sdy.custom_op(*RIGHT[name]), normal(7, 6))


def test_maxima_are_combined_as_the_op_says():
    most = sdy.custom_op(lambda x: x.max(0), "([i, j])->([j]) {i=8, j=6} reduction={i}", reduction="max")
    assert verified(most, normal(8, 6))


def test_a_kernel_that_is_another_function_than_its_reference():
    found = verified(sdy.partition_like(lambda x: x * 1.01, lambda x: x), normal(8, 6))
    assert not found and only(found).factor == "" and "on whole arrays differs by" in str(found)


def test_a_kernel_that_is_another_function_on_blocks():
    """On whole arrays it is the reference, of which the rule is."""
    found = verified(sdy.partition_like(lambda x: x * (x.shape[0] / 8), lambda x: x * 1), normal(8, 6))
    assert not found and only(found).factor.startswith("factor i=8 in 2 parts (dim 0 of operand 0)")


def test_integers_are_indices_of_the_reference():
    fun = sdy.partition_like(jax.jit(lambda table, rows: table[rows]), lambda table, rows: table[rows])
    assert verified(fun, normal(5, 8), jax.ShapeDtypeStruct((6, 4), "int32"))


def test_a_kernel_that_does_not_run_here_is_said_to_be_not_compared(monkeypatch):
    from sdy_jax.equivalence import kernels

    monkeypatch.setattr(kernels, "drawn_arguments", lambda *_: 1 / 0)
    found = verified(sdy.partition_like(jnp.sin, jnp.sin), normal(8, 6))
    assert (
        found and "kernel `sin` at" in str(found) and "not compared with its reference: division by zero" in str(found)
    )


def test_equal_kernels_are_compared_once():
    fun = sdy.partition_like(jax.jit(jnp.sin), jnp.sin)
    assert len(verified(lambda x: fun(fun(x)) + fun(x[:4]).sum(), normal(8, 6)).kernels) == 2
