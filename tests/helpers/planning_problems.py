"""Random problems for the layout planner's solver, and what they cost at best."""

import itertools
import math
import random

import numpy as np

from sdy_jax.lowering.planner.solve.pbqp import PBQP, Ports


def small_problem(rng: random.Random, nodes: int) -> PBQP:
    """A few nodes, dense or sparse, with whole or real costs, with or without what is impossible."""
    density, impossible, whole = rng.choice([0.2, 0.5, 0.9]), rng.choice([0, 0.1, 0.3]), rng.random() < 0.5

    def costs(*shape: int) -> np.ndarray:
        values = np.array([rng.randrange(4) if whole else rng.random() for _ in range(math.prod(shape))], float)
        values[[rng.random() < impossible for _ in values]] = math.inf
        return values.reshape(shape)

    def prices(rows: int, cols: int) -> np.ndarray | Ports:
        if rng.random() < 0.6:
            return costs(rows, cols)
        ports = rng.randint(1, 3), rng.randint(1, 3)
        chosen = [np.array([rng.randrange(p) for _ in range(n)]) for p, n in zip(ports, (rows, cols), strict=True)]
        return Ports(*chosen, costs(*ports), rng.choice([1.0, 2.0, 0.5]))

    problem = PBQP([costs(rng.randint(1, 4)) for _ in range(nodes)])
    for i, j in itertools.combinations(range(nodes), 2):
        for _ in range((rng.random() < density) + (rng.random() < 0.1)):
            a, b = (i, j) if rng.random() < 0.5 else (j, i)
            problem.add(a, b, prices(len(problem.costs[a]), len(problem.costs[b])))
    return problem


def least_cost(problem: PBQP) -> float:
    """By trying everything."""
    return min(problem.cost(choice) for choice in itertools.product(*(range(len(v)) for v in problem.costs)))


def band(rng: random.Random, nodes: int, width: int, repeat: int = 1) -> PBQP:
    """A graph in which each node has edges to the `width` nodes before it; its layers of `nodes` are all equal."""
    costs = [np.array([rng.random() for _ in range(rng.randint(2, 3))]) for _ in range(nodes)]
    edges = {}
    for i in range(nodes):
        for back in range(1, width + 1):
            shape = len(costs[(i - back) % nodes]), len(costs[i])
            edges[i, back] = np.array([rng.random() for _ in range(math.prod(shape))]).reshape(shape)
    problem = PBQP(costs * repeat)
    for i in range(nodes * repeat):
        for back in range(1, min(width, i) + 1):
            problem.add(i - back, i, edges[i % nodes, back])
    return problem


def least_cost_of_band(problem: PBQP, width: int) -> float:
    """By dynamic programming over the choices for the last `width` nodes."""
    prices = {}
    for edge in problem.edges:
        prices[edge.first, edge.second] = (
            edge.ports.weight * edge.ports.prices[np.ix_(edge.ports.rows, edge.ports.cols)]
        )
    states = {(): 0.0}
    for node, own in enumerate(problem.costs):
        reached: dict[tuple, float] = {}
        for state, paid in states.items():
            for choice, cost in enumerate(own):
                before = enumerate(state, start=node - len(state))
                total = paid + cost + sum(prices[k, node][a, choice] for k, a in before)
                key = (*state, choice)[-width:]
                reached[key] = min(total, reached.get(key, math.inf))
        states = reached
    return min(states.values())
