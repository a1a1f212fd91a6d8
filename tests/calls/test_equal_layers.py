"""Equal layers of a model run alike: what is emitted, compiled and read for one serves for all."""

import re

import benchmarks  # noqa: F401 - makes the scripts importable
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

# isort: split
import training
from workloads import Dims

import sdy_jax as sdy

_NAME = re.compile(r"%[\w#]+")
_BUCKET = re.compile(r"sdy_jax\.bucket = \d+[^,}]*")


def step(weights, x):
    """A step of descent, in half precision."""

    def loss(weights):
        y = x.astype(jnp.bfloat16)
        for layer in weights:
            y = training.fused_block(y, jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer), 0.0)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def ops(text):
    """The ops of a module, each with those of its operands: their texts, without the names of values."""
    made, found = dict[str, str](), set()
    for line in text.splitlines():
        names, equals, op = line.strip().partition(" = ")
        if equals and names.startswith("%"):
            text = _BUCKET.sub("", _NAME.sub("%", op))
            found.add((text, *(made.get(name.partition("#")[0]) for name in _NAME.findall(op))))
            made[names.partition(":")[0]] = text
    return found


def emitted(layers, mesh, meanings):
    """The ops of a step with so many layers; `meanings`: the mesh axes for each meaning of a dimension."""
    weights, spec = training.fused_layer(64, 8)
    if "weights" in meanings:
        spec = training.spread(weights, spec, "last")
    specs = jax.tree.map(lambda dims: P(*map(meanings.get, dims)), spec, is_leaf=lambda leaf: isinstance(leaf, Dims))
    args, ins = ([weights] * layers, training.f32(16, 32, 64)), ([specs] * layers, P("x"))
    return ops(sdy.partition(step, mesh=mesh, in_shardings=ins, out_shardings=ins[0]).plan(*args).mlir("partitioned"))


@pytest.mark.dear
@pytest.mark.parametrize(
    ("mesh", "meanings"),
    [(LINE, {"weights": "x"}), (PLANE, {"weights": "x", "tensor": "y"})],
    ids=["fsdp", "fsdp and tensor"],
)
def test_further_layers_add_no_new_ops(mesh, meanings):
    assert emitted(4, mesh, meanings) == emitted(3, mesh, meanings)
