"""jit's documented behaviour, a row per sentence, with `jax.jit` and `partition` side by side.

A row is a function of `jit`, which is one of both, and `x`, an array that is split over eight devices. What it returns
or raises has to be the same on both sides; an error of ours is of the class of jit's.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy

TABLE: dict[str, Callable[..., Any]] = {}


def row(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds a function to the table."""
    TABLE[function.__name__.replace("_", " ")] = function
    return function


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fun: Callable[..., Any]):
        self.count = 0
        functools.update_wrapper(self, fun)
        self._fun = fun

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._fun(*args, **kwargs)


def traces(jit: Callable[..., Any], fun: Callable[..., Any], *calls: Callable[..., Any], **options: Any) -> int:
    """How often a function is traced in some calls of it."""
    counted = Counted(fun)
    jitted = jit(counted, **options)
    for call in calls:
        call(jitted)
    return counted.count


def add(x, y=1):
    return x + y


# Donation


@row
def a_donated_array_is_gone(jit, x):
    y = jit(add, donate_argnums=0)(x)
    return y, x.is_deleted()


@row
def arrays_are_donated_by_name(jit, x):
    jit(add, donate_argnames="x")(x=x)
    return x.is_deleted()


@row
def all_leaves_of_a_donated_tree_are_gone(jit, x):
    tree = {"a": x, "b": [jnp.copy(x)]}
    jit(lambda tree: jax.tree.map(jnp.sin, tree), donate_argnums=0)(tree)
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


@row
def what_is_not_donated_stays(jit, x):
    y = jnp.copy(x)
    jit(lambda x, y: (x + y, y), donate_argnums=(0,))(x, y)
    return x.is_deleted(), y.is_deleted()


@row
def a_donated_array_cannot_be_passed_again(jit, x):
    jit(add, donate_argnums=0)(x)
    return jit(jnp.sin)(x)  # by jit, the same function would end the process with jaxlib 0.10 (test_donation.py)


@row
def donated_arrays_that_no_result_can_take_over_are_reported(jit, x):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jit(lambda x: x.sum(), donate_argnums=0)(x)
    return ["donated buffers were not usable" in str(w.message) for w in caught]


def warned(fun, *args):
    """What is said of donated buffers, and the result."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fun(*args)
    return [str(w.message).splitlines()[0] for w in caught if "donated buffers" in str(w.message)], result


@row
def donated_arrays_that_lie_otherwise_than_results_are_reported(jit, x):
    other = NamedSharding(x.sharding.mesh, P(None, "model"))
    return warned(jit(lambda x: x + 1, donate_argnums=0, out_shardings=other), x), x.is_deleted()


@row
def they_are_reported_once_ahead_of_time(jit, x):
    other = NamedSharding(x.sharding.mesh, P(None, "model"))
    f = jit(lambda x: x + 1, donate_argnums=0, out_shardings=other)
    return warned(lambda x: f.lower(x).compile()(x), x)


@row
def of_two_donated_arrays_one_is_enough(jit, x):
    y = jnp.copy(x)
    return warned(jit(add, donate_argnums=(0, 1), out_shardings=x.sharding), x, y), x.is_deleted(), y.is_deleted()


@row
def a_donated_array_that_nobody_uses_stays(jit, x):
    jit(lambda x, y: y + 1, donate_argnums=0)(x, jnp.copy(x))
    return x.is_deleted()


@row
def a_negative_position_donates_nothing(jit, x):
    y = jnp.copy(x)
    jit(lambda x, y: (x + 1, y + 1), donate_argnums=-1)(x, y)
    return x.is_deleted(), y.is_deleted()


@row
def a_position_that_is_donated_and_static(jit, x):
    return jit(add, donate_argnums=1, static_argnums=1)


@row
def a_donated_position_that_there_is_not(jit, x):
    return jit(add, donate_argnums=2)


@row
def a_donated_name_that_there_is_not(jit, x):
    return jit(add, donate_argnames="z")


@row
def numpy_arrays_are_donated_for_nothing(jit, x):
    given = np.ones((8, 8), np.float32)
    return jit(add, donate_argnums=0)(given), given


# Static arguments


@row
def a_static_argument_is_a_value(jit, x):
    return jit(lambda x, n: x * n if n > 1 else x, static_argnums=1)(x, 2)


@row
def a_static_argument_by_name(jit, x):
    return jit(lambda x, *, mode: x + 1 if mode == "plus" else x, static_argnames="mode")(x, mode="plus")


@row
def a_static_position_may_be_passed_by_name(jit, x):
    return jit(lambda x, n: jnp.tile(x, n), static_argnums=1)(x, n=2)


@row
def a_static_name_may_be_passed_by_position(jit, x):
    return jit(lambda x, n: jnp.tile(x, n), static_argnames="n")(x, 2)


@row
def negative_static_positions_count_from_the_end(jit, x):
    return jit(lambda x, n: jnp.tile(x, n), static_argnums=-1)(x, 2)


@row
def a_static_parameter_that_has_no_name_outside(jit, x):
    def tiled(x, n=3, /):
        return jnp.tile(x, n)

    return jit(tiled, static_argnums=1)(x, 2), jit(tiled, static_argnums=1)(x)


@row
def a_keyword_with_the_name_of_such_a_parameter(jit, x):
    def tiled(x, n, /, **others):
        return jnp.tile(x, n) * others["n"]

    return jit(tiled, static_argnums=1)(x, 2, n=x[0, 0])


@row
def the_name_of_such_a_parameter(jit, x):
    def tiled(x, n, /):
        return jnp.tile(x, n)

    return jit(tiled, static_argnames="n")(x, 2)


@row
def a_static_argument_with_a_default(jit, x):
    return jit(lambda x, n=3: jnp.tile(x, n), static_argnums=1)(x)


@row
def each_static_value_is_traced_once(jit, x):
    return traces(jit, add, *[lambda f, n=n: f(x, n) for n in (1, 2, 1, 2, 3)], static_argnums=1)


@row
def equal_static_objects_are_traced_once(jit, x):
    class Options(NamedTuple):
        size: int

    return traces(jit, lambda x, o: x * o.size, *[lambda f: f(x, Options(2))] * 3, static_argnums=1)


@row
def static_functions(jit, x):
    f = jit(lambda g, x: g(x), static_argnums=0)
    return f(jnp.sin, x), f(jnp.cos, x)


@row
def static_tuples_and_none(jit, x):
    f = jit(lambda x, shape, scale: x.reshape(shape) * (scale or 1), static_argnums=(1, 2))
    return f(x, (64,), None), f(x, (4, 16), 2)


@row
def static_arguments_among_variable_ones(jit, x):
    return jit(lambda *args: args[0] * args[1], static_argnums=1)(x, 3)


@row
def a_static_argument_that_cannot_be_hashed(jit, x):
    return jit(lambda x, n: x, static_argnums=1)(x, [1])


@row
def a_second_static_argument_that_cannot_be_hashed(jit, x):
    f = jit(lambda x, n: x, static_argnums=1)
    f(x, 1)
    return f(x, [1])


@row
def a_static_array(jit, x):
    return jit(lambda x, n: x, static_argnums=1)(x, np.ones(3))


@row
def a_static_position_that_there_is_not(jit, x):
    return jit(add, static_argnums=5)


@row
def a_static_name_that_there_is_not(jit, x):
    return jit(add, static_argnames="z")


@row
def a_static_position_that_is_no_number(jit, x):
    return jit(add, static_argnums="x")


@row
def a_static_name_that_is_no_string(jit, x):
    return jit(add, static_argnames=1)


# Caching


@row
def a_function_is_traced_once_per_type(jit, x):
    calls = [lambda f: f(x), lambda f: f(x + 1), lambda f: f(x[:4]), lambda f: f(x.astype(int)), lambda f: f(x)]
    return traces(jit, add, *calls)


@row
def python_numbers_are_traced_once(jit, x):
    return traces(jit, add, *[lambda f, n=n: f(x, n) for n in (1, 2, 3)])


@row
def weak_types_are_types_of_their_own(jit, x):
    return traces(jit, add, lambda f: f(x, 1.0), lambda f: f(x, jnp.float32(1)), lambda f: f(x, 2.0))


@row
def trees_are_types_of_their_own(jit, x):
    calls = [lambda f: f((x, x)), lambda f: f([x, x]), lambda f: f((x, x)), lambda f: f({"a": x})]
    return traces(jit, lambda tree: jax.tree.map(jnp.sin, tree), *calls)


@row
def dicts_of_another_order_are_the_same(jit, x):
    calls = [lambda f: f({"a": x, "b": x}), lambda f: f({"b": x, "a": x})]
    return traces(jit, lambda tree: tree["a"] - tree["b"], *calls)


@row
def keyword_arguments_of_another_order_are_the_same(jit, x):
    return traces(jit, lambda x, y: x - y, lambda f: f(x=x, y=x), lambda f: f(y=x, x=x))


@row
def keyword_and_positional_arguments_are_traced_apart(jit, x):
    return traces(jit, add, lambda f: f(x, 1), lambda f: f(x, y=1), lambda f: f(x=x, y=1))


@row
def each_wrapper_of_a_new_function_traces(jit, x):
    return [traces(jit, lambda x: x + 1, lambda f: f(x)) for _ in range(2)]


@row
def a_cleared_cache_traces_again(jit, x):
    return traces(jit, add, lambda f: f(x), lambda f: f.clear_cache(), lambda f: f(x))


@row
def settings_are_part_of_the_key(jit, x):
    def precise(f):
        with jax.default_matmul_precision("highest"):
            return f(x)

    return traces(jit, lambda x: x @ x, lambda f: f(x), precise, lambda f: f(x), precise)


@row
def lowering_shares_the_trace(jit, x):
    return traces(jit, add, lambda f: f.lower(x), lambda f: f.trace(x), lambda f: f(x), lambda f: f.lower(x).compile())


@row
def what_a_function_closes_over_is_read_once(jit, x):
    scale = {"value": 2}
    f = jit(lambda x: x * scale["value"])
    first = f(x)
    scale["value"] = 3
    return first, f(x), f(x[:4])


@row
def tracing_can_be_forbidden(jit, x):
    f = jit(add)
    f(x)
    with jax.no_tracing():
        return f(x[:4])


@row
def without_jit_the_function_runs_at_each_call(jit, x):
    with jax.disable_jit():
        return traces(jit, add, *[lambda f: f(x)] * 3)


# Errors


@row
def an_argument_that_is_no_array(jit, x):
    return jit(add)(x, "one")


@row
def a_leaf_that_is_no_array(jit, x):
    return jit(lambda tree: tree["x"])({"x": x, "name": object()})


@row
def none_is_an_empty_tree(jit, x):
    return jit(lambda x, y: (x, y))(x, None)


@row
def a_result_that_is_no_array(jit, x):
    return jit(lambda x: "one")(x)


@row
def a_result_of_nothing(jit, x):
    return jit(lambda x: None)(x)


@row
def an_argument_is_missing(jit, x):
    return jit(lambda x, y: x)(x)


@row
def an_argument_too_many(jit, x):
    return jit(lambda x: x)(x, x)


@row
def a_name_that_is_no_parameter(jit, x):
    return jit(lambda x: x)(x, z=x)


@row
def an_argument_twice(jit, x):
    return jit(lambda x: x)(x, x=x)


@row
def a_type_in_place_of_an_array(jit, x):
    return jit(add)(jax.ShapeDtypeStruct((8, 8), np.float32))


@row
def a_number_that_is_too_large(jit, x):
    return jit(add)(x, 2**40)


@row
def a_branch_on_a_value(jit, x):
    return jit(lambda x: x if x.sum() > 0 else -x)(x)


@row
def a_loop_over_a_value(jit, x):
    return jit(lambda x, n: [x for _ in range(n)])(x, 3)


@row
def numpy_on_a_value(jit, x):
    return jit(lambda x: np.asarray(x) + 1)(x)


@row
def a_mask_as_an_index(jit, x):
    return jit(lambda x: x[x > 0])(x)


@row
def an_assignment_in_place(jit, x):
    def assigned(x):
        x[0] = 1
        return x

    return jit(assigned)(x)


@row
def a_value_that_leaks(jit, x):
    leaked = []
    jit(lambda x: leaked.append(x) or x)(x)
    return leaked[0] + 1


@row
def shapes_that_do_not_fit(jit, x):
    return jit(lambda x: x @ jnp.ones((3, 3)))(x)


@row
def an_error_of_the_function_itself(jit, x):
    def broken(x):
        raise ZeroDivisionError("mine")

    return jit(broken)(x)


@row
def a_function_works_after_an_error(jit, x):
    state = {"fails": True}

    def sometimes(x):
        if state["fails"]:
            raise KeyError("now")
        return x + 1

    f = jit(sometimes)
    with pytest.raises(KeyError):
        f(x)
    state["fails"] = False
    return f(x)


@row
def in_shardings_of_another_tree(jit, x):
    return jit(lambda tree: tree["a"], in_shardings=({"b": x.sharding},))({"a": x})


@row
def too_many_in_shardings(jit, x):
    return jit(lambda x: x, in_shardings=(x.sharding, x.sharding))(x)


@row
def out_shardings_of_another_tree(jit, x):
    return jit(lambda x: (x, x), out_shardings=(x.sharding,))(x)


@row
def a_sharding_with_too_many_dimensions(jit, x):
    sharding = NamedSharding(x.sharding.mesh, P(None, None, "data"))
    return jit(add, out_shardings=sharding)(x)


@row
def something_that_cannot_be_called(jit, x):
    return jit(3)


@row
def a_generator(jit, x):
    def generated(x):
        yield x

    return jit(generated)(x)


@row
def an_array_on_another_device(jit, x):
    return jit(add)(x, jax.device_put(np.ones((8, 8), np.float32), jax.devices()[0]))


@row
def an_option_that_there_is_not(jit, x):
    return jit(add, options=3)


@row
def an_option_of_the_compiler_that_there_is_not(jit, x):
    return jit(add, compiler_options={"xla_no_such_option": True})(x)


# Effects


@row
def python_runs_while_tracing_only(jit, x):
    seen = []
    f = jit(lambda x: seen.append(type(x).__name__ == "Array") or x)
    f(x), f(x)
    return seen


@row
def random_numbers_are_those_of_the_key(jit, x):
    f = jit(lambda key: jax.random.normal(key, (8, 8)))
    return [f(key) for key in jax.random.split(jax.random.key(7), 2)]


@row
def constants_are_computed_while_tracing(jit, x):
    def sized(x):
        with jax.ensure_compile_time_eval():
            return jnp.tile(x, int(jnp.ones(2).sum()))

    return jit(sized)(x)


@row
def transfers_can_be_forbidden(jit, x):
    with jax.transfer_guard("disallow"):
        return jit(add)(np.ones((8, 8), np.float32))


@row
def promotion_can_be_strict(jit, x):
    with jax.numpy_dtype_promotion("strict"):
        return jit(lambda x, n: x + n)(x, jnp.ones((8, 8), int))


@row
def wide_numbers(jit, x):
    with jax.enable_x64(True):
        return jit(lambda x: x.astype(float) + 1)(x)


# Ahead of time


def stages(jit, x, **options):
    f = jit(lambda p, x, *, k: {"y": x @ p["w"] + k, "n": x.sum()}, **options)
    traced = f.trace({"w": x}, x, k=x)
    lowered = traced.lower()
    return traced, lowered, lowered.compile()


@row
def stages_know_their_trees_and_types(jit, x):
    found = []
    for stage in stages(jit, x, donate_argnums=1):
        types = jax.tree.map(lambda t: (t.shape, t.dtype), stage.out_info)
        donated = jax.tree.map(lambda info: (info.shape, info.dtype, info.donated), stage.args_info)
        found += [str(stage.in_tree), str(stage.out_tree), types, donated, stage.donate_argnums, stage.in_avals]
    return found


@row
def a_traced_function_has_its_name(jit, x):
    traced = jit(add).trace(x)
    return traced.fun_name, "jit_add" in traced.lower().as_text()


@row
def a_compiled_function_can_be_called(jit, x):
    return stages(jit, x)[2]({"w": x}, x, k=x)


@row
def a_compiled_function_takes_one_shape(jit, x):
    return stages(jit, x)[2]({"w": x}, x[:4], k=x)


@row
def a_compiled_function_takes_one_dtype(jit, x):
    return stages(jit, x)[2]({"w": x.astype(int)}, x, k=x)


@row
def a_compiled_function_takes_one_tree(jit, x):
    return stages(jit, x)[2]({"v": x}, x, k=x)


@row
def a_compiled_function_takes_its_keywords(jit, x):
    return stages(jit, x)[2]({"w": x}, x)


@row
def a_compiled_function_takes_no_static_arguments(jit, x):
    return jit(lambda x, n: x * n, static_argnums=1).lower(x, 3).compile()(x)


@row
def a_compiled_function_has_no_derivative(jit, x):
    return jax.grad(lambda x: stages(jit, x)[2]({"w": x}, x, k=x)["n"])(x)


@row
def a_compiled_function_can_be_examined(jit, x):
    _, lowered, compiled = stages(jit, x)
    memory = compiled.memory_analysis()
    return (
        type(lowered.compiler_ir("stablehlo")).__name__,
        "flops" in lowered.cost_analysis(),
        "flops" in compiled.cost_analysis(),
        memory.argument_size_in_bytes,
        "HloModule" in compiled.as_text(),
        type(compiled.runtime_executable()).__name__,
        jax.tree.structure(compiled.input_shardings),
        jax.tree.structure(compiled.output_shardings),
        jax.tree.structure(compiled.input_formats),
    )


@row
def options_of_the_compiler(jit, x):
    lowered = jit(add, compiler_options={"xla_embed_ir_in_executable": True}).lower(x)
    return lowered.compile()(x), lowered.compile(compiler_options={"xla_embed_ir_in_executable": "False"})(x)


@row
def options_of_the_compiler_that_there_are_not(jit, x):
    return jit(add).lower(x).compile(compiler_options={"xla_no_such_option": True})


@row
def lowering_for_types(jit, x):
    type_ = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jit(add).lower(type_).compile()(x)


@row
def shapes_without_running(jit, x):
    def results(x, n):
        return {"y": jnp.tile(x, n), "k": jax.random.key(0)}

    return jax.tree.map(lambda t: (t.shape, str(t.dtype)), jit(results, static_argnums=1).eval_shape(x, 2))


@row
def what_a_wrapper_says_of_itself(jit, x):
    f = jit(add)
    return f.__name__, f.__wrapped__ is add, f.__module__, callable(f), f == f, len({f, f})


# Tokens


def kinds(tree):
    return [type(leaf).__name__ for leaf in jax.tree.leaves(tree)]


@row
def a_token_is_passed(jit, x):
    return jit(lambda token, x: x * 2)(jax.lax.create_token(), x)


@row
def a_token_is_returned(jit, x):
    y, token = jit(lambda x: (x * 2, jax.lax.create_token()))(x)
    return y, kinds(token)


@row
def a_token_goes_through(jit, x):
    f = jit(lambda token, x: {"x": x * 2, "token": jax.lax.after_all(token)})
    found = f(jax.lax.create_token(), x)
    again = jax.jit(f)(found["token"], found["x"])
    return again["x"], kinds(again)


@row
def a_token_in_stages(jit, x):
    f = jit(lambda token, x: (token, x * 2))
    return jax.tree.structure(f.eval_shape(jax.lax.create_token(), x)), f.trace(jax.lax.create_token(), x).out_info[1]


# With jax's other transformations


def composed(name: str, use: Callable[[Any, Any], Any]) -> None:
    def of_both(jit: Any, x: Any) -> Any:
        return use(jit(lambda x: jnp.sin(x) * x), x)

    TABLE[name] = of_both


composed("its gradient", lambda f, x: jax.grad(lambda x: f(x).sum())(x))
composed("its tangents", lambda f, x: jax.jvp(f, (x,), (x,)))
composed("its cotangents", lambda f, x: jax.vjp(f, x)[1](x))
composed("linearized", lambda f, x: jax.linearize(f, x)[1](x))
composed("its second derivative", lambda f, x: jax.jvp(jax.grad(lambda x: f(x).sum()), (x,), (x,)))
composed("its jacobian", lambda f, x: jax.jacrev(lambda r: f(r).sum(1))(x[:2]))
composed("mapped", lambda f, x: jax.vmap(f)(x))
composed("mapped along the second dimension", lambda f, x: jax.vmap(f, 1, 1)(x))
composed("in a loop", lambda f, x: jax.lax.fori_loop(0, 3, lambda _, x: f(x), x))
composed("in a branch", lambda f, x: jax.lax.cond(x.sum() > 0, f, jnp.cos, x))
composed("in a scan", lambda f, x: jax.lax.scan(lambda c, r: (c + f(r), r), x[0], x))
composed("recomputed", lambda f, x: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x))
composed("in another", lambda f, x: jax.jit(lambda x: f(f(x)) + 1)(x))
composed("its shapes", lambda f, x: jax.eval_shape(f, x).shape)
composed("its types", lambda f, x: [str(t) for t in jax.make_jaxpr(f)(x).out_avals])


@row
def a_custom_derivative(jit, x):
    @jax.custom_vjp
    def f(x):
        return x * 2

    f.defvjp(lambda x: (f(x), None), lambda _, g: (g * 7,))
    return jax.grad(lambda x: jit(f)(x).sum())(x)


def mapped_by_its_own_rule():
    @jax.custom_batching.custom_vmap
    def f(x):
        return x * 2

    @f.def_vmap
    def _(size, batched, x):
        return x * 100, True

    return f


@row
def a_custom_rule_of_mapping(jit, x):
    f = mapped_by_its_own_rule()
    return jax.vmap(jit(f))(x), jit(jax.vmap(f))(x), jit(f)(x), jax.vmap(jax.vmap(jit(f)))(x)


@row
def a_custom_rule_of_mapping_inside_of_others(jit, x):
    f = mapped_by_its_own_rule()
    inside = [
        lambda x: jnp.sin(x) + f(x),
        lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
        lambda x: jax.lax.cond(x.sum() > 0, f, jnp.cos, x),
        jax.checkpoint(f),
        jax.jit(f),
        lambda x: jax.jvp(f, (x,), (x,))[1],
    ]
    found = [jax.vmap(jit(each))(x) for each in inside]
    return found, jax.vmap(lambda x: jax.jvp(jit(f), (x,), (x,)))(x), jax.jit(jax.vmap(jit(f)))(x)


@row
def gradients_of_weak_types_are_weak(jit, x):
    f = jit(lambda x, s: (x * s["a"]).sum())
    x = x.astype(jnp.bfloat16)
    found = jax.grad(f, argnums=1)(x, {"a": 2.0})["a"], jax.vjp(f, x, {"a": 2.0})[1](jnp.bfloat16(1))[1]["a"]
    return [(x * g).dtype for g in found], jax.jvp(lambda s: f(x, s), ({"a": 2.0},), ({"a": 1.0},))[1]


@row
def a_reducer(jit, x):
    @jit
    def longer(a, b):
        return jnp.sqrt(a * a + b * b)

    def of_rows(x):
        return jax.lax.reduce(x, np.float32(0), longer, (1,))

    return of_rows(x), jit(of_rows)(x), jax.jit(of_rows)(x)


def outcome(name: str, jit: Callable[..., Any], mesh: jax.sharding.Mesh) -> Any:
    """What a row returns, or the error that it raises."""
    x = jax.device_put(np.linspace(0.1, 1, 64, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("data")))
    try:
        return TABLE[name](jit, x)
    except Exception as error:
        return error


def leaves(found: Any) -> Iterator[Any]:
    for leaf in jax.tree.leaves(found, is_leaf=lambda x: x is None):
        yield np.asarray(leaf) if isinstance(leaf, (jax.Array, np.ndarray)) else leaf


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:Some donated buffers", "ignore::sdy_jax.PartitionWarning")
def test_as_jit(mesh, name):
    theirs = outcome(name, jax.jit, mesh)
    ours = outcome(name, lambda f, **options: sdy.partition(f, mesh=mesh, **options), mesh)
    if isinstance(theirs, Exception):
        kinds = [kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins"]
        assert isinstance(ours, kinds[0]), (type(theirs), theirs, ours)
        return
    assert not isinstance(ours, Exception), ours
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(b, np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
        else:
            assert a == b
