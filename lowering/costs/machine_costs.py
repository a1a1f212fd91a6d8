"""What a cost model takes of a machine: its published rates, or what was measured, as fields of a `CostModel`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from sdy_jax.errors import SdyError
from sdy_jax.lowering.targets.calibration import Calibration
from sdy_jax.lowering.targets.registry import family_of_machine, machine_called, machines
from sdy_jax.lowering.targets.target import family_of
from sdy_jax.representation.named import AnyMesh
from sdy_jax.runtime.devices import network_axes


def published_fields(name: str, axes: tuple[str, ...], slow: Mapping[str, float]) -> dict[str, Any]:
    """The rates of a machine that are published, on a mesh of these axes, of which some are slow.

    Raises:
        SdyError: no machine is called so.
    """
    known, called = machines(), machine_called(name)
    if called is None:
        near = difflib.get_close_matches(str(name).lower(), known, 1)
        meant = f"did you mean {near[0]!r}? Known" if near else "known"
        raise SdyError(f"no machine is called {name!r}; {meant} are {', '.join(known)}. Or give CostModel your own")
    name = called
    chip, links, family = known[name].chip, known[name].links, family_of_machine(name)
    return {
        "latency": dict.fromkeys(axes, links.latency) | dict.fromkeys(slow, links.network.latency),
        "flop": 2 / chip.flops,
        "bandwidth": dict.fromkeys(axes, links.bandwidth) | dict(slow),
        "start": links.start,
        "memory": 1 / chip.memory,
        "launch": chip.launch,
        "product_launch": chip.product_launch,
        "copies": family.arrays.copies(1 / chip.memory, chip.launch),
        "combines": tuple(family.compiler.collectives.combines),
        "torus": tuple(axis for axis in axes if links.is_torus and axis not in slow),
        "rounds": family.arrays.moved,
        "machine": name,
        "origin": f"{name}, by its published rates",
    }


def measured_fields(found: Calibration, mesh: AnyMesh, machine: str, torus: tuple[str, ...]) -> dict[str, Any]:
    """The rates that were measured on a mesh; `torus`: the axes along which devices reach only their neighbours."""
    family = family_of(mesh)
    over_network = axes_over_network(mesh, machine) if torus else {}
    torus = tuple(axis for axis in torus if axis not in over_network)
    copies = family.arrays.copies(found.memory, found.launch)
    return {
        "latency": {name: axis.latency * (2 if name in torus else 1) for name, axis in found.axes.items()},
        "flop": found.flop,
        "bandwidth": {name: axis.bandwidth for name, axis in found.axes.items()},
        "start": {name: axis.start for name, axis in found.axes.items()},
        "memory": found.memory,
        "launch": found.launch,
        "copies": copies._replace(sent=0.0),  # those of all kinds are a part of what was measured
        "combines": tuple(family.compiler.collectives.combines),
        "torus": torus,
    }


def axes_over_network(mesh: AnyMesh, machine: str) -> dict[str, int]:
    """The axes of a mesh along which devices are of several slices, or hosts, with the sizes of major parts."""
    return network_axes(mesh, joins_hosts=machines()[machine].links.joins_hosts)
