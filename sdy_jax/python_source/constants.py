"""Arrays of the module: small ones in its text, large ones in a file beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import numpy as np

from sdy_jax.python_source.formatting import TEXT_LENGTH
from sdy_jax.python_source.literals import dtype_text, shape_text

LARGEST_IN_TEXT = 1024
"""Elements of an array that is written as text. Chosen: larger ones are no page that one reads."""


def constants_text(arrays: Mapping[str, np.ndarray]) -> tuple[str, dict[str, np.ndarray]]:
    """The assignments of the arrays, and those of them that they load from a file."""
    loaded = {name: x for name, x in arrays.items() if x.size > LARGEST_IN_TEXT}
    lines = ['ARRAYS = np.load(Path(__file__).with_suffix(".npz"))'] if loaded else []
    for name, x in arrays.items():
        lines += [_loaded(name, x)] if name in loaded else [_written(name, x)]
    return "\n".join(lines), {name: stored(x) for name, x in loaded.items()}


def stored(x: np.ndarray) -> np.ndarray:
    """The array in a dtype that files of numpy keep: bits, for those of ml_dtypes."""
    return x if x.dtype.isbuiltin == 1 else x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _loaded(name: str, x: np.ndarray) -> str:
    view = "" if x.dtype.isbuiltin == 1 else f".view({dtype_text(x.dtype)})"
    return f'{name} = ARRAYS["{name}"]{view}'


def _written(name: str, x: np.ndarray) -> str:
    """The elements in lines, which a formatter leaves as they are."""
    flat = stored(x).reshape(-1)
    words = [repr(item) for item in flat.tolist()]
    lines = textwrap.wrap(", ".join(words), TEXT_LENGTH, break_long_words=False, break_on_hyphens=False)
    dtype = dtype_text(flat.dtype).replace("jnp", "np")
    view = "" if x.dtype.isbuiltin == 1 else f".view({dtype_text(x.dtype)})"
    body = "\n".join(f"    {line}" for line in lines)
    elements = body.replace("nan", "np.nan").replace("inf", "np.inf")
    return f"# fmt: off\n{name} = np.array([\n{elements}\n], {dtype}){view}.reshape({shape_text(x.shape)})\n# fmt: on"
