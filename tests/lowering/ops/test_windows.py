"""Windows over split dimensions: convolutions, pooling and their gradients, in padded blocks on eight devices."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from partitioned_ops import CUBE, LINE, PLANE, op
from random_programs.windows import SCATTERED, random_convolution, random_pool, random_select_and_scatter
from uneven_blocks import PARTITIONED, assert_close, split
from wire_totals import OPTIONS

import sdy_jax as sdy
from sdy_jax.lowering.targets.cost_model import CostModel
from sdy_jax.plan.profile import collectives_in_hlo, totals

pytestmark = pytest.mark.usefixtures("poisoned_padding")

LAYOUT = ("NHWC", "HWIO", "NHWC")
WITHOUT_MERGING = {"compiler_options": OPTIONS["compiler_options"]}
WORK_COUNTS = CostModel(flop=1e3)
"""With which nothing is gathered to be computed everywhere."""


def floats(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def integers(*shape):
    return np.random.default_rng(sum(shape)).integers(-9, 9, shape).astype(np.int32)


def run(function, *args, mesh=LINE, costs=WORK_COUNTS, rtol=0.0, layouts="global"):
    """Compares a function with itself on one device; its bytes as planned with those as compiled."""
    partitioned = sdy.partition(function, mesh=mesh, costs=costs, layouts=layouts, **WITHOUT_MERGING)
    token = PARTITIONED.set(True)
    plan, compiled = partitioned.plan(*args), partitioned.lower(*args).compile()
    found = partitioned(*args)
    PARTITIONED.reset(token)
    assert_close(found, jax.jit(lambda *xs: function(*xs))(*args), rtol)
    if jnp.bfloat16 not in [x.dtype for x in args]:  # which the CPU sends as f32
        assert plan.wire_bytes == pytest.approx(totals(collectives_in_hlo(compiled.as_text())).wire_bytes), plan
    return plan, compiled


def flops(compiled):
    return compiled.cost_analysis()["flops"]


def alone(function, *args):
    """The flops of one device without others."""
    return flops(jax.jit(lambda *xs: function(*xs)).lower(*args).compile())


def convolution(x, kernel, strides=(1, 1), padding="SAME", **options):
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT, **options)


def transposed(x, kernel):
    return lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=LAYOUT)


def max_pool(x, window=2, stride=2, padding="VALID"):
    sizes, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, sizes, strides, padding)


def mean_pool(x, window=2, stride=2):
    return lax.reduce_window(x, 0.0, lax.add, (1, window, window, 1), (1, stride, stride, 1), "SAME") / window**2


IMAGE, KERNEL = floats(4, 64, 32, 8), floats(3, 3, 8, 8)
ROW = IMAGE[:, 0].nbytes
COUNTED = {
    "3x3": (lambda x: convolution(x, KERNEL), 2),
    "3x3 with stride 2": (lambda x: convolution(x, KERNEL, (2, 2)), 1),
    "3x3 of dilation 2": (lambda x: convolution(x, KERNEL, rhs_dilation=(2, 2)), 4),
    "3x3 of each feature": (lambda x: convolution(x, KERNEL[:, :, :1], feature_group_count=8), 2),
    "1x1": (lambda x: convolution(x, KERNEL[:1, :1]), 0),
    "2x2 with stride 2": (lambda x: convolution(x, KERNEL[:2, :2], (2, 2)), 0),
    "transposed 2x2": (lambda x: transposed(x, KERNEL[:2, :2]), 0),
    "max pool 2x2": (max_pool, 0),
    "max pool 3x3 with stride 2": (lambda x: max_pool(x, 3, 2, "SAME"), 1),
    "mean pool 2x2": (mean_pool, 0),
    "gradient of max pool 2x2": (jax.grad(lambda x: (max_pool(x) ** 2).sum()), 0),
    "gradient of mean pool 2x2": (jax.grad(lambda x: (mean_pool(x) ** 2).sum()), 0),
    "gradient of max pool 3x3": (jax.grad(lambda x: (max_pool(x, 3, 2, "SAME") ** 2).sum()), 4.5),
    "gradient of mean pool 3x3": (jax.grad(lambda x: (mean_pool(x, 3, 2) ** 2).sum()), 1.5),
    "3x3 after a pad": (
        lambda x: convolution(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), KERNEL, (1, 1), "VALID"),
        2,
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_images_split_over_rows_send_the_rows_that_windows_reach(name):
    function, rows = COUNTED[name]
    plan, compiled = run(lambda x: split(function(split(x, None, "x")), None, "x"), IMAGE, costs=None, rtol=1e-5)
    assert plan.wire_bytes == rows * ROW, plan
    assert flops(compiled) < alone(function, IMAGE) / 8 * 1.3 + 1e4  # windows at edges are computed on both sides


@pytest.mark.parametrize("name", ["3x3", "3x3 with stride 2", "3x3 of dilation 2"])
def test_rows_of_neighbours_stand_beside_a_block_which_is_written_nowhere(name):
    """Compilers for TPUs read such a concatenation within the convolution."""
    function = lambda x: split(COUNTED[name][0](split(x, None, "x")), None, "x")  # noqa: E731
    token = PARTITIONED.set(True)
    text = sdy.partition(function, mesh=LINE).lower(IMAGE).as_text()
    PARTITIONED.reset(token)
    assert "stablehlo.concatenate" in text
    assert not any(op in text for op in ("stablehlo.dynamic_update_slice", "stablehlo.pad"))


def test_both_gradients_of_a_convolution():
    """Of its input nothing more than forward is sent; a term of the kernel's is added up."""

    def gradients(x, kernel, stride):
        def total(x, kernel):
            return (convolution(split(x, None, "x"), kernel, (stride, stride)) ** 2).sum()

        return jax.grad(total, (0, 1))(x, kernel)

    summed = 2 * 7 / 8 * KERNEL.nbytes
    for stride, rows in ((1, 6), (2, 2.5)):
        function = functools.partial(gradients, stride=stride)
        plan, compiled = run(function, IMAGE, KERNEL, costs=None, rtol=1e-4)
        assert plan.wire_bytes == rows * ROW + summed, plan
        assert flops(compiled) < alone(function, IMAGE, KERNEL) / 8 * 1.1


def test_zeros_between_the_elements_of_a_dilated_input_are_not_computed_with():
    function = lambda x: transposed(split(x, None, "x"), KERNEL)  # noqa: E731
    without_holes = alone(lambda x: transposed(x, KERNEL), IMAGE) / 8
    assert flops(run(function, IMAGE, rtol=1e-5)[1]) < without_holes * 1.2


def test_corners_come_with_the_second_dimension():
    def function(x):
        return convolution(split(x, None, "x", "y", mesh=PLANE), KERNEL)

    plan, _ = run(function, IMAGE, mesh=PLANE, costs=None, rtol=1e-5)
    rows, columns = 4 * 8 * 8 * 4, 2 * 4 * (32 + 2) * 8 * 4
    assert plan.wire_bytes == rows + columns


SPLIT_KERNELS = {
    "plain": {},
    "stride": {"strides": (2, 3)},
    "dilated kernel": {"rhs_dilation": (2, 1)},
    "dilated image": {"lhs_dilation": (2, 3), "padding": ((4, 3), (1, 2))},
    "less than the image": {"padding": ((-1, 3), (0, -2))},
    "groups": {"feature_group_count": 2},
}


@pytest.mark.parametrize("rows", [8, 5, 3])
@pytest.mark.parametrize("name", SPLIT_KERNELS)
def test_kernels_split_over_rows(name, rows):
    """Each device has a term of every result; with gradients, of which the kernel's is split alike."""
    features = SPLIT_KERNELS[name].get("feature_group_count", 1)
    x, kernel = integers(2, 16, 13, 4).astype(float), integers(rows, 3, 4 // features, 6).astype(float)

    def function(x, kernel):
        y, pull = jax.vjp(lambda x, k: convolution(x, split(k, "x"), **SPLIT_KERNELS[name]), x, kernel)
        return y, pull(y % 5)

    run(function, x, kernel)


def test_a_kernel_split_over_both_dimensions_out_of_a_batch():
    x, kernel = integers(4, 12, 13, 4).astype(float), integers(5, 4, 4, 6).astype(float)

    def function(x, kernel):
        return convolution(split(x, "y", mesh=CUBE), split(kernel, "z", "x", mesh=CUBE))

    run(function, x, kernel, mesh=CUBE)


def test_a_kernel_larger_than_its_images_is_not_gathered():
    x, kernel = floats(1, 16, 16, 8), floats(16, 16, 8, 8)
    plan, _ = run(lambda x, k: convolution(x, split(k, "x")), x, kernel, costs=None, rtol=1e-5)
    assert plan.wire_bytes == 2 * 7 / 8 * x.nbytes  # gathering the kernel: 7/8 of 16 times as much


def test_a_kernel_smaller_than_its_images_is_gathered():
    plan, _ = run(
        lambda x, k: convolution(split(x, "x"), split(k, "x")),
        floats(8, 32, 32, 8),
        floats(8, 3, 8, 8),
        costs=None,
        rtol=1e-5,
    )
    assert plan.wire_bytes == 7 / 8 * 8 * 3 * 8 * 8 * 4


def test_patches_of_images_split_over_rows():
    """As vision transformers read them: fewer rows of patches than rows in a patch."""
    x, kernel = floats(2, 48, 16, 3), floats(8, 8, 3, 4)

    def function(x, kernel):
        y, pull = jax.vjp(lambda x, k: convolution(split(x, None, "x"), k, (8, 8), "VALID"), x, kernel)
        return y, pull(jnp.sin(y))

    run(function, x, kernel, rtol=1e-4)


def test_one_window_over_everything_is_a_reduction():
    def function(x):
        sizes = (1, *x.shape[1:3], 1)
        pooled = lax.reduce_window(x, 1.0, lax.add, sizes, (1, 1, 1, 1), "VALID")
        return pooled, lax.reduce_window(x, -jnp.inf, lax.max, sizes, sizes, "VALID")

    plan, _ = run(lambda x: function(split(x, None, "x")), IMAGE[:, :61], costs=None, rtol=1e-5, layouts="local")
    assert {c.kind for c in plan.collectives if c.wire_bytes} == {"all_reduce"}
    assert plan.wire_bytes == 2 * 2 * 7 / 8 * 4 * 8 * 4


def scattered_to_one(direction, x, source, window):
    """The op that puts `source`, of one element per batch, to what a single window over rows and columns selects."""
    types = ["x".join([*map(str, a.shape), "f32"]) for a in (x, source)]
    sizes = ", ".join(map(str, (1, *window)))
    options = {"padding": [[0, 0]] * 3, "rank": 3, "strides": "1, 1, 1"}
    return op(SCATTERED.format(window=sizes, direction=direction, x=types[0], source=types[1], **options), types[0])


@pytest.mark.parametrize(
    ("direction", "spec"),
    [("GE", ("x", None)), ("GE", (None, "x")), ("GT", ("y", "x")), ("LE", ("x", "y")), ("LT", ("y", None))],
    ids=str,
)
def test_the_element_that_one_window_selects_is_found_by_reductions(direction, spec):
    """Also among equal ones, with NaN before, between and behind the others, and among nothing but infinities."""
    mesh = PLANE if "y" in spec else LINE
    x, source = integers(6, 13, 5).astype(np.float32), integers(6, 1, 1).astype(np.float32)
    x[1, 3, 1] = x[1, 7, 4] = x[2, 0, 0] = x[3, 12, 4] = x[4] = np.nan
    x[5] = -np.inf
    function = scattered_to_one(direction, x, source, (13, 5))
    run(lambda x, source: function(split(x, None, *spec, mesh=mesh), source, np.float32(1)), x, source, mesh=mesh)


def test_the_gradient_of_global_max_pooling_sends_numbers_of_its_results():
    def function(x):
        return lax.reduce_window(split(x, None, "x"), -jnp.inf, lax.max, (1, 64, 32, 1), (1, 1, 1, 1), "VALID")

    gradient = jax.grad(lambda x: (function(x) ** 2).sum())
    plan, compiled = run(lambda x: split(gradient(x), None, "x"), IMAGE, costs=None, rtol=1e-5)
    assert plan.wire_bytes == 4 * (2 * 7 / 8 * 4 * 8 * 4), plan  # the maximum, and who has it: values, positions, NaN
    assert flops(compiled) < IMAGE.size / 8 * 30


def test_a_pad_is_a_window_s_padding_only_if_it_adds_nothing():
    """By zeros before a sum of products or elements, by -inf before a maximum; space only, and nothing taken away."""
    margins = [(0, 0), (2, 1), (1, 0), (0, 0)]

    def function(x):
        x = split(x, None, "x")
        yield convolution(jnp.pad(x, margins, constant_values=1), KERNEL)
        yield convolution(jnp.pad(x, [(1, 0), (1, 1), (0, 0), (0, 0)]), KERNEL)
        yield convolution(lax.pad(x, 0.0, [(0, 0, 0), (1, -2, 1), (0, 0, 0), (0, 0, 0)]), KERNEL)
        yield max_pool(jnp.pad(x, margins)), max_pool(jnp.pad(x, margins, constant_values=-jnp.inf), 3, 1, "SAME")
        yield mean_pool(lax.pad(x, 0.0, [(0, 0, 0), (2, 0, 1), (0, 0, 0), (0, 0, 0)]), 3)

    run(lambda x: list(function(x)), floats(1, 13, 6, 8) - 2, rtol=1e-5)


def test_windows_of_nothing_but_negative_infinity_have_the_same_gradient():
    x = np.where(np.arange(32)[:, None, None] % 9 < 6, -np.inf, floats(1, 32, 6, 2))
    run(jax.grad(lambda x: max_pool(split(x, None, "x"), 3, 2, "SAME").sum()), x)


# Numbers.

RANDOM = {
    "convolution": (random_convolution, 4),
    "pool": (random_pool, 5),
    "select and scatter": (random_select_and_scatter, 4),
}


def check_random(family, seeds):
    make, _ = RANDOM[family]
    for seed in seeds:
        program = make(np.random.default_rng([seed, len(family)]))
        if program is None:
            continue
        function = functools.partial(program.function, functools.partial(split, mesh=program.mesh))
        try:
            run(function, *program.arguments, mesh=program.mesh)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {program.text}") from error


@pytest.mark.dear
@pytest.mark.parametrize("family", RANDOM)
def test_random_windows(family):
    check_random(family, range(RANDOM[family][1]))


LEFT_OUT = {
    "convolution": {
        142: "XLA (jaxlib 0.10 to 0.12) ends the process at such a convolution on one device, too",
        170: "all but the padding is multiplied by nothing, so that XLA sends less than planned",
        184: "two permutes send what XLA finds to be equal, so that it sends one",
    },
    "pool": {100: "all windows lie in the padding, so that XLA sends less than planned"},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", RANDOM)
def test_more_random_windows(family):
    if family == "select and scatter" and "xla_cpu_use_fusion_emitters=false" not in os.environ["XLA_FLAGS"]:
        pytest.skip("XLA's fusion emitters for CPUs (jaxlib 0.10 to 0.12) compute other results, on one device, too")
    check_random(family, set(range(100, 300)) - set(LEFT_OUT.get(family, {})))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "complex64"])
def test_element_types(dtype):
    x, kernel = (jnp.asarray(integers(*shape)).astype(dtype) for shape in ((1, 13, 5, 2), (3, 3, 2, 2)))

    def function(x, kernel):
        x = split(x, None, "x")
        pooled = lax.reduce_window(x, jnp.zeros((), x.dtype), lax.add, (1, 3, 1, 1), (1, 2, 1, 1), "SAME")
        return convolution(x, kernel), pooled

    run(function, x, kernel)


@pytest.mark.parametrize("size", [1, 3, 8, 9])
def test_few_rows_on_eight_devices(size):
    def function(x, kernel):
        return convolution(split(x, None, "x"), kernel), max_pool(split(x, None, "x"), 1, 1)

    run(function, integers(2, size, 4, 2).astype(np.float32), integers(5, 3, 2, 2).astype(np.float32))


def test_sub_axes_and_features_split_beside_space():
    x, kernel = integers(2, 13, 6, 4).astype(np.float32), integers(3, 3, 4, 4).astype(np.float32)

    def function(x, kernel):
        x = split(x, None, "z", "y", "x", mesh=CUBE)
        return jax.vjp(convolution, x, kernel)[1](split(jnp.cos(x).round(), None, "z", None, "x", mesh=CUBE))

    run(function, x, kernel, mesh=CUBE)


REVERSED = """stablehlo.convolution(%a, %b) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f],
  window = {{stride = [2], pad = [[2, 1]], rhs_dilate = [2], reverse = [true]}}
  {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}
  : (tensor<2x{n}x3xf32>, tensor<{k}x3x2xf32>) -> tensor<2x{r}x2xf32>"""


@pytest.mark.dear
@pytest.mark.parametrize(("size", "window"), [(21, 3), (21, 11)])
def test_reversed_windows(size, window):
    """Also where the kernel spans more than the results do."""
    results = (size + 3 - (window - 1) * 2 - 1) // 2 + 1
    convolved = op(REVERSED.format(n=size, k=window, r=results), f"2x{results}x2xf32")
    x, kernel = integers(2, size, 3).astype(np.float32), integers(window, 3, 2).astype(np.float32)
    plan, _ = run(lambda x, k: convolved(split(x, None, "x"), k), x, kernel)
    assert not plan.notes
    run(lambda x, k: convolved(x, split(k, "x")), x, kernel)


# A model.


def u_net(weights, x):
    """Down and up once, with a skip; images `[batch, rows, columns, 4]`."""
    a = jax.nn.relu(convolution(x, weights["in"]))
    b = jax.nn.relu(convolution(max_pool(a), weights["down"]))
    up = transposed(b, weights["up"])
    return convolution(jax.nn.relu(convolution(jnp.concatenate([a, up], -1), weights["both"])), weights["out"])


WEIGHTS = {
    "in": floats(3, 3, 4, 8) / 6,
    "down": floats(3, 3, 8, 16) / 8,
    "up": floats(2, 2, 16, 8) / 8,
    "both": floats(3, 3, 16, 8) / 12,
    "out": floats(3, 3, 8, 4) / 8,
}


def step(weights, x, y):
    loss, gradients = jax.value_and_grad(lambda w: ((u_net(w, x) - y) ** 2).mean())(weights)
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


ROWS, TILES = P(None, "x"), P(None, "x", "y")


@pytest.mark.parametrize(
    ("function", "spec"),
    [(u_net, ROWS), (u_net, TILES), (step, ROWS), pytest.param(step, TILES, marks=pytest.mark.slow)],
)
def test_a_u_net_split_in_space_sends_and_computes_no_more_than_jit(function, spec):
    mesh = LINE if len(spec) == 2 else PLANE
    args = (WEIGHTS, *(floats(2, 32, 32, 4) for _ in range(2 if function is step else 1)))
    specs = (P(), *(spec for _ in args[1:]))
    ours = sdy.partition(function, mesh=mesh, in_shardings=specs)
    assert_close(ours(*args), jax.jit(function)(*args), 1e-4)
    placed = tuple(NamedSharding(mesh, s) for s in specs)
    mine, theirs = (f.lower(*args).compile() for f in (ours, jax.jit(function, in_shardings=placed)))
    sent = [totals(collectives_in_hlo(c.as_text())).wire_bytes for c in (mine, theirs)]
    print(f"{function.__name__} {spec}: wire bytes {sent}, flops {[flops(mine), flops(theirs)]}")
    assert sent[0] <= sent[1] and flops(mine) <= flops(theirs) * 1.05
    assert not ours.plan(*args).notes
