"""Colour refinement of problems that repeat themselves: one node in place of all of one colour."""

from __future__ import annotations

import numpy as np
import pytest

from sdy_jax.lowering.planner.solve import pbqp, solver
from sdy_jax.lowering.planner.solve.pbqp import PBQP, Ports, identity, quotient
from sdy_jax.lowering.planner.solve.solver import solve

PER_LAYER = 6
STATE = np.random.default_rng(3)
OWN = [STATE.integers(0, 9, 4).astype(float) for _ in range(PER_LAYER)]
PRICES = [STATE.integers(0, 9, (4, 4)).astype(float) for _ in range(2 * PER_LAYER)]
PORTS = [np.arange(4) for _ in range(2 * PER_LAYER)]


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pbqp, "LARGE", 0)


def layers(count: int, dearer: float = 0.0) -> PBQP:
    """Equal layers one after the other, around a cycle of nodes each; later ones may be dearer."""
    problem = PBQP([own * (1 + dearer * layer) for layer in range(count) for own in OWN])
    for layer in range(count):
        first = PER_LAYER * layer
        for n in range(PER_LAYER):
            ports = Ports(PORTS[n], identity(4), PRICES[n])
            problem.add(first + n, first + (n + 1) % PER_LAYER, ports)
        if layer:
            problem.add(first - 1, first, Ports(PORTS[-1], identity(4), PRICES[-1]))
    return problem


@pytest.mark.parametrize("dearer", [0.0, 0.25])
def test_a_quotient_costs_the_same(dearer: float) -> None:
    problem = layers(40, dearer)
    small = quotient(problem, None)
    assert small is not None and len(small.problem.costs) < len(problem.costs) / 4
    for choice in np.random.default_rng(1).integers(0, 4, (5, len(small.problem.costs))).tolist():
        assert small.problem.cost(choice) == pytest.approx(problem.cost(small.lifted(choice)), rel=1e-12)


def test_more_layers_have_no_more_nodes() -> None:
    few, many = quotient(layers(40), None), quotient(layers(80), None)
    assert few is not None and many is not None
    assert len(few.problem.costs) == len(many.problem.costs)


def test_layers_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = list[int]()
    whole = solver._solve

    def counted(problem: PBQP, *args: object) -> object:
        nodes.append(len(problem.costs))
        return whole(problem, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(solver, "_solve", counted)
    problem = layers(60)
    once, each = solve(problem, refines=True), solve(problem)
    assert problem.cost(once.choice) == once.cost == each.cost
    assert nodes == [nodes[0], len(problem.costs)] and 4 * nodes[0] < nodes[1]


def test_the_start_stays_in_it() -> None:
    problem = layers(60)
    best = solve(problem).choice
    start = [*best]
    start[30 * PER_LAYER + 2] = (start[30 * PER_LAYER + 2] + 1) % 4
    small = quotient(problem, start)
    assert small is not None and small.start is not None
    assert small.lifted(small.start) == start
    assert solve(problem, best, refines=True).choice == best


def test_edges_tell_nodes_apart() -> None:
    problem = layers(60)
    problem.add(30 * PER_LAYER, 31 * PER_LAYER, Ports(PORTS[0], identity(4), PRICES[0]))
    small = quotient(problem, None)
    assert small is not None
    assert small.colours[30 * PER_LAYER] != small.colours[20 * PER_LAYER]
    assert small.colours[15 * PER_LAYER] == small.colours[20 * PER_LAYER]


def test_what_is_small_or_repeats_little_is_not_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quotient(layers(3), None) is None
    monkeypatch.setattr(pbqp, "LARGE", 1000)
    assert quotient(layers(40), None) is None
