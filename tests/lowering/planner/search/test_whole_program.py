"""Layouts of whole programs: the model beside what is emitted, choices beside brute force, numbers on eight devices."""

import functools
import gc
import itertools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE
from planned_steps import BATCH, LAYER, PROGRAMS, Program, shapes, stacked, step

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph, Op
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.lowering.planner.memory.buffers import LocalBytes
from sdy_jax.lowering.planner.search import layout_search, memory_search
from sdy_jax.lowering.planner.search.held_copies import HeldCopy, UseOfCopy, place_uses
from sdy_jax.lowering.planner.search.layout_search import best_choice
from sdy_jax.lowering.planner.search.memory_search import FEW, MemoryBudget, ProgramsTried
from sdy_jax.lowering.planner.search.partitioned_program import PartitionedProgram
from sdy_jax.lowering.planner.solve import improvement
from sdy_jax.lowering.planner.solve.improvement import Improver
from sdy_jax.lowering.reshard.bounds import steps_between
from sdy_jax.lowering.targets.family import Fusion
from sdy_jax.lowering.targets.target import CPU, Target
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.testing import assert_same


def looked_up(table, ids):
    def loss(table):
        return jnp.sum(jax.nn.log_softmax(table[ids] @ table.T))

    return jax.grad(loss)(table)


ROWS, COLUMNS = (AxisRef("x"),), (AxisRef("y"),)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_baseline_s_choices_emit_no_more_than_it_did(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    assert program.placed_by_its_own_choices().cost <= program.baseline.cost


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_choice_near_another_one_costs_no_more(name, monkeypatch):
    """Of wide problems it is made node by node, and may cost more than what is chosen for all at once."""
    monkeypatch.setattr(improvement, "_WIDE", 0)
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    made, start, cost = Improver(program.modelled), program.modelled.start, program.model.cost
    nearby, best = made.improved(start, nearby=True), made.improved(start)
    assert cost(best) <= cost(nearby) * (1 + 1e-9) and cost(nearby) <= cost(start)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_planned_is_emitted(name):
    """Up to what every device computes from constants, which the model leaves out, and what each reshard is charged."""
    function, args, in_shardings, mesh = PROGRAMS[name]
    program = Program(function, args, mesh, in_shardings)
    chosen, emitted = best_choice(Improver(program.modelled)), program.placed_by_plan()
    program.model.charge_each_reshard(0.0)
    assert emitted.cost == pytest.approx(program.model.cost(chosen), rel=0.03)


@pytest.mark.dear
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_and_costs_of_whole_programs(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda a: jnp.asarray(rng.normal(0, 0.3, a.shape), a.dtype), args)
    found = {
        layouts: assert_same(function, *drawn, mesh=mesh, in_shardings=in_shardings, rtol=1e-4, layouts=layouts)
        for layouts in ("local", "global")
    }
    assert found["global"].layouts.cost <= found["global"].layouts.baseline_cost
    assert found["global"].wire_bytes <= found["local"].wire_bytes


@functools.cache
def peak_of(name):
    """What a device holds where the memory is not limited."""
    function, args, in_shardings, mesh = PROGRAMS[name]
    plan = sdy.partition(function, mesh=mesh, in_shardings=in_shardings, layouts="global", memory="1GiB").plan(*args)
    return plan.memory.peak


def renamed(tree, names):
    """The specs of a tree with other axis names."""

    def spec(given):
        return P(*[names.get(axis, axis) for axis in given])

    return jax.tree.map(spec, tree, is_leaf=lambda leaf: isinstance(leaf, P))


@pytest.mark.parametrize("name", PROGRAMS)
def test_axis_names_do_not_matter(name):
    function, args, in_shardings, mesh = PROGRAMS[name]
    names = dict(zip("xyz", "zab", strict=True))
    other = jax.make_mesh(mesh.axis_sizes, tuple(names[axis] for axis in mesh.axis_names), axis_types=mesh.axis_types)

    def costs(share):
        memory = share and share * peak_of(name)
        for where, specs in ((mesh, in_shardings), (other, renamed(in_shardings, names))):
            f = sdy.partition(function, mesh=where, in_shardings=specs, layouts="global", memory=memory)
            try:
                plan = f.plan(*args)
                yield plan.layouts.cost, plan.wire_bytes, plan.memory.peak
            except sdy.SdyError as error:
                yield re.sub(r"tensor<.*", "", str(error))

    for share in (None, 0.9) if name in ("fsdp", "weights of both") else (None,):
        one, two = costs(share)
        assert one == two


STACK = shapes((8, 64, 256), (8, 256, 64)), *shapes((64, 64), (64, 64))


def stacked_step(**options):
    spec = [P(None, "x"), P(None, None, "x")]
    step = sdy.partition(stacked, mesh=LINE, in_shardings=(spec, P("x"), P("x")), out_shardings=spec, **options)
    plan = step.plan(list(STACK[0]), *STACK[1:])
    return plan, step.lower(list(STACK[0]), *STACK[1:]).compile().memory_analysis().temp_size_in_bytes


def test_layers_are_gathered_one_by_one_where_memory_asks_for_it():
    """At most 3 (g - 1) / g W: one layer for each trip forward, one backward, and its gradient."""
    size = sum(4 * np.prod(w.shape) for w in STACK[0])
    (held, much), (freed, little) = stacked_step(layouts="global", memory="1GiB"), stacked_step(layouts="global")
    assert little < much
    assert held.wire_bytes <= freed.wire_bytes <= 1.02 * 3 * 7 / 8 * size


def test_too_little_memory_names_the_largest_values():
    used = stacked_step(layouts="global")[0].memory
    with pytest.raises(sdy.MemoryLimitError, match=r"is not enough: the least.*f32\[\d+@.*planned_steps"):
        stacked_step(layouts="global", memory=used.arguments + used.results + 1000)


def test_arguments_that_are_too_large_are_named():
    with pytest.raises(sdy.MemoryLimitError, match=r"1000 B is not enough: arguments.*`weights\[1\]` \(\d.*AUTO"):
        stacked_step(layouts="global", memory=1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": "all"}, "layouts='all'; expected 'local', 'propagated' or 'global'"),
        ({"layouts": "global", "memory": np.int64(-1)}, "expected a number of bytes"),
        ({"layouts": "global", "memory": "much"}, "memory='much'; expected a number of bytes"),
        ({"layouts": "global", "memory": -1}, "memory=-1; expected a number of bytes"),
        ({"layouts": "local", "memory": "1GiB"}, "memory= needs layouts='global'"),
        ({"memory": 1000, "layouts": "propagated"}, "the layouts of 'propagated' do not depend on it"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(sdy.SdyError, match=message):
        sdy.partition(stacked, mesh=LINE, **options)


def test_plans_say_what_was_chosen_and_why():
    spec = P("x")
    f = sdy.partition(step, mesh=LINE, in_shardings=(spec, spec, spec), layouts="global")
    plan = f.plan([LAYER] * 2, *BATCH)
    assert plan.layouts.cost < plan.layouts.baseline_cost
    assert "sends 35.0 KiB less than the propagated ones op by op (0.69 of that)" in str(plan)
    line = next(change.source.rsplit("/")[-1] for change in plan.layouts.changed)
    assert "chosen for the whole program" in str(plan.why(line))
    local = sdy.partition(step, mesh=LINE, in_shardings=(spec, spec, spec), layouts="local")
    assert local.plan([LAYER] * 2, *BATCH).layouts is None


def test_what_is_fused_takes_no_memory_and_its_operands_live_until_it_is_read():
    def function(x, w, v):
        h = x @ w
        return h.sum(0), jnp.tanh(h * 2 + 1) @ v

    program = Program(function, shapes((32, 64), (64, 64), (64, 64)), LINE, (P("x"), P(), P()))
    place_uses(program.modelled, fusion=Fusion())
    values = {value: program.model.values[n] for value, n in program.modelled.values.items() if n >= 0}
    products = [value for value in values if value.defining_op and value.defining_op.name == "stablehlo.dot_general"]
    (scaled,) = [value for value in values if value.defining_op and value.defining_op.name == "stablehlo.multiply"]
    assert values[scaled].is_at_hand and not values[products[0]].is_at_hand
    until = {use.node: end for use, (_, end) in zip(values[products[0]].uses, values[products[0]].needed, strict=True)}
    assert until[values[scaled].maker.node] == max(until.values()) > values[scaled].maker.node


class Tried:
    """A search for multipliers of memory, in which choice `n` costs and holds `programs[n]`, from a baseline of
    `programs[0]`. Each try finds the next one, or the one in `order`."""

    def __init__(self, monkeypatch, programs, copies=(), order=()):
        self.multipliers, self.programs, self.multiplier = [], programs, 0.0
        tries = itertools.chain(order, itertools.count(max(order, default=0) + 1))
        self.copies, self.most = list(copies), None

        def improved(*_, **__):
            self.multipliers.append(self.multiplier)
            return [min(next(tries), len(programs) - 1)]

        def set_memory_multipliers(multipliers):
            self.multiplier = max(multipliers)

        def set_work_multiplier(multiplier):
            self.multipliers.append(("work", multiplier))
            model.work_multiplier = multiplier

        monkeypatch.setattr(memory_search, "plan_of", lambda _, chosen, copies: (chosen[0], copies))
        self.placed, self.forgotten, self.talkative, self.sent = [], [], (), 0.0
        monkeypatch.setattr(memory_search, "place_uses", lambda program, _: self.placed.append(program))
        monkeypatch.setattr(memory_search, "held_copies", lambda *_: self.copies)
        model = SimpleNamespace(
            nodes=[],
            cost=lambda c: programs[c[0]][0],
            held=lambda c: programs[c[0]][1],
            charge_each_reshard=lambda _: None,
            set_work_multiplier=set_work_multiplier,
            work_multiplier=1.0,
            mean_reshard=lambda _: 0.0,
            operations=lambda _: 0.0,
        )
        self.program = SimpleNamespace(
            model=model, start=[0], set_memory_multipliers=set_memory_multipliers, most_operations=0.0
        )
        self.choices = SimpleNamespace(program=self.program, improved=improved, left=9.0)

    def tried(self, limit, memory=0.0, worth=0.0, by_time=False, incumbent=math.inf):
        best, room = best_choice(self.choices), MemoryBudget(limit, memory, worth, by_time, incumbent)
        return ProgramsTried(self.choices, best, self.place((0, {})), room, self.place)

    def found(self, *limits, **more):
        return [(trial.cost, trial.peak.total) for trial in self.tried(*limits, **more).at_multipliers()]

    def place(self, plan):
        """Ops 0 and 9 hold nothing; what is made again is freed between ops 2 and 7."""
        number, copies = plan
        cost, held = self.programs[number]
        again, live = len({copy for copy in copies.values() if copy > 1}), np.zeros(10)
        live[1:9] = held
        live = np.array(self.most, float) if self.most else live
        for copy in self.copies:
            live[3:7] -= copy.bytes * (copies.get(copy.uses[1].planned, 1) - 1)
        peak = SimpleNamespace(total=live.max(), border=0.0)
        cost += again
        return SimpleNamespace(
            cost=cost,
            exposed=cost,
            sending=cost,
            sent=self.sent,
            sends_too_much_beside=lambda _: number in self.talkative,
            peak=peak,
            live=live,
            forget=lambda: self.forgotten.append((cost, held)),
            setting=SimpleNamespace(costs=sdy.CostModel(), target=Target()),
            placed=SimpleNamespace(mesh=SimpleNamespace(axes=())),
        )


def test_no_price_is_tried_where_the_best_choice_fits(monkeypatch):
    programs_tried = Tried(monkeypatch, [(10, 5), (4, 5), (4, 5)])
    assert programs_tried.found(limit=5) == [(10, 5), (4, 5)] and programs_tried.multipliers == [0]
    assert not programs_tried.placed


def test_prices_rise_until_it_fits_and_then_fall_a_little(monkeypatch):
    programs_tried = Tried(monkeypatch, [(10, 5), (4, 9), (5, 8), (6, 5), (5.5, 6), (5.6, 5)], order=[1, 1, 2, 3])
    assert programs_tried.found(limit=5)[-1] == (5.6, 5)
    assert programs_tried.placed == [programs_tried.program]
    first, *rest = programs_tried.multipliers[1:]
    of_nothing, of_something = 16 * first, 64 * first
    between = math.sqrt(of_nothing * of_something)
    assert rest == [of_nothing, of_something, between, pytest.approx(math.sqrt(between * of_something))]


@pytest.mark.parametrize("family", [CPU, TPU])
def test_what_is_forgotten_is_freed_at_once_and_keeps_its_figures(family):
    """Planning puts off the collection of garbage."""
    program = Program(*PROGRAMS["fsdp"][:2], LINE, PROGRAMS["fsdp"][2], target=Target(family))
    gc.collect()
    gc.disable()
    try:
        before = sum(type(each) is Op for each in gc.get_objects())
        trial = program.placed_by_plan()
        figures = trial.cost, trial.sent, trial.peak.total, trial.live.tolist()
        trial.forget()
        assert sum(type(each) is Op for each in gc.get_objects()) == before
    finally:
        gc.enable()
    assert (trial.cost, trial.sent, trial.peak.total, trial.live.tolist()) == figures


def test_trials_that_will_not_be_chosen_are_forgotten(monkeypatch):
    """Neither the baseline, nor what costs least of what fits, nor what holds least."""
    programs_tried = Tried(monkeypatch, [(10, 5), (4, 9), (5, 8), (6, 4), (5.5, 6), (5.6, 5)])
    programs_tried.found(limit=5)
    assert set(programs_tried.forgotten) == {(4, 9), (5, 8), (5.5, 6)}


@pytest.mark.parametrize(
    ("held", "usual", "chosen"),
    [
        ([12, 8, 9], 0.0, [8, 9]),  # within the limit
        ([12, 9.5, 9.8], 0.0, [9.5, 9.8]),  # within what there is
        ([12, 11, 11.5], 0.0, []),
        ([12, 9.5, 9.8], 9.0, []),  # a limit that is stated is kept to
    ],
)
def test_what_keeps_within_all_of_the_memory_may_be_chosen_where_nothing_keeps_within_the_limit(held, usual, chosen):
    """The limit is a share of the memory, as estimates are no better: what is quicker is not given up for it."""
    trials = [SimpleNamespace(peak=SimpleNamespace(total=each)) for each in held]
    budget = MemoryBudget(limit=9, memory=10, worth=0.0, usual=usual)
    assert [trial.peak.total for trial in budget.choosable(trials, trials[0])] == chosen


def test_prices_that_were_tried_are_not_tried_again_and_what_was_asked_for_is_kept(monkeypatch):
    programs = [(10, 5), (4, 9), (5, 8), (6, 7), (6.5, 4), (6.2, 6), (6.3, 5)]
    search = Tried(monkeypatch, programs)
    trials = search.tried(limit=5)
    assert len(trials.at_multipliers(FEW)) == 2 + FEW and len(search.multipliers) == 1 + FEW
    every = trials.at_multipliers()
    assert [(trial.cost, trial.peak.total) for trial in every] == Tried(monkeypatch, programs).found(limit=5)
    assert len(search.multipliers) == len(every) - 1 and (6, 7) not in search.forgotten
    assert trials.at_multipliers(FEW) == every[: 2 + FEW]


def test_work_is_cheaper_until_nothing_is_sent_to_save_it_that_the_baseline_does_not_send(monkeypatch):
    programs_tried = Tried(monkeypatch, [(10, 5), (4, 5), (5, 5), (6, 5)])
    programs_tried.talkative = (1, 2)
    assert programs_tried.found(limit=5, by_time=True)[-1] == (6, 5)
    assert programs_tried.multipliers[1:] == [("work", 1 / 4), 0, ("work", 1 / 16), 0]
    assert len(Tried(monkeypatch, [(10, 5), (4, 5), (5, 5)]).found(limit=5)) == 2


def test_work_is_dearer_once_where_something_is_sent(monkeypatch):
    """What hides it is not in the model; by bytes nothing is hidden."""
    programs = [(10, 5), (4, 5), (3, 5), (5, 5)]
    by_time, by_bytes = Tried(monkeypatch, programs), Tried(monkeypatch, programs)
    by_time.sent = by_bytes.sent = 1.0
    assert by_time.found(limit=5, by_time=True) == [(10, 5), (4, 5), (3, 5)]
    assert by_time.multipliers == [0, ("work", 4.0), 0, ("work", 1.0)]
    assert by_bytes.found(limit=5) == [(10, 5), (4, 5)]


@pytest.mark.parametrize(
    ("sent", "exposed", "is_too_much"),
    [(10, 8, False), (10, 9, False), (10.1, 7.7, False), (10.1, 7.9, True), (11, 9, True), (30, 0.1, False)],
)
def test_bytes_are_paid_for_time_alone(sent, exposed, is_too_much):
    """Time comes first, within three hundredths."""
    trial, baseline = SimpleNamespace(sent=sent, exposed=exposed), SimpleNamespace(sent=10, exposed=8)
    assert PartitionedProgram.sends_too_much_beside(trial, baseline) == is_too_much


def test_trials_that_may_be_chosen_are_kept_beside_cheaper_ones_that_may_not_and_larger_ones(monkeypatch):
    """Which one is best depends on what memory is worth, and that on what the cheapest of all costs."""
    programs_tried = Tried(monkeypatch, [(10, 5), (4, 5), (6, 5), (6.2, 4), (6.4, 4.5)])
    programs_tried.talkative = (1,)
    programs_tried.found(limit=9, memory=10, worth=0.1, by_time=True)
    assert set(programs_tried.forgotten) == {(4, 5)}


def test_memory_has_its_small_price_where_a_program_that_fits_fills_a_device(monkeypatch):
    programs = [(10, 5), (4, 5), (4.1, 3), (4.1, 3)]
    programs_tried = Tried(monkeypatch, programs)
    assert programs_tried.found(limit=9, memory=10, worth=1.25)[-1] == (4.1, 3)
    worth = 1.25 * 4 / 10  # at the eight moments at which most is held, half of it at two others
    assert programs_tried.multipliers[1:] == [worth / 9, *(times * worth / 8 for times in (1, 8, 64, 256))]
    assert Tried(monkeypatch, [(10, 5), (4, 2), (4.1, 1)]).found(limit=9, memory=10, worth=1.25)[-1] == (4, 2)
    monkeypatch.setattr(memory_search, "_MANY", 0)
    assert Tried(monkeypatch, programs).found(limit=9, memory=10, worth=1.25)[-1] == (4, 5)


def test_between_what_holds_much_and_what_holds_little_others_are_tried(monkeypatch):
    programs = [(10, 8), (4, 8), (4, 8), (4, 8), (4, 8), (4.9, 2), (4.9, 2), (4.2, 3), (4.2, 3)]
    search = Tried(monkeypatch, programs)
    assert search.found(limit=9, memory=10, worth=1.25)[-1] == (4.2, 3)
    low, high = search.multipliers[3], search.multipliers[4]
    assert search.multipliers[5:7] == pytest.approx([(low * high) ** (1 / 2), (low**3 * high) ** (1 / 4)])


def test_nothing_is_tried_beyond_what_costs_more_than_a_baseline_that_fits(monkeypatch):
    programs_tried = Tried(monkeypatch, [(10, 5), (4, 9), (11, 8), (12, 5)])
    assert len(programs_tried.found(limit=5)) == 3
    assert Tried(monkeypatch, [(10, 6), (4, 9), (11, 8), (12, 5)]).found(limit=5)[-1] == (12, 5)


def test_a_baseline_that_nothing_saves_beside_is_left_where_it_does_not_fit(monkeypatch):
    programs_tried = Tried(monkeypatch, [(4, 9), (4, 9), (5, 5)])
    assert programs_tried.found(limit=5)[-1] == (5, 5) and programs_tried.multipliers[1] > 0


def copy_used_at(first, last, size):
    return HeldCopy([UseOfCopy((None, 0, op), op, op) for op in (first, last)], size, 1.0)


def test_copies_are_made_again_before_memory_has_a_multiplier(monkeypatch):
    """Choice 1 holds too much between ops 2 and 7 only, where a copy is not needed."""
    search = Tried(monkeypatch, [(100, 9), (80, 9)], copies=[copy_used_at(2, 7, 2.0)])
    search.most = [0, 1, 1, 9, 9, 9, 9, 1, 1, 0]
    assert search.found(limit=7)[1:] == [(80, 9), (81, 7)]
    assert search.multipliers == [0]


def test_copies_stay_where_freeing_them_helps_nothing(monkeypatch):
    """As much is live elsewhere. Where the program then holds less than any other, it is tried, though nothing fits."""
    copies, programs = [copy_used_at(2, 7, 2.0)], [(100, 8), (80, 9), (90, 6)]
    assert Tried(monkeypatch, programs, copies).found(limit=6) == programs
    search = Tried(monkeypatch, [(100, 9), (80, 9)], copies)
    search.most = [0, 1, 1, 9, 9, 9, 9, 8, 1, 0]
    assert search.found(limit=6)[2] == (81, 8)


def test_what_costs_more_than_a_program_that_fits_is_tried_at_no_multiplier_of_memory(monkeypatch):
    programs = [(10, 9), (4, 9), (5, 5)]
    search = Tried(monkeypatch, programs)
    assert search.found(limit=5, incumbent=3.0) == programs[:2] and search.multipliers == [0]
    assert Tried(monkeypatch, programs).found(limit=5, incumbent=4.5)[-1] == programs[2]


def test_prices_are_given_up_where_nothing_holds_less(monkeypatch):
    programs_tried = Tried(monkeypatch, [(10, 9), (4, 9), *[(5 + n, 9) for n in range(9)]])
    programs_tried.found(limit=5)
    assert len(programs_tried.multipliers) == 1 + 3


def nested(weights, x):
    """Loops in a loop, what the inner one makes carried on by the outer one."""

    def outer(h, _):
        return jax.lax.fori_loop(0, 3, lambda i, g: jnp.tanh(g @ weights), h) + h, None

    return jax.lax.scan(outer, x, None, length=4)[0]


@pytest.mark.parametrize("function", [nested, jax.grad(lambda w, x: jnp.sum(nested(w, x)))], ids=["plain", "gradient"])
def test_values_are_needed_after_they_are_made(function):
    program = Program(function, shapes((64, 64), (32, 64)), LINE, (P("x"), P("x")))
    place_uses(program.modelled, fusion=Fusion())
    needed = [(value.born, begin, end) for value in program.model.values for begin, end in value.needed]
    assert needed and all(born <= begin <= end for born, begin, end in needed)


def test_a_sum_is_held_in_the_smaller_layout_until_it_is_taken_and_constants_are_not():
    """It is scattered at once where its only user wants it so."""

    def gradient(w, x, y):
        g = x.T @ y
        return jnp.tanh(x @ w), w - g, jnp.zeros_like(y) + jnp.sum(x)

    program = Program(gradient, shapes((64, 64), (32, 64), (32, 64)), LINE, (P("x"), P("x"), P("x")))
    model = program.modelled.model
    place_uses(program.modelled, fusion=Fusion())
    program.modelled.set_memory_multipliers([1.0] * len(program.modelled.graph.ops))
    values = {value: model.values[n] for value, n in program.modelled.values.items() if n >= 0}
    constants = [v for v in values if v.defining_op is not None and not v.defining_op.operands]
    assert all(values[value].is_at_hand for value in constants)
    (total,) = [
        v for v in values if v.defining_op and v.defining_op.name == "stablehlo.dot_general" and v.shape == (64, 64)
    ]
    known, number = values[total], program.modelled.table.number_of_axes
    split, summed = number(((AxisRef("x"),), ())), number(((), ()), (AxisRef("x"),))
    assert 0 < model._held(known, summed, [split]) < 2 * model._held(known, split, [split])
    assert model._held(known, summed, [summed]) == 8 * model._held(known, split, [split])


def test_a_program_that_sends_nothing_in_the_baseline_is_not_planned(monkeypatch):
    """Though devices along an axis that nobody named compute the same."""
    monkeypatch.setattr(layout_search, "planning_problem", None)
    weights, batch = np.ones((64, 16), np.float32), np.ones((32, 64), np.float32)
    for spec in (P(), P("x")):
        plan = assert_same(lambda x, w: jnp.tanh(x @ w), batch, weights, mesh=PLANE, in_shardings=(spec, P()))
        assert not plan.collectives and not plan.layouts.changed and plan.repeated_flops


def test_a_plan_has_to_save_half_a_percent(monkeypatch):
    f = sdy.partition(step, mesh=LINE, in_shardings=(P("x"), P("x"), P("x")))
    assert f.plan([LAYER] * 2, *BATCH).layouts.changed
    monkeypatch.setattr(layout_search, "_LEAST_GAIN", 1.1)
    g = sdy.partition(step, mesh=LINE, in_shardings=(P("x"), P("x"), P("x")))
    assert not g.plan([LAYER] * 2, *BATCH).layouts.changed


def test_gradients_are_reduced_at_once_where_updating_a_part_saves_next_to_nothing(monkeypatch):
    """Though biases of which there are many cost little on average; and nothing that the model suggests is placed."""
    monkeypatch.setattr(layout_search, "ProgramsTried", None)

    def function(layers, x):
        def loss(layers):
            h = x
            for w, *biases in layers:
                h = jnp.tanh(h @ w + sum(biases))
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, layers, jax.grad(loss)(layers))

    layer = shapes((64, 64), *[(64,)] * 8)
    costs = sdy.CostModel.of_platform("cpu")
    f = sdy.partition(function, mesh=LINE, in_shardings=(P(), P("x")), costs=costs)
    plan = f.plan([layer] * 2, *shapes((4096, 64)))
    assert {record.moved.summary.kind for record in plan.collectives} == {"all_reduce"}


def test_reshards_of_several_collectives_are_charged_for_each():
    sharded, partial, both, whole = (
        TensorSharding.closed("mesh", [axes, ()], unreduced)
        for axes, unreduced in ((ROWS, ()), ((), COLUMNS), (ROWS, COLUMNS), ((), ()))
    )
    assert steps_between([sharded, partial, both, whole], Mesh.of(x=2, y=4))[:, 3].tolist() == [1, 1, 2, 1]


def test_a_program_that_holds_nothing_in_between():
    plan = assert_same(lambda x: x, np.ones((8, 4), np.float32), mesh=LINE, in_shardings=P("x"), layouts="global")
    assert not plan.layouts.changed
    with pytest.raises(sdy.SdyError, match="memory=1 B is not enough"):
        sdy.partition(lambda x: x, mesh=LINE, layouts="global", memory=1).plan(np.ones((8, 4), np.float32))


@pytest.mark.parametrize("worth", [0.0, 0.1, 1.0, 10.0])
def test_the_trial_that_is_best_is_a_candidate(worth):
    figures = [(1.0, 0.9, 6), (1.1, 0.5, 6), (1.2, 0.8, 4), (1.3, 0.9, 4), (1.4, 0.5, 7), (1.1, 0.5, 6)]
    programs = [
        SimpleNamespace(cost=cost, exposed=exposed, peak=SimpleNamespace(total=held)) for cost, exposed, held in figures
    ]
    room = MemoryBudget(limit=10, memory=10, worth=worth)
    assert any(room.best(programs) is trial for trial in room.candidates(programs))
    assert len(room.candidates(programs)) == 2


@pytest.mark.parametrize("family", [TPU, CPU], ids=["tpu", "cpu"])
def test_holding_counts_the_bytes_that_are_live(family):
    """Those by which the limit is checked: in tiles, and rounded where products alone read a value."""

    def function(x, w, v):
        h = jnp.tanh(x @ w)
        return h @ v, jnp.sum(h * h, 1)

    args = shapes((64, 128), (128, 24), (24, 72))
    given = {"costs": sdy.CostModel.of_platform(family.name), "target": Target(family)}
    program = Program(function, args, LINE, (P("x"), P(), P()), (P("x"), P("x")), **given)
    placed = Graph(program.placed.module)
    assert [op.name for op in placed.ops] == [op.name for op in program.graph.ops]  # nothing moves
    sizes = LocalBytes(placed, family.arrays)
    for op, after in zip(program.graph.ops, placed.ops, strict=True):
        for value, found in zip(op.results, after.results, strict=True):
            if not value.rank:
                continue
            known = program.model.values[program.modelled.values[value]]
            layout = program.model.layout(program.modelled.start, known.maker)
            assert program.model.bytes_of(known, layout) == sizes.of(found), op.name
    weights = [program.model.values[program.modelled.values[value]] for value in program.graph.arguments[1:]]
    held = [program.model.bytes_of(each, program.model.layout(program.modelled.start, each.maker)) for each in weights]
    assert held == ([2 * 128 * 24, 2 * 24 * 128] if family is TPU else [4 * 128 * 24, 4 * 24 * 72])
