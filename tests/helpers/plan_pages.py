"""Pages of plans that tests look at."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.cli.main import main

MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPECS, BEFORE = {"up": P(None, "model"), "down": P("model")}, {"up": P(), "down": P("model")}
W = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
LONG = "state['optimizer'][0].mu['layers'][11]['attention_norm']['scale']"
HOSTILE = "</script><script>document.title='run'</script><!--<script>&amp;"


def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(w: dict[str, jax.Array]) -> jax.Array:
        with jax.named_scope("block"):
            y = jnp.tanh(x @ w["up"]) @ w["down"]
        y, _ = jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w["up"] @ w["down"]), None), y, length=3)
        return jnp.mean(y**2)

    value, gradient = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value


def planned(specs: dict[str, P]) -> sdy.Plan:
    """The plan of the step with weights that are split so."""
    borders: Any = {"in_shardings": (specs, P("data")), "out_shardings": (specs, None)}
    return sdy.partition(step, mesh=MESH, layouts="global", **borders).plan(W, jnp.ones((8, 16)))


def write_pages(plan: sdy.Plan, before: sdy.Plan, folder: Path) -> None:
    """Writes pages of plans into a folder: as it is, compared, and with odd names and types."""
    plan.to_html(folder / "plan.html")
    plan.to_html(folder / "compared.html", against=before)
    hostile = dataclasses.replace(plan.record(), name=HOSTILE, headline=HOSTILE)
    value = dataclasses.replace(hostile.values[0], name=HOSTILE)
    argument = dataclasses.replace(hostile.arguments[0], path=LONG)
    odd = dataclasses.replace(
        hostile, values=(value, *hostile.values[1:]), arguments=(argument, *hostile.arguments[1:])
    )
    odd.to_html(folder / "hostile.html")
    with_type(plan.record(), "w['up']", "f32[16@(model:(2)2,data),32@model:(1)2]").to_html(folder / "parts.html")
    with_type(plan.record(), "w['up']", "f32[16,32@data]{U:model}").to_html(folder / "sums.html")
    (folder / "local.mlir").write_text(LOCAL)
    assert main(["plan", str(folder / "local.mlir"), "--html", str(folder / "local.html")]) == 0


LOCAL = """mesh.mesh @m(shape = 2x4)
func.func @main(%x: tensor<8x4xf32>) -> tensor<16x4xf32> {
  %r = mesh.all_gather %x on @m mesh_axes = [0] gather_axis = 0 : tensor<8x4xf32> -> tensor<16x4xf32>
  return %r : tensor<16x4xf32>
}
"""


def with_type(record: sdy.PlanRecord, name: str, type_: str) -> sdy.PlanRecord:
    """A record in which a value has another type."""
    tensor = dataclasses.replace(record.value_of[name].tensor, type=type_)
    values = [dataclasses.replace(v, tensor=tensor) if v.name == name else v for v in record.values]
    return dataclasses.replace(record, values=tuple(values))
