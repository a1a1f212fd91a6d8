"""Rules from references, for random ones and their backward passes: all splits that a rule allows, on blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from partitioned_ops import LINE
from random_references import random_reference

import sdy_jax as sdy
from sdy_jax.equivalence.kernels import verified_kernels
from sdy_jax.equivalence.subject import traced_program
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.references import derived_rule, factors
from sdy_jax.lowering.planner.references.reference import backward_of


def verified(fun, shapes, seed=0):
    """A function as a kernel with itself as reference, by the rule that it has so."""
    kernel = sdy.partition_like(lambda *xs: fun(*xs), fun)
    partitioned = sdy.partition(lambda *xs: kernel(*xs), mesh=LINE)
    program = traced_program(partitioned, tuple(jax.ShapeDtypeStruct(s, "float32") for s in shapes), {})
    (found,) = verified_kernels(Graph(program.module), seed, rtol=None, atol=1e-5)
    assert found.status != "failed", found
    return found


def some(few, many):
    """Few seeds, and more of them."""
    more = pytest.mark.more("further random references")
    return [*range(few), *(pytest.param(seed, marks=more) for seed in range(few, many))]


@pytest.mark.dear(cases=20)
@pytest.mark.parametrize("seed", some(5, 60))
def test_blocks_of_random_references(seed):
    reference = random_reference(seed)
    found = verified(reference, reference.shapes, seed)
    assert found.ok, found


@pytest.mark.dear(cases=10)
@pytest.mark.parametrize("seed", some(3, 30))
def test_blocks_of_random_backward_passes(seed):
    reference = random_reference(seed)
    results = jax.eval_shape(reference, *(jax.ShapeDtypeStruct(s, "float32") for s in reference.shapes))
    backward = backward_of(reference, range(len(reference.shapes)), range(len(results)))
    found = verified(backward, (*reference.shapes, *(result.shape for result in results)), seed)
    assert found.ok, found


def believing(*_):
    return None


PLANTED = {
    "positions": (factors.FactorFlow, "_check_made_of_nothing", lambda x: x * jnp.arange(x.shape[0])[:, None]),
    "sums that are squared": (factors.FactorFlow, "_check_terms", lambda x: x.sum(0) + 1),
    "sums that decide": (
        factors.FactorFlow,
        "_check_decisions",
        lambda x: jax.lax.while_loop(lambda c: c[1], lambda c: (c[0] + 0.1, (c[0] < 1).any()), (x, (x < 2).any()))[0],
    ),
    "numbers that are others on blocks": (derived_rule, "difference", lambda x: x.mean(0)),
    "means of squares": (derived_rule, "difference", lambda x: x.sum(0) / x.shape[0] * x.shape[1]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_wrong_rules_are_found(name, monkeypatch):
    where, check, fun = PLANTED[name]
    assert verified(fun, [(8, 4)]).ok
    monkeypatch.setattr(where, check, believing)
    found = verified(fun, [(8, 4)])
    assert not found.ok and found.factor.startswith("factor i=8 in 2 parts (dim 0 of operand 0)"), found
