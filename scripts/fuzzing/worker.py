"""A process that runs seeds: reads lines `SUITE SEED`, answers each with a line of JSON.

An answer has `cases` by kind, `problem` (a traceback, or null), and what was `reached` since the answer before.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

import conftest  # sets the devices up, so it comes before jax

# isort: split
import jax
from padding import poisoned
from reached import KINDS, Reached

from fuzzing.suites import Suite, loaded_suites

__all__ = ["conftest"]

_CLEARED_AFTER = 20
"""Seeds between which what jax has compiled is forgotten."""


def main(names: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what suites print is no answer
    suites, known = loaded_suites(names), {kind: set[str]() for kind in KINDS}
    with Reached() as reached, poisoned():
        for number, line in enumerate(sys.stdin):
            name, seed = line.split()
            answer = _run(suites[name], int(seed))
            now = reached.listed()
            answer["reached"] = {kind: sorted(set(now[kind]) - known[kind]) for kind in KINDS}
            for kind in KINDS:
                known[kind].update(now[kind])
            print(json.dumps(answer), file=answers, flush=True)
            if number % _CLEARED_AFTER == 0:
                jax.clear_caches()
                gc.collect()


def _run(suite: Suite, seed: int) -> dict[str, Any]:
    try:
        found = suite(seed)
    except Exception:
        return {"cases": {}, "problem": traceback.format_exc()}
    return {"cases": {"numeric": 1} if found is None else dict(found), "problem": None}


if __name__ == "__main__":
    main(sys.argv[1:])
