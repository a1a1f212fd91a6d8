"""Local improvement of a choice: each node alone, on the true cost."""

import random

import pytest

from sdy_jax.lowering.planner.problem.candidates import Candidate
from sdy_jax.lowering.planner.problem.layout_table import ValueClass
from sdy_jax.lowering.planner.problem.program_model import ProgramModel
from sdy_jax.lowering.planner.solve.improvement import LEAST, improved_locally
from sdy_jax.lowering.planner.solve.moves import Move, everything

LAYOUTS = 4
SHAPE = ValueClass((8,), 4.0)


class RandomPrices:
    """Prices of reshards between a few layouts of one class."""

    def __init__(self, rng):
        self._prices = [[0 if a == b else rng.randint(0, 9) for b in range(LAYOUTS)] for a in range(LAYOUTS)]

    def cost(self, of, source, target):
        return self._prices[source][target]

    def is_whole(self, layout):
        return True

    def local_bytes(self, of, layout, is_rounded=False):
        return 1.0 + layout


def random_model(rng, nodes):
    """A chain of nodes that take one shared value and some values of earlier nodes, one of them perhaps twice."""
    model = ProgramModel(RandomPrices(rng))
    shared = model.add_value(SHAPE, 1.0)
    values = [shared]
    for number in range(nodes):
        takes = [shared, *rng.choices(values, k=2)] if number else []
        makes = [shared] if not number else [model.add_value(SHAPE, rng.choice([1.0, 3.0]))]
        slots = len(takes) + len(makes)
        candidates = [Candidate(tuple(rng.choices(range(LAYOUTS), k=slots)), rng.randint(0, 5), 0.0) for _ in range(5)]
        model.add_node(candidates, 1.0, takes, makes)
        values += makes if number else []
    for value in model.values:
        value.needed = [(use.node, use.node) for use in value.uses]
    return model


def with_candidate(chosen, node, candidate):
    return [candidate if number == node else now for number, now in enumerate(chosen)]


@pytest.mark.parametrize("has_multipliers", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_no_node_alone_can_do_better(seed, has_multipliers):
    rng = random.Random(seed)
    model = random_model(rng, nodes=12)
    if has_multipliers:
        model.set_memory_multipliers([0.25] * 12)
    start = [rng.randrange(5) for _ in model.nodes]
    found = improved_locally(model, start, [everything()], model.cost(start))
    least = model.cost(found)
    assert least <= model.cost(start)
    for node in range(len(model.nodes)):
        others = [model.cost(with_candidate(found, node, candidate)) for candidate in range(5)]
        assert min(others) >= least - LEAST * model.cost(start)


def test_nodes_keep_to_the_candidates_that_a_move_allows():
    rng = random.Random(0)
    model = random_model(rng, nodes=12)
    start = [rng.randrange(5) for _ in model.nodes]
    only = Move(lambda layouts: lambda now: layouts[:, -1:] == layouts[now, -1])
    found = improved_locally(model, start, [only], model.cost(start))
    for node, before, now in zip(model.nodes, start, found, strict=True):
        assert node.candidates[before].layouts[-1] == node.candidates[now].layouts[-1]


@pytest.mark.parametrize(
    ("taken", "held"),
    [
        ([2, 2, 2], 3 * 4),  # as it is made, until its last use
        ([0], 2 + 1),  # moved at once into a layout that is smaller, in which it is then for its use
        ([3], 2 * 3 + 4),  # moved late into one that is larger
        ([2, 0], 2 * 3 + 1),
    ],
)
def test_values_are_held_from_where_they_are_made_to_their_last_use(taken, held):
    model = ProgramModel(RandomPrices(random.Random(0)))
    value = model.add_value(SHAPE, 1.0)
    model.add_node([Candidate((2,), 0.0, 0.0)], 1.0, [], [value])
    for layout in taken:
        model.add_node([Candidate((layout,), 0.0, 0.0)], 1.0, [value], [])
    model.values[value].needed = [(use.node, use.node) for use in model.values[value].uses]
    model.set_memory_multipliers([1.0] * len(model.nodes))
    assert model.held([0] * len(model.nodes)) == held
