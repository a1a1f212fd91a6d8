"""Types as jax prints them, with the axes that split each dimension: `f32[8@data,4]{U:model}`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from sdy_jax.ir.meshes import AxisRef
from sdy_jax.ir.shardings import TensorSharding

_KIBI, _KILO = 1024, 1000
"""Given: the steps of units."""

_ONE = 0.9995
"""Given: what rounds to one of the unit in three digits."""

_JAX_NAMES = {"i1": "bool", "complex<f32>": "c64", "complex<f64>": "c128"}


@lru_cache(maxsize=1 << 8)
def dtype_name(dtype: str) -> str:
    """jax's short name of an MLIR element type (`ui8`: `u8`, `i1`: `bool`, `f8E4M3FN`: `f8_e4m3fn`)."""
    name = _JAX_NAMES.get(dtype) or re.sub(r"^ui", "u", dtype)
    return re.sub(r"^(f\d)(E\w+)$", lambda found: f"{found[1]}_{found[2].lower()}", name)


_SHORT_DTYPE = re.compile(r"(bf|f|i|s|u|c)(\d+)")
_LONG_KINDS = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_LONG_NAMES = {"pred": "bool", "i1": "bool"}


def long_dtype_name(name: str) -> str:
    """numpy's name of an element type that is written short.

    >>> [long_dtype_name(name) for name in ("f32", "bf16", "s8", "pred", "float8_e5m2")]
    ['float32', 'bfloat16', 'int8', 'bool', 'float8_e5m2']
    """
    short = _SHORT_DTYPE.fullmatch(name)
    return f"{_LONG_KINDS[short[1]]}{short[2]}" if short else _LONG_NAMES.get(name, name)


def array_text(info: Any) -> str:
    """`f32[8,4]`: the type of what has a shape, whose sizes may be symbolic, and a dtype."""
    if info.dtype.type is np.void:  # bytes of no type, which jax has no name for
        return type_text(str(info.dtype), info.shape, None)
    scalar = str(jax.core.ShapedArray((), info.dtype).str_short(short_dtypes=True))
    return type_text(scalar.removesuffix("[]"), info.shape, None)


def sizes_text(sizes: Iterable[int | None]) -> str:
    """`2x4`, `2x?` with a size that is not known, `[]` without any."""
    return "x".join("?" if size is None else str(size) for size in sizes) or "[]"


def axis_name(axis: AxisRef) -> str:
    return axis.name if axis.sub_axis is None else f"{axis.name}:{axis.sub_axis}"


def listed_axes(axes: Iterable[AxisRef]) -> str:
    """`'data', 'model'`."""
    return ", ".join(f"'{axis_name(axis)}'" for axis in axes)


def type_text(
    dtype: str, shape: Sequence[int] | None, sharding: TensorSharding | None, mesh_name: str | None = None
) -> str:
    """`f32[8@data,4@(x,y)]{U:model}`: global shape, axes per dimension, unreduced axes.

    With the name of the program's mesh, a sharding on another one says so: `f32[8@data] on @other`.
    """
    if shape is None:
        return dtype
    axes = sharding.axes if sharding else ((),) * len(shape)
    dims = ",".join(f"{n}{_at(a)}" for n, a in zip(shape, axes, strict=True))
    unreduced = sharding.unreduced_axes if sharding else ()
    text = f"{dtype_name(dtype)}[{dims}]" + (f"{{U:{','.join(map(axis_name, unreduced))}}}" if unreduced else "")
    if mesh_name is None or sharding is None or sharding.mesh == mesh_name or sharding.has_no_axes:
        return text
    return f"{text} on @{sharding.mesh}"


def _at(axes: Sequence[AxisRef]) -> str:
    if not axes:
        return ""
    names = ",".join(map(axis_name, axes))
    return f"@{names}" if len(axes) == 1 else f"@({names})"


def bytes_of_text(text: str) -> float | None:
    """The number of bytes that a text such as `16GiB`, `1.5 MB` or `4096` says; None where it says none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]):
        return None
    base = _KIBI if match[3] else _KILO
    power = " KMGT".index(match[2].upper() or " ")
    return float(match[1]) * math.pow(base, power)


def count_text(count: int) -> str:
    """What follows one of several that are alike, or what runs so often: ` x 3`; nothing where that is once.

    >>> [count_text(count) for count in (0, 1, 3)]  # a loop may never run
    [' x 0', '', ' x 3']
    """
    return f" x {count}" if count != 1 else ""


def bytes_text(count: float) -> str:
    """`512 B`, `24.0 KiB`, `1.5 MiB`."""
    if count < _KIBI:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= _KIBI
        if count < _KIBI:
            return f"{count:.1f} {unit}"
    return f"{count / _KIBI:.1f} TiB"


def flops_text(count: float) -> str:
    """`512 flop`, `2.1 Mflop`, `13.0 Gflop`."""
    if count < _KILO:
        return f"{count:.0f} flop"
    for unit in ("kflop", "Mflop", "Gflop"):
        count /= _KILO
        if count < _KILO:
            return f"{count:.1f} {unit}"
    return f"{count / _KILO:.1f} Tflop"


def seconds_text(amount: float) -> str:
    """A time with its unit.

    >>> [seconds_text(amount) for amount in (2000.0, 2.0, 0.0125, 0.0009999, 3e-6)]
    ['2000 s', '2 s', '12.5 ms', '1 ms', '3 us']
    """
    for unit in ("s", "ms"):
        if amount >= _ONE:
            return f"{amount:.0f} {unit}" if amount >= _KILO else f"{amount:.3g} {unit}"
        amount *= _KILO
    return f"{amount:.3g} us"


def amount_text(unit: str, amount: float) -> str:
    """What communication costs in the unit of a cost model, "seconds" or "bytes"."""
    return seconds_text(amount) if unit == "seconds" else bytes_text(amount)
