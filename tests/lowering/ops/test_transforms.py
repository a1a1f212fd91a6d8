"""Fourier transforms along split dimensions, linear algebra in split batches, random bits on any number of devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import agreed, check_inside, rarely, split
from jax import lax
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE
from uneven_blocks import normal

import sdy_jax as sdy
from sdy_jax.lowering.ops.fourier_transforms import Problem, moved, schedule, schedules

pytestmark = pytest.mark.usefixtures("poisoned_padding")

FFT = "stablehlo.fft"


def complex_(*shape):
    return normal(*shape) + 1j * normal(*shape[::-1]).T


def test_a_transform_of_two_dimensions_moves_the_split_one_there_and_back():
    plan = agreed(jnp.fft.fft2, complex_(64, 32), spec=P("x"), out=P("x"))
    assert plan.wire_bytes == 2 * 7 / 8 * 8 * 32 * 8


def test_a_real_transform_moves_halves():
    plan = agreed(jnp.fft.rfft2, normal(64, 30), spec=P("x"), out=P("x"))
    assert plan.wire_bytes == 2 * 7 / 8 * 8 * 16 * 8


def test_a_long_vector_is_transformed_in_four_steps():
    for transform in (jnp.fft.fft, jnp.fft.ifft):
        plan = agreed(transform, complex_(512), spec=P("x"), out=P("x"), rtol=1e-5)
        assert plan.wire_bytes == 3 * 7 / 8 * 64 * 8


def test_moves_inside_of_a_transform_take_as_long_as_others():
    """A filter is moved once, so that no transform has to move its operand there and back in every trip."""

    def filtered(u, filter):
        def step(u, _):
            spectrum = jnp.fft.fft(jnp.fft.fft(u, axis=1), axis=0) * filter
            return jnp.fft.ifft(jnp.fft.ifft(spectrum, axis=0), axis=1), None

        return lax.scan(step, u, length=4)[0]

    x, costs = jax.ShapeDtypeStruct((512, 512), np.complex64), sdy.CostModel.of_machine("v5e", ("x",))
    f = sdy.partition(filtered, mesh=LINE, in_shardings=P("x"), out_shardings=P("x"), costs=costs)
    assert f.plan(x, x).wire_bytes == (4 * 2 + 1) * 7 / 8 * 64 * 512 * 8


@pytest.mark.parametrize("mesh", [LINE, *rarely(PLANE)], ids=["line", "plane"])
def test_long_vectors_of_real_numbers_are_half_as_many_complex_ones(mesh):
    spec = mesh.axis_names[::-1]
    plan = check_inside(lambda x: split(jnp.fft.rfft(split(x, spec)), spec), normal(1024), mesh=mesh, rtol=1e-5)
    inside = [c.wire_bytes for c in plan.collectives if c.cause == FFT and c.wire_bytes]
    assert inside == [pytest.approx((3 * 7 / 8 * 64 + 64 + 1 + 8) * 8 / 3)] * 3, plan


@pytest.mark.parametrize("mesh", [PLANE, *rarely(LINE)], ids=["plane", "line"])
def test_half_a_transform_makes_as_many_real_numbers(mesh):
    spec, x = mesh.axis_names[::-1], complex_(513, 1)[:, 0]
    plan = check_inside(lambda x: jnp.fft.irfft(split(x, spec)), x, mesh=mesh, sent_by=FFT, rtol=1e-5)
    inside = [c.wire_bytes for c in plan.collectives if c.cause == FFT and c.wire_bytes]
    assert inside == [pytest.approx((3 * 7 / 8 * 64 + 64 + 2 + 8) * 8 / 3)] * 3, plan
    transform = lambda x: jnp.fft.irfft2(split(x, None, spec))  # noqa: E731
    check_inside(transform, complex_(3, 257), mesh=mesh, sent_by=FFT, rtol=1e-5)
    check_inside(jax.grad(lambda x: (transform(jnp.fft.rfft2(x)) ** 3).sum()), normal(3, 256), mesh=mesh, rtol=1e-5)


def test_planes_of_real_numbers_whose_last_dimension_is_split():
    for transform in (jnp.fft.rfft2, jnp.fft.rfft):
        check_inside(lambda x: split(transform(split(x, None, "x")), None, "x"), normal(3, 512), sent_by=FFT, rtol=1e-5)  # noqa: B023
    power = lambda x: (jnp.abs(jnp.fft.rfft(x) * jnp.arange(257)) ** 2).sum()  # noqa: E731
    agreed(power, normal(512), spec=P("x"), rtol=1e-5)


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
def test_four_steps_with_batches(mesh):
    spec = P(None, mesh.axis_names[::-1])
    plan = agreed(jnp.fft.fft, complex_(2, 128), spec=spec, out=spec, mesh=mesh, rtol=1e-5)
    assert plan.wire_bytes == 3 * 7 / 8 * 32 * 8


TRANSFORMS = {
    "fft": (jnp.fft.fft, True),
    "ifft2": (jnp.fft.ifft2, True),
    "fftn": (jnp.fft.fftn, True),
    "rfft": (jnp.fft.rfft, False),
    "rfft2": (jnp.fft.rfft2, False),
    "rfftn": (jnp.fft.rfftn, False),
    "irfft": (lambda x: jnp.fft.irfft(x, 9), True),
    "irfft2": (jnp.fft.irfft2, True),
    "irfftn": (lambda x: jnp.fft.irfftn(x, (5, 12, 9)), True),
}
SPECS = [("x", "y", "z"), (None, None, ("x", "y", "z")), (None, ("z", "x"), "y"), (("y", "x"), None, "z")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_uneven_dimensions(name, spec):
    transform, is_complex = TRANSFORMS[name]
    x = complex_(5, 12, 9) if is_complex else normal(5, 12, 9)
    check_inside(lambda x: transform(split(x, *spec)), x, sent_by=FFT if "n" in name else None, mesh=CUBE, rtol=2e-5)


def test_gradients_of_transforms():
    def loss(x):
        return (jnp.abs(jnp.fft.rfft2(split(x, "x"))) ** 2 * jnp.arange(6.0)).sum() + jnp.fft.irfft(split(x, "x"))[3, 2]

    check_inside(jax.grad(loss), normal(13, 10), rtol=1e-4)


def test_of_all_schedules_the_one_that_sends_least_is_taken():
    for kind, rank in itertools.product(("FFT", "RFFT", "IRFFT"), (1, 2, 3)):
        for shards in itertools.product((1, 2, 4), repeat=3):
            shape, result = (5, 16, 16), (5, 16, 9 if kind == "RFFT" else 16)
            problem = Problem(
                kind, shape, result, rank, shards, (4 if kind == "RFFT" else 8, 4 if kind == "IRFFT" else 8)
            )
            ways = schedules(problem)
            assert schedule(problem) in ways and all(sum(schedule(problem).sent) <= sum(w.sent) for w in ways)
            assert moved(problem) is not None


@pytest.mark.slow
def test_random_transforms_send_what_the_plan_says():
    rng = np.random.default_rng(0)
    for _ in range(30):
        shape = tuple(int(n) * 4 for n in rng.integers(1, 5, 3))
        spec = P(*rng.permutation(["x", "y", None]))
        transform, is_complex = TRANSFORMS[list(TRANSFORMS)[rng.integers(6)]]
        agreed(transform, complex_(*shape) if is_complex else normal(*shape), spec=spec, mesh=PLANE, rtol=1e-5)


# Linear algebra.


def positive(x):
    return x @ x.mT + 5 * jnp.eye(x.shape[-1])


SOLVERS = {
    "cholesky": lambda x: jnp.linalg.cholesky(positive(x)),
    "triangular solve": lambda x: lax.linalg.triangular_solve(jnp.tril(positive(x)), x, left_side=True, lower=True),
    "solve": lambda x: jnp.linalg.solve(positive(x), x),
    "qr": lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
    "eigh": lambda x: jnp.linalg.eigh(positive(x))[0],
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "inverse": lambda x: jnp.linalg.inv(positive(x)),
    "determinant": lambda x: jnp.linalg.slogdet(positive(x))[1],
}


@pytest.mark.dear
@pytest.mark.parametrize("name", SOLVERS)
def test_problems_in_uneven_batches(name):
    plan = check_inside(lambda x: SOLVERS[name](split(x, "x")), normal(13, 3, 3), rtol=1e-4)
    assert "@x" in str(plan)


# Random numbers.


def draws(key, rows):
    """Numbers of several distributions, in rows."""
    shape, several = (rows, 3), jax.random.split(key, rows)
    return jax.random.bits(key, shape), jax.random.normal(key, shape), jax.vmap(jax.random.bits)(several)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("count", [2, 8, *rarely(1, 4)])
@pytest.mark.more("random numbers on meshes of several sizes")
def test_random_numbers_do_not_depend_on_the_number_of_devices(count, implementation):
    def function(key):
        return [split(x, "x") for rows in (16, 13) for x in draws(key, rows)]

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))
    check_inside(function, jax.random.key(7, impl=implementation), mesh=mesh)  # where work is dear, keys are split up
    plan = check_inside(function, jax.random.key(7, impl=implementation), mesh=mesh, layouts="local")
    assert {c.cause for c in plan.collectives if c.wire_bytes} <= {"func.return"}, plan
