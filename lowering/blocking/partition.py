"""Partitioning a program that may compute again what it would else hold, and work on its largest values in parts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from jax.extend.mlir import ir

from sdy_jax.ir.graph import Graph
from sdy_jax.ir.operations import copied
from sdy_jax.lowering.blocking.choice import BlockingCandidate, BlockingCandidates
from sdy_jax.lowering.blocking.groups import Growth
from sdy_jax.lowering.blocking.loops import run_in_parts
from sdy_jax.lowering.blocking.separation import Sizes, tell_apart
from sdy_jax.lowering.blocking.spans import Cut, RuleOf
from sdy_jax.lowering.interface.outcomes import InParts
from sdy_jax.lowering.interface.report import PartitionReport
from sdy_jax.lowering.interface.setting import Setting
from sdy_jax.lowering.prepare.dead_code import erase_dead_code
from sdy_jax.lowering.prepare.preparation import PREPARED, prepared
from sdy_jax.lowering.recomputation.partition import FEW, Program, best_program
from sdy_jax.lowering.recomputation.program_prices import ProgramPrices
from sdy_jax.lowering.recomputation.segment_prices import Mark
from sdy_jax.lowering.schedule.marks import erase_marks
from sdy_jax.lowering.whole_program.layout_search import LayoutSearch
from sdy_jax.lowering.whole_program.partition import finished
from sdy_jax.lowering.whole_program.partition import partition_whole as partition_as_written
from sdy_jax.op_rules import RuleBook

_TRIES = 4
"""Programs with more and more parts that are planned, at most. Guessed: each is a plan; the last one that holds less is
taken, so fewer may end above the limit."""

_MORE = 1.1
"""How much less large values may take than the last program held too much: what is around them changes, too. Guessed:
with 1, the next try misses the limit by little again; with more, there are more parts than need be."""

_SHARED = 1 / 16
"""The share of what the program holds too much from which on a value that two groups share is recomputed. Guessed: with
less, small values are computed twice for nothing; with more, groups stay joined and cannot be cut."""

_AS_MUCH = 2
"""How many times as much as its largest group's values a program may hold too much, so that parts may help. Guessed: a
search that is spared; with less, programs that would fit in parts are given up."""

_OF_LIMIT = 1 / 8
"""The share of what a device may hold that the values of a group may take: more parts cost little, and what compilers
rearrange of them is not known. Measured (2026-11, libtpu 0.0.51): with as much as was left, an 8B model's step on 32768
tokens per chip of v5e was estimated at 13.9 GiB and took 16.9."""

_LEAST = 1 / 64
"""The share of what a device may hold that they may take at least: in more parts, other values are in the way.
Guessed: with less, there are loops of many short trips."""


def partition(module: ir.Operation, setting: Setting, named: Collection[Mark] = ()) -> PartitionReport:
    """As `partition_whole`. Where the cheapest program does not fit, values that are held between a forward and
    a backward pass are computed again, and where that does not suffice, the largest values are made part by part.

    Args:
        named: the lines and types of values that are held where anything fits by that.

    Raises:
        MemoryLimitError: no program was found that keeps within the memory that the policy states.
    """
    if setting.policy.layouts != "global" or not setting.available:
        return partition_as_written(module, setting)
    erase_marks(module)
    search = LayoutSearch(prepared(module, setting), setting)
    program = _best(search, named)
    fitting = program.search.fitting(program.found)
    before = None if program.what is None and not program.blocked else _stage(program.search.graph)
    report = finished(module, program.search, fitting)
    report.recomputed, report.blocked, report.before = program.what, program.blocked, before
    return report


def _best(search: LayoutSearch, named: Collection[Mark]) -> Program:
    """The best form of a program, the first that fits of these: with something that is computed again; in parts; in
    parts, with something that is computed again; and of that, more in parts, as its layouts are others."""
    written = Program(search, prices=FEW)
    tried = [_again(written, named)]
    if not tried[-1].fits:
        tried += _in_parts(written)
    if not tried[-1].fits:
        parts = min(tried[1:] or tried, key=Program.rank)
        again = _again(replace(parts, prices=FEW), named) if parts.blocked else parts
        tried += [again, *_in_parts(again)] if again.blocked or again.what is not None else []
    return min(tried, key=Program.rank)


def _again(program: Program, named: Collection[Mark]) -> Program:
    """A program, with trials at few prices, that may compute something again; with trials at all prices else."""
    if not program.search.policy.recompute:
        return program.at_all_prices
    found = best_program(program, named)
    found.blocked = program.blocked
    return found


def _stage(graph: Graph) -> ir.Operation:
    """A program as it is before it is partitioned."""
    module = copied(graph.module)
    module.attributes[PREPARED] = ir.UnitAttr.get(module.context)
    return module


def _in_parts(program: Program) -> Iterator[Program]:
    """Programs that make their largest values in more and more parts; the last one fits, if there is such."""
    rule_of = RuleBook(conservative=True).without_overrides().rule_of
    size, before, last = None, None, math.inf
    for _ in range(_TRIES):
        graph, candidates = _candidates(program, rule_of)
        most = max([each.inside for each in candidates.above(0.0)], default=0.0)
        if program.too_much > _AS_MUCH * most:
            return
        size = min(most - program.too_much, _OF_LIMIT * program.search.limit) if size is None else size
        size = max(size, _LEAST * program.search.limit)
        chosen = [(each, cut) for each in candidates.above(size) if (cut := each.cut(size)) is not None]
        if not chosen or [cut for _, cut in chosen] == before:
            return
        before = [cut for _, cut in chosen]
        what = tuple(_in_report(*each) for each in chosen)
        for each, cut in chosen:
            run_in_parts(each.group, cut, rule_of)
        search = program.search.of(erase_dead_code(Graph(graph.module)))
        less = Program(search, program.what, blocked=(*program.blocked, *what))
        yield less
        if less.fits or less.too_much >= last:
            return
        last = less.too_much
        size = min(size / 2, size - _MORE * less.too_much)


def _candidates(program: Program, rule_of: RuleOf) -> tuple[Graph, BlockingCandidates]:
    """A copy of a program, in which groups share no large values, and what of it could run in parts."""
    search, graph = program.search, Graph(copied(program.search.graph.module))
    target = search.setting.target
    prices = ProgramPrices(graph, program.least, target.arrays)
    origins = tell_apart(graph, Growth(rule_of, prices.bytes_of), _SHARED * max(program.too_much, 0.0))
    sizes, graph = Sizes(graph, prices, origins), Graph(graph.module) if origins else graph
    return graph, BlockingCandidates(graph, sizes, search.mesh, rule_of, target.compiler.fusion, search.limit)


def _in_report(candidate: BlockingCandidate, cut: Cut) -> InParts:
    value, dim = candidate.value, candidate.span.dim
    assert value.defining_op is not None and value.shape is not None
    return InParts(value.dtype, value.shape, dim, cut.parts, candidate.inside, value.defining_op.mlir.location)
