"""Somebody else's program: exported to a file, then read, planned and run on a mesh that its author never saw.

    python examples/exported_program.py     # needs flatbuffers: pip install flatbuffers

The file has StableHLO and the trees of arguments, no Python and no weights. What is said about devices is said after
reading. Of a text of MLIR, a portable artifact or bytecode `sdy.load` makes a program in the same way. The command line
does the same: `sdy-jax plan FILE --mesh data=2,model=4 --in-shardings ...`.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

jax.config.update("jax_platforms", "cpu")  # eight virtual devices; leave these two lines out on eight GPUs or TPUs
jax.config.update("jax_num_cpu_devices", 8)

BATCH, WIDTH = 16, 64


def write(path):
    """The author's side: a gated MLP for any size of batch."""

    def gated(weights, x):
        return x + (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]

    f32 = jnp.float32
    types = {
        "gate": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), f32),
        "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), f32),
        "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), f32),
    }
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"batch, {WIDTH}"), f32)
    path.write_bytes(jax.export.export(jax.jit(gated), platforms=["cpu", "cuda", "tpu"])(types, rows).serialize())
    return jax.jit(gated)


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "gated.bin"
    original = write(file)
    print(f"{file.name}: {file.stat().st_size} bytes")
    program = sdy.load(file)

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
specs = {"gate": P(None, "model"), "up": P(None, "model"), "down": P("model")}
partitioned = sdy.partition(program, mesh=mesh, in_shardings=(specs, P("data")), out_shardings=P("data"))

keys = jax.random.split(jax.random.key(0), 3)
weights = {
    name: jax.random.normal(key, (WIDTH, 4 * WIDTH) if name != "down" else (4 * WIDTH, WIDTH)) / WIDTH
    for key, name in zip(keys, specs, strict=True)
}
sent = {}
for rows in (BATCH, 4 * BATCH):  # the sizes of each call
    x = jax.random.normal(jax.random.key(1), (rows, WIDTH))
    np.testing.assert_allclose(partitioned(weights, x), original(weights, x), atol=1e-4)
    plan = partitioned.plan(weights, x)
    sent[rows] = plan.wire_bytes
    print(plan.table("collectives"), "\n")

said = ", ".join(f"{count:.0f} bytes per device for {rows} rows" for rows, count in sent.items())
print(f"the file's program on 2 x 4 devices sends {said}; its results are those of one device")
