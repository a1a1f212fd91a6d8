"""Random programs of the mesh and shard dialects, with arithmetic, branches and loops, against a model in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from random_local_programs import RandomLocalProgram

import sdy_jax as sdy


def fuzz(seed: int) -> dict[str, int]:
    program = RandomLocalProgram(seed)
    text = program.text()
    try:
        results = sdy.shard.run_local(text)(*program.arguments.values())
        results = results if isinstance(results, tuple) else (results,)
        for name, found, wanted in zip(program.returned, results, program.wanted(), strict=True):
            wanted = wanted & 1 if found.dtype == bool else wanted
            np.testing.assert_array_equal(np.asarray(found), wanted, f"{name}: {program.main.types[name]}")
    except Exception as error:
        raise AssertionError(f"program {seed}\n{text}") from error
    return {"numeric": 1}


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(12))
def test_random_programs_compute_what_their_ops_say(seed: int) -> None:
    fuzz(seed)
