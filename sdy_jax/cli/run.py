"""`sdy-jax run`, of a program on devices with arrays in files, and `verify`, of one beside itself on one device."""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sdy_jax.base.errors import SdyError
from sdy_jax.base.files import refusal, whole_file
from sdy_jax.calls.partitioned_function import PartitionedFunction
from sdy_jax.cli import UsageError
from sdy_jax.cli.arguments import explained, parse_mesh
from sdy_jax.cli.partitioned_program import UserProgram, job_of
from sdy_jax.cli.plan import check_sizes
from sdy_jax.equivalence.verification import Verification
from sdy_jax.equivalence.verify import known_targets, verify
from sdy_jax.ir.jax_shardings import array_text
from sdy_jax.ir.text.modules import SourceError
from sdy_jax.plan.page.text import aligned

# Arrays of a command: read from and written to numpy's files, made up, and summarized.

_ONE_ARRAY, _ARCHIVE = b"\x93NUMPY", b"PK"
"""What numpy's files of one array begin with, and those of several."""

_INTEGERS = 10
"""Made-up integers are smaller than this: they may be indices. Chosen: small enough for most tables, and not all
alike."""


def read_inputs(file: str, paths: Sequence[str], infos: Sequence[Any]) -> list[Any]:
    """The arguments of a program from a file.

    Args:
      file: an .npz file with arrays `arg0`, `arg1`, ..., or with the arguments' paths as names.
      paths: what the arguments are called.
      infos: their shapes and dtypes; a size may be symbolic.

    Raises:
      SourceError: the file cannot be read, or has other arrays; the message says which, and what would be right.
    """
    found = _read(file)
    names = [f"arg{i}" if f"arg{i}" in found or path not in found else path for i, path in enumerate(paths)]
    missing = [f"{name}: {array_text(info)}" for name, info in zip(names, infos, strict=True) if name not in found]
    if missing:
        raise SourceError(f"has no {', no '.join(missing)}; it has {', '.join(found) or 'nothing'}", file)
    extra = sorted(set(found) - set(names))
    if extra:
        raise SourceError(f"has {', '.join(extra)}, but the program takes only {', '.join(names) or 'nothing'}", file)
    return [_fitted(found[name], info, name, file) for name, info in zip(names, infos, strict=True)]


def _read(file: str) -> Mapping[str, np.ndarray]:
    try:
        with open(file, "rb") as opened:
            kind = opened.read(len(_ONE_ARRAY))
            if not kind.startswith(_ARCHIVE):
                what = "one array (.npy)" if kind == _ONE_ARRAY else "no archive of arrays"
                raise SourceError(f"is {what}; expected an .npz file: numpy.savez(FILE, arg0=..., arg1=...)", file)
            opened.seek(0)
            archive = np.load(opened, allow_pickle=False)
            return {name: archive[name] for name in archive.files}
    except SourceError:
        raise
    except OSError as error:
        raise SourceError(refusal(error, file), file) from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SourceError(f"is no .npz file of numbers: {error}", file) from None


def _fitted(array: np.ndarray, info: Any, name: str, file: str) -> Any:
    is_key = jnp.issubdtype(info.dtype, jax.dtypes.prng_key)
    wanted = jax.eval_shape(jax.random.key_data, info) if is_key else info
    array = _with_dtype(array, np.dtype(wanted.dtype))
    if array.dtype != wanted.dtype or not _has_shape(array.shape, wanted.shape):
        raise SourceError(f"{name} is {array_text(array)}, the program takes {array_text(wanted)}", file)
    return _keys(array, info.dtype) if is_key else array


def _keys(words: np.ndarray, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(words), impl=jax.random.key_impl(jnp.empty((), dtype)))


def _with_dtype(array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """The array in the machine's byte order; raw bytes as what they are to be, which numpy's files cannot name."""
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == wanted.itemsize:
        return array.view(wanted)
    return array.astype(array.dtype.newbyteorder("=")) if not array.dtype.isnative else array


def _has_shape(given: Sequence[int], wanted: Sequence[Any]) -> bool:
    """Of symbolic sizes jax says when the program is called whether they fit."""
    return len(given) == len(wanted) and all(
        a == b or not isinstance(b, int) for a, b in zip(given, wanted, strict=True)
    )


def random_inputs(seed: int, infos: Sequence[Any]) -> list[Any]:
    """Made-up arguments: floats normally distributed, integers from 0 to 9.

    Raises:
      SdyError: a size is symbolic.
    """
    rng = np.random.default_rng(seed)
    return [_random(rng, info) for info in infos]


def _random(rng: np.random.Generator, info: Any) -> Any:
    if not all(isinstance(n, int) for n in info.shape):
        raise SdyError(f"an argument is {array_text(info)}; to fix: give the types with sizes as --args")
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, info)
        return _keys(rng.integers(0, 2**32, words.shape, dtype=np.uint32), info.dtype)
    if jnp.issubdtype(info.dtype, jnp.bool_):
        return rng.integers(0, 2, info.shape).astype(bool)
    if jnp.issubdtype(info.dtype, jnp.integer):
        return rng.integers(0, min(_INTEGERS, int(jnp.iinfo(info.dtype).max) + 1), info.shape).astype(info.dtype)
    if jnp.issubdtype(info.dtype, jnp.complexfloating):
        return (rng.standard_normal(info.shape) + 1j * rng.standard_normal(info.shape)).astype(info.dtype)
    return np.asarray(rng.standard_normal(info.shape)).astype(info.dtype)


def to_numpy(result: jax.Array) -> np.ndarray:
    """A whole result on the host; of random keys, their words."""
    return np.asarray(jax.random.key_data(result) if jnp.issubdtype(result.dtype, jax.dtypes.prng_key) else result)


def write_outputs(file: str, results: Sequence[np.ndarray]) -> None:
    """
    Raises:
      SourceError: the file cannot be written.
    """
    arrays: dict[str, Any] = {f"out{i}": result for i, result in enumerate(results)}
    try:
        with whole_file(file) as opened:
            np.savez(opened, **arrays)
    except OSError as error:
        raise SourceError(refusal(error, file), file) from None


def summary(results: Sequence[np.ndarray]) -> str:
    """One line per result: its type, and its smallest, largest and mean value."""
    rows = [(f"out{i}", array_text(result), _figures(result)) for i, result in enumerate(results)]
    return "\n".join(aligned(rows))


def _figures(result: np.ndarray) -> str:
    if not result.size:
        return ""
    if result.dtype == bool:
        return f"{int(result.sum())} of {result.size} true"
    if result.ndim == 0:
        return str(result)
    values = np.abs(result) if np.iscomplexobj(result) else result
    wide = values.astype(np.float64)
    odd = int(np.size(wide) - np.isfinite(wide).sum())
    figures = f"min {np.min(wide):.6g}  max {np.max(wide):.6g}  mean {wide.mean():.6g}"
    return figures + (f"  ({odd} not finite)" if odd else "")


# `sdy-jax run`: a program on devices, arrays in and out.


def run(options: argparse.Namespace) -> int:
    """Runs the program, and writes the results or prints a summary."""
    job = job_of(options)
    with explained(job.file), job.settings():
        args, kwargs = arguments(job, options)
        headline = job.headline(args, kwargs)
        results = [to_numpy(leaf) for leaf in jax.tree.leaves(job.function(*args, **kwargs))]
    if options.outputs:
        write_outputs(options.outputs, results)
    else:
        print(headline)
        print(summary(results))
    return 0


def arguments(job: UserProgram, options: argparse.Namespace) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments, as the options say; numbers among the types of a function's arguments are as they are."""
    leaves, tree = jax.tree.flatten((job.args, job.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    infos = [leaves[i] for i in places]
    if options.inputs:
        arrays = read_inputs(options.inputs, [job.paths[i] for i in places], infos)
    elif options.random is not None:
        arrays = random_inputs(options.random, infos)
    elif infos:
        wanted = ", ".join(f"arg{i}: {array_text(info)}" for i, info in enumerate(infos))
        raise SdyError(f"the program takes {wanted}; to fix: give --inputs FILE.npz, or --random SEED to make them up")
    else:
        arrays = []
    for place, array in zip(places, arrays, strict=True):
        leaves[place] = array
    args, kwargs = jax.tree.unflatten(tree, leaves)
    return args, kwargs


# `sdy-jax verify`: a program, partitioned, beside itself on one device.


def verify_program(options: argparse.Namespace) -> int:
    """Prints what was found. Returns the exit status: 1 where something differs."""
    options.chips = None
    meshes = [parse_mesh(text) for text in options.also]
    for name in options.target or ():
        if name not in known_targets():
            raise UsageError(f"--target {name}: expected one of {', '.join(known_targets())}")
    job = job_of(options)
    with explained(job.file), job.settings():
        check_sizes(job)
        found = _verified(job, options, meshes)
    print(found.to_json() if options.json else found)
    if options.reproducer and not found.ok:
        _write_reproducer(found, options.reproducer)
    return int(not found.ok)


def _verified(job: UserProgram, options: argparse.Namespace, meshes: list) -> Verification:
    if not isinstance(job.function, PartitionedFunction):
        raise UsageError(f"{options.program} is a program on local arrays, which nothing partitions")
    options.random = None
    args, kwargs = arguments(job, options) if options.inputs else (job.args, job.kwargs)
    chosen = {"targets": options.target, "derivatives": options.derivatives, "uneven": options.uneven}
    return verify(job.function, *args, meshes=meshes, seed=options.seed, **chosen, **kwargs)


def _write_reproducer(found: Verification, file: str) -> None:
    try:
        if not found.write_reproducer(file):
            raise SourceError("nothing is written: no program shows by itself what is wrong", file)
    except OSError as error:
        raise SourceError(error.strerror or str(error), file) from None
