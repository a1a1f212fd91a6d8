"""Arguments and results in the memory of the host, and values that are moved there in between, next to jit's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

X = np.arange(128, dtype=np.float32).reshape(8, 16) / 16
JITS = (sdy.partition, jax.jit)
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=str)
def mesh(request):
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(request.param,) * 2)


def placed(mesh, kind="device", spec=P("a")):
    return jax.device_put(X, NamedSharding(mesh, spec, memory_kind=kind))


def hidden(x):
    return jnp.sin(checkpoint_name(jnp.sin(x), "h")).sum()


def there_and_back(x):
    return jax.device_put(jax.device_put(x * 2, jax.memory.Space.Host), jax.memory.Space.Device) + 1


FUNCTIONS = {
    "an argument": (lambda x: jax.device_put(x, jax.memory.Space.Device) * 2, "pinned_host"),
    "a result": (lambda x: jax.device_put(x * 2, jax.memory.Space.Host), "device"),
    "both": (
        lambda x: jax.device_put(jax.device_put(x, jax.memory.Space.Device) * 2, jax.memory.Space.Host),
        "pinned_host",
    ),
    "in between": (there_and_back, "device"),
    "what a policy offloads": (jax.grad(jax.checkpoint(hidden, policy=OFFLOAD)), "device"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_is_that_of_jit(mesh, name):
    function, kind = FUNCTIONS[name]
    x = placed(mesh, kind)
    with jax.set_mesh(mesh):
        ours, theirs = (jit(function)(x) for jit in JITS)
    assert ours.sharding.memory_kind == theirs.sharding.memory_kind
    assert ours.sharding.is_equivalent_to(theirs.sharding, 2) and str(jax.typeof(ours)) == str(jax.typeof(theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("jit", JITS)
def test_a_result_that_is_stated_to_be_on_the_host(mesh, jit):
    stated = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    y = jit(lambda x: (x * 2, x + 1), out_shardings=(stated, None))(placed(mesh))
    assert [r.sharding.memory_kind for r in y] == ["pinned_host", "device"]
    np.testing.assert_array_equal(y[0], X * 2)


def test_gradients_of_functions_that_offload(mesh):
    with jax.set_mesh(mesh):
        f = sdy.partition(jax.checkpoint(hidden, policy=OFFLOAD))
        np.testing.assert_allclose(jax.grad(f)(placed(mesh)), np.cos(np.sin(X)) * np.cos(X), rtol=1e-5, atol=1e-6)


def test_kinds_of_memory_that_types_do_not_know(mesh):
    stated = NamedSharding(mesh, P("a"), memory_kind="unpinned_host")
    ours, theirs = (jit(lambda x: x * 2, out_shardings=stated)(placed(mesh)) for jit in JITS)
    assert ours.sharding == theirs.sharding == stated
    np.testing.assert_array_equal(ours, X * 2)
