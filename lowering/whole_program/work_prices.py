"""The best choice of layouts where work has a price: it rises until ops perform hardly more than in the proposal."""

from __future__ import annotations

from sdy_jax.lowering.model.nodes import Chosen
from sdy_jax.lowering.model.program_model import ProgramModel
from sdy_jax.lowering.solve.choices import Choices

_WORTH = 1 / 16
"""The share of what the proposal's reshards cost on average that another one has to save: each is time to compile, and
latency that a model of bytes does not know. Measured (2026-11, `scripts/bench_bytes`): without it a transformer's step
with replicated weights on 2 x 4 has 94 collectives, with it 77 for 0.6 percent more cost. Half as much would have the
data-parallel step of twelve flax layers compile for 1.4 as long, with 226 instead of 200 collectives for 1 percent
less."""

_LATENCIES = 0.25
"""The latencies that it has to save at most, where the model knows them. Measured (2026-11, `scripts/bench_models`):
the proposal for an 8B model on 256 chips moves whole activations, 0.1 s each on average; a sixteenth of that for each
gather of a layer had stacks gathered before the loops, which held twice of what a chip has."""

_LEAST_WORTH = 2048.0
"""The bytes that it has to save at least, where the model knows bytes alone: the step of one token is all latency.
Measured (2026-11, plans for CPUs): without it tokens of a dense model and of latent attention on 2 x 4 take 50 and 37
collectives, 1.8 and 1.5 of the bytes, to save a tenth of the work; with it 11 and 15. No step of `scripts/bench_bytes`
sends more; with four times as much a perceptron's sends 1.09."""

_TRIES = 8
"""Prices of work that are tried. Guessed, a guard: the price is 4^7 times the first by then, or what it has to be."""

_DEARER = 4.0
"""By how much the price of work rises from try to try. Guessed: with less, more tries; with more, bytes are paid for
work that a lower price would have saved as well. It rises faster where the last price would be too low for what the
first choice saves, as by a model of latencies in which work costs next to nothing."""


def best_choice(choices: Choices, latency: float = 0.0) -> Chosen:
    """The best choice that was found, if holding costs nothing; of those that do not do too much work, at a price of
    work that rises where the best one does. `latency`: that of a collective; 0 where that is not known."""
    program = choices.program
    model, start = program.model, program.start
    worth = _WORTH * model.mean_reshard(start)
    model.charge_each_reshard(min(worth, _LATENCIES * latency) if latency else max(worth, _LEAST_WORTH))
    dearer = _DEARER
    for number in range(1, _TRIES + 1):
        found = choices.improved(start)
        if model.operations(found) <= program.most_operations:
            return found
        if number == 1:
            dearer = max(dearer, _worthless_from(model, start, found) ** (1 / (_TRIES - 1)))
        model.price_work(dearer**number)
    return start


def _worthless_from(model: ProgramModel, start: Chosen, found: Chosen) -> float:
    """The price of work, as a multiple of today's, at which a choice costs as much as that which it is to replace."""
    more = model.work(found) - model.work(start)
    return 1 + (model.cost(start) - model.cost(found)) / more if more > 0 else 1.0
