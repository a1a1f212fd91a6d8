"""What looks into programs or through them, beside jit: checkify, NaN checks, `vmap` over mesh axes, Pallas kernels,
functions of libraries (FFI)."""

import ctypes
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE, PLANE

import sdy_jax as sdy
from sdy_jax.errors import ShardingError

X = jnp.arange(16.0)


def jitted(function, spec=P("x"), mesh=LINE):
    return jax.jit(function, in_shardings=NamedSharding(mesh, spec))


def partitioned(function, spec=P("x"), mesh=LINE, **options):
    return sdy.partition(function, mesh=mesh, in_shardings=spec, on_unknown="ignore", **options)


def both(wrapped):
    """What is made of both kinds of functions."""
    return [wrapped(wrap) for wrap in (partitioned, jitted)]


# checkify


def small(x):
    checkify.check(x.sum() > 1000, "the sum is {}", x.sum())
    return x * 2


@pytest.mark.parametrize(
    "function, errors",
    [
        (small, checkify.user_checks),
        (lambda x: jnp.log(x - 5), checkify.float_checks),
        (lambda x: x[x.astype(int) + 5], checkify.index_checks),
        (lambda x: jax.lax.scan(lambda x, _: (small(x), None), x, None, length=2)[0], checkify.user_checks),
    ],
)
def test_checks_inside_say_what_they_say_under_jit(function, errors):
    ours, jits = both(lambda wrap: wrap(checkify.checkify(function, errors=errors))(X))
    assert ours[0].get() == jits[0].get() is not None
    np.testing.assert_array_equal(ours[1], jits[1])


def in_while(x):
    def body(state):
        i, x = state
        checkify.check(i < 2, "trip {i}", i=i)
        return i + 1, x * 2

    return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, x))[1]


def two(x):
    checkify.check(jnp.all(x < 10), "at most {}", x.max())
    y = jnp.sin(x)
    checkify.check(jnp.all(y > 3), "at least {}", y.min())
    return y


def debugged(x):
    checkify.debug_check(x.sum() > 1000, "the sum is {}", x.sum())
    return x * 2


CHECKED = {
    "plain": small,
    "two": two,
    "branch": lambda x: jax.lax.cond(x[0] < 1, small, lambda x: x, x),
    "scan": lambda x: jax.lax.scan(lambda x, _: (small(x), None), x, None, length=3)[0],
    "while": in_while,
    "debug": debugged,
}


@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_users_outside_find_what_they_find_under_jit(name):
    ours, jits = both(lambda wrap: checkify.checkify(wrap(CHECKED[name]))(X))
    assert ours[0].get() == jits[0].get() is not None
    np.testing.assert_allclose(ours[1], jits[1], rtol=1e-6)


AROUND = {
    "jit": lambda f: jax.jit(checkify.checkify(f))(X),
    "fine": lambda f: checkify.checkify(f)(X + 1000),
    "other errors": lambda f: checkify.checkify(f, errors=checkify.float_checks)(X),
    "all errors": lambda f: checkify.checkify(f, errors=checkify.all_checks)(X),
    "scan": lambda f: checkify.checkify(jax.lax.scan)(lambda x, _: (f(x), None), X, jnp.arange(2)),
    "vmap inside": lambda f: checkify.checkify(jax.vmap(f))(jnp.stack([X, X + 1000])),
    "vmap outside": lambda f: jax.vmap(checkify.checkify(f))(jnp.stack([X, X + 1000])),
    "grad": lambda f: checkify.checkify(jax.grad(lambda x: f(x).sum()))(X),
    "jvp": lambda f: checkify.checkify(lambda x: jax.jvp(f, (x,), (x,)))(X),
    "remat": lambda f: checkify.checkify(jax.grad(lambda x: jax.checkpoint(f)(x).sum()))(X),
    "then another": lambda f: checkify.checkify(lambda x: f(partitioned(jnp.sin)(f(x))))(X),
}


@pytest.mark.parametrize("name", AROUND)
def test_checks_of_users_are_found_through_transformations_as_under_jit(name):
    ours, jits = both(lambda wrap: AROUND[name](wrap(small)))
    assert ours[0].get() == jits[0].get()
    np.testing.assert_allclose(jax.tree.leaves(ours[1])[0], jax.tree.leaves(jits[1])[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["scan", "while"])
def test_checks_in_loops_are_found_through_tangents_as_under_jit(name):
    ours, jits = both(lambda wrap: AROUND["jvp"](wrap(CHECKED[name])))
    assert ours[0].get() == jits[0].get() is not None
    np.testing.assert_allclose(jax.tree.leaves(ours[1]), jax.tree.leaves(jits[1]), rtol=1e-6)


def test_checks_in_loops_are_found_through_gradients_though_jit_leaves_them_out():
    ours, jits = both(lambda wrap: AROUND["grad"](wrap(CHECKED["scan"])))
    assert ours[0].get().startswith("the sum is 120.0") and jits[0].get() is None
    np.testing.assert_allclose(ours[1], jits[1], rtol=1e-6)


def test_what_is_checked_is_traced_once_and_raises():
    traced = []
    checked = checkify.checkify(partitioned(lambda x: (traced.append(1), small(x))[1]))
    errors = [checked(X)[0] for _ in range(3)]
    assert len(traced) == 1
    with pytest.raises(ValueError, match=r"the sum is 120\.0"):
        errors[0].throw()


AUTOMATIC = {
    "nan": (lambda x: jnp.log(x - 5), checkify.float_checks),
    "nan of a gradient": (jax.grad(lambda x: jnp.sqrt(x - 5).sum()), checkify.float_checks),
    "index": (lambda x: x[x.astype(int) + 5], checkify.index_checks),
    "fine where shards look up": (lambda x: x[jnp.arange(8) * 2], checkify.index_checks),
    "fine where blocks are padded": (lambda x: (x[:13] + 1) / (x[:13] + 1), checkify.float_checks),
    "zero": (lambda x: 1 // x.astype(int), checkify.div_checks),
}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_checks_of_numbers_outside_find_what_they_find_under_jit(name):
    """On the whole arrays: blocks are padded, and look up what others have."""
    function, errors = AUTOMATIC[name]
    ours, jits = both(lambda wrap: checkify.checkify(wrap(function), errors=errors)(X))
    assert ours[0].get() == jits[0].get()
    assert (ours[0].get() is None) == ("fine" in name)


def test_checks_that_nobody_functionalizes_are_refused_with_what_to_do():
    np.testing.assert_array_equal(partitioned(debugged)(X), X * 2)
    with pytest.raises(ValueError, match=r"not functionalized; to fix: .*partition\(checkify\.checkify"):
        partitioned(small)(X)


@pytest.mark.parametrize("setting, function", [("nans", lambda x: jnp.log(x - 5)), ("infs", jnp.log)])
def test_jax_debug_nans_and_infs_raise_as_under_jit(setting, function):
    with getattr(jax, f"debug_{setting}")(True):
        for wrap in (jitted, partitioned):
            with pytest.raises(FloatingPointError, match=rf"{setting[:-1]}\)"):
                wrap(function)(X)


# vmap over axes of the mesh


def rows(x):
    return jnp.tanh(x @ jnp.ones((16, 16))).cumsum(0)


def test_vmap_over_a_mesh_axis_that_the_plan_leaves_alone_is_that_of_jit():
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    jits = jax.vmap(jitted(rows, P("y"), PLANE), spmd_axis_name="x")(x)
    ours = jax.vmap(partitioned(rows, P("y"), PLANE, layouts="propagated"), spmd_axis_name="x")(x)
    np.testing.assert_allclose(ours, jits, rtol=1e-5)
    assert ours.sharding.spec[0] == jits.sharding.spec[0] == "x"


def products(x, w):
    return jnp.tanh(jnp.sin(x) @ w).cumsum(0)


def loss(f):
    return lambda x, w: (f(x, w) ** 2).sum()


def over_rows(f, **along):
    return jax.vmap(f, (0, None), **along)


MAPPED = {
    "plain": over_rows,
    "jit": lambda f, **along: jax.jit(over_rows(f, **along)),
    "scan": lambda f, **along: over_rows(
        lambda x, w: jax.lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0], **along
    ),
    "of a gradient": lambda f, **along: over_rows(jax.grad(loss(f), (0, 1)), **along),
    "of a hessian": lambda f, **along: over_rows(jax.hessian(lambda x, w: loss(f)(x[:1], w)), **along),
    "of a checkpoint": lambda f, **along: over_rows(
        jax.grad(loss(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))), **along
    ),
    "gradient of it": lambda f, **along: jax.grad(loss(over_rows(f, **along)), (0, 1)),
    "tangent of it": lambda f, **along: lambda x, w: jax.jvp(over_rows(f, **along), (x, w), (x, w)),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_over_a_mesh_axis_that_the_planner_chose_plans_without_it(name):
    x, w = jax.random.normal(jax.random.key(0), (4, 8, 16)), jax.random.normal(jax.random.key(1), (16, 16))
    function = partitioned(products, (P("y"), None), PLANE, costs=sdy.CostModel(bandwidth=1e9, flop=1e-10))
    assert "'x'" in str(function.plan(x[0], w).collectives)
    ours = MAPPED[name](function, spmd_axis_name="x")(x, w)
    expected = MAPPED[name](products)(x, w)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert jax.tree.leaves(ours)[0].sharding.spec[0] == "x" or "hessian" in name


def test_vmap_over_two_mesh_axes():
    x, w = jax.random.normal(jax.random.key(0), (4, 2, 8, 16)), jnp.ones((16, 16))
    inner = over_rows(partitioned(products, None, PLANE), spmd_axis_name="x")
    ours = over_rows(inner, spmd_axis_name="y")(x, w)
    np.testing.assert_allclose(ours, over_rows(over_rows(products))(x, w), rtol=1e-4, atol=1e-4)
    assert ours.sharding.spec[:2] == ("y", "x")


def test_vmap_over_a_mesh_axis_that_the_function_itself_names_is_refused():
    def split(x):
        return rows(jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(PLANE, P("x"))))

    x = jax.random.normal(jax.random.key(0), (4, 8, 16))
    function = partitioned(split, P("y"), PLANE)
    with pytest.raises(ValueError, match="spmd_axis_name"):
        jax.vmap(jitted(split, P("y"), PLANE), spmd_axis_name="x")(x)
    for call in (function, lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, None, length=1)[0]):
        with pytest.raises(ShardingError, match=r"test_checks\.py:.* says .*x.*vmap inside"):
            jax.vmap(call, spmd_axis_name="x")(x)
    np.testing.assert_allclose(jax.vmap(function)(x), jax.vmap(rows)(jnp.sin(x)), rtol=1e-5)


@pytest.mark.parametrize("option", ["in_shardings", "out_shardings"])
@pytest.mark.parametrize(
    "mapped",
    [
        lambda f, **along: jax.vmap(f, **along),
        lambda f, **along: jax.vmap(jax.grad(lambda x: f(x).sum()), **along),
        lambda f, **along: jax.grad(lambda x: jax.vmap(f, **along)(x).sum()),
        lambda f, **along: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)), **along),
        lambda f, **along: jax.vmap(jax.hessian(lambda x: f(x).sum()), **along),
    ],
)
def test_vmap_over_a_mesh_axis_that_the_options_name_is_refused(option, mapped):
    x = jax.random.normal(jax.random.key(0), (2, 4, 16)) / 16
    with pytest.raises(Exception, match="at most one positional dimension"):
        mapped(jax.jit(rows, **{option: NamedSharding(PLANE, P("x"))}), spmd_axis_name="x")(x)
    with pytest.raises(ShardingError, match=rf"of rows: {option} says .*x"):
        mapped(sdy.partition(rows, mesh=PLANE, **{option: P("x")}), spmd_axis_name="x")(x)


def test_vmap_of_tangents_over_a_mesh_axis():
    def both_of(f, **along):
        return jax.vmap(lambda x: jax.jvp(f, (x,), (x,)), **along)

    x = jax.random.normal(jax.random.key(0), (2, 4, 16)) / 16
    ours = both_of(sdy.partition(rows, mesh=PLANE, in_shardings=P("y")), spmd_axis_name="x")(x)
    for one, other in zip(ours, both_of(rows)(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


# Pallas


def kernel(x, out):
    out[...] = jnp.sin(x[...]) * 2


def whole(x):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def in_grid(x, interpret=True):
    spec = pl.BlockSpec((2, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = pl.pallas_call(
        kernel, out_shape=shape, grid=(x.shape[0] // 2,), in_specs=[spec], out_specs=spec, interpret=interpret
    )
    return call(x)


KERNELS = {
    "whole": whole,
    "grid": in_grid,
    "in scan": lambda x: jax.lax.scan(lambda x, _: (in_grid(x), None), x, None, length=2)[0],
    "vmap": jax.vmap(whole),
    "for TPUs": lambda x: in_grid(x, pltpu.InterpretParams()),
    "custom_op": sdy.custom_op(in_grid, "([i, j])->([i, j]) {i=16, j=4}"),
    "shard_map": lambda x: jax.shard_map(whole, mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x),
}


@pytest.mark.parametrize("name", KERNELS)
def test_interpreted_kernels_give_the_numbers_of_jit(name):
    x = jax.random.normal(jax.random.key(1), (16, 4))
    ours, jits = both(lambda wrap: wrap(KERNELS[name])(x))
    np.testing.assert_allclose(ours, jits, rtol=1e-6)


# FFI

LIBRARY = """
#include <atomic>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static std::atomic<int> runs{0};
extern "C" int Runs() { return runs.exchange(0); }
static ffi::Error Scaled(float by, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  ++runs;
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = by * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(Scale, Scaled, ffi::Ffi::Bind().Attr<float>("by").Arg<ffi::Buffer<ffi::F32>>()
                              .Ret<ffi::Buffer<ffi::F32>>());
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler for C++")
    folder = tmp_path_factory.mktemp("ffi")
    folder.joinpath("scale.cc").write_text(LIBRARY)
    include = f"-I{jax.ffi.include_dir()}"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-w", include, "scale.cc", "-o", "scale.so"]
    subprocess.run(command, cwd=folder, check=True)
    found = ctypes.cdll.LoadLibrary(str(folder / "scale.so"))
    jax.ffi.register_ffi_target("sdy_jax_test_scale", jax.ffi.pycapsule(found.Scale), platform="cpu")
    return found


def scaled(x, **options):
    call = jax.ffi.ffi_call("sdy_jax_test_scale", jax.ShapeDtypeStruct(x.shape, x.dtype), **options)
    return call(x, by=np.float32(3))


FOREIGN = {
    "plain": scaled,
    "unused": lambda x: (scaled(x), x)[1],
    "vmap, sequential": jax.vmap(lambda x: scaled(x, vmap_method="sequential")),
    "vmap, broadcast": jax.vmap(lambda x: scaled(x, vmap_method="broadcast_all")),
    "aliased": lambda x: scaled(x, input_output_aliases={0: 0}),
    "in scan": lambda x: jax.lax.scan(lambda x, _: (scaled(x), None), x, None, length=3)[0],
    "shard_map": lambda x: jax.shard_map(scaled, mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x),
    "custom_op": sdy.custom_op(scaled, "([i])->([i]) {i=16}"),
}


def runs(library, function):
    library.Runs()
    result = jax.block_until_ready(function(X))
    return result, library.Runs()


@pytest.mark.parametrize("name", FOREIGN)
def test_functions_of_libraries_run_as_often_as_under_jit(library, name):
    """On every device, as nothing says how they split."""
    function = FOREIGN[name] if "vmap" not in name else lambda x: FOREIGN[name](x.reshape(8, 2)).reshape(-1)
    (ours, times), (jits, expected) = both(lambda wrap: runs(library, wrap(function)))
    np.testing.assert_array_equal(ours, jits)
    assert times == expected


def test_effects_of_libraries_stay_where_jit_does_not_compile(library):
    def called(x):
        scaled(x, has_side_effect=True)
        return x

    assert runs(library, partitioned(called))[1] == 8


def test_strips_are_sent_under_vmap_where_64_bit_types_are_off():
    """Their positions are as wide as others: jax clamps those of mapped scatters when it lowers them."""
    x = jnp.arange(256.0).reshape(2, 8, 16)
    for function in (lambda x: jnp.concatenate([x, x]), lambda x: jnp.pad(x, 1)):
        found = jax.vmap(partitioned(function, P("x", "y"), PLANE))(x)
        np.testing.assert_array_equal(found, jax.vmap(function)(x))
