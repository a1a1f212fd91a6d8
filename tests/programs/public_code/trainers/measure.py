"""One trainer's steps on eight virtual CPU devices, under `jax.jit` or `sdy.partition`, as one line of JSON.

    python measure.py maxtext_steps fsdp_tensor {jit|partition}

Programs beside this file build what a trainer's own loop calls, from the trainer's own functions. In the trainer's
modules that they name, the word `jax.jit` is read as `sdy.partition`; nothing else of the trainer is changed. Under
`jit` the word is read likewise, and stands for `jax.jit`: both are recorded by the same means.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # MaxText names a folder; seconds are those without it
os.environ["SDY_JAX_CACHE_DIR"] = "0"

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import jax
import numpy as np

import sdy_jax as sdy
from sdy_jax.plan.profile import collectives_in_hlo, totals

STEPS = 3
COMPILED = "/jax/core/compile/backend_compile_duration"


class Recorded:
    """A jitted or partitioned function which states what its first call's program is and took to make, in CPU s."""

    made: ClassVar[list[Recorded]] = []

    def __init__(self, function: Any) -> None:
        self.function, self.program, self.seconds = function, None, (0.0, 0.0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.program is None:
            start = time.process_time()
            lowered = self.function.lower(*args, **kwargs)
            middle = time.process_time()
            self.program = lowered.compile()
            self.seconds = (middle - start, time.process_time() - middle)
            Recorded.made.append(self)
        return self.function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)


class ChangedWord(importlib.machinery.SourceFileLoader):
    """Reads a module whose `jax.jit` is `sdy.partition`."""

    make: Any

    def get_code(self, fullname: str) -> Any:
        text = self.get_data(self.path).decode()
        assert "jax.jit" in text
        return compile(text.replace("jax.jit", "sdy.partition"), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        module.sdy = SimpleNamespace(partition=self.make)
        super().exec_module(module)


class Changed(importlib.abc.MetaPathFinder):
    def __init__(self, modules: tuple[str, ...], make: Any) -> None:
        self.modules, self.make = modules, make

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        assert found is not None
        loader = ChangedWord(name, found.origin)
        loader.make = self.make
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


def main(program: str, case: str, how: str) -> None:
    makes = {"jit": jax.jit, "partition": sdy.partition}[how]

    def make(function: Any = None, **options: Any) -> Any:
        return Recorded(makes(function, **options)) if function else lambda function: make(function, **options)

    trainer = importlib.import_module(program)
    sys.meta_path.insert(0, Changed(trainer.MODULES, make))
    step = trainer.build(case)
    Recorded.made.clear()  # what made the state is no step
    compiles: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: compiles.append(seconds) if name == COMPILED else None
    )
    numbers, counts = [], []
    for _ in range(STEPS):
        compiles.clear()
        numbers.append(np.asarray(step(), np.float64).tolist())
        counts.append(len(compiles))
    sent = [totals(collectives_in_hlo(each.program.as_text())) for each in Recorded.made]
    report = {
        "numbers": numbers,
        "wire_bytes": sum(each.wire_bytes for each in sent),
        "collectives": sum(each.count for each in sent),
        "temporary_bytes": sum(each.program.memory_analysis().temp_size_in_bytes for each in Recorded.made),
        "programs": len(Recorded.made),
        "compiles": counts,
        "lower_seconds": sum(each.seconds[0] for each in Recorded.made),
        "compile_seconds": sum(each.seconds[1] for each in Recorded.made),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
