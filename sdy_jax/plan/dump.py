"""Every stage of every plan as a file, in the directory that the environment variable `SDY_JAX_DUMP_TO` names.

Each plan has a folder of its own there, `step.0`, with `00.traced.mlir`, a file per pass and `NN.partitioned.mlir`.
Each file is written when its stage is reached, so a plan that fails leaves those before its failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import count
from pathlib import Path

from jax.extend.mlir import ir

from sdy_jax.files.whole import explained
from sdy_jax.passes.registry import Pass
from sdy_jax.passes.save import write_module

VARIABLE = "SDY_JAX_DUMP_TO"

Dump = Callable[[Pass | str, ir.Operation], None]
"""What is called with each stage, a pass or a name, and the module after it."""


def dump_of(plan: str) -> Dump:
    """What writes the stages of a new plan, if that is asked for, into a folder named after its function.

    Raises:
      SdyError: the folder cannot be made.
    """
    directory = os.environ.get(VARIABLE)
    return _Files(directory, plan) if directory else ignore


def ignore(stage: Pass | str, module: ir.Operation) -> None:
    """Nothing is to be written."""


class _Files:
    """The files of one plan, numbered in the order of its stages."""

    def __init__(self, directory: str, plan: str):
        self._numbers = count()
        with _explained(directory):
            self._folder = _new_folder(Path(directory), re.sub(r"[^\w.-]", "_", plan))

    def __call__(self, stage: Pass | str, module: ir.Operation) -> None:
        name = stage.name if isinstance(stage, Pass) else stage
        with _explained(str(self._folder)):
            write_module(module, self._folder / f"{next(self._numbers):02}.{name}.mlir")


def _explained(path: str) -> AbstractContextManager[None]:
    return explained(f"{VARIABLE}: {path} cannot be written", "name a directory that can be")


def _new_folder(directory: Path, name: str) -> Path:
    """The first folder `name.0`, `name.1`, ... that is not there yet; other processes may be making theirs."""
    directory.mkdir(parents=True, exist_ok=True)
    for folder in (directory / f"{name}.{number}" for number in count()):
        with suppress(FileExistsError):
            folder.mkdir()
            break
    return folder
