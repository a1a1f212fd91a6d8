"""What the benchmarks that compare compiled programs share: counting, ratios, numbers, meshes of eight virtual devices.

Import it before jax: it says how many devices there are.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_VENV_PYTHON = ROOT / ".venv" / "bin" / "python"
if importlib.util.find_spec("jax") is None and _VENV_PYTHON.exists():
    os.execv(_VENV_PYTHON, [str(_VENV_PYTHON), *sys.argv])
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh
from workloads import MESHES

from sdy_jax.cli.devices import Topology, prepare
from sdy_jax.plan.profile import HloTotals, collectives_in_hlo, totals

Tree = Any
SLICE, GPUS = "tpu:v5e:2x4", "gpu:h100:8"
"""The TPUs, and GPUs, that programs are compiled for, though none is there."""
IN_HBM: dict[str, str | bool] = {"xla_msa_enable": False}
"""XLA's options for TPUs: no memory space assignment."""


def mesh_of(name: str) -> jax.sharding.Mesh:
    """The mesh of this name, for functions that jax itself partitions."""
    sizes, axes = MESHES[name]
    return jax.make_mesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def chips_of(name: str, slice_: str = SLICE) -> Mesh:
    """The mesh of this name, of chips that programs can be compiled for, though none is there."""
    prepare()
    sizes, axes = MESHES[name]
    chips = np.array(Topology.of(slice_).devices)
    return Mesh(chips.reshape(sizes), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one device sends, computes and holds between arguments and results in one call of a compiled program."""

    sent: HloTotals
    flops: float
    memory: int

    @classmethod
    def of(cls, compiled: Any) -> Cost:
        counted, text = compiled.cost_analysis() or {}, compiled.as_text()
        flops = max(0.0, counted.get("flops", 0.0)) + library_flops(text)
        return cls(totals(collectives_in_hlo(text)), flops, compiled.memory_analysis().temp_size_in_bytes)


_LIBRARY_CALL = re.compile(
    r'target="(?:lapack_[sdcz](potrf|trsm|geqrf|orgqr|ungqr)_ffi|'
    r"(Cholesky|CompactWyHelper|InvertDiagBlocks|QrDecompositionBlock)(?:(?:Lower|Upper)Triangular)?)"
    r'", operand_layout_constraints=\{(.*?)\}, [a-z_]+='
)
_SHAPE = re.compile(r"\w\d+\[([\d,]*)\]")


def library_flops(hlo: str) -> float:
    """The operations of LAPACK's calls in a compiled program, and of those for blocks of which libtpu makes
    decompositions. XLA counts none of them."""
    return sum(_of_call(lapack or block, operands) for lapack, block, operands in _LIBRARY_CALL.findall(hlo))


def _of_call(name: str, operands: str) -> float:
    shapes = [[int(n) for n in text.split(",")] for text in _SHAPE.findall(operands)]
    *batch, m, n = shapes[0]
    whole = 2 * n * n * (m - n / 3)
    triangle = dict.fromkeys(("potrf", "Cholesky", "CompactWyHelper", "InvertDiagBlocks"), n**3 / 3)
    return math.prod(batch) * (triangle | {"trsm": n * math.prod(shapes[-1][-2:])}).get(name, whole)


def ratio(found: float, other: float) -> float:
    """`found / other`; 1 where both are 0."""
    return found / other if other else math.inf if found else 1.0


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation: that of the ranks of both sides."""
    ranks = [np.argsort(np.argsort(side)) for side in zip(*pairs, strict=True)]
    return float(np.corrcoef(*ranks)[0, 1])


def largest_difference(found: Tree, wanted: Tree, least: float = 1e-30) -> float:
    """The largest difference of two trees of arrays, relative to the largest value of each array plus `least`.

    Infinite where the trees, or shapes, or anything but floating-point numbers differ at all.
    """
    if jax.tree.structure(found) != jax.tree.structure(wanted):
        return math.inf
    pairs = zip(*(map(np.asarray, jax.tree.leaves(jax.device_get(tree))) for tree in (found, wanted)), strict=True)
    return max((_difference(x, y, least) for x, y in pairs), default=0.0)


def _difference(found: np.ndarray, wanted: np.ndarray, least: float) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    if not np.issubdtype(wanted.dtype, np.inexact):
        return 0.0 if np.array_equal(found, wanted) else math.inf
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return math.inf
    largest = np.abs(wanted[finite]).max(initial=0.0)
    apart = np.abs(found[finite] - wanted[finite]).max(initial=0.0)
    return float(apart / (largest + least)) if not np.isnan(apart) else math.inf


def kinds(side: str, sent: HloTotals) -> str:
    """A line with number and bytes of each kind of collective."""
    listed = ", ".join(f"{kind} {n} x {wire:,.0f} B" for kind, (n, wire) in sorted(sent.by_kind.items()))
    return f"    {side:<5}{listed or 'nothing'}"
