"""Each device sorts its own rows where nobody can see which rows are sorted together, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE, op

import sdy_jax as sdy

EXPERTS, CHOSEN, TOKENS, WIDTH = 4, 2, 1024, 32

Tree = dict[str, jax.Array]
Order = Callable[..., jax.Array]


def weights(hidden: int = 8, layers: tuple[int, ...] = ()) -> Tree:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, hidden), "down": (EXPERTS, hidden, WIDTH)}
    named = zip(keys, shapes.items(), strict=True)
    return {name: jax.random.normal(key, (*layers, *shape)) / shape[-2] ** 0.5 for key, (name, shape) in named}


def tokens(seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (TOKENS, WIDTH))


WHOLE = {"router": P(), "up": P(), "down": P()}
FSDP = {"router": P(), "up": P(None, "x"), "down": P(None, None, "x")}


def routed(w: Tree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.top_k(jax.nn.softmax(x @ w["router"]), CHOSEN)


def by_bincount(keys: jax.Array) -> jax.Array:
    return jnp.bincount(keys, length=EXPERTS).astype(jnp.int32)


def by_scatter(keys: jax.Array) -> jax.Array:
    return jnp.zeros(EXPERTS, jnp.int32).at[keys].add(1)


def by_one_hot(keys: jax.Array) -> jax.Array:
    return jax.nn.one_hot(keys, EXPERTS, dtype=jnp.int32).sum(0)


def by_comparison(keys: jax.Array) -> jax.Array:
    return jnp.sum(jnp.arange(EXPERTS)[:, None] == keys, 1, dtype=jnp.int32)


def experts(w: Tree, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, w["up"], sizes))
    return jax.lax.ragged_dot(inner, w["down"], sizes)


def combined(made: jax.Array, shares: jax.Array) -> jax.Array:
    return jnp.einsum("txd,tx->td", made.reshape(-1, CHOSEN, WIDTH), shares)


def looked_up(made: jax.Array, order: jax.Array, shares: jax.Array) -> jax.Array:
    """Back by the inverse order."""
    return combined(made[jnp.argsort(order)], shares)


def written(made: jax.Array, order: jax.Array, shares: jax.Array) -> jax.Array:
    """Back by a scatter."""
    return combined(jnp.zeros_like(made).at[order].set(made), shares)


def counted(made: jax.Array, order: jax.Array, shares: jax.Array) -> jax.Array:
    """Back by an inverse order that is written."""
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return combined(made[inverse], shares)


def added(made: jax.Array, order: jax.Array, shares: jax.Array) -> jax.Array:
    """To each token what its experts make."""
    made = made * shares.reshape(-1)[order][:, None]
    return jnp.zeros((order.size // CHOSEN, WIDTH)).at[order // CHOSEN].add(made)


def layer(w: Tree, x: jax.Array, back: Order = looked_up, sizes: Order = by_bincount) -> jax.Array:
    shares, chosen = routed(w, x)
    keys = chosen.reshape(-1)
    order = jnp.argsort(keys)
    return back(experts(w, x[order // CHOSEN], sizes(keys)), order, shares)


def check(
    function: Callable[..., Any],
    args: Sequence[Any],
    in_shardings: Sequence[Any],
    out_shardings: Any = None,
    *,
    mesh: jax.sharding.Mesh = LINE,
    kinds: str | None = None,
) -> sdy.Plan:
    """The plan by prices of chips that have products of groups, whose numbers are the plain function's."""
    f = sdy.partition(
        function,
        mesh=mesh,
        in_shardings=tuple(in_shardings),
        out_shardings=out_shardings,
        costs=sdy.CostModel.of_machine("tpu v5e", mesh),
    )
    plan = f.plan(*args)
    assert kinds is None or sorted(c.kind for c in plan.collectives if c.wire_bytes) == sorted(kinds.split()), plan
    expected, found = function(*args), f(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
    return plan


def sorted_by(plan: sdy.Plan) -> list[tuple[int, tuple[str, ...]]]:
    return [(each.rows, each.axes) for each in plan.local_sorts]


ROWS = TOKENS * CHOSEN
BACK = [looked_up, written, counted, added]


@pytest.mark.parametrize("back", BACK)
def test_layers_of_experts_send_nothing_but_weights(back: Order) -> None:
    args, shardings = (weights(), tokens()), (FSDP, P("x"))
    run = partial(layer, back=back)
    plan = check(run, args, shardings, P("x"), kinds="all_gather all_gather")
    assert sorted_by(plan) == [(ROWS, ("x",))]
    assert plan.local_sorts[0].line.endswith(f"test_local_sorts.py:{layer.__code__.co_firstlineno + 3}")


@pytest.mark.parametrize("sizes", [by_bincount, by_scatter, by_one_hot, by_comparison])
def test_groups_are_counted_in_many_ways(sizes: Order) -> None:
    args, run = (weights(), tokens()), partial(layer, sizes=sizes)
    plan = check(run, args, (WHOLE, P("x")), P("x"), kinds="")
    assert sorted_by(plan) == [(ROWS, ("x",))]


@pytest.mark.parametrize("back", BACK)
def test_gradients_are_summed_once(back: Order) -> None:
    """Of the weights alone, which is what a device has of them; tokens stay where they are."""

    def loss(w: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean(layer(w, x, back) ** 2)

    args, step = (weights(), tokens()), jax.value_and_grad(loss, (0, 1))
    plan = check(step, args, (WHOLE, P("x")), (P(), (WHOLE, P("x"))))
    assert sorted_by(plan) == [(ROWS, ("x",))]
    assert plan.wire_bytes <= 2 * sum(w.nbytes for w in weights().values()) + 64, plan


@pytest.mark.parametrize("back", [looked_up, added])
def test_layers_in_a_scan_that_are_computed_again(back: Order) -> None:
    @jax.checkpoint
    def one(x: jax.Array, w: Tree) -> tuple[jax.Array, None]:
        return x + layer(w, x, back), None

    def loss(w: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(one, x, w)[0] ** 2)

    args, whole = (weights(layers=(2,)), tokens()), (WHOLE, P("x"))
    plan = check(jax.grad(loss), args, whole, WHOLE)
    assert sorted_by(plan) == [(ROWS, ("x",))] * 2
    assert {each.kind for each in plan.collectives if each.wire_bytes} <= {"all_reduce"}, plan


def test_one_expert_for_each_token() -> None:
    def run(w: Tree, x: jax.Array) -> jax.Array:
        scores = jax.nn.softmax(x @ w["router"])
        keys = jnp.argmax(scores, -1)
        order = jnp.argsort(keys)
        made = experts(w, x[order], by_bincount(keys))
        return jnp.zeros_like(x).at[order].set(made) * scores.max(-1, keepdims=True)

    plan = check(run, (weights(), tokens()), (WHOLE, P("x")), P("x"), kinds="")
    assert sorted_by(plan) == [(TOKENS, ("x",))]


def test_kernels_of_groups() -> None:
    """Each device runs the kernel on its own rows, with its own sizes of groups."""

    def run(w: Tree, x: jax.Array) -> jax.Array:
        shares, chosen = routed(w, x)
        keys = chosen.reshape(-1)
        order, sizes = jnp.argsort(keys), by_bincount(keys)
        made = gmm(x[order // CHOSEN], w["up"], sizes, x.dtype, (64, 32, 32), interpret=True)
        return looked_up(made, order, shares)

    def loss(w: Tree, x: jax.Array) -> jax.Array:
        return jnp.mean(run(w, x) ** 2)

    args, shardings = (weights(hidden=WIDTH), tokens()), (WHOLE, P("x"))
    assert sorted_by(check(run, args, shardings, P("x"), kinds="")) == [(ROWS, ("x",))]
    assert sorted_by(check(jax.grad(loss), args, shardings, WHOLE)) == [(ROWS, ("x",))]


def test_layers_one_after_the_other() -> None:
    """The second one's rows depend on what the first one makes, and so do the gradients of the first one."""

    def loss(w: Tree, x: jax.Array) -> jax.Array:
        x = x + layer(w, x, written)
        return jnp.mean((x + layer(w, jnp.tanh(x), looked_up)) ** 2)

    args = weights(), tokens()
    plan = check(jax.grad(loss), args, (WHOLE, P("x")), WHOLE)
    assert sorted_by(plan) == [(ROWS, ("x",))] * 2


def test_what_is_summed_up_over_all_rows_comes_back() -> None:
    """A mean over rows is complete only when all devices have done theirs: what takes it is a second computation."""

    def run(keys: jax.Array, x: jax.Array) -> jax.Array:
        order = jnp.argsort(keys)
        rows = jnp.tanh(x[order])
        return (rows - rows.mean(0))[jnp.argsort(order)]

    keys = jax.random.randint(jax.random.key(3), (TOKENS,), 0, 9)
    plan = check(run, (keys, tokens()), (P("x"), P("x")), P("x"), kinds="all_reduce")
    assert sorted_by(plan) == [(TOKENS, ("x",))]


def test_two_sorts_that_wait_for_each_other() -> None:
    """Each takes what the other one sums up: only one of them is by devices."""

    def run(one: jax.Array, other: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        one, other = jnp.argsort(one), jnp.argsort(other)
        rows, others = jnp.tanh(x[one]), jnp.cos(x[other])
        return undone(x, rows * others.sum(0), one), undone(x, others + rows.sum(0), other)

    keys = [jax.random.randint(jax.random.key(seed), (TOKENS,), 0, 9) for seed in (3, 4)]
    plan = check(run, (*keys, WIDE), (P("x"),) * 3, P("x"))
    assert sorted_by(plan) == [(TOKENS, ("x",))]


def test_rows_keep_the_other_axes() -> None:
    """The hidden dimension is split over the second axis, of which no computation has to know."""
    split = {"router": P(), "up": P(None, None, "y"), "down": P(None, "y", None)}
    args = weights(hidden=64), tokens()
    plan = check(layer, args, (split, P("x")), P("x"), mesh=PLANE)
    assert sorted_by(plan) == [(ROWS, ("x",))]
    assert {each.kind for each in plan.collectives if each.wire_bytes} <= {"all_reduce", "reduce_scatter", "all_gather"}
    check(layer, args, (WHOLE, P(("x", "y"))), P(("x", "y")), mesh=PLANE, kinds="")


def test_rows_may_be_of_more_dimensions_and_meet_one_row_for_all() -> None:
    def run(keys: jax.Array, x: jax.Array, bias: jax.Array, table: jax.Array) -> jax.Array:
        order = jnp.argsort(keys)
        rows = x.reshape(TOKENS, 4, 8)[order] + jnp.broadcast_to(bias, (TOKENS, 4, 8))
        rows = jnp.einsum("thi,tgi->thg", rows, rows * 2) + table[keys[order]][:, None, None]
        return jnp.zeros((TOKENS, 4, 4)).at[order].set(rows)

    keys = jax.random.randint(jax.random.key(3), (TOKENS,), 0, 9)
    args = keys, tokens(), tokens(2)[0, :8], tokens(3)[:9, 0]
    plan = check(run, args, (P("x"), P("x"), P(), P()), P("x"), kinds="")
    assert sorted_by(plan) == [(TOKENS, ("x",))]


def test_a_constraint_on_rows_along_the_same_axes_is_kept_by_it() -> None:
    def run(keys: jax.Array, x: jax.Array) -> jax.Array:
        order = jnp.argsort(keys)
        rows = jax.lax.with_sharding_constraint(x[order], P("x", None))
        return jnp.zeros_like(x).at[order].set(jnp.tanh(rows))

    keys = jax.random.randint(jax.random.key(3), (TOKENS,), 0, 9)
    with jax.set_mesh(LINE):
        plan = check(run, (keys, tokens()), (P("x"), P("x")), P("x"), kinds="")
    assert sorted_by(plan) == [(TOKENS, ("x",))]


# What can be seen of the order of all rows.


def undone(x: jax.Array, rows: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.zeros_like(x).at[order].set(rows)


def seen(change: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Rows that are changed while they are in order."""

    def run(keys: jax.Array, x: jax.Array) -> jax.Array:
        order = jnp.argsort(keys)
        return undone(x, change(x[order], order), order)

    return run


def ordered(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A function of rows and of one order of them."""
    return lambda keys, x: function(x, jnp.argsort(keys))


NUMBERS = jnp.arange(TOKENS)
WIDE = jnp.tile(tokens(), (1, 32))
"""So wide that to send rows costs more than any work on them."""


SEEN = {
    "the order is returned": lambda keys, x: (jnp.argsort(keys), x),
    "rows in order are returned": lambda keys, x: x[jnp.argsort(keys)],
    "rows meet those before them": seen(lambda rows, _: rows + jnp.roll(rows, 1, 0)),
    "rows are summed up so far": seen(lambda rows, _: jnp.cumsum(rows, 0)),
    "rows are compared with the largest": seen(lambda rows, _: rows - rows.max(0)),
    "rows are numbered": seen(lambda rows, _: rows * NUMBERS[:, None]),
    "rows meet another array of rows": seen(lambda rows, _: rows * jnp.sin(NUMBERS.astype(jnp.float32))[:, None]),
    "rows say where they were": seen(lambda rows, order: rows + order[:, None]),
    "the first rows are others": seen(lambda rows, _: rows.at[:8].set(0)),
    "rows are pairs": seen(lambda rows, _: jnp.repeat(rows.reshape(-1, 2, rows.shape[1]).sum(1), 2, 0)),
    "rows are looked up elsewhere": ordered(lambda x, order: undone(x, x[(order + 1) % TOKENS], order)),
    "rows are put elsewhere": ordered(lambda x, order: undone(x, x[order], TOKENS - 1 - order)),
    "rows are put where keys say": lambda keys, x: jnp.zeros_like(x).at[keys].add(x[jnp.argsort(keys)]),
    "rows come back in another order": ordered(lambda x, order: x[order][order]),
    "rows are looked up by where they went": ordered(lambda x, order: x[jnp.argsort(order)]),
    "rows are put where they went": ordered(lambda x, order: undone(x, x[order], jnp.argsort(order))),
    "rows are sorted again": ordered(lambda x, order: undone(x, jnp.sort(x[order], 0), order)),
    "places come back": ordered(
        lambda x, order: undone(x, jnp.tanh(x[order]), order) + order[jnp.argsort(order)][:, None]
    ),
    "rows come back by another inverse": ordered(lambda x, order: x[order][jnp.argsort(-order)]),
    "what is put in order meets what stood there": ordered(
        lambda x, order: undone(x, jnp.sin(NUMBERS[:, None] + 0 * x).at[jnp.argsort(order)].add(x), order)
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_an_order_that_can_be_seen_stays(name: str) -> None:
    keys = jax.random.randint(jax.random.key(3), (TOKENS,), 0, 9)
    shardings = (P("x"), P("x"))
    plan = check(SEEN[name], (keys, WIDE), shardings)
    assert not plan.local_sorts, plan


def test_an_order_that_cannot_be_seen_does_not() -> None:
    """What the functions above would be, if nothing were seen."""
    keys = jax.random.randint(jax.random.key(3), (TOKENS,), 0, 9)
    assert sorted_by(check(seen(lambda rows, _: jnp.tanh(rows)), (keys, WIDE), (P("x"), P("x")))) == [(TOKENS, ("x",))]


def grouped(
    sizes: Order, order: Order = jnp.argsort, taken: Order = lambda keys: keys, change: Order = lambda rows, sizes: rows
) -> Any:
    """Rows in groups, of which other sizes are said than there are keys of each."""

    def run(w: Tree, x: jax.Array, given: jax.Array) -> jax.Array:
        keys = taken(jax.lax.top_k(x @ w["router"], 1)[1].reshape(-1))
        by, counts = order(keys), sizes(keys, given)
        return undone(x, experts(w, change(x[by], counts), counts), by)

    return run


def of_keys(keys: jax.Array, given: jax.Array) -> jax.Array:
    return by_bincount(keys)


GROUPED = {
    "sizes are given": grouped(lambda keys, given: jnp.full(EXPERTS, TOKENS // EXPERTS) + 0 * given[:EXPERTS]),
    "other keys are counted": grouped(lambda keys, given: by_bincount(jnp.clip(given, 0, EXPERTS - 1))),
    "half of each is counted": grouped(lambda keys, given: by_bincount(keys) // 2),
    "groups have room for so many": grouped(lambda keys, given: jnp.minimum(by_bincount(keys), 50)),
    "keys are counted twice": grouped(lambda keys, given: by_scatter(keys) + by_scatter(keys)),
    "counting starts at one": grouped(lambda keys, given: jnp.ones(EXPERTS, jnp.int32).at[keys].add(1)),
    "two are counted": grouped(lambda keys, given: jnp.zeros(EXPERTS, jnp.int32).at[keys].add(2)),
    "groups are counted from the last": grouped(lambda keys, given: by_bincount(EXPERTS - 1 - keys)),
    "the greatest come first": grouped(of_keys, lambda keys: jnp.argsort(keys, descending=True)),
    "keys may be any": grouped(lambda keys, given: by_one_hot(keys), taken=lambda keys: keys * 3 - 2),
    "rows know the sizes": grouped(of_keys, taken=lambda keys: keys, change=lambda rows, sizes: rows * sizes[0]),
    "rows know all sizes": grouped(
        of_keys, change=lambda rows, sizes: rows * jnp.tile(sizes, WIDTH // EXPERTS)[None].astype(rows.dtype)
    ),
    "weights know the sizes": lambda w, x, given: (
        layer({**w, "up": w["up"] * w["router"].sum()}, x)
        * jnp.bincount(routed(w, x)[1].reshape(-1), length=EXPERTS)[0]
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_other_sizes(name: str) -> None:
    """The numbers are right; devices may sort their own where what is said elsewhere of sizes is of all rows."""
    given = jax.random.randint(jax.random.key(5), (TOKENS,), 0, EXPERTS)
    args, shardings = (weights(), tokens(), given), (WHOLE, P("x"), P("x"))
    plan = check(GROUPED[name], args, shardings, P("x"))
    assert bool(plan.local_sorts) == ("know" in name), plan


GREATEST_FIRST = """\"stablehlo.sort\"(%a, %b) <{dimension = 0 : i64, is_stable = true}> ({
^bb0(%c: tensor<i32>, %d: tensor<i32>, %e: tensor<i32>, %f: tensor<i32>):
  %g = stablehlo.compare GT, %c, %d, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.return %g : tensor<i1>
}) : (tensor<1024xi32>, tensor<1024xi32>) -> (tensor<1024xi32>, tensor<1024xi32>)"""


def test_groups_that_are_counted_from_the_least_and_sorted_from_the_greatest() -> None:
    descending = op(GREATEST_FIRST, "1024xi32", "1024xi32")
    run = grouped(of_keys, lambda keys: descending(keys, jnp.arange(TOKENS, dtype=jnp.int32))[1])
    plan = check(run, (weights(), tokens(), jnp.zeros(TOKENS, jnp.int32)), (WHOLE, P("x"), P("x")), P("x"))
    assert not plan.local_sorts, plan


def test_copies_of_tokens_in_another_order_are_no_blocks() -> None:
    """Row `r` is of token `r % tokens`: the rows of a block are of all tokens."""

    def run(w: Tree, x: jax.Array) -> jax.Array:
        shares, chosen = routed(w, x)
        keys = chosen.T.reshape(-1)
        order = jnp.argsort(keys)
        made = experts(w, x[order % TOKENS], by_bincount(keys))
        back = jnp.zeros_like(made).at[order].set(made)
        return jnp.einsum("xtd,tx->td", back.reshape(CHOSEN, TOKENS, WIDTH), shares)

    plan = check(run, (weights(), tokens()), (WHOLE, P("x")), P("x"))
    assert not plan.local_sorts, plan


def test_a_plan_that_is_read_sorts_in_the_same_way(tmp_path: Any) -> None:
    costs = sdy.CostModel.of_machine("tpu v5e", LINE)
    options = {"mesh": LINE, "costs": costs, "in_shardings": (WHOLE, P("x")), "out_shardings": P("x")}
    args = weights(), tokens()
    plan = sdy.partition(layer, **options).plan(*args)
    plan.save(tmp_path / "plan.json")
    again = sdy.partition(layer, **options, plan=tmp_path / "plan.json")
    assert again.plan(*args).fingerprint() == plan.fingerprint()
    assert again.plan(*args).local_sorts
    np.testing.assert_allclose(again(*args), layer(*args), rtol=1e-5, atol=1e-5)
    assert "each device sorts its own rows" in str(plan)
    assert sdy.load_plan(tmp_path / "plan.json").local_sorts[0].rows == ROWS


def test_what_such_a_sort_gathers_is_not_what_the_user_asked_for() -> None:
    costs = sdy.CostModel.of_machine("tpu v5e", LINE)
    options = {"mesh": LINE, "costs": costs, "in_shardings": (FSDP, P("x")), "out_shardings": P("x")}
    with pytest.raises(sdy.ContractError, match="all_gather"):
        sdy.partition(layer, **options, strict="x").plan(weights(), tokens())
