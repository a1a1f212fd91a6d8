"""Automatic layouts: arguments and results that the user leaves to the planner (`AUTO`).

The usual layouts are planned first, each as if the user had stated it, but for those in which the arguments alone are
more than a device may hold. From the best of them that fits, the program is planned once more with a free border: an
argument is made in any layout, and what is carried from step to step comes back in the layout in which it went in. What
was found is then stated, and the program planned as any other, so that stating it by hand gives the same plan.
See docs/explanation/planner.md#auto.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

from jax.extend.mlir import ir

from sdy_jax.annotate.program import Program
from sdy_jax.annotate.specs import padded
from sdy_jax.base.errors import MemoryLimitError
from sdy_jax.ir.operations import body_of, copied, main_function, returned_by
from sdy_jax.ir.shardings import TensorSharding
from sdy_jax.ir.stored_shardings import set_function_shardings
from sdy_jax.lowering.planner.problem.layout_plan import FreeBorder
from sdy_jax.lowering.planner.search.memory_search import GivenUp
from sdy_jax.plan.border import AutomaticLayouts, Measured
from sdy_jax.plan.notices import Tell
from sdy_jax.plan.plan import Plan
from sdy_jax.plan.usual_layouts import UsualLayouts, carried, largest

_SEARCH = 3
"""How much longer the search with a free border, and the plan after it, take than a plan with usual layouts, about.
Guessed, for a bar of progress alone."""

_MOST_STATED = 3
"""Usual layouts that fit and are planned again as if they were stated, at most. Measured (2026-11,
`scripts/bench_models`): of a mixture of 128 experts on 64 H100s the one that was fastest along whole axes took 0.03
more along parts of these, and the next one, where nothing is cut, 0.05 less; of an 8B model there, 8 x 8, the third one
took 0.04 less than what was found, after two that are alike. With more, planning takes longer."""

_APART = 1.02
"""By how much plans with different borders differ in time along whole axes where it is clear which is faster. Measured
(2026-11, `scripts/bench_models`): what was found along parts of axes took 0.03 to 0.16 less than the fastest usual
layout along whole ones where a usual layout along parts took 0.03 to 0.05 less again, and usual ones that were within
0.01 of each other along whole axes were then up to 0.08 apart."""

Border = tuple[Mapping[int, TensorSharding], Mapping[int, TensorSharding]]
"""The shardings of argument leaves, and those of result leaves, by index."""


@dataclass(frozen=True, slots=True)
class Planners:
    """How programs are planned on the way.

    Attributes:
        stated: plans a program whose border is stated; takes the incumbent, the cost of another one that fits, and
            gives up what costs more to have it fit.
        unlimited: likewise, whatever memory that takes.
        freed: the best border of a program with a free one, found from the one that is stated; takes the
            incumbent, dearer programs than which need not be found.
        along_parts: whether programs whose border is stated are planned along parts of axes, which the others are not.
    """

    stated: Callable[[Program, float], Plan]
    unlimited: Callable[[Program], Plan]
    freed: Callable[[Program, FreeBorder, float], Border]
    along_parts: bool


def automatic_plan(
    program: Program, imported: ir.Operation, planners: Planners, limit: float, slow: Collection[str], tell: Tell
) -> Plan:
    """The plan of a program with automatic arguments or results.

    Args:
        program: the traced program.
        imported: its module after import.
        planners: how programs are planned on the way.
        limit: the bytes that a device may hold by what the user says, or else its own.
        slow: the mesh axes along which devices send much slower than along others.
        tell: is told what is tried, and how much of the search is done.

    Raises:
        MemoryLimitError: no border was found whose plan keeps within the memory.
    """
    search = _Search(program, planners, limit, tell)
    return search.run(program.with_module(imported), slow)


class _Search:
    def __init__(self, program: Program, planners: Planners, limit: float, tell: Tell):
        self._program, self._planners, self._limit, self._tell = program, planners, limit, tell
        back = carried(program).items()
        free = program.automatic_arguments, program.automatic_results
        self._carried = {argument: result for argument, result in back if argument in free[0] and result in free[1]}
        self._problems: list[MemoryLimitError] = []
        self._given_up: list[Program] = []

    def run(self, imported: Program, slow: Collection[str]) -> Plan:
        plans, borders = dict[str, Plan](), self._usual(imported, ())
        if slow:  # state is split along them where it is too large otherwise
            borders |= self._usual(imported, slow)
        for name, border in borders.items():
            self._tell(name, len(plans) / (len(borders) + _SEARCH))
            plans[name] = self._planners.unlimited(self._stated((border, self._results_of(border))))
        self._tell("a free border", len(plans) / (len(plans) + _SEARCH))
        chosen = self._chosen(sorted(plans.values(), key=_time))
        return replace(chosen, automatic=automatic_layouts(self._program, chosen, plans, self._limit))

    def _usual(self, imported: Program, slow: Collection[str]) -> dict[str, Mapping[int, TensorSharding]]:
        """The usual layouts by name, but for those in which arguments alone are too large."""
        free, state = self._program.automatic_arguments, set(self._carried or largest(self._program))
        usual = UsualLayouts(imported, sorted(free), sorted(state & free), slow)
        return {name: border for name, border in usual.borders() if self._held(border) <= self._limit}

    def _held(self, border: Mapping[int, TensorSharding]) -> float:
        """The bytes that a device holds of automatic arguments in some layouts."""
        leaves = ((self._program.in_info[leaf], sharding) for leaf, sharding in border.items())
        mesh = self._program.mesh
        return float(sum(math.prod(each.local_shape(of.shape, mesh)) * of.dtype.itemsize for of, each in leaves))

    def _chosen(self, usual: Sequence[Plan]) -> Plan:
        """The best of the plan with the border that is found from the fastest usual one that leaves room for anything
        else, and of those with usual ones. They come in order of their times."""
        roomy = [plan for plan in usual if plan.memory.border <= self._limit]
        borders = [self._stated(self._border_of(plan)) for plan in roomy]
        incumbent = min([_cost(plan) for plan in usual if self._fits(plan)], default=math.inf)
        starts = borders[:1] if self._weights_come_back and borders else [self._program, *borders[:1]]
        found = [*self._within(lambda start: self._searched(start, incumbent), starts)]
        found += [*self._better_stated(roomy, borders, found)]
        if not any(map(self._fits, found)):  # the incumbent fits along whole axes
            found += [*self._within(self._planned, self._given_up)]
        if not found:
            raise min(self._problems, key=lambda problem: problem.least)
        return min(found, key=self._rank)

    @property
    def _weights_come_back(self) -> bool:
        """Whether what has the most bytes is state, as where weights are trained. Where they are not, usual layouts are
        guesses, of the weights or of a cache that comes back: then what propagation says is a start as well."""
        return bool(self._carried) and self._carried.keys() >= set(largest(self._program))

    def _searched(self, start: Program, incumbent: float) -> Plan:
        """The plan with the border that is found from a stated one; `incumbent`: the cost of a plan that fits."""
        return self._planned(self._stated(self._planners.freed(start, self._free_border(), incumbent)), incumbent)

    def _planned(self, program: Program, incumbent: float = math.inf) -> Plan:
        """The plan of a program with a stated border; one that is given up is remembered."""
        try:
            return self._planners.stated(program, incumbent)
        except GivenUp:
            self._given_up.append(program)
            raise

    def _better_stated(
        self, usual: Sequence[Plan], borders: Sequence[Program], found: Sequence[Plan]
    ) -> Iterator[Plan]:
        """The plans with usual borders that may be better than those that were found and than each other: as likely
        those that fit at their least time; where nothing fits, the first other one that does within the memory, though
        it takes longer. Where parts of axes tell, times along whole axes say little, and all are tried that are about
        as fast as the fastest one."""
        planned, pairs = list(found), list(zip(usual, borders, strict=True))
        likely, others = ([pair for pair in pairs if self._fits(pair[0]) == fits] for fits in (True, False))
        fastest = _time((likely or others)[0][0]) if pairs else 0.0
        if self._planners.along_parts and self._least_time(planned) < fastest / _APART:  # parts of axes tell
            close = [pair for pair in likely or others if _time(pair[0]) < fastest * _APART]
            yield from self._first_fitting(close, _MOST_STATED if likely else 1)
            return
        faster = takewhile(lambda pair: _time(pair[0]) < self._least_time(planned), likely)
        for stated in self._first_fitting(faster, _MOST_STATED, lambda plan: self._worth(plan, planned)):
            planned.append(stated)
            yield stated
        if math.isinf(self._least_time(planned)):
            yield from self._first_fitting(others, 1)

    def _worth(self, usual: Plan, planned: Sequence[Plan]) -> float:
        """What a plan with a usual border may cost, if it does not fit as it is written, to take less than those that
        are planned, where as much is hidden as along whole axes; nothing where it promises little."""
        least, promised = self._least_time(planned), _time(usual)
        return _cost(usual) + least - promised if promised * _APART < least else 0.0

    def _first_fitting(
        self, usual: Iterable[tuple[Plan, Program]], most: int, worth: Callable[[Plan], float] = lambda _: math.inf
    ) -> Iterator[Plan]:
        """The plans with usual borders, in order, up to so many that fit; `worth`: what each may cost for that."""
        for plan, border in usual:
            for stated in self._within(partial(self._planned, incumbent=worth(plan)), [border]):
                yield stated
                most -= self._fits(stated)
            if not most:
                return

    def _least_time(self, plans: Iterable[Plan]) -> float:
        """The time of the fastest plan that fits; infinite where none does."""
        return min([_time(plan) for plan in plans if self._fits(plan)], default=math.inf)

    def _within(self, planned: Callable[[Program], Plan], programs: Sequence[Program]) -> Iterator[Plan]:
        """The plans of programs but for those that are given up; of those for which the memory is not enough, the
        problems are kept."""
        for program in programs:
            try:
                yield planned(program)
            except GivenUp:
                continue
            except MemoryLimitError as error:
                self._problems.append(error.with_traceback(None))  # which keeps all that it was raised in

    def _fits(self, plan: Plan) -> bool:
        return plan.memory.peak <= self._limit

    def _rank(self, plan: Plan) -> tuple[bool, float]:
        """By what plans are compared: first those that fit, what takes least; then what holds least."""
        return (False, _time(plan)) if self._fits(plan) else (True, plan.memory.peak)

    def _results_of(self, arguments: Mapping[int, TensorSharding]) -> dict[int, TensorSharding]:
        """The layouts in which arguments come back."""
        return {result: arguments[argument] for argument, result in self._carried.items()}

    def _border_of(self, plan: Plan) -> Border:
        program = self._program
        arguments = {i: plan.arguments[i].sharding for i in program.automatic_arguments}
        return arguments, {i: plan.results[i].sharding for i in program.automatic_results}

    def _free_border(self) -> FreeBorder:
        program, first = self._program, len(self._program.constants)
        arguments = frozenset(first + i for i in program.automatic_arguments)
        back = {first + argument: result for argument, result in self._carried.items()}
        return FreeBorder(arguments, program.automatic_results, back)

    def _stated(self, border: Border) -> Program:
        return with_border(self._program, border)


def with_border(program: Program, border: Border) -> Program:
    """A program with layouts of arguments and results stated, which are not automatic then."""
    module = copied(program.module)
    main, first = main_function(module), len(program.constants)
    arguments, results = border
    at_arguments = {first + i: sharding for i, sharding in arguments.items()}
    set_function_shardings(main, "arg_attrs", dict(_fitting(at_arguments, list(body_of(main).arguments))))
    set_function_shardings(main, "res_attrs", dict(_fitting(results, list(returned_by(main)))))
    left = program.automatic_arguments - arguments.keys(), program.automatic_results - results.keys()
    return replace(program, module=module, automatic_arguments=left[0], automatic_results=left[1])


def automatic_layouts(program: Program, chosen: Plan, usual: Mapping[str, Plan], limit: float) -> AutomaticLayouts:
    """What a plan says of the arguments and results of a program that were left to the planner."""
    inputs = frozenset(program.inputs[i] for i in program.automatic_arguments)
    outputs = frozenset(program.outputs[i] for i in program.automatic_results)
    measured = {name: _measured(plan) for name, plan in usual.items()}
    return AutomaticLayouts(inputs, outputs, _measured(chosen), measured, limit)


def _fitting(
    shardings: Mapping[int, TensorSharding], values: Sequence[ir.Value]
) -> Iterator[tuple[int, TensorSharding]]:
    """The shardings with the ranks of the values: raw words of random keys have a dimension more."""
    for number, sharding in shardings.items():
        yield number, padded(sharding, ir.RankedTensorType(values[number].type).rank)


def _measured(plan: Plan) -> Measured:
    sent = plan.wire_bytes if plan.costs.unit == "bytes" else plan.time.communication
    return Measured(_time(plan), sent, plan.memory.peak)


def _time(plan: Plan) -> float:
    """What a plan takes, beside what is hidden: by that plans with different borders are compared, as `print(plan)`
    shows it."""
    return plan.time.total


def _cost(plan: Plan) -> float:
    """What a plan costs, whatever is hidden, as the search for layouts counts; of one on many axes, which is made op by
    op, what it takes."""
    return plan.layouts.cost if plan.layouts is not None else _time(plan)
