"""Convolutions of images that are split in rows: one image over eight devices.

    python examples/spatial_convolution.py

A convolution of a block of rows needs a few rows of its neighbours, the halo: three on each side here, whatever the
size of the image. The plan sends them by collective_permute; strides and pooling go on in blocks, and no device ever
has the whole image.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

SIZE, CHANNELS = 128, 8
LAYERS = {"edges": (7, 3, CHANNELS, 1), "parts": (3, CHANNELS, CHANNELS, 2), "things": (3, CHANNELS, CHANNELS, 1)}
"""Of each layer the kernel's size, channels in and out, and the stride."""


def init(key):
    keys = jax.random.split(key, len(LAYERS))
    return {
        name: jax.random.normal(k, (size, size, inputs, outputs)) / (size * size * inputs) ** 0.5
        for k, (name, (size, inputs, outputs, _)) in zip(keys, LAYERS.items(), strict=True)
    }


def network(kernels, image):
    """[1, height, width, 3] to features [1, height / 4, width / 4, channels]."""
    x = image
    for name, (_, _, _, stride) in LAYERS.items():
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernels[name], (stride, stride), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
rows = P(None, "rows")
partitioned = sdy.partition(network, mesh=mesh, in_shardings=(P(), rows), out_shardings=rows)
kernels = init(jax.random.key(0))
image = jax.random.normal(jax.random.key(1), (1, SIZE, SIZE, 3))
plan = partitioned.plan(kernels, image)
print(plan)
np.testing.assert_allclose(partitioned(kernels, image), network(kernels, image), atol=1e-4)

moves = [collective for collective in plan.collectives if collective.wire_bytes]
assert {collective.kind for collective in moves} == {"collective_permute"}
print(f"\nhalos: {plan.wire_bytes / 1024:.0f} KiB per device in {len(moves)} collective_permutes;")
print(f"to gather the image alone would be {7 / 8 * image.nbytes / 1024:.0f} KiB")
