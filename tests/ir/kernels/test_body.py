"""What bodies carry from step to step, read, draw and send, and which dimensions of their grids that keeps whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_splits import call_of, rule_of, why_whole

STATE = pltpu.VMEM((2, 4), jnp.float32)
ROWS = ((8, 4), (2, 4), lambda i, k: (i, 0))
"""Rows in blocks of two, which follow the first of two grid dimensions."""
GRID = (4, 2)


def dims_of(body, *, grid=GRID, operands=(ROWS,), results=(ROWS,), scratch=(STATE,), **options):
    """The grid dimensions along which a kernel of rows may be split."""
    return rule_of(call_of(body, grid, operands, results, scratch=scratch, **options)).dims


def set_at_first(x, out, state):
    """A sum over the inner dimension."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    state[...] += x[...]
    out[...] = state[...]


def set_once(x, out, state):
    """A state that goes on from block to block, as in recurrences over blocks of time."""

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        state[...] = jnp.zeros_like(state)

    state[...] = state[...] * 0.5 + x[...]
    out[...] = state[...]


def set_at_even(x, out, state):
    @pl.when((pl.program_id(0) % 2 == 0) & (pl.program_id(1) == 0))
    def _():
        state[...] = jnp.zeros_like(state)

    state[...] += x[...]
    out[...] = state[...]


def never_set(x, out, state):
    state[...] += x[...]
    out[...] = state[...]


def set_in_each_step(x, out, state):
    state[...] = x[...] * 2
    out[...] = state[...] + 1


def half_set(x, out, state):
    @pl.when(pl.program_id(1) == 0)
    def _():
        state[0] = jnp.zeros(4)

    state[0] += x[0]
    state[1] += x[1]
    out[...] = state[...]


def set_by_halves(x, out, state):
    @pl.when(pl.program_id(1) == 0)
    def _():
        state[0] = jnp.zeros(4)
        state[1:2, 0:3] = jnp.zeros((1, 3))
        state[1, 3] = 0.0

    state[...] += x[...]
    out[...] = state[...]


def late(x, out, state):
    """The second row of the state is neither set nor read in first steps, and yet goes on from block to block."""
    inner = pl.program_id(1)

    @pl.when(inner == 0)
    def _():
        state[0] = x[0]

    @pl.when(inner == 1)
    def _():
        state[1] += x[1]
        out[...] = state[...]


def late_but_set(x, out, state):
    @pl.when(pl.program_id(1) == 1)
    def _():
        state[...] = x[...]
        out[...] = state[...]


def set_by_data(x, out, state):
    @pl.when(x[0, 0] > 0)
    def _():
        state[...] = jnp.zeros_like(state)

    state[...] += x[...]
    out[...] = state[...]


def set_in_both_branches(x, out, state):
    def zeros():
        state[...] = jnp.zeros_like(state)

    def ones():
        state[...] = jnp.ones_like(state)

    lax.cond(x[0, 0] > 0, zeros, ones)
    state[...] += x[...]
    out[...] = state[...]


def set_in_a_call(x, out, state):
    @jax.jit
    def set_state(is_first):
        @pl.when(is_first)
        def _():
            state[...] = jnp.zeros_like(state)

    set_state(pl.program_id(1) == 0)
    state[...] += x[...]
    out[...] = state[...]


def written_only(x, out, state):
    state[...] = x[...]
    out[...] = x[...]


def set_at_half(x, out, state):
    """`pl.program_id(1) / 2` is no integer."""

    @pl.when(pl.program_id(1) / 2 == 0)
    def _():
        state[...] = jnp.zeros_like(state)

    state[...] += x[...]
    out[...] = state[...]


CARRIES = {
    set_at_first: (0,),
    set_once: (),
    set_at_even: (),
    never_set: (),
    set_in_each_step: (0,),
    half_set: (),
    set_by_halves: (0,),
    late: (),
    late_but_set: (0,),
    set_by_data: (),
    set_in_both_branches: (0,),
    set_in_a_call: (0,),
    written_only: (0,),
}


@pytest.mark.parametrize("body", CARRIES, ids=lambda body: body.__name__)
def test_scratch_that_first_steps_do_not_set_keeps_a_dimension_whole(body):
    assert dims_of(body) == CARRIES[body]


def test_scratch_too_large_to_be_looked_at_element_by_element_counts_as_a_whole(monkeypatch):
    monkeypatch.setattr("sdy_jax.ir.kernels.body._MOST_ELEMENTS", 7)
    assert dims_of(set_at_first) == (0,)
    assert dims_of(set_by_halves) == dims_of(half_set) == ()


def test_a_state_of_one_number_is_read_as_any_other():
    def counts(x, out, count):
        @pl.when(x[0, 0] > 0)
        def _():
            count[...] = jnp.float32(0)

        count[...] = jnp.float32(1)
        out[...] = x[...] * count[...]

    def goes_on(x, out, count):
        @pl.when(x[0, 0] > 0)
        def _():
            count[...] = jnp.float32(0)

        count[...] += 1
        out[...] = x[...] * count[...]

    number = [pltpu.SMEM((), jnp.float32)]
    assert dims_of(counts, scratch=number) == (0,)
    assert dims_of(goes_on, scratch=number) == ()


def test_what_is_kept_in_scratch_is_said():
    equation = call_of(set_once, GRID, [ROWS], [ROWS], scratch=[STATE])
    assert why_whole(equation, 0) == "something is kept in scratch from step to step of grid dimension 0 of `set_once`"
    assert why_whole(equation, 1) == "nothing follows grid dimension 1 of `set_once`"


def test_conditions_on_fractions_are_not_evaluated():
    assert dims_of(set_at_half) == ()


def test_scratch_set_in_the_first_of_two_steps_is_carried_only_from_one_to_the_other():
    rows = (8, 4), (2, 4), lambda i, k: (i // 2, 0)
    steps = (16, 4), (2, 4), lambda i, k: (i, 0)
    operands = [((16, 4), (2, 4), lambda i, k: (i, 0))]
    assert dims_of(set_at_even, grid=(8, 1), operands=operands, results=[rows]) == (0,)
    found = rule_of(call_of(set_at_even, (8, 1), [steps], [rows], scratch=[STATE]))
    assert found.rule.factor_sizes[0] == 4 and found.shifted == {0}


def test_dimensions_that_are_declared_parallel_carry_nothing():
    def semantics(*names):
        return {"compiler_params": pltpu.CompilerParams(dimension_semantics=names)}

    assert dims_of(never_set, **semantics("parallel", "arbitrary")) == (0,)
    assert dims_of(never_set, **semantics("arbitrary", "parallel")) == ()
    assert dims_of(never_set, **semantics(pltpu.PARALLEL, pltpu.ARBITRARY)) == (0,)


def test_dimensions_of_vmap_carry_nothing():
    from kernel_splits import calls_of

    def run(x):
        rows = pl.BlockSpec((2, 4), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        body = lambda x, out, state: set_at_first_of(0)(x, out, state)  # noqa: E731
        call = pl.pallas_call(
            body, out_shape=shape, grid=(4,), in_specs=[rows], out_specs=rows, scratch_shapes=[STATE], interpret=True
        )
        return call(x)

    (equation,) = calls_of(jax.vmap(run), jax.ShapeDtypeStruct((3, 8, 4), jnp.float32))
    found = rule_of(equation)
    assert found.dims == (0,) and not found.shifted
    assert why_whole(equation, 1).endswith("from step to step of grid dimension 0 of `<lambda>`")


def set_at_first_of(dim):
    """A running sum along a dimension."""

    def body(x, out, state):
        @pl.when(pl.program_id(dim) == 0)
        def _():
            state[...] = jnp.zeros_like(state)

        state[...] += x[...]
        out[...] = state[...]

    return body


def test_running_sums_over_a_dimension_leave_those_around_it():
    rows = (4, 8, 4), (None, 2, 4), lambda b, i: (b, i, 0)
    assert dims_of(set_at_first_of(1), grid=(4, 4), operands=[rows], results=[rows]) == (0,)
    assert dims_of(set_at_first_of(0), grid=(4, 4), operands=[rows], results=[rows]) == ()


def test_a_result_that_sums_up_is_carried():
    def body(x, out, total):
        @pl.when(pl.program_id(0) == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += x[...]
        out[...] = total[...]

    whole = (2, 4), (2, 4), lambda i, k: (0, 0)
    equation = call_of(body, GRID, [ROWS], [ROWS, whole])
    assert rule_of(equation).dims == ()
    assert why_whole(equation, 0) == "result 1 is added to from step to step of grid dimension 0 of `body`"


def test_a_result_whose_block_moves_with_inner_steps_is_not_set_by_the_first_of_them():
    def body(x, out, other):
        @pl.when(pl.program_id(1) == 0)
        def _():
            other[...] = jnp.zeros_like(other)

        other[...] += x[...]
        out[...] = other[...]

    moving, still = ((4, 4), (2, 4), lambda i, k: (k, 0)), ((2, 4), (2, 4), lambda i, k: (0, 0))
    assert rule_of(call_of(body, GRID, [ROWS], [ROWS, moving])).dims == (1,)
    assert rule_of(call_of(body, GRID, [ROWS], [ROWS, still])).dims == (0,)


def test_operands_that_a_body_changes_are_carried():
    def body(x, y, out):
        y[...] += x[...]
        out[...] = y[...]

    whole = (2, 4), (2, 4), lambda i, k: (0, 0)
    equation = call_of(body, GRID, [ROWS, whole], [ROWS])
    assert why_whole(equation, 0) == "operand 1 is changed from step to step of grid dimension 0 of `body`"
    assert rule_of(call_of(body, GRID, [ROWS, ROWS], [ROWS])).dims == (0,)


def test_scalars_that_a_body_changes_are_carried():
    def body(count, x, out):
        count[0] += 1
        out[...] = x[...] * count[0].astype(jnp.float32)

    rows = (8, 4), (2, 4), lambda i, k, count: (i, 0)
    equation = call_of(body, GRID, [rows], [rows], scalars=[(1,)])
    assert why_whole(equation, 0) == "operand 0 is changed from step to step of grid dimension 0 of `body`"


def test_what_talks_to_others_or_draws_stays_whole():
    def draws(x, out):
        pltpu.prng_seed(pl.program_id(0))
        out[...] = x[...] + pltpu.prng_random_bits((2, 4)).astype(jnp.float32)

    def sends(x, out, sem):
        copy = pltpu.make_async_remote_copy(x, out, sem, sem, device_id=0, device_id_type=pl.DeviceIdType.LOGICAL)
        copy.start()
        copy.wait()

    def signals(x, out, sem):
        pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1)
        out[...] = x[...]

    def copies(x, out, sem):
        copy = pltpu.make_async_copy(x, out, sem)
        copy.start()
        copy.wait()

    semaphore = [pltpu.SemaphoreType.DMA]
    parallel = {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))}
    for body, reason in ((sends, "talks to other devices"), (signals, "talks to other devices")):
        equation = call_of(body, GRID, [ROWS], [ROWS], scratch=semaphore, **parallel)
        assert reason in why_whole(equation, 0) and not rule_of(equation).dims
    assert "draws random bits" in why_whole(call_of(draws, GRID, [ROWS], [ROWS]), 0)
    assert dims_of(copies, scratch=semaphore, **parallel) == (0,)
