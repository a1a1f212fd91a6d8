"""A Python program of a few lines that shows by itself what is wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from sdy_jax.equivalence.alone import difference_alone
from sdy_jax.equivalence.bisection import WrongOp
from sdy_jax.equivalence.comparison import Difference
from sdy_jax.equivalence.drawing import draw_of
from sdy_jax.equivalence.extraction import extracted, with_border
from sdy_jax.equivalence.job import Trial
from sdy_jax.errors import SdyError
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied
from sdy_jax.loading.load import loads

_SEEDS = 3
"""How many times arguments are made up. Chosen: what is wrong for most arguments is found by the first."""

_WRITTEN = 256
"""Elements up to which arrays are written into the program. Chosen: for a reader."""

_TEXT = 1 << 18
"""Characters up to which a whole program is written. Chosen: for an editor."""

_ALONE = '''\
"""{what}"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"

import numpy as np

from sdy_jax.equivalence.alone import difference_alone

PROGRAM = r"""
{text}"""

rng = np.random.default_rng({seed})
arguments = [
{arguments}
]
print(difference_alone(PROGRAM, arguments).problem or "no difference")
'''

_WHOLE = '''\
"""{what}"""

import numpy as np

import sdy_jax as sdy

PROGRAM = r"""
{text}"""

rng = np.random.default_rng({seed})
arguments = [
{arguments}
]
print(sdy.verify(sdy.loads(PROGRAM), *arguments, targets=["{target}"], uneven=False))
'''


def reproducer_of_op(wrong: WrongOp, what: str) -> str:
    """A program that runs the wrong op alone, on smaller arrays as long as it is wrong on these; empty if none is."""
    known = wrong.observed.shardings
    sides = [[known.get(v) for v in values] for values in (wrong.inputs, wrong.results)]
    module = with_border(extracted(wrong.ops, wrong.inputs, wrong.results), *sides)
    text = module.get_asm(enable_debug_info=False, print_generic_op_form=True)
    seed = next((seed for seed in range(_SEEDS) if _differs(text, seed)), None)
    if seed is None:
        return _of_given(wrong, text, what)
    text = _shrunk(text, seed)
    arguments = [str(draw_of(value)) for value in _graph(text).arguments]
    return _program(_ALONE, what, text, seed, arguments, devices=wrong.observed.mesh.size)


def reproducer_of_program(trial: Trial, text: str, what: str) -> str:
    """A program that verifies the whole one; empty if that, or an argument, is too long to be written."""
    if len(text) > _TEXT or trial.target == "own":
        return ""
    draws = [str(draw_of(value)) for value in _graph(text).arguments]
    return _program(_WHOLE, what, text, 0, draws, target=trial.target)


def _of_given(wrong: WrongOp, text: str, what: str) -> str:
    """With the arguments for which the op was found to be wrong, if they are small."""
    if sum(x.size for x in wrong.arguments) > _WRITTEN or not _differs(text, given=wrong.arguments):
        return ""
    arguments = [f'np.array({x.tolist()!r}, "{x.dtype.name}")' for x in wrong.arguments]
    return _program(_ALONE, what, text, 0, arguments, devices=wrong.observed.mesh.size)


def _program(form: str, what: str, text: str, seed: int, arguments: Sequence[str], **more: object) -> str:
    lines = "\n".join(f"    {argument}," for argument in arguments)
    return form.format(
        what=what.replace("\\", "/").replace('"""', "'''"), text=text, seed=seed, arguments=lines, **more
    )


def _graph(text: str) -> Graph:
    return Graph(copied(loads(text).module))


def _differs(text: str, seed: int = 0, given: Sequence[np.ndarray] | None = None) -> bool:
    """Whether ops are wrong for arguments that are made up, or given; not where they do not run at all."""
    return not _difference(text, seed, given).ok


def _difference(text: str, seed: int, given: Sequence[np.ndarray] | None) -> Difference:
    try:
        if given is None:
            rng = np.random.default_rng(seed)
            given = [draw_of(value).array(rng) for value in _graph(text).arguments]
        return difference_alone(text, given)
    except (SdyError, ValueError, TypeError, IndexError, RuntimeError):
        return Difference()


# Smaller sizes --------------------------------------------------------------------------------------------------------

_SIZE = re.compile(r"(?<=[<x])(\d+)(?=x)")


def _shrunk(text: str, seed: int) -> str:
    """The text with smaller sizes, each divided as long as the ops are still wrong."""
    for size in sorted({int(size) for size in _SIZE.findall(text)}, reverse=True):
        while (found := _smaller(text, size, seed)) is not None:
            text, size = found
    return text


def _smaller(text: str, size: int, seed: int) -> tuple[str, int] | None:
    """The text with another size wherever it has this one, in types and attributes, and the size; most such texts are
    no programs at all."""
    number = re.compile(rf"(?<![0-9A-WYZa-wyz_.%\"#)])(?<!0x){size}(?=x|,|\]|>)")
    for other in (size // 4, size // 2):
        lines = text.splitlines(keepends=True)
        changed = "".join(line if "sdy.mesh" in line else number.sub(str(other), line) for line in lines)
        if other >= 1 and changed != text and _differs(changed, seed):
            return changed, other
    return None
