"""Plans for 16 accelerators, by their machines' prices: what is sent, held and done, against the least that can be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training
from jax import lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from workloads import specs

import sdy_jax as sdy

COUNT = 16
ROWS = 256
"""Of a device: with few, these small models are quicker where each device computes all of them."""
GRID = AbstractMesh((4, 4), ("x", "y"))


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


def of_machine(machine, mesh):
    return sdy.CostModel.of_machine(machine, mesh.axis_names)


def with_rows(model, rows):
    """A model whose batch has so many rows."""
    return dataclasses.replace(
        model, batch=tuple(jax.ShapeDtypeStruct((rows, *row.shape[1:]), row.dtype) for row in model.batch)
    )


def data_parallel(model, count, machine):
    """The plan of a training step whose batch is split over so many devices."""
    workload, layout, mesh = training.workload(model, "data"), {"batch": ("x",)}, AbstractMesh((count,), ("x",))
    ins, outs = specs(workload.arguments_spec, layout), specs(workload.results_spec, layout)
    options = {"donate_argnums": workload.donated, "costs": of_machine(machine, mesh)}
    step = sdy.partition(workload.plain_step(), mesh=mesh, in_shardings=ins, out_shardings=outs, **options)
    return step.plan(*workload.arguments)


def operations(plan):
    return sum(work.flops * work.runs.times for work in plan.work)


@pytest.mark.dear(cases=2)
@pytest.mark.parametrize(
    ("make", "machine"),
    [(training.gpt, "h100"), (training.lstm, "h100"), (training.resnet, "h100"), (training.stack, "v5e")],
    ids=["gpt", "lstm", "resnet", "scanned"],
)
def test_data_parallel_steps_send_gradients_and_hold_and_do_what_one_device_does_with_its_rows(make, machine):
    plan = data_parallel(with_rows(make(1), ROWS * COUNT), COUNT, machine)
    alone = data_parallel(with_rows(make(1), ROWS), 1, machine)
    gradients = 4 * sum(leaf.size for leaf in jax.tree.leaves(make(1).weights))
    # Beside gradients, the loss and the sums of a normalization over the batch; little more where that saves time.
    assert plan.wire_bytes <= 1.25 * 2 * (COUNT - 1) / COUNT * gradients
    assert plan.memory.temporaries <= alone.memory.temporaries + gradients
    assert operations(plan) <= 1.001 * operations(alone)


def stencil(x):
    p = jnp.pad(x, 1)
    return 0.25 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])


@pytest.mark.parametrize(("machine", "size"), [("h100", 8192), ("v5e", 1024)])
def test_a_stencil_on_a_grid_sends_its_borders(machine, size):
    costs = of_machine(machine, GRID)
    step = sdy.partition(stencil, mesh=GRID, in_shardings=P("x", "y"), out_shardings=P("x", "y"), costs=costs)
    assert step.plan(f32(size, size)).wire_bytes == 4 * size // 4 * 4


def test_the_forward_pass_of_a_transformer_split_by_its_heads_sums_activations_twice_a_layer():
    d, rows, length, layers = 1024, 4, 256, 2
    layer, spec = training.gated_layer(d, COUNT)
    weights = {"embedding": f32(512, d), "layers": [layer] * layers, "norm": f32(d), "unembedding": f32(d, 512)}
    tensor = {"embedding": training.dims("tensor", None), "layers": [spec] * layers, "norm": training.dims(None)}
    tensor["unembedding"] = training.dims(None, "tensor")

    def forward(weights, tokens):
        x = weights["embedding"][tokens]
        for layer in weights["layers"]:
            x = training.rotary_block(x, layer)
        return training.norm(x, weights["norm"]) @ weights["unembedding"]

    mesh = AbstractMesh((COUNT,), ("model",))
    ins = specs(tensor, {"tensor": ("model",)}), P()
    step = sdy.partition(forward, mesh=mesh, in_shardings=ins, costs=of_machine("v5e", mesh))
    plan = step.plan(weights, jax.ShapeDtypeStruct((rows, length), np.int32))
    activations = 4 * rows * length * d
    assert plan.wire_bytes <= (2 * layers + 1) * 2 * (COUNT - 1) / COUNT * activations
    assert plan.repeated_flops <= 0.01 * operations(plan)


def likelihood(parameters, x, y):
    """The negative logarithm of a Gaussian process' likelihood."""
    z = x / parameters["length"]
    squares = jnp.sum(z * z, 1)
    kernel = parameters["scale"] * jnp.exp(z @ z.T - 0.5 * (squares[:, None] + squares))
    factor = jnp.linalg.cholesky(kernel + parameters["noise"] * jnp.eye(len(y)))
    solved = jax.scipy.linalg.cho_solve((factor, True), y)
    return 0.5 * y @ solved + jnp.log(jnp.diag(factor)).sum()


@pytest.mark.parametrize(("machine", "matrices"), [("h100", 2), ("v5e", 2), (None, 2.5)])
def test_the_gradient_of_a_gaussian_process_sends_few_matrices(machine, matrices):
    """By bytes alone the work is shared, for which half a matrix more is sent."""
    n, mesh = 256, AbstractMesh((8,), ("x",))
    costs = None if machine is None else of_machine(machine, mesh)
    ins = P(), P("x"), P("x")
    f = sdy.partition(jax.grad(likelihood), mesh=mesh, in_shardings=ins, costs=costs, on_unknown="ignore")
    plan = f.plan({"length": f32(4), "scale": f32(), "noise": f32()}, f32(n, 4), f32(n))
    assert plan.wire_bytes <= matrices * 4 * n * n


def test_the_gradient_of_ragged_products_sends_rows_of_experts_that_stay_split():
    """Each device has an expert: rows of results are summed and gathered, cotangents of rows summed."""

    def loss(weights, x, sizes):
        return jnp.tanh(lax.ragged_dot(x, weights, sizes)).sum()

    mesh, rows, d, hidden = AbstractMesh((8,), ("x",)), 64, 16, 32
    options = {"in_shardings": (P("x"), P(), P()), "out_shardings": (P("x"), P())}
    f = sdy.partition(jax.grad(loss, (0, 1)), mesh=mesh, **options)
    plan = f.plan(f32(8, d, hidden), f32(rows, d), jax.ShapeDtypeStruct((8,), np.int32))
    index = 4  # of an expert, to its device
    assert plan.wire_bytes <= 2 * 7 / 8 * 4 * rows * (hidden + d) + index
