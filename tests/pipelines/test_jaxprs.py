"""Functions in parts: what is kept between the passes of a layer, and what gradients of weights are made from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sdy_jax.pipelines.jaxprs import CutFunction, Inputs, LayerPasses, inlined
from sdy_jax.pipelines.region import Region

ROWS, WIDTH, HIDDEN = 8, 16, 64
REGION = Region(None, "stage", 4, alone=True, planned=False, around=None)


def mlp(x, up, down):
    return [x + jax.nn.gelu(x @ up.astype(x.dtype)) @ down.astype(x.dtype)]


def passes(layer) -> LayerPasses:
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    x = [jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)]
    return LayerPasses(REGION, layer, x, Inputs([], weights, [], []))


def shapes(variables) -> list[tuple[int, ...]]:
    return sorted(v.aval.shape for v in variables)


@pytest.mark.parametrize("layer", [mlp, jax.jit(mlp), jax.checkpoint(mlp), jax.checkpoint(jax.jit(mlp))])
def test_weights_in_another_precision_are_not_kept(layer):
    """Also where the layer is a call, whose residuals are all results of one equation."""
    made = passes(layer)
    assert all(shape[0] == ROWS for shape in shapes(made._kept))
    assert (WIDTH, HIDDEN) in shapes(made._remade)


def test_a_checkpoint_keeps_the_activations_alone():
    assert shapes(passes(jax.checkpoint(mlp))._kept) == [(ROWS, WIDTH)]


@pytest.mark.parametrize("layer", [mlp, jax.jit(mlp), jax.checkpoint(mlp)])
def test_gradients_of_weights_are_made_from_operands_and_cotangents(layer):
    made = passes(layer)
    assert shapes(made._deferred) == [(ROWS, WIDTH)] * 2 + [(ROWS, HIDDEN)] * 2
    products = [eqn for eqn in made._backward._after if eqn.primitive.name == "dot_general"]
    assert len(products) == 2


def test_parts_compute_what_the_whole_does():
    def whole(x, y):
        z = jnp.sin(x) * y
        return [z.sum(0), jnp.cos(z) * x, (x * y) @ z.T]

    x, y = (jnp.asarray(np.random.default_rng(i).normal(size=(4, 4)), jnp.float32) for i in range(2))
    cut = CutFunction(inlined(whole, [x, y]), 1)
    first, crossing = cut.first([x, y])
    for found, wanted in zip([*first, *cut.second(crossing)], whole(x, y), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_what_is_cast_to_a_wider_type_and_back_is_what_it_was():
    def function(x):
        wide = x.astype(jnp.float32)
        return [jax.jit(lambda x: jnp.sin(x.astype(jnp.bfloat16)))(wide), wide.astype(jnp.float16), wide.sum()]

    found = inlined(function, [jax.ShapeDtypeStruct((4,), jnp.bfloat16)]).jaxpr
    assert [eqn.params["new_dtype"] for eqn in found.eqns if eqn.primitive.name == "convert_element_type"] == [
        jnp.float32,
        jnp.float16,
    ]
    for types in ((jnp.bfloat16, jnp.float16), (jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float8_e5m2)):
        narrowed = inlined(lambda x, types=types: [x.astype(types[1]).astype(types[0])], [jnp.ones(4, types[0])]).jaxpr
        assert len(narrowed.eqns) == 2
