"""Layers that a scan changes in part are changed in the stack that they come from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import PLANE
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.ir.graph import Graph
from sdy_jax.lowering.ops.emit import laid_out_as_arrays
from sdy_jax.testing import assert_same

LAYOUTS = (P(), P(None, "x", "y"), P(None, "y", None, "x"), P(None, None, ("x", "y")), P("x", "y"), P("y"))


def layer(x, given, position):
    """Adds a token to what is known of earlier ones, and reads all."""
    known, w = given
    known = jax.lax.dynamic_update_slice_in_dim(known, (x @ w)[:, None], position, 1)
    return x + jnp.einsum("bsd->bd", known) @ w, known


def decode(x, known, weights, position, *, reverse=False):
    return jax.lax.scan(lambda x, given: layer(x, given, position), x, (known, weights), reverse=reverse)


def at(stack, i):
    return jax.lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def put(stack, layer_, i):
    return jax.lax.dynamic_update_index_in_dim(stack, layer_, i, 0, allow_negative_indices=False)


def arguments(layers=4, position=5):
    rng = np.random.default_rng(0)
    shapes = (4, 8), (layers, 4, 16, 8), (layers, 8, 8)
    x, known, weights = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, known, 0.1 * weights, np.int32(position)


def updates(function, *given):
    """How many updates in part the partitioned program has."""
    return sdy.partition(function, mesh=PLANE).lower(*given).as_text().count("stablehlo.dynamic_update_slice")


@pytest.mark.parametrize("stack", LAYOUTS, ids=str)
def test_the_numbers_are_the_plain_functions(stack):
    given = arguments()
    assert_same(decode, *given, mesh=PLANE, in_shardings=(P("x"), stack, P(), P()), out_shardings=(P("x"), stack))


@pytest.mark.parametrize("position", [-3, 0, 15, 40])
def test_positions_are_those_of_the_layer(position):
    given = arguments(position=position)
    assert_same(decode, *given, mesh=PLANE, in_shardings=(P(), P(None, None, "y"), P(), P()))


def test_one_update_is_left():
    assert updates(decode, *arguments()) == 1


def by_sequence(x, known, weights, positions):
    """`decode` with each sequence at a position of its own."""

    return jax.lax.scan(lambda x, given: by_sequence_step(x, *given, positions), x, (known, weights))


def by_sequence_step(x, known, w, positions):
    put_token = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    known = jax.vmap(put_token)(known, (x @ w)[:, None], positions)
    return x + jnp.einsum("bsd->bd", known) @ w, known


def by_numbers(x, known, weights, positions):
    """`by_sequence`, with numbers of sequences: what is out of bounds is left out."""

    def trip(x, given):
        known, w = given
        known = known.at[jnp.arange(4), positions].add(x @ w, mode="drop")
        return x + jnp.einsum("bsd->bd", known) @ w, known

    return jax.lax.scan(trip, x, (known, weights))


def of_one_dimension(x, known, weights, positions):
    """`by_sequence` of layers of numbers, with indices that have no dimension of vectors."""

    def trip(x, given):
        known, w = given
        numbers = jax.lax.ScatterDimensionNumbers((), (0,), (0,))
        known = jax.lax.scatter_add(known, positions[:, None], (x @ w).sum(1), numbers)
        return x + known.sum(), known

    return jax.lax.scan(trip, x, (known[:, 0, :, 0], weights))


@pytest.mark.parametrize("stack", LAYOUTS, ids=str)
@pytest.mark.parametrize("function", [by_sequence, by_numbers])
def test_each_sequence_at_its_own_position(function, stack):
    x, known, weights, _ = arguments()
    given = x, known, weights, np.array([3, 15, 0, 40], np.int32)
    assert_same(function, *given, mesh=PLANE, in_shardings=(P("x"), stack, P(), P()), out_shardings=(P(), stack))


@pytest.mark.parametrize("function", [by_sequence, by_numbers, of_one_dimension])
def test_one_scatter_is_left(function):
    x, known, weights, _ = arguments()
    given = x, known, weights, np.array([3, 15, 0, 3], np.int32)
    assert updates(function, *given) == 0
    assert_same(function, *given, mesh=PLANE)


def test_from_the_last_layer_on():
    def backwards(*given):
        return decode(*given, reverse=True)

    assert updates(backwards, *arguments()) == 1
    assert_same(backwards, *arguments(), mesh=PLANE)


def test_counters_of_another_type_than_positions():
    def counted(x, known, weights, position):
        def trip(carried):
            i, x, known, new = carried
            x, layer_ = layer(x, (at(known, i), at(weights, i)), position)
            return i + 1, x, known, put(new, layer_, i)

        start = jnp.uint8(0), x, known, jnp.zeros_like(known)
        _, x, _, new = jax.lax.while_loop(lambda carried: carried[0] < 4, trip, start)
        return x, new

    assert updates(counted, *arguments()) == 1
    assert_same(counted, *arguments(), mesh=PLANE)


def test_stacks_that_loops_carry():
    def carried_on(x, known, weights, position):
        def trip(i, carried):
            x, known = carried
            x, layer_ = layer(x, (at(known, i + 1), at(weights, i)), position)
            return x, put(known, layer_, i + 1)

        return jax.lax.fori_loop(0, 2, trip, (x, known))

    assert updates(carried_on, *arguments()) == 1
    assert_same(carried_on, *arguments(), mesh=PLANE, in_shardings=(P("x"), P(None, "x", "y"), P(), P()))


def test_layers_by_numbers_that_are_given():
    def by_number(x, known, weights, position):
        def trip(carried, given):
            (x, known), (i, w) = carried, given
            x, layer_ = layer(x, (jax.lax.dynamic_index_in_dim(known, i, 0, False), w), position)
            return (x, jax.lax.dynamic_update_index_in_dim(known, layer_, i, 0)), None

        return jax.lax.scan(trip, (x, known), (jnp.array([2, -1, 2, 0]), weights))[0]

    assert updates(by_number, *arguments()) == 1
    assert_same(by_number, *arguments(), mesh=PLANE)


@pytest.mark.parametrize("number", [-7, 1, 9])
def test_numbers_of_layers_that_are_not_there(number):
    """Slices and updates take the nearest layer, a scatter into the stack would leave it out."""

    def by_number(x, known, weights, positions, number):
        def trip(carried, w):
            x, known = carried
            x, layer_ = by_sequence_step(x, at(known, number), w, positions)
            return (x, put(known, layer_, number)), None

        return jax.lax.scan(trip, (x, known), weights)[0]

    x, known, weights, _ = arguments()
    given = x, known, weights, np.array([3, 15, 0, 3], np.int32), np.int32(number)
    assert updates(by_number, *given) == 0
    assert_same(by_number, *given, mesh=PLANE)


def test_the_old_stack_stays_where_it_is_needed():
    def kept(x, known, weights, position):
        x, new = decode(x, known, weights, position)
        return x, new - known, known

    assert updates(kept, *arguments()) == 1
    assert_same(kept, *arguments(), mesh=PLANE)


def test_tokens_one_after_the_other():
    def generated(x, known, weights):
        def step(carried, position):
            return decode(*carried, weights, position), None

        return jax.lax.scan(step, (x, known), jnp.arange(3, dtype=jnp.int32))[0]

    given = arguments()[:3]
    assert updates(generated, *given) == 1
    specs = P("x"), P(None, "x", "y"), P()
    assert_same(generated, *given, mesh=PLANE, in_shardings=specs)


def test_a_donated_stack_is_held_once():
    given = arguments()
    held = [sdy.partition(decode, mesh=PLANE, donate_argnums=donated).plan(*given).memory for donated in ((), (1,))]
    assert held[0].peak - held[1].peak == given[1].nbytes


def test_derivatives():
    def loss(x, known, weights):
        x, new = decode(x, known, weights, 5)
        return (x**2).sum() + (new**3).sum()

    given, gradient = arguments()[:3], jax.grad(loss, argnums=(0, 1, 2))
    assert_same(gradient, *given, mesh=PLANE, in_shardings=(P("x"), P(None, "x", "y"), P()))


# Where a stack is not changed in place.


def _reads_the_old_layer(x, known, weights, position):
    def trip(x, given):
        x, new = layer(x, given, position)
        return x + given[0].sum(1), new

    return jax.lax.scan(trip, x, (known, weights))


def _writes_another_layer(x, known, weights, position):
    def trip(i, carried):
        x, new = carried
        x, layer_ = layer(x, (at(known, i), at(weights, i)), position)
        return x, put(new, layer_, 3 - i)

    return jax.lax.fori_loop(0, 4, trip, (x, jnp.zeros_like(known)))


def _writes_some_layers(x, known, weights, position):
    def trip(i, carried):
        x, new = carried
        x, layer_ = layer(x, (at(known, i), at(weights, i)), position)
        return x, put(new, layer_, i)

    return jax.lax.fori_loop(0, 3, trip, (x, jnp.zeros_like(known)))


def _reads_the_new_stack(x, known, weights, position):
    def trip(i, carried):
        x, new = carried
        x, layer_ = layer(x, (at(known, i), at(weights, i)), position)
        return x + new[0, :, 0], put(new, layer_, i)

    return jax.lax.fori_loop(0, 4, trip, (x, jnp.zeros_like(known)))


def _reads_the_old_stack(x, known, weights, position):
    def trip(i, carried):
        x, new = carried
        x, layer_ = layer(x, (at(new, i), at(weights, i)), position)
        return x + new[0, :, 0], put(new, layer_, i)

    return jax.lax.fori_loop(0, 4, trip, (x, known))


def _reads_another_layer_of_the_stack(x, known, weights, position):
    def trip(i, carried):
        x, new = carried
        x, layer_ = layer(x, (at(new, 3 - i), at(weights, i)), position)
        return x, put(new, layer_, i)

    return jax.lax.fori_loop(0, 4, trip, (x, known))


def _changes_the_layer_further(x, known, weights, position):
    def trip(x, given):
        x, new = layer(x, given, position)
        return x, 2 * new

    return jax.lax.scan(trip, x, (known, weights))


@pytest.mark.parametrize(
    "function",
    [
        _reads_the_old_layer,
        _writes_another_layer,
        _writes_some_layers,
        _reads_the_new_stack,
        _reads_the_old_stack,
        _reads_another_layer_of_the_stack,
        _changes_the_layer_further,
    ],
)
def test_what_is_not_the_same_stack_stays(function):
    assert updates(function, *arguments()) == 2
    assert_same(function, *arguments(), mesh=PLANE, in_shardings=(P("x"), P(None, "x", "y"), P(), P()))


# How what is changed lies.

STACK, LAYER, TOKEN = "tensor<4x8x16xf32>", "tensor<8x16xf32>", "tensor<1x1x16xf32>"
TYPES = f"({STACK}, {TOKEN}, {', '.join(['tensor<i32>'] * 3)}) -> {STACK}"
UPDATE = f"%u = stablehlo.dynamic_update_slice %x, %t, %i, %i, %i : {TYPES}\n"


def laid_out(body, results):
    arguments = f"%x: {STACK}, %t: {TOKEN}, %i: tensor<i32>"
    module = parse(f"func.func @main({arguments}) -> ({results}) {{\n{UPDATE}{body}\n}}")
    return [v.defining_op.name for v in laid_out_as_arrays(Graph(module.operation))]


def test_what_is_changed_read_and_returned_lies_as_arrays():
    read = f"%n = stablehlo.negate %u : {STACK}\nreturn %n, %u : {STACK}, {STACK}"
    assert laid_out(read, f"{STACK}, {STACK}") == ["stablehlo.dynamic_update_slice"]


def test_what_is_only_returned_or_only_read_lies_as_it_likes():
    assert laid_out(f"return %u : {STACK}", STACK) == []
    assert laid_out(f"%n = stablehlo.negate %u : {STACK}\nreturn %n : {STACK}", STACK) == []


def test_numbers_of_layers_that_are_sums_of_sums():
    """Each sum is compared once, though it is asked for by two others, and these by four."""

    def doubled(i):
        for _ in range(40):
            i = i + i
        return i

    def counted(x, known, weights, position):
        def step(known, i):
            number = doubled(i)
            return put(known, layer(x, (at(known, doubled(i)), weights[0]), position)[1], number), None

        return jax.lax.scan(step, known, jnp.arange(4))[0]

    assert_same(counted, *arguments(), mesh=PLANE)
