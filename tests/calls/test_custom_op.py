"""sdy.custom_op: functions that devices run on their blocks, by a rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE, check

import sdy_jax as sdy
from sdy_jax.errors import ParseError, SdyError, ShardingError
from sdy_jax.plan.profile import collectives_in_hlo, totals

SEEN: list[tuple[int, ...]] = []


def normal(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape)


def spied(fun):
    """Notes the shapes of the blocks on which a function runs."""

    def run(*xs):
        SEEN.append(tuple(x.shape for x in xs))
        return fun(*xs)

    return run


PRODUCT = "([i, k], [k, j])->([i, j]) {i=16, j=8, k=24} reduction={k}"
matmul = sdy.custom_op(spied(lambda x, w: x @ w), PRODUCT)


@pytest.mark.parametrize(
    "specs, blocks, kinds",
    [
        ((P("x", None), P(None, "y")), ((8, 24), (24, 2)), ""),
        ((P(None, "y"), P("y", None)), ((16, 6), (6, 8)), "all_reduce"),
        ((P("x", "y"), P("y", None)), ((8, 6), (6, 8)), "all_reduce"),
    ],
)
def test_blocks_are_those_of_the_rule(specs, blocks, kinds):
    SEEN.clear()
    check(lambda x, w: matmul(x, w), (normal(16, 24), normal(24, 8)), specs, mesh=PLANE, kinds=kinds)
    assert blocks in SEEN


def test_terms_are_scattered_where_that_is_wanted():
    args, specs = (normal(16, 24), normal(24, 8)), (P(None, "y"), P("y", None))
    check(lambda x, w: matmul(x, w), args, specs, P("y", None), mesh=PLANE, kinds="reduce_scatter", wire_bytes=384)


def test_what_needs_replication_is_gathered():
    op = sdy.custom_op(lambda x: x - x.mean(1, keepdims=True), "([i, j])->([i, j]) {i=16, j=8} need_replication={j}")
    check(lambda x: op(x), (normal(16, 8),), (P("x", "y"),), P("x", "y"), mesh=PLANE)


def test_other_reductions_and_several_results():
    def extremes(x):
        return {"most": x.max(0), "least": -(-x).max(0)}

    most = sdy.custom_op(lambda x: x.max(0), "([i, j])->([j]) {i=16, j=8} reduction={i}", reduction="max")
    both = sdy.custom_op(extremes, "([i, j])->([j], [j]) {i=16, j=8} need_replication={i}")
    check(lambda x: (most(x), both(x)), (normal(16, 8),), (P("x", "y"),), mesh=PLANE)


@pytest.mark.parametrize("padding, whole", [(None, True), (0.0, False)])
def test_reductions_that_do_not_divide(padding, whole):
    SEEN.clear()
    rule = "([i, j])->([j]) {i=13, j=8} reduction={i}"
    total = sdy.custom_op(spied(lambda x: jnp.exp(x).sum(0) if whole else x.sum(0)), rule, padding=padding)

    def split(x):
        return total(jax.lax.with_sharding_constraint(x * 2, NamedSharding(LINE, P("x"))))

    found = sdy.partition(split, mesh=LINE, layouts="local")(normal(13, 8))
    (block,) = SEEN[-1]
    np.testing.assert_allclose(found, total(normal(13, 8) * 2), rtol=1e-5)
    assert block == ((13, 1) if whole else (2, 8))


def test_transformations():
    rule = "([i, j], [j])->([i]) {i=8, j=4} reduction={j}"
    op = sdy.custom_op(lambda x, w: jnp.tanh(x) @ w, rule)
    x, w = normal(8, 4), normal(4)
    check(jax.vmap(op, in_axes=(0, None)), (normal(3, 8, 4), w), (P(None, "x"), P()), mesh=PLANE)
    check(jax.vmap(jax.vmap(op, (None, 0)), (0, None)), (normal(2, 8, 4), normal(5, 4)), (P("x"), P()), mesh=PLANE)
    check(jax.grad(lambda x, w: op(x, w).sum(), (0, 1)), (x, w), (P("x"), P()), mesh=PLANE, rtol=1e-5)
    np.testing.assert_array_equal(op(x, w), jnp.tanh(x) @ w)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: op(x, w).sum()))(x), (1 - jnp.tanh(x) ** 2) * w, rtol=1e-5)


def test_arrays_that_are_closed_over_are_constants():
    scale = jnp.arange(4.0)
    op = sdy.custom_op(lambda x: x * scale, "([i, j])->([i, j]) {i=8, j=4} need_replication={j}")
    check(lambda x: op(x), (normal(8, 4),), (P("x"),), mesh=PLANE, kinds="")


def test_python_numbers_and_numpy_arrays_are_as_wide_as_outside():
    held = np.linspace(0, 1, 8)
    scaled = sdy.custom_op(lambda x: x * held + jnp.arange(8.0) * jnp.ones(8), "([i, j])->([i, j]) {i=16, j=8}")
    check(lambda x: scaled(x), (normal(16, 8),), (P("x"),), mesh=PLANE, kinds="")


def test_the_plan_names_the_op():
    plan = sdy.partition(lambda x, w: matmul(x, w), mesh=PLANE, in_shardings=(P("x"), P())).plan(
        normal(16, 24), normal(24, 8)
    )
    assert "sdy_jax.custom_op" in plan.mlir()


def test_errors():
    x = normal(16, 24)
    with pytest.raises(ParseError, match="custom_op of `<lambda>`"):
        sdy.custom_op(lambda x: x, "([i)->([i])")
    with pytest.raises(SdyError, match="'avg'; it is one of sum"):
        sdy.custom_op(lambda x: x, "([i])->([i]) {i=2}", reduction="avg")
    with pytest.raises(SdyError, match="got an int; expected a function"):
        sdy.custom_op(3, "([i])->([i]) {i=2}")
    with pytest.raises(SdyError, match="closes over a traced array; to fix: make it an argument"):
        jax.jit(lambda x: sdy.custom_op(lambda y: x + y, "([i])->([i]) {i=2}")(x))(jnp.ones(2))
    wrong = sdy.custom_op(lambda x: x, "([i])->([i]) {i=16}")
    with pytest.raises(ShardingError, match="custom_op of `<lambda>`"):
        sdy.partition(lambda x: wrong(x), mesh=PLANE)(x)
    fixed = sdy.custom_op(lambda x: jnp.zeros((16, 24)), "([i, j])->([i, j]) {i=16, j=24}")
    with pytest.raises(ShardingError, match=r"returned a block of shape \(16, 24\) as result 0, expected \(8, 24\)"):
        sdy.partition(lambda x: fixed(x), mesh=PLANE, in_shardings=P("x"))(x)


def test_another_process_does_not_know_the_function():
    plan = sdy.partition(lambda x, w: matmul(x, w), mesh=PLANE).plan(normal(16, 24), normal(24, 8))
    program = sdy.loads(plan.mlir("traced").replace('"run:', '"kernel:'))
    with pytest.raises(ShardingError, match="the function `kernel` of a custom_op or callback is not known here"):
        sdy.partition(program)(normal(16, 24), normal(24, 8))


def fft_of_rows():
    """The example of JAX's documentation."""

    @custom_partitioning
    def rows(x):
        return jnp.fft.fft(x)

    def supported(sharding, shape):
        return NamedSharding(sharding.mesh, P(*sharding.spec[: len(shape.shape) - 1]))

    def partition(mesh, arg_shapes, result_shape):
        sharding = supported(arg_shapes[0].sharding, arg_shapes[0])
        SEEN.append(sharding.spec)
        return mesh, jnp.fft.fft, sharding, (sharding,)

    rows.def_partition(partition, sharding_rule="... i -> ... i", need_replication_factors=("i",))
    return rows


@pytest.mark.parametrize("spec", [P("x"), P(("x", "y")), P("x", "y"), P("x", None, "y"), P()])
def test_functions_with_a_custom_partitioning(spec):
    rows, x = fft_of_rows(), normal(8, 4, 16).astype(np.complex64)
    SEEN.clear()
    check(lambda x: rows(x) * 2, (x,), (spec,), mesh=PLANE, rtol=1e-4)
    assert SEEN


def test_static_arguments_trees_and_rules_that_are_functions():
    def scaled(x, factor):
        return {"a": x["a"] * factor, "b": x["b"] + 1}

    op = custom_partitioning(scaled, static_argnums=(1,))

    def partition(factor, mesh, arg_shapes, result_shape):
        taken = jax.tree.map(lambda s: s.sharding, arg_shapes)
        return mesh, lambda x: scaled(x, factor), jax.tree.map(lambda s: s.sharding, result_shape), taken

    op.def_partition(partition, sharding_rule=lambda factor, mesh, operands, results: "i j, i -> i j, i")
    x = {"a": normal(8, 4), "b": normal(8)}
    check(lambda x: op(x, 3.0), (x,), (P("x"),), mesh=PLANE, kinds="")


def check_bytes(function, args, in_shardings, out_shardings=None):
    """As `check`; the plan's bytes are those of the compiled program."""
    plan = check(function, args, in_shardings, out_shardings, mesh=PLANE, rtol=1e-4)
    partitioned = sdy.partition(
        lambda *xs: function(*xs), mesh=PLANE, in_shardings=in_shardings, out_shardings=out_shardings
    )
    assert plan.wire_bytes == totals(collectives_in_hlo(partitioned.lower(*args).compile().as_text())).wire_bytes, plan
    return plan


def product_by(partition, rule="i k, k j -> i j"):
    @custom_partitioning
    def product(x, w):
        return x @ w

    product.def_partition(partition, sharding_rule=rule, reduction_factors=("k",))
    return product


def axes_of(entry):
    return entry if isinstance(entry, tuple) else (entry,) if entry else ()


def summing(mesh, arg_shapes, result_shape):
    """Takes operands that are split along what is summed up."""
    taken = tuple(shape.sharding for shape in arg_shapes)
    rows, summed = (taken[0].spec + (None,) * 2)[:2]
    columns = (taken[1].spec + (None,) * 2)[1]

    def run(x, w):
        assert x.shape[1] == w.shape[0]
        return jax.lax.psum(x @ w, axes_of(summed)) if summed else x @ w

    return mesh, run, NamedSharding(mesh, P(rows, columns)), taken


def not_summing(mesh, arg_shapes, result_shape):
    """Gives the sum up to others: they would have to know."""
    return mesh, lambda x, w: x @ w, result_shape.sharding, tuple(shape.sharding for shape in arg_shapes)


def wanting_whole(mesh, arg_shapes, result_shape):
    rows = (arg_shapes[0].sharding.spec + (None,) * 2)[0]
    columns = (arg_shapes[1].sharding.spec + (None,) * 2)[1]
    wanted = NamedSharding(mesh, P(rows, None)), NamedSharding(mesh, P(None, columns))
    return mesh, lambda x, w: x @ w, NamedSharding(mesh, P(rows, columns)), wanted


def refusing(mesh, arg_shapes, result_shape):
    if any(axes_of(entry) for entry in arg_shapes[0].sharding.spec[1:2]):
        raise NotImplementedError("split along what is summed up")
    return not_summing(mesh, arg_shapes, result_shape)


OPERANDS = normal(16, 24), normal(24, 8)


@pytest.mark.parametrize(
    "spec, kinds, sent",
    [
        ((P(None, "y"), P("y", None)), "all_reduce", 2 * 3 / 4 * 16 * 8 * 4),
        ((P("x", "y"), P("y", None)), "all_reduce", 2 * 3 / 4 * 8 * 8 * 4),
        ((P(None, ("x", "y")), P(("x", "y"), None)), "all_reduce", 2 * 7 / 8 * 16 * 8 * 4),
        ((P("x", None), P(None, "y")), "", 0),
    ],
)
def test_a_partition_may_combine_along_reduction_factors(spec, kinds, sent):
    plan = check_bytes(product_by(summing), OPERANDS, spec)
    assert plan.wire_bytes == sent and [c.kind for c in plan.collectives] == kinds.split(), plan


@pytest.mark.parametrize("partition", [not_summing, wanting_whole, refusing])
def test_a_partition_that_does_not_combine_gets_whole_operands(partition):
    specs = P(None, "y"), P("y", None)
    plan = check(product_by(partition), OPERANDS, specs, P(), mesh=PLANE, rtol=1e-4)
    assert {c.kind for c in plan.collectives} <= {"all_gather", "all_to_all"}, plan


def test_reduction_factors_that_do_not_divide_stay_whole():
    x, w = normal(16, 23), normal(23, 8)
    function = product_by(summing)
    plan = check(lambda x, w: function(x, w), (x, w), (P("x"), P()), mesh=PLANE, rtol=1e-4)
    assert not plan.collectives


def test_the_plan_counts_what_a_lower_fn_sends():
    """Two rings of permutes, in a loop, and a gather."""

    @custom_partitioning
    def smoothed(x):
        return (x + jnp.roll(x, 1, 0) + jnp.roll(x, 2, 0)) * x.sum(0)

    def partition(mesh, arg_shapes, result_shape):
        (sharding,) = (shape.sharding for shape in arg_shapes)
        names = axes_of(sharding.spec[0] if sharding.spec else None)

        def run(x):
            count = jax.lax.axis_size(names) if names else 1
            ring = [(i, (i + 1) % count) for i in range(count)]
            last, total = x[-2:], x.sum(0)
            if not names:
                return smoothed.fun(x)
            last = jax.lax.ppermute(last, names, ring)
            total, _ = jax.lax.scan(lambda t, _: (jax.lax.psum(t, names) / count, None), total, None, length=2)
            long = jnp.concatenate([last, x])
            return (x + long[1:-1] + long[:-2]) * jax.lax.all_gather(x.sum(0), names).sum(0) + 0 * total

        return mesh, run, result_shape.sharding, (sharding,)

    smoothed.def_partition(partition, sharding_rule="i j -> i j", need_replication_factors=("j",))
    plan = check_bytes(smoothed, (normal(16, 4),), (P("y"),), P("y"))
    counted = {kind: wire for kind, (_, wire) in plan.totals.by_kind().items()}
    row = 4 * 4
    assert counted == {"collective_permute": 2 * row, "all_reduce": 2 * 1.5 * row, "all_gather": 3 * row}, plan
