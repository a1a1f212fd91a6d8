"""Random command lines over files with random mistakes, in one folder."""

from __future__ import annotations

import copy
import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from sdy_jax.cli.main import main

PROGRAM = """\
sdy.mesh @mesh = <["x"=2, "y"=4]>
func.func @main(%arg0: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>},
                %arg1: tensor<16x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}) -> tensor<8x4xf32> {
  %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
  %1 = stablehlo.tanh %0 : tensor<8x4xf32>
  return %1 : tensor<8x4xf32>
}
"""

_VALUES: dict[str, tuple[str, ...]] = {
    "--mesh": ("x=2,y=4", "x=8", "x=0", "x", "x=2,x=4", "=2", "y=4,x=2", "x=2,y=4,z=1", "é=8", "x=-1", "x=99999999"),
    "--in-shardings": ("P('x'), None", "AUTO", "P('q')", "None", "(", "P(('x', 'y'), None), P()", "__import__('os')"),
    "--out-shardings": ("P('x')", "P(None, 'y')", "P('x', 'y', 'x')", "[P('x')]", "''", "'[{\"x\"}, {}]'"),
    "--layouts": ("local", "propagated", "global", "best", ""),
    "--memory": ("1KiB", "10", "16GiB", "-1", "many", "0", "1e400", "nan"),
    "--effort": ("1", "0", "x", "100"),
    "--devices": ("8", "1", "0", "seven", "4"),
    "--why": ("result", "arg0", "arg9", "", "tanh", "\x01"),
    "--table": ("collectives", "ops", "values", "arguments", "memory", "meshes", "none"),
    "--stage": ("traced", "imported", "propagated", "partitioned", "recomputed", "x"),
    "--budget": ("wire_bytes=1", "wire_bytes=10MiB,forbid=all_gather", "memory=", "q=all_reduce", "x=all_reduce", ","),
    "--donate": ("0", "arg1", "7", "-1", ""),
    "--args": ("f32[8,16], f32[16,4]", "f32[", "f99[2]", "{}"),
    "--diff": ("plan.json", "none.json", "model.mlir", "."),
    "--pipeline": ("basic-propagate", "propagation-pipeline", "nothing", "basic-propagate{x=1}", "{", ",,"),
    "--topology": ("q", "tpu", "gpu:x:1x2", ""),
    "--slices": ("0", "x"),
}
"""Values of options, some of which are right."""

_FLAGS = ("--fixes", "--drop-shardings", "--optimize-collectives", "--no-recompute", "--generic", "--strict")
_ODD: tuple[Any, ...] = (None, -1, 0, 1e300, "", "x", "é", [], {}, True, [[]], {"a": 1}, 2**70, "0" * 3000)


class Outcome(NamedTuple):
    status: Any
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """What is wrong with what was said; empty where nothing is."""
        said = self.out + self.err
        if "Traceback" in said or "bug in sdy_jax" in said:
            return "a mistake of ours reaches the user"
        if self.status not in (0, 1, 2):
            return f"status {self.status!r}"
        if self.status and "error" not in self.err:
            return "no error is told"
        return "" if self.status or self.out else "nothing is printed"


def ran(arguments: list[str]) -> Outcome:
    """What a command line prints, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status: Any = main(arguments)
        except SystemExit as error:  # of argparse
            status = error.code
    return Outcome(status, out.getvalue(), err.getvalue())


class CommandLines:
    """Over a program and its saved plan, in a folder."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._model, self._plan = folder / "model.mlir", folder / "plan.json"
        self._model.write_text(PROGRAM)
        done = ran(["plan", str(self._model), "--save", str(self._plan)])
        assert done.status == 0, done
        self._saved = self._plan.read_text()

    def drawn(self, seed: int) -> list[str]:
        """A command line; the file that it names is written."""
        rng = random.Random(seed)
        drawn: Callable[[random.Random], list[str]] = rng.choice([self._on_plan, self._on_plan, self._options])
        return [self._placed(word) for word in drawn(rng)]

    def _placed(self, word: str) -> str:
        return str(self._folder / word) if word.endswith((".json", ".mlir")) else word

    def _on_plan(self, rng: random.Random) -> list[str]:
        text = broken_text(rng, broken_json(rng, self._saved) if rng.random() < 0.8 else self._saved)
        (self._folder / "broken.json").write_text(text, encoding="utf-8")
        tail = rng.choice([[], [], ["--table", "collectives"], ["--table", "ops"], ["--why", "result"]])
        return rng.choice([["plan", "broken.json", *tail], ["plan", "model.mlir", "--diff", "broken.json"]])

    def _options(self, rng: random.Random) -> list[str]:
        command = rng.choice(["plan", "plan", "plan", "opt", "verify --help", "nothing", ""]).split()
        found = []
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            name = rng.choice([*_VALUES, *_FLAGS])
            found += [name, rng.choice(_VALUES[name])] if name in _VALUES else [name]
        return [*command, rng.choice(["model.mlir"] * 6 + ["plan.json", "none.mlir", "."]), *found]


def broken_json(rng: random.Random, text: str) -> str:
    """The text of a JSON value in which something is another thing."""
    held = json.loads(text)
    for _ in range(rng.choice([1, 1, 2])):
        places = list(_places(held))
        parent, key = rng.choice(places)
        change = rng.random()
        if change < 0.3:
            del parent[key]
        elif change < 0.8 or not isinstance(parent, dict):
            parent[key] = copy.deepcopy(rng.choice([*_ODD, rng.choice(places)[0]]))
        else:
            parent[rng.choice(["x", "", "é"])] = parent.pop(key)
        if not held:
            break
    return json.dumps(held)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(parent, key) of all values in one."""
    pairs: Iterable[tuple[Any, Any]] = enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict):
        pairs = value.items()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)


def broken_text(rng: random.Random, text: str) -> str:
    """The text, which now and then is cut or has another character."""
    at = rng.randrange(len(text))
    change = rng.random()
    if change < 0.1:
        return text[:at]
    if change < 0.2:
        return text[:at] + rng.choice('{}[]",:0-\x00é\n') + text[at + 1 :]
    return text
