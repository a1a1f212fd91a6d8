"""Compiles a transformer's training step for a slice of TPUs that is not there, and prints what that says as JSON.

pod_programs.py SLICE SLICES AXES
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import pods

import sdy_jax as sdy
from sdy_jax.cli.arguments import parse_mesh
from sdy_jax.cli.devices import Topology, compiled_report, prepare
from sdy_jax.plan.profile import collectives_in_hlo, totals


def main() -> None:
    prepare()
    name, slices, axes = sys.argv[1:]
    topology = Topology.of(f"tpu:{name}", int(slices))
    mesh = topology.mesh(parse_mesh(axes))
    batch = tuple(axis for axis in mesh.axis_names if axis != "model")
    ins, outs = pods.shardings(2, {**pods.LAYOUT, "batch": batch})
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    types = pods.arguments(2, d=128 * sizes["data"], heads=16, batch=2 * mesh.size // sizes["model"])
    step = sdy.partition(
        pods.step(), mesh=mesh, in_shardings=ins, out_shardings=outs, donate_argnums=0, on_unknown="ignore"
    )
    plan, lowered = step.plan(*types), step.lower(*types)
    compiled = lowered.compile()
    sent = totals(collectives_in_hlo(compiled.as_text() or ""))
    memory: Any = compiled.memory_analysis()
    found = {
        "devices": len(topology.devices),
        "planned": plan.wire_bytes,
        "sent": sent.wire_bytes,
        "kinds": sorted(sent.by_kind),
        "over slices": sum(r.total_wire_bytes for r in plan.collectives if any(a.name == "slice" for a in r.axes)),
        "weights": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(types[0])),
        "estimated": plan.memory.peak,
        "memory": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "unit": plan.costs.unit,
        "report": compiled_report(lowered, topology),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
