"""Steps of one token, weights by heads: all latency. At most as many collectives as `jax.jit` runs, and its bytes, but
where sending more takes less time."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from models import rows
from models.common import Layout, Program
from models.experts import Dropless, Latent, decoded_latent
from models.llama import Llama
from models.serving import decoded

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

DENSE = Llama(4, 256, 8, 8, 32, 512, 1024)
GROUPED = replace(DENSE, kv_heads=4)
EXPERTS = replace(DENSE, experts=8, chosen=2, routing=Dropless(jax.lax.ragged_dot, mapped=False))
LATENT = Latent(4, 256, 8, 32, 64, 512, 1024)
STEPS: dict[str, Callable[..., Program]] = {
    "dense": partial(decoded, DENSE),
    "grouped heads": partial(decoded, GROUPED),
    "experts": partial(decoded, EXPERTS),
    "latent": partial(decoded_latent, LATENT),
}
PLACES = {
    "8": ({"model": 8}, {**rows.TENSOR, "expert": "model"}),
    "2x4": ({"data": 2, "model": 4}, {**rows.BATCH, "expert": "model"}),
}
ROWS = [(place, name) for place in PLACES for name in STEPS if (place, name) != ("8", "grouped heads")]


@pytest.mark.dear(cases=7)
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(("place", "name"), ROWS)
def test_no_more_collectives_or_bytes_than_jit_but_for_time(place, name, constrained):
    axes, rules = PLACES[place]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    layout = Layout(mesh, rules, constrained)
    step = STEPS[name](layout=layout, batch=8, sequence=64)
    given, made = layout.specs(step.named), layout.specs(step.results)
    named = [jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree) for tree in (given, made)]
    plain = jax.jit(step.run, in_shardings=named[0], out_shardings=named[1], donate_argnums=step.donated)
    jits = totals(collectives_in_hlo(plain.lower(*step.arguments).compile().as_text()))

    options = {"in_shardings": given, "out_shardings": made, "donate_argnums": step.donated, "on_unknown": "ignore"}
    f = sdy.partition(step.run, mesh=mesh, **options)
    ours = totals(collectives_in_hlo(f.lower(*step.arguments).compile().as_text()))
    if (
        name != "latent"
    ):  # by a CPU's prices a product that all devices would repeat is split, and what it makes gathered
        assert ours.count <= jits.count and ours.wire_bytes <= jits.wire_bytes
    assert ours.count <= 1.4 * jits.count and ours.wire_bytes <= 1.06 * jits.wire_bytes
    for machine in ("tpu v5e", "h100"):
        options["costs"] = sdy.CostModel.of_machine(machine, mesh)
        plan = sdy.partition(step.run, mesh=mesh, **options).plan(*step.arguments)
        assert sum(one.times for one in plan.collectives if one.wire_bytes) <= jits.count
        if plan.wire_bytes > jits.wire_bytes:
            around_stated = sdy.partition(step.run, mesh=mesh, layouts="local", **options).plan(*step.arguments)
            assert plan.time.total < around_stated.time.total
