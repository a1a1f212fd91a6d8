"""What `sdy-jax doctor` tries out.

A check says whether something is there that one can do without; it raises an error if what one needs does not work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.sharding import PartitionSpec as P

from sdy_jax.base.jax_calls import jit
from sdy_jax.calls.load import load
from sdy_jax.calls.partition import partition
from sdy_jax.cli import devices
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.ir.text.modules import new_context
from sdy_jax.plan.digests import FOLDER, cache_folder
from sdy_jax.shardy.passes.pipelines import run

_TINY = 2.0**-1000
"""Given: what float32 has no number for."""

_SIZES = (64, 96), (96, 192), (192, 96)
"""Chosen: a network whose layers a few devices divide."""

_ROUNDING = 1e-5
"""Guessed, some hundred roundings of float32: with less, a right network may fail where its order of summation
differs."""

DoctorCheck = Callable[[argparse.Namespace], tuple[bool, str]]

_MODULE = """\
sdy.mesh @mesh = <["x"=2]>
func.func @main(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}]>}) -> tensor<8xf32> {
  %b = stablehlo.tanh %a : tensor<8xf32>
  return %b : tensor<8xf32>
}
"""

_LOCAL_MODULE = """\
mesh.mesh @mesh(shape = 2)
func.func @main(%a: tensor<8xf32>) -> tensor<16xf32> {
  %b = mesh.all_gather %a on @mesh mesh_axes = [0] gather_axis = 0 : tensor<8xf32> -> tensor<16xf32>
  return %b : tensor<16xf32>
}
"""


def prepare(options: argparse.Namespace) -> None:
    """To be called before the first check."""
    devices.request(options.devices or 1)


def _devices(options: argparse.Namespace) -> tuple[bool, str]:
    found = devices.devices(options.devices or jax.device_count())
    kinds = dict.fromkeys(d.device_kind for d in found)
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return True, f"{len(found)} x {found[0].platform} ({', '.join(kinds)}){processes}"


def _wide_types(_: argparse.Namespace) -> tuple[bool, str]:
    with jax.enable_x64(True):
        value = float(jit(lambda x: x * 2)(np.float64(_TINY)))
    if value != 2 * _TINY:
        raise ValueError(f"2 * 2**-1000 is {value}")
    return True, "float64 and int64 are computed as such"


def _shard_map(options: argparse.Namespace) -> tuple[bool, str]:
    found = devices.devices(options.devices or jax.device_count())
    mesh = jax.sharding.Mesh(np.array(found), ("x",))
    total = jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    got = float(total(jnp.arange(float(len(found))))[0])
    wanted = len(found) * (len(found) - 1) / 2
    if got != wanted:
        raise ValueError(f"a sum over {len(found)} devices is {got}, not {wanted}")
    return True, f"a sum over {len(found)} devices is right"


def _dialects(_: argparse.Namespace) -> tuple[bool, str]:
    load(_MODULE.encode())
    load(_LOCAL_MODULE.encode())
    return True, "stablehlo, sdy, mesh and shard, with their verifiers"


def _passes(_: argparse.Namespace) -> tuple[bool, str]:
    text = run(_MODULE, "propagation-pipeline")
    if 'stablehlo.tanh %arg0 {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"x"}]>]>}' not in text:
        raise ValueError("a sharding does not propagate through an elementwise op")
    return True, "shardings propagate"


def _shardys_passes(_: argparse.Namespace) -> tuple[bool, str]:
    try:
        with new_context():
            passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
    except (ValueError, ir.MLIRError):
        return False, "optional: jaxlib has no Shardy, with which the tests compare"
    return True, "jaxlib has them; the tests compare with them"


def _end_to_end(options: argparse.Namespace) -> tuple[bool, str]:
    """A small network, partitioned in two ways at once where the devices allow."""
    found = devices.devices(options.devices or jax.device_count())
    shape = (2, len(found) // 2) if len(found) % 2 == 0 else (1, len(found))
    mesh = jax.sharding.Mesh(np.array(found).reshape(shape), ("data", "model"))
    rng = np.random.default_rng(0)
    x, up, down = (rng.standard_normal(shape, dtype=np.float32) for shape in _SIZES)

    def network(x: Any, up: Any, down: Any) -> Any:
        return jnp.tanh(x @ up) @ down

    ours = partition(network, mesh=mesh, in_shardings=(P("data"), P(None, "model"), P("model")), on_unknown="ignore")
    wanted = np.tanh(x.astype(np.float64) @ up) @ down
    ratio = float(np.abs(np.asarray(ours(x, up, down)) - wanted).max() / np.abs(wanted).max())
    plain = float(np.abs(np.asarray(jit(network)(x, up, down)) - wanted).max() / np.abs(wanted).max())
    if ratio > 4 * plain + _ROUNDING:
        raise ValueError(f"a network on {shape} devices is off by {ratio:.1e}, the plain one by {plain:.1e}")
    count = ours.plan(x, up, down).totals.transfers.count
    return True, f"a network on {shape} devices, collectives: {count}; off by {ratio:.1e}, the plain one by {plain:.1e}"


def _kept_plans(options: argparse.Namespace) -> tuple[bool, str]:
    folder = cache_folder()
    if folder is None:
        return False, f"none are kept: name a folder by {FOLDER}, or turn jax's compilation cache on"
    files, size = folder.size
    return True, f"{files} files in {folder.path}, {bytes_text(size)} of {bytes_text(folder.limit)} at most"


CHECKS: dict[str, DoctorCheck] = {
    "devices": _devices,
    "64-bit types": _wide_types,
    "shard_map": _shard_map,
    "dialects": _dialects,
    "passes": _passes,
    "Shardy's passes": _shardys_passes,
    "end to end": _end_to_end,
    "plans": _kept_plans,
}
