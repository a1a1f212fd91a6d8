"""Random programs get the shardings that jaxlib's own passes give them, by every propagation pass and the pipeline.

Each program is compared as text: the same ops in the same order with the same operands and the same shardings.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice

import jax
import pytest
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from random_programs import RandomProgram
from sdy_oracle import Oracle
from sharding_dump import parse, plain_text

from sdy_jax.shardy.passes.pipelines import run_pipeline

PROPAGATIONS = (
    "sdy-basic-propagate",
    "sdy-basic-propagate{conservative-propagation=true}",
    "sdy-aggressive-propagate{propagation-strategy=basic}",
    "sdy-aggressive-propagate",
    "sdy-aggressive-propagate{propagation-strategy=basic-then-aggressive}",
    "sdy-aggressive-propagate{conservative-propagation=true}",
    "sdy-op-priority-propagate",
    "sdy-op-priority-propagate{run-op-priority-propagation=false}",
    "sdy-op-priority-propagate{propagation-strategy=basic-then-aggressive conservative-propagation=true}",
    "sdy-user-priority-propagate",
    "sdy-user-priority-propagate{propagation-strategy=basic}",
    "sdy-user-priority-propagate{conservative-propagation=true}",
)
BEFORE = (
    "sdy-lift-inlined-meshes",
    "sdy-remove-size-one-axes",
    "sdy-constant-or-scalar-splitter",
    "sdy-manual-axes-cleanup",
    "sdy-add-data-flow-edges",
    "sdy-apply-sharding-constraints",
    "sdy-sharding-group-import",
)
AFTER = (
    "func.func(sdy-constant-or-scalar-merger)",
    "func.func(sdy-sink-data-flow-edges)",
    "sdy-remove-sharding-groups",
    "func.func(sdy-sharding-constraint-to-reshard)",
    "sdy-update-non-divisible-input-output-shardings",
    "sdy-remove-sub-axes-in-input-output-shardings",
    "sdy-close-shardings",
)
NEEDED_BY = {
    "sdy-lift-inlined-meshes": ("inline",),
    "sdy-manual-axes-cleanup": ("manual",),
    "sdy-add-data-flow-edges": ("priority",),
    "sdy-sharding-group-import": ("group",),
}
"""Passes that are always run on programs with these features: the oracle needs them, or we do (for edges)."""

IS_NEW = jax.__version_info__ >= (0, 11)
WITHOUT = () if IS_NEW else ("if",)
"""Older versions let no sharding through `stablehlo.if`, and apply no constraint to what is stated to be open; in both
we do as the newest does."""


@dataclass(frozen=True)
class Case:
    """A program and the passes to run on it; the same numbers give the same case."""

    seed: int
    propagation: int
    """Index into `PROPAGATIONS`; -1: the whole pipeline."""
    steps: int = 20

    @property
    def program(self) -> RandomProgram:
        return RandomProgram(self.seed, ops=self.steps, without=WITHOUT)

    def passes(self, features: tuple[str, ...]) -> str:
        """The pipeline, or one propagation pass behind some of the passes before it."""
        left_out = [] if IS_NEW else ["sdy-apply-sharding-constraints"]
        left_out += ["sdy-add-data-flow-edges"] if "edges" in features else []
        before = [name for name in BEFORE if name not in left_out]
        if self.propagation < 0:
            return ",".join([*before, "sdy-user-priority-propagate", *AFTER])
        rng = random.Random(self.seed)
        kept = [n for n in before if rng.random() < 0.3 or any(f in features for f in NEEDED_BY.get(n, ()))]
        return ",".join([*kept, PROPAGATIONS[self.propagation]])


@cache
def _context() -> ir.Context:
    return make_ir_context()


def ours(text: str, passes: str) -> str:
    """The module's text after our passes, doing only what Shardy does."""
    module = parse(text, _context())
    with module.context, ir.Location.unknown(module.context), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups whose members disagree
        run_pipeline(
            module.operation,
            re.sub(r"(sdy-[\w-]*propagate)(?:\{(.*?)\})?", _in_shardys_terms, passes),
        )
    return plain_text(module)


def _in_shardys_terms(match: re.Match[str]) -> str:
    return f"{match[1]}{{{f'{match[2]} ' if match[2] else ''}compat=shardy}}"


def difference(case: Case, oracle: Oracle) -> str | None:
    """The first lines that differ; empty where nothing does.

    None where the oracle rejects the program, dies, or makes a module that it would not read itself: it may give an
    axis to two dimensions where one waits for its user priority.
    """
    program = case.program
    passes = case.passes(program.features)
    theirs = oracle.run(program.text, passes)
    if theirs is None:
        return None
    mine = ours(program.text, passes)
    if mine == theirs:
        return ""
    if oracle.ask(program.text, passes.split(",")) is None:
        return None
    pairs = zip([*mine.splitlines(), ""], [*theirs.splitlines(), ""], strict=False)
    return next(f"ours:   {a.strip()}\ntheirs: {b.strip()}" for a, b in pairs if a != b)


def shrunk(case: Case, oracle: Oracle) -> Case:
    """The case with the shortest program from the same seed that still shows a difference."""
    shorter = (Case(case.seed, case.propagation, steps) for steps in range(1, case.steps))
    return next((c for c in shorter if difference(c, oracle)), case)


def report(case: Case, oracle: Oracle) -> str:
    case = shrunk(case, oracle)
    program = case.program
    return (
        f"{case} differs: difference({case}, Oracle()) shows it again\n"
        f"passes: {case.passes(program.features)}\n{difference(case, oracle)}\n\n{program.text}"
    )


def cases(seed: int) -> Iterator[Case]:
    """Every program runs through the pipeline and through one propagation pass."""
    while True:
        yield Case(seed, -1)
        yield Case(seed, seed % len(PROPAGATIONS))
        seed += 1


def check(seed: int, programs: int) -> None:
    rejected = 0
    with Oracle() as oracle:
        for case in islice(cases(seed), 2 * programs):
            found = difference(case, oracle)
            assert not found, report(case, oracle)
            rejected += found is None
    assert rejected <= 2 + programs // 50, f"the oracle rejects {rejected} of {2 * programs} cases from seed {seed}"


def fuzz(seed: int) -> dict[str, int]:
    check(20 * seed, 20)
    return {"oracle": 40}


def test_random_programs_get_the_shardings_of_the_oracle() -> None:
    check(100_000, 220 if IS_NEW else 400)


@pytest.mark.slow
@pytest.mark.skipif(IS_NEW, reason="one program in a thousand differs under newer versions of Shardy")
def test_many_random_programs_get_the_shardings_of_the_oracle() -> None:
    check(0, 2500)


FOUND = {
    "groups are numbered in the order of their values": (
        "sdy-sharding-group-import",
        """func.func @main(%x: tensor<8xf32>, %y: tensor<8xf32>, %z: tensor<8xf32>) {
          sdy.sharding_group %x group_id=7 : tensor<8xf32>
          sdy.sharding_group %y group_id=4 : tensor<8xf32>
          sdy.sharding_group %z group_id=3 : tensor<8xf32>
          sdy.sharding_group %z group_id=7 : tensor<8xf32>
          return
        }""",
    ),
    "what only a dead region uses is dead": (
        "sdy-basic-propagate",
        """func.func @main(%x: tensor<8xf32>, %i: tensor<i32>) {
          %0 = stablehlo.tanh %x : tensor<8xf32>
          %1 = "stablehlo.case"(%i) ({
            %2 = stablehlo.negate %0 : tensor<8xf32>
            stablehlo.return %2 : tensor<8xf32>
          }) : (tensor<i32>) -> tensor<8xf32>
          return
        }""",
    ),
    "one value is given to a manual computation twice": (
        "sdy-add-data-flow-edges,sdy-apply-sharding-constraints",
        """func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
          %0 = stablehlo.optimization_barrier %x : tensor<8xf32>
          %1 = sdy.manual_computation(%0, %0) in_shardings=[<@mesh, [{"a"}]>, <@mesh, [{"a"}]>]
              out_shardings=[<@mesh, [{"a"}]>] manual_axes={"a"} (%p: tensor<4xf32>, %q: tensor<4xf32>) {
            sdy.return %p : tensor<4xf32>
          } : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
          return %1 : tensor<8xf32>
        }""",
    ),
    "a loop's argument follows its group, which does not follow it": (
        "sdy-add-data-flow-edges,sdy-sharding-group-import,sdy-basic-propagate",
        """func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}, %y: tensor<8xf32>)
            -> (tensor<8xf32>, tensor<8xf32>) {
          %0 = stablehlo.tanh %y : tensor<8xf32>
          sdy.sharding_group %0 group_id=0 : tensor<8xf32>
          %1 = stablehlo.while(%p = %x) : tensor<8xf32>
          cond {
            %t = stablehlo.constant dense<true> : tensor<i1>
            stablehlo.return %t : tensor<i1>
          } do {
            sdy.sharding_group %p group_id=0 : tensor<8xf32>
            stablehlo.return %p : tensor<8xf32>
          }
          return %0, %1 : tensor<8xf32>, tensor<8xf32>
        }""",
    ),
    "an edge by hand gives a computation a manual axis behind a free one": (
        "sdy-basic-propagate",
        """func.func @main(%x: tensor<8x8xf32>) -> (tensor<8x8xf32>
            {sdy.sharding = #sdy.sharding<@mesh, [{}, {"a", "b"}]>}) {
          %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{}, {?}], replicated={"b"}>]
              out_shardings=[<@mesh, [{}, {?}], replicated={"b"}>] manual_axes={"b"} (%p: tensor<8x8xf32>) {
            %2 = sdy.data_flow_edge %p sharding=<@mesh, [{?}, {?}]> : tensor<8x8xf32>
            %3 = stablehlo.negate %2 : tensor<8x8xf32>
            sdy.return %3 : tensor<8x8xf32>
          } : (tensor<8x8xf32>) -> tensor<8x8xf32>
          %1 = sdy.data_flow_edge %0 sharding=<@mesh, [{}, {?}]> : tensor<8x8xf32>
          return %1 : tensor<8x8xf32>
        }""",
    ),
    "named computations of one name are constant together": (
        "sdy-constant-or-scalar-splitter",
        """func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
          %c = stablehlo.constant dense<1.0> : tensor<8xf32>
          %0 = sdy.named_computation<"f">(%c) (%p: tensor<8xf32>) {
            sdy.return %p : tensor<8xf32>
          } : (tensor<8xf32>) -> tensor<8xf32>
          %1 = sdy.named_computation<"f">(%x) (%p: tensor<8xf32>) {
            %r = stablehlo.reverse %p, dims = [0] : tensor<8xf32>
            sdy.return %r : tensor<8xf32>
          } : (tensor<8xf32>) -> tensor<8xf32>
          return %1 : tensor<8xf32>
        }""",
    ),
    "a complex constant has a sharding": (
        "sdy-constant-or-scalar-splitter",
        """func.func @main() -> tensor<8xcomplex<f32>> {
          %c = stablehlo.constant {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}]>]>} dense<(1.0, 2.0)> :
            tensor<8xcomplex<f32>>
          return %c : tensor<8xcomplex<f32>>
        }""",
    ),
}
"""Programs that random ones led to."""


@pytest.mark.dear
@pytest.mark.parametrize(("passes", "text"), FOUND.values(), ids=FOUND)
def test_programs_once_found_stay_equal(passes: str, text: str) -> None:
    with Oracle() as oracle:
        assert ours(text, passes) == oracle.run(text, passes), oracle.error


def test_a_difference_is_reported_with_the_shortest_program_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ours", lambda text, passes: "nothing\n")
    with Oracle() as oracle:
        text = report(Case(1, -1), oracle)
    assert text.startswith("Case(seed=1, propagation=-1, steps=1) differs")
    assert "ours:   nothing\ntheirs: module {" in text
