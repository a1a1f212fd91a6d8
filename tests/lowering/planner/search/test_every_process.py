"""Processes whose sets and dicts of strings have other orders plan the same, whatever is planned how."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeded_process import printed

ROOM = Path(__file__).parent.parent
FOLDERS = [str(ROOM / name) for name in ("search", "memory", "rewrites", "../reshard")]
"""Where the test modules lie that the code below imports."""
PRINTED = {
    "whole programs": """
import sdy_jax as sdy
from test_whole_program import PROGRAMS, peak_of
for name, shares in (("fsdp", (None, 0.9)), ("weights of both", (None,)), ("scanned", (None,))):
    function, args, in_shardings, mesh = PROGRAMS[name]
    for share in shares:
        memory = share and share * peak_of(name)
        try:
            f = sdy.partition(function, mesh=mesh, in_shardings=in_shardings, layouts="global", memory=memory)
            plan = f.plan(*args)
            print(plan, plan.bound, *(plan.why(argument.path) for argument in plan.arguments))
        except sdy.SdyError as error:
            print(error)
""",
    "what is gathered again": """
import sdy_jax as sdy
from partitioned_ops import LINE
from test_within_memory import PROGRAMS, size_of, specs, step_of
blocks, arguments, spec = PROGRAMS["unrolled"]
options = {"mesh": LINE, **specs(spec), "layouts": "global", "memory": 2.2 * size_of(arguments[0])}
found = str(sdy.partition(step_of(blocks), **options).plan(*arguments))
assert "made again" in found
print(found)
""",
    "what is computed again": """
import test_recomputation
from test_recomputation import arguments, layer, partitioned, scanned, step_of, unrolled
test_recomputation.LAYERS = 3
for stack in (unrolled, scanned):
    print(partitioned(step_of(stack, layer), 0.5).plan(*arguments()))
""",
    "what runs part by part": """
from test_blocking import PAIR, attended, heads, partitioned
args = heads(batch=8)
print(partitioned(attended, args, 0.6, mesh=PAIR)[1].plan(*args))
""",
    "prices of reshards": """
from test_planning_routes import CUBE, COSTS, RoutePrices, layouts
given = layouts(CUBE, (8, 16))
print(RoutePrices("m", CUBE, COSTS).matrix((8, 16), 4.0, given, given).tobytes().hex())
""",
    "choices of the solver": """
import random
from planning_problems import band, small_problem
from sdy_jax.lowering.planner.solve.solver import solve
for seed in range(20):
    print(solve(small_problem(random.Random(seed), 7), largest_table=0 if seed % 2 else 1000))
print(solve(band(random.Random(0), 30, 3)), solve(band(random.Random(0), 30, 3), largest_table=0))
""",
    "files of plans": """
import os, pathlib, plan_edits, tempfile
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    plan_edits.planned(plan_edits.MLP, pathlib.Path()).save("plan.json")
    print(pathlib.Path("plan.json").read_text())
    os.chdir("/")
""",
}
"""Code that prints what depends on no order."""

ALL = f"""
import sys
sys.path += {FOLDERS}
import conftest
for name, code in {PRINTED}.items():
    print("##", name)
    exec(code, {{}})
"""
"""All of it in one process: starting one takes longer than most of these."""


@pytest.mark.more("other processes, beside the fingerprint's")
def test_plans_do_not_depend_on_the_seed_of_hashes():
    one, two = (printed(ALL, seed, ROOM).split("## ") for seed in ("1", "2"))
    assert len(one) == 1 + len(PRINTED)
    for mine, other in zip(one, two, strict=True):
        assert mine == other and mine.count("\n") != 1
