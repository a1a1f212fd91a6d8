"""The per-device function of a partitioned program, traced: its steps, and the ops of the program that they are of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from sdy_jax.errors import InternalError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.graph import Value as GlobalValue
from sdy_jax.lowering.emission.emit import NotedOp, local_function, noting_ops, used_axes
from sdy_jax.lowering.emission.re_emission import numpy_dtype
from sdy_jax.python_source.reading import new_values, read_function
from sdy_jax.python_source.renamed_axes import on_atoms
from sdy_jax.python_source.steps import Block, captured_by, without_dead_steps
from sdy_jax.representation.mesh import Mesh
from sdy_jax.representation.sharding import TensorSharding
from sdy_jax.runtime.mesh import RefinedMesh, abstract_mesh, in_place_of_context


@dataclass(frozen=True, slots=True)
class Traced:
    """The per-device function.

    Attributes:
        body: of local blocks, one per entry of `taken`, to local blocks, one per entry of `made`.
        ops: the ops of the partitioned program, by the index in `Step.op`.
        mesh: the mesh of the `shard_map`.
        taken, made: the indices of the arguments and results of the program that it takes and makes: those that are
            used, and those that have elements.
    """

    body: Block
    ops: Sequence[NotedOp]
    mesh: RefinedMesh
    taken: tuple[int, ...]
    made: tuple[int, ...]

    def spec(self, sharding: TensorSharding) -> jax.sharding.PartitionSpec:
        return self.mesh.spec(sharding)


def trace(graph: Graph, mesh: Mesh, results: Sequence[TensorSharding]) -> Traced:
    """Traces the main function of a partitioned module on its mesh; `results` are the shardings of its results."""
    refined = RefinedMesh.of(mesh, used_axes(graph))
    arguments = [v.sharding or TensorSharding.replicated("mesh", len(v.shape or ())) for v in graph.arguments]
    devices = abstract_mesh(refined.shape, refined.axis_names)

    def on_mesh(*xs: jax.Array) -> Any:
        return jax.shard_map(
            local_function(graph, refined),
            mesh=devices,
            in_specs=tuple(map(refined.spec, arguments)),
            out_specs=tuple(map(refined.spec, results)),
            check_vma=False,
        )(*xs)

    with noting_ops() as ops, jax.enable_x64(True), in_place_of_context(devices):
        jaxpr = jax.make_jaxpr(on_mesh)(*map(_type_of, graph.arguments))
    body = _read(jaxpr, refined)
    returned = graph.main.blocks[0].terminator.operands
    made = tuple(i for i, value in enumerate(returned) if math.prod(value.shape or ()))
    body = without_dead_steps(Block(body.inputs, body.steps, [body.outputs[i] for i in made]))
    used = captured_by(Block([], body.steps, body.outputs))
    taken = tuple(i for i, value in enumerate(body.inputs) if value in used)
    return Traced(Block([body.inputs[i] for i in taken], body.steps, body.outputs), ops, refined, taken, made)


def _type_of(value: GlobalValue) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(value.shape or (), numpy_dtype(value.dtype))


def _read(jaxpr: Any, mesh: RefinedMesh) -> Block:
    """The body of the `shard_map`, and nothing else, of a function that is one."""
    found = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    if len(found) != 1:
        raise InternalError(f"a per-device function is {len(found)} shard_maps, expected one")
    inner = found[0].params["jaxpr"]
    inputs = new_values(inner)
    known = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    given = list(_constants(found[0].invars, known))
    for value, x in zip(inputs, given, strict=True):
        value.constant = x
    block = read_function(on_atoms(inner, [*zip(mesh.axis_names, mesh.shape, strict=True)]), inputs)
    return Block([v for v in inputs if v.constant is None], block.steps, block.outputs)


def _constants(variables: Sequence[Any], known: dict[Any, Any]) -> Iterator[Any]:
    """What `shard_map` closes over, which it takes like arguments."""
    for variable in variables:
        found = known.get(variable) if not hasattr(variable, "val") else variable.val
        yield None if found is None else np.asarray(found)
