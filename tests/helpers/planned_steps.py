"""Steps whose layouts are planned as a whole, and their models."""

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.planner.placement.program_placement import ProgramPlacement
from sdy_jax.lowering.planner.problem.planning_problem import planning_problem
from sdy_jax.lowering.planner.rewrites.preparation import prepared
from sdy_jax.lowering.planner.search.layout_search import best_choice
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram, plan_of
from sdy_jax.lowering.planner.setting import Setting
from sdy_jax.lowering.planner.solve.improvement import Improver
from sdy_jax.lowering.targets.target import Target


class Program:
    """A function of one mesh up to the model of its layouts."""

    def __init__(self, function, args, mesh, in_shardings, out_shardings=None, costs=None, target=Target()):  # noqa: B008
        f = sdy.partition(function, mesh=mesh, in_shardings=in_shardings, out_shardings=out_shardings, costs=costs)
        plan = f.plan(*args)
        module = plan.stages["propagated"].clone().operation
        self.costs = costs or sdy.CostModel.of_platform("cpu")
        with module.context, ir.Location.unknown(module.context):
            self.setting = Setting(plan.program.mesh_name, self.costs, target=target)
            self.graph = prepared(module, self.setting)
            self.baseline = self.place()
            self.placed = self.baseline.placed
            atoms = self.placed.layouts.atoms(self.placed.mesh, {})
            self.modelled = planning_problem(self.graph, self.placed, self.setting, atoms)
        self.model = self.modelled.model

    def place(self, plan=None):
        copy = Graph(self.graph.module.clone().operation)
        return PartitionedProgram(ProgramPlacement(copy, self.setting, plan).run(), self.setting, plan)

    def placed_by_plan(self):
        module = self.graph.module
        with module.context, ir.Location.unknown(module.context):
            return self.place(plan_of(self.modelled, best_choice(Improver(self.modelled))))

    def placed_by_its_own_choices(self):
        module = self.graph.module
        with module.context, ir.Location.unknown(module.context):
            return self.place(plan_of(self.modelled, self.modelled.start))


def shapes(*sizes):
    return [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]


def step(weights, x, y):
    def loss(weights):
        h = x
        for up, down in weights:
            h = h + jax.nn.gelu(h @ up) @ down
        return jnp.mean((h - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def scanned(weights, x):
    def loss(weights):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

    return jax.grad(loss)(weights)


def attention(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", scores, v)


def block_step(layers, x, y):
    """Descent on attention and a feed-forward network, per layer."""

    def loss(layers):
        h = x
        for *heads, out, up, down in layers:
            h = h + jnp.einsum("bshe,hed->bsd", attention(h, *heads), out)
            h = h + jax.nn.gelu(h @ up) @ down
        return jnp.mean((h - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), value


LAYER = shapes((64, 256), (256, 64))
BATCH = shapes((32, 64), (32, 64))
BLOCK = shapes(*[(32, 8, 4)] * 3, (8, 4, 32), (32, 128), (128, 32))
SEQUENCES = shapes((8, 16, 32), (8, 16, 32))
PROGRAMS = {
    "data": (step, ([LAYER] * 2, *BATCH), (P(), P("x"), P("x")), LINE),
    "fsdp": (step, ([LAYER] * 2, *BATCH), (P("x"), P("x"), P("x")), LINE),
    "fsdp of the last": (step, ([LAYER] * 2, *BATCH), (P(None, "x"), P("x"), P("x")), LINE),
    "weights of both": (step, ([LAYER] * 2, *BATCH), (P("x", "y"), P("x"), P("x")), PLANE),
    "three axes": (step, ([LAYER], *BATCH), (P("x", "y"), P("z"), P("z")), CUBE),
    "scanned": (scanned, shapes((4, 64, 64), (32, 64)), (P(None, "x"), P("x")), LINE),
    "blocks": (block_step, ([BLOCK], *SEQUENCES), (P("x"), P("x"), P("x")), LINE),
    "blocks of both": (block_step, ([BLOCK], *SEQUENCES), (P("x", "y"), P("x"), P("x")), PLANE),
    "attention": (attention, shapes((8, 16, 32), *[(32, 8, 4)] * 3), (P(None, "x"), P("x"), P("x"), P("x")), LINE),
}


def stacked(weights, x, y):
    """A step over scanned layers."""

    def loss(weights):
        def layer(h, layer):
            up, down = layer
            return h + jnp.tanh(h @ up) @ down, None

        return jnp.mean((jax.lax.scan(layer, x, weights)[0] - y) ** 2)

    return jax.grad(loss)(weights)
