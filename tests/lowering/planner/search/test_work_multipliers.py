"""The Lagrange multiplier of work, which rises until a choice performs hardly more than the baseline."""

from types import SimpleNamespace

import pytest

from sdy_jax.lowering.planner.search.layout_search import best_choice

OPERATIONS = (100, 103, 101)
"""Of the baseline, and of two choices beside it, of which the second is within the limit."""
MOST = 102


class Model:
    """A choice is its number; `sent`: what each one costs beside its work."""

    mean_reshard = staticmethod(lambda start: 0.0)
    charge_each_reshard = staticmethod(lambda least: None)

    def __init__(self, sent, operation):
        self.sent, self.operation, self.multiplier = sent, operation, 1.0

    def operations(self, chosen):
        return OPERATIONS[chosen]

    def work(self, chosen):
        return self.multiplier * self.operation * OPERATIONS[chosen]

    def cost(self, chosen):
        return self.sent[chosen] + self.work(chosen)

    def set_work_multiplier(self, multiplier):
        self.multiplier = multiplier

    def best(self, start):
        return min(range(3), key=self.cost)


def choice(sent, operation):
    model = Model(sent, operation)
    program = SimpleNamespace(model=model, start=0, most_operations=MOST)
    return best_choice(SimpleNamespace(program=program, improved=model.best))


@pytest.mark.parametrize("operation", [10.0, 1e-3, 1e-9, 1e-15])
def test_work_becomes_as_dear_as_what_it_saves_is_worth(operation):
    """Where latencies cost much and work next to nothing, too."""
    assert choice((10_000.0, 10.0, 20.0), operation) == 2


def test_the_baseline_stays_where_all_that_costs_less_does_too_much():
    assert choice((1000.0, 10.0, 2000.0), 1e-3) == 0


def test_work_without_a_price_gets_no_multiplier():
    assert choice((1000.0, 10.0, 20.0), 0.0) == 0
