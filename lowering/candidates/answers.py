"""Candidates of ops that have a say of their own in their layouts: taken as they are, in other layouts, or not at all.

See docs/explanation/strategies.md#ops-that-are-asked.
"""

from __future__ import annotations

from typing import NamedTuple

from sdy_jax.lowering.analysis.factors import split_factors
from sdy_jax.lowering.candidates.op_problem import InsideCollective, OpProblem, Shardings
from sdy_jax.lowering.strategies.registry import Refused, Shards, Strategy
from sdy_jax.representation.mesh import axes_size
from sdy_jax.representation.sharding import TensorSharding


class Answer(NamedTuple):
    """How an op runs that was asked: its layouts, in how many shards each factor of its rule is then, and what it sends
    by itself."""

    shardings: Shardings
    shards: Shards
    inside: tuple[InsideCollective, ...]


def answer_of(problem: OpProblem, strategy: Strategy, shardings: Shardings) -> Answer | None:
    """What an op answers to layouts along a strategy that asks it; None where it refuses them."""
    assert strategy.ask is not None
    taken = strategy.ask(problem.mesh, shardings)
    if isinstance(taken, Refused):
        return None
    split = split_factors(problem.rule, taken.shardings, problem.mesh)
    shards = tuple([axes_size(split.get(f, ()), problem.mesh) for f in range(len(problem.rule.factor_sizes))])
    time, last = problem.costs.sending_time, len(taken.shardings) - 1
    inside = [
        InsideCollective(kind, axes, last, sent, time(kind, axes, problem.mesh, sent), is_exact=True)
        for (kind, axes), sent in taken.sent.items()
    ]
    return Answer(taken.shardings, shards, tuple(inside))


def refusal_of(problem: OpProblem) -> Refused | None:
    """What an op says that does not even run with nothing split; None if it does, or is not asked."""
    whole = tuple([TensorSharding.replicated(problem.mesh_name, len(tensor.shape)) for tensor in problem.tensors])
    answers = (strategy.ask(problem.mesh, whole) for strategy in problem.strategies if strategy.ask is not None)
    return next((answer for answer in answers if isinstance(answer, Refused)), None)
