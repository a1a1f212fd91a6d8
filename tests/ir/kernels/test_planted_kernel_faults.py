"""Mistakes that are planted in the rules of kernels and in how they run on blocks: kernels show each of them, and
`verify` names the kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from kernel_splits import calls_of, rule_of, run_on_blocks
from partitioned_ops import LINE
from random_kernels import drawn_kernel

import sdy_jax as sdy
from sdy_jax.ir.kernels import grid_rule, index_arithmetic
from sdy_jax.ir.kernels.body import Shift
from sdy_jax.ir.kernels.index_arithmetic import IndexEntry
from sdy_jax.lowering.ops.custom_calls import _shifted
from sdy_jax.lowering.ops.registry import STRATEGIES, Strategy, pass_through_factors

X = np.arange(64, dtype=np.float32).reshape(16, 4)


class Planted(NamedTuple):
    """A mistake: what stands in the place of an attribute, made of it; and what shows it: a drawn kernel, by its seed,
    or a function of an array with a kernel whose first result is read."""

    holder: Any
    attribute: str
    planted: Callable[[Any], Any]
    shown_by: int | Callable[..., Any]


def _reads_nothing(right):
    return lambda *args: replace(right(*args), dims=frozenset())


def _counts_dimensions_of_vmap(right):
    return lambda mapping, extents: Shift(dict(extents))


def _reads_those_of_vmap(right):
    return lambda body, vmapped, rank: right(body, (), rank)


def _follows_what_is_odd(right):
    def wrong(dim, table):
        found = right(dim, table)
        return IndexEntry(found.mentions, dim) if found.is_odd_to(dim) else found

    return wrong


def _stays_in_place(right):
    return lambda old, kinds, extents, avals: right(old, [IndexEntry()] * len(kinds), extents, avals)


def _moves_all(right):
    return lambda old, kinds, extents, avals: right(old, [IndexEntry(frozenset(extents))] * len(kinds), extents, avals)


def _stays(right):
    return lambda call, dim: [kept._replace(moves=False) for kept in right(call, dim)]


def through_a_result_that_moves(x):
    """A running sum in each of two blocks of a result that nothing else reads."""

    def body(x_ref, out_ref, other_ref):
        @pl.when((pl.program_id(0) == 0) | (pl.program_id(1) == 0))
        def _():
            other_ref[...] = jnp.zeros_like(other_ref)

        other_ref[...] += x_ref[...]
        out_ref[...] = other_ref[...]

    rows, others = pl.BlockSpec((2, 4), lambda i, k: (i, 0)), pl.BlockSpec((2, 4), lambda i, k: (k, 0))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 4), (4, 4))]
    run = pl.pallas_call(body, grid=(8, 2), in_specs=[rows], out_specs=[rows, others], out_shape=shapes, interpret=True)
    return run(x)


def numbered(x, size=2):
    """Each block of so many rows with the number of its step; and the last block."""

    def body(x_ref, out_ref, whole_ref):
        out_ref[...] = x_ref[...] + pl.program_id(0)
        whole_ref[...] = x_ref[...]

    rows, whole = pl.BlockSpec((size, 4), lambda i: (i, 0)), pl.BlockSpec((size, 4), lambda i: (0, 0))
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.shape, (size, 4))]
    run = pl.pallas_call(
        body, grid=(len(x) // size,), in_specs=[rows], out_specs=[rows, whole], out_shape=shapes, interpret=True
    )
    return run(x)


PLANTED = {
    "nothing is carried": Planted(grid_rule, "carrier", lambda right: lambda *args: None, 0),
    "nothing is kept": Planted(grid_rule, "_kept", lambda right: lambda call, dim: [], 0),
    "what moves stays": Planted(grid_rule, "_kept", _stays, through_a_result_that_moves),
    "operands are not changed": Planted(grid_rule, "written_arguments", lambda right: lambda body: frozenset(), 9),
    "bodies read nothing": Planted(grid_rule, "reads_of", _reads_nothing, 0),
    "steps are not shifted": Planted(Shift, "_equations_of", lambda right: lambda self, x, _: list(x.eqns), 0),
    "index maps are not shifted": Planted(grid_rule, "_shifted_map", _stays_in_place, 3),
    "all indices are shifted": Planted(grid_rule, "_shifted_map", _moves_all, 0),
    "odd indices follow": Planted(index_arithmetic, "_of_table", _follows_what_is_odd, 4),
    "groups are taken apart": Planted(grid_rule, "_steps", lambda right: lambda *args: 1, 85),
    "blocks are whole": Planted(grid_rule.PallasCall, "_fits", lambda right: lambda *args: True, 8),
    "dimensions of vmap are shifted": Planted(grid_rule, "own_shift", _counts_dimensions_of_vmap, 1),
    "dimensions of vmap are read": Planted(grid_rule, "reads_of", _reads_those_of_vmap, 1),
}


def differs(shown_by):
    """Whether a kernel has other numbers where one of its factors is split."""
    kernel = drawn_kernel(shown_by) if isinstance(shown_by, int) else shown_by
    args = kernel.arguments() if isinstance(shown_by, int) else [X]
    (equation,) = calls_of(kernel, *args)
    are_read = [t.is_used for t in kernel.results] if isinstance(shown_by, int) else [True, False]
    found, expected = rule_of(equation), run_on_blocks(equation, args, {})
    for factor, size in enumerate(found.rule.factor_sizes[: len(found.dims)]):
        least = min(n for n in range(2, size + 1) if not size % n)
        results = run_on_blocks(equation, args, {factor: least})
        for i, mapping in enumerate(found.rule.result_mappings):
            has_factor = any(dim[:1] == (factor,) for dim in mapping)
            if are_read[i] and has_factor and not np.array_equal(results[i], expected[i]):
                return True
    return False


@pytest.mark.dear(cases=7)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_shown(name, monkeypatch):
    holder, attribute, planted, shown_by = PLANTED[name]
    assert not differs(shown_by)
    monkeypatch.setattr(holder, attribute, planted(getattr(holder, attribute)))
    assert differs(shown_by)


def verified(function, x=X, spec=P("x"), **options):
    options = {"targets": ["cpu"], "uneven": False, "derivatives": False, **options}
    return sdy.verify(function, x, mesh=LINE, in_shardings=spec, options={"layouts": "local"}, **options)


def names_the_kernel(found):
    fault = found.faults[0]
    file, _, line = fault.source.rpartition(":")
    is_here = file.endswith("test_planted_kernel_faults.py") and int(line) > 0
    return not found and is_here and (fault.op, fault.culprit) == ("sdy_jax.kernel", "sdy_jax")


def test_verify_names_a_kernel_that_is_not_told_its_place(monkeypatch):
    def first(x):
        return jnp.sin(numbered(x)[0])

    assert verified(first)
    monkeypatch.setattr(grid_rule, "reads_of", _reads_nothing(grid_rule.reads_of))
    found = verified(first)
    assert names_the_kernel(found), found
    assert not found.faults[0].reproducer  # which would call a kernel of this process


def test_verify_names_a_kernel_whose_result_is_read_where_it_is_of_one_device(monkeypatch):
    def second(x):
        return numbered(x)[1] * 2

    assert verified(second)

    def of_any(op, rule):
        return [Strategy("kernel", pass_through_factors(rule), dividing=_shifted(op))]

    monkeypatch.setitem(STRATEGIES, "sdy_jax.kernel", of_any)
    found = verified(second)
    assert names_the_kernel(found), found


def test_verify_names_a_kernel_that_is_told_another_place_in_uneven_shards(monkeypatch):
    """Of 14 blocks on 8 devices: seven of these have 2 each, which are counted as if each had 14 // 8."""
    right, x = STRATEGIES["sdy_jax.kernel"], np.arange(14 * 4, dtype=np.float32).reshape(14, 4)

    def first(x):
        split = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(LINE, P("x")))
        return numbered(jnp.sin(split), 1)[0]

    assert verified(first, x, P())
    monkeypatch.setitem(
        STRATEGIES, "sdy_jax.kernel", lambda op, rule: [replace(s, dividing=frozenset()) for s in right(op, rule)]
    )
    found = verified(first, x, P())
    assert names_the_kernel(found), found
