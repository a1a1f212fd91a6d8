"""What is emitted in another form for TPUs: products are made as they are sent."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from partitioned_ops import LINE
from partitioned_text import run_partitioned
from sharding_dump import parse

import sdy_jax as sdy
from sdy_jax.calls import planned_call
from sdy_jax.ir.graph import Graph
from sdy_jax.ir.meshes import Mesh
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.lowering.ops.collectives.movement import Numbers
from sdy_jax.lowering.ops.collectives.reductions import ScatterForm, as_rows, scattered_as
from sdy_jax.lowering.ops.products import multiplied
from sdy_jax.lowering.ops.registry import LocalOp
from sdy_jax.lowering.targets.gpu import GPU
from sdy_jax.lowering.targets.target import UNKNOWN
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.runtime.meshes import Forms, RefinedMesh


@pytest.fixture
def tpus(monkeypatch):
    """The forms for TPUs, of arrays of any size, on whatever devices there are."""
    monkeypatch.setattr(planned_call, "forms_for", lambda mesh: TPU.forms)
    for least in ("LEAST_BYTES", "LEAST_MOVED"):
        monkeypatch.setattr(reductions, least, 0)


@pytest.mark.usefixtures("tpus")
@pytest.mark.parametrize(
    ("shape", "dim", "parts", "found"),
    [
        ((512, 3, 8, 64), 0, 8, True),
        ((2, 512, 8, 64), 1, 8, True),
        ((512, 8, 128), 0, 8, False),  # whole lanes
        ((512, 1, 64), 0, 8, False),  # one dimension alone
        ((8, 64, 512), 2, 8, False),  # nothing behind
        ((16, 32, 8, 64), 0, 8, False),  # two rows for each device
        ((512, 3, 2, 64), 0, 2, False),  # a part fills lanes
    ],
)
def test_what_fills_lanes_together_only_is_one_dimension(shape, dim, parts, found):
    assert as_rows(shape, 4, dim, parts, TPU.forms) is found


def test_small_arrays_keep_the_dimensions(monkeypatch):
    assert as_rows((512, 8, 64), 4, 0, 8, TPU.forms)
    assert not as_rows((512, 8, 64), 2, 0, 8, TPU.forms)


def test_other_devices_keep_the_dimensions():
    assert not as_rows((512, 3, 8, 64), 4, 0, 8, GPU.forms)


SENT = [
    # bytes per element, shape, dimension, parts, and what is scattered: its shape, dimension, and whether in tiles
    (2, (2048, 64), 0, 16, (16, 128, 64), 0, False),  # the first dimension
    (2, (512, 3, 8, 64), 0, 8, (512, 1536), 0, True),
    (2, (512, 3, 8, 64), 0, 4, (512, 1536), 0, True),  # 128 rows in lanes are an odd number of tiles
    (2, (512, 3, 8, 64), 0, 2, (2, 256, 3, 8, 64), 0, False),
    (4, (512, 3, 8, 64), 0, 4, (4, 128, 3, 8, 64), 0, False),
    (2, (64, 8, 16, 128), 1, 8, (64, 128, 128), 1, True),  # rows of whole lanes
    (2, (2, 3, 8, 16, 128), 2, 8, (6, 128, 128), 1, True),
    (2, (64, 64, 128), 1, 8, (64, 8192), 1, True),  # half of a tile
    (4, (64, 64, 128), 1, 8, (64, 64, 128), 1, True),
    (2, (64, 8, 128, 4), 1, 8, (64, 4096), 1, True),  # no whole lanes
    (2, (64, 4096), 1, 16, (64, 4096), 1, True),  # one tile for each way around a ring
    (2, (64, 2048), 1, 16, (64, 16, 128), 1, False),
    (4, (64, 2048), 1, 16, (64, 2048), 1, True),
    (2, (64, 2560), 1, 8, (64, 8, 320), 1, False),
    (2, (16, 32, 8, 64), 2, 8, (512, 8, 64), 1, False),
    (2, (3, 3, 256, 1024), 3, 8, (3, 3, 256, 1024), 3, True),  # a convolution's kernel
    (2, (4, 64, 64), 1, 8, (4, 8, 8, 64), 1, False),  # four rows in front are no tile
    (4, (2, 2, 8, 64, 32), 2, 8, (2, 2, 8, 1, 64, 32), 2, False),
    (4, (2, 3, 8, 64, 32), 2, 8, (6, 16384), 1, True),
    (2, (4096, 128256), 0, 8, (8, 512, 128256), 0, False),  # 6 * 167 tiles
    (2, (4096, 128000), 0, 8, (4096, 128000), 0, True),  # 1000 tiles
    (2, (64,), 0, 8, (64,), 0, True),
]


@pytest.mark.usefixtures("tpus")
@pytest.mark.parametrize(("itemsize", "shape", "dim", "parts", "sent", "at", "is_tiled"), SENT)
def test_sums_are_scattered_as_they_stay_scatters(itemsize, shape, dim, parts, sent, at, is_tiled):
    assert scattered_as(shape, itemsize, dim, parts, TPU.forms) == ScatterForm(sent, at, is_tiled)


def test_small_sums_are_scattered_as_they_are(monkeypatch):
    assert scattered_as((16, 8, 64, 4), 2, 1, 8, TPU.forms) == ScatterForm((16, 2048), 1)
    assert scattered_as((8, 8, 64, 4), 2, 1, 8, TPU.forms) == ScatterForm((8, 8, 64, 4), 1)


def test_other_devices_scatter_sums_as_they_are():
    assert scattered_as((64, 8, 128, 4), 2, 1, 8, GPU.forms) == ScatterForm((64, 8, 128, 4), 1)


SHAPES = {"b": 64, "s": 8, "d": 64, "e": 2, "n": 3, "h": 2, "k": 4}
"""The sizes of dimensions by their letters; `b` is split."""

SCATTERED = [
    # einsum, where the result is split, the shapes of products, and of what is scattered
    ("bsd,bsnhk->dnhk", P("x"), "64,24", "8,8,24"),
    ("bsnhk,bsd->dnhk", P("x"), "64,24", "8,8,24"),
    ("sbd,sbhk->sdhk", P(None, "x"), "8,64,8", "8,64,8"),  # a batch of products
    ("bsd,bsnhk->dknh", P("x"), "3,2,4,64", "3,2,4,64"),  # columns in another order: transposed afterwards
    ("bsde,bsk->dek", P("x"), "64,2,4", "8,8,8"),  # columns of both operands
    ("bsd,bsnhk->nhkd", P(None, None, None, "x"), "3,2,4,64", "3,2,4,64"),
]


@pytest.mark.usefixtures("tpus")
@pytest.mark.parametrize(("equation", "spec", "product", "scattered"), SCATTERED)
def test_products_are_scattered_as_matrices(equation, spec, product, scattered):
    rng = np.random.default_rng(0)
    operands = equation.partition("->")[0].split(",")
    x, y = (jnp.asarray(rng.normal(size=[SHAPES[c] for c in names]), jnp.float32) for names in operands)
    specs = tuple(P(*("x" if c == "b" else None for c in names)) for names in operands)

    def gradient(x, y):
        return jnp.einsum(equation, x, y)

    step = sdy.partition(gradient, mesh=LINE, in_shardings=specs, out_shardings=spec)
    np.testing.assert_allclose(step(x, y), gradient(x, y), rtol=1e-4, atol=1e-4)
    text = str(jax.make_jaxpr(step)(x, y))
    assert re.findall(r"f32\[([\d,]+)\] = dot_general", text) == [product]
    assert operand_of("reduce_scatter", text) == scattered


TRANSPOSED = [
    # operands, dimension numbers, the transposition before the scatter, and the shape as which the product is made
    ((5, 3, 2, 4), (5, 64), (((0,), (0,)), ((), ())), (3, 0, 1, 2), "64,24"),
    ((5, 64), (5, 3, 2, 4), (((0,), (0,)), ((), ())), (0, 1, 2, 3), "64,24"),
    ((5, 64), (3, 2, 5, 4), (((0,), (2,)), ((), ())), (0, 1, 2, 3), "64,3,2,4"),  # apart in the operand
    ((5, 3, 2, 4), (5, 64), (((0,), (0,)), ((), ())), (3, 0, 2, 1), "3,2,4,64"),  # in another order
    ((5, 3, 4), (5, 4, 64), (((0,), (0,)), ((2,), (1,))), (2, 1, 0), "4,3,64"),  # one of them a batch
    ((4, 5, 3, 2), (4, 5, 64), (((1,), (1,)), ((0,), (0,))), (0, 3, 1, 2), "4,64,6"),  # behind a batch
    ((4, 5, 3), (4, 5, 64), (((1,), (1,)), ((0,), (0,))), (0, 2, 1), "4,64,3"),  # operands in each other's place
]


@pytest.mark.usefixtures("tpus")
@pytest.mark.parametrize(("lhs", "rhs", "numbers", "permutation", "shape"), TRANSPOSED)
def test_products_are_made_as_they_are_sent(lhs, rhs, numbers, permutation, shape):
    x, y = (jnp.asarray(np.random.default_rng(0).normal(size=of), jnp.float32) for of in (lhs, rhs))
    wanted = jax.lax.dot_general(x, y, numbers)
    run = product_in(scattered(wanted.shape, permutation, permutation.index(wanted.shape.index(64))), numbers, TPU)
    np.testing.assert_allclose(run(x, y), wanted, rtol=1e-5, atol=1e-6)
    assert re.findall(r"f32\[([\d,]+)\] = dot_general", str(jax.make_jaxpr(run)(x, y))) == [shape]


@pytest.mark.usefixtures("tpus")
def test_operands_keep_their_precisions_in_each_others_places():
    numbers, x, y = (((0,), (0,)), ((), ())), jnp.ones((5, 3)), jnp.ones((5, 64))
    precisions = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    run = product_in(scattered((3, 64), (1, 0), 0), numbers, TPU, precisions)
    assert "precision=(Precision.DEFAULT, Precision.HIGHEST)" in str(jax.make_jaxpr(run)(x, y))


def test_on_unknown_devices_operands_keep_their_places():
    run = product_in(scattered((3, 64), (1, 0), 0), (((0,), (0,)), ((), ())), UNKNOWN)
    text = str(jax.make_jaxpr(run)(jnp.ones((5, 3)), jnp.ones((5, 64))))
    assert "f32[3,64] = dot_general" in text and "transpose" not in text


def product_in(module, numbers, family, precisions=None):
    """What the first op of a module would be as a product."""
    op = Graph(module.operation).main.blocks[0].ops[0]
    local = LocalOp(op, RefinedMesh.of(Mesh.of(x=8), [], family.forms), (None,), (None,), module)  # which lives as long
    return lambda x, y: multiplied(local, (x, y), Numbers(*numbers), precisions, np.float32)


def scattered(shape, permutation, dim):
    """A module with an op whose result is transposed and scattered."""
    types = ["tensor<" + "".join(f"{n}x" for n in of) + "f32>" for of in (shape, [shape[d] for d in permutation])]
    dims = ", ".join('{"x"}' if d == dim else "{}" for d in range(len(shape)))
    return parse(f"""
    sdy.mesh @mesh = <["x"=8]>
    func.func @main(%x: {types[0]}) -> {types[1]} {{
      %p = stablehlo.negate %x : {types[0]}
      %t = stablehlo.transpose %p, dims = {list(permutation)} : ({types[0]}) -> {types[1]}
      %r = sdy.reduce_scatter [{dims}] %t out_sharding=<@mesh, [{dims}]> : {types[1]}
      return %r : {types[1]}
    }}""")


TURNED = """
sdy.mesh @mesh = <["x"=2, "y"=4]>
func.func @main(%x: tensor<4x16x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}, {}]>})
    -> (tensor<6x4x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}, {"y"}]>}) {
  %a = sdy.replicated_to_unreduced {"x", "y"} %x out_sharding=<@mesh, [{}, {}, {}], unreduced={"x", "y"}>
    : tensor<4x16x6xf32>
  %0 = sdy.reduce_scatter [{}, {}, {"x"}] %a out_sharding=<@mesh, [{}, {}, {"x"}], unreduced={"y"}> : tensor<4x16x6xf32>
  %1 = stablehlo.transpose %0, dims = [2, 0, 1] {sdy.sharding = #sdy.sharding_per_value<[<@mesh,
    [{"x"}, {}, {}], unreduced={"y"}>]>} : (tensor<4x16x6xf32>) -> tensor<6x4x16xf32>
  %2 = sdy.reduce_scatter [{}, {}, {"y"}] %1 out_sharding=<@mesh, [{"x"}, {}, {"y"}]> : tensor<6x4x16xf32>
  return %2 : tensor<6x4x16xf32>
}"""


@pytest.mark.parametrize("are_tpus", [True, False])
def test_what_a_scatter_left_is_scattered_before_it_is_transposed(are_tpus):
    """XLA would join the transposition and the second scatter."""
    forms = TPU.forms if are_tpus else Forms()
    module, x = parse(TURNED), np.random.default_rng(2).normal(size=(4, 16, 6)).astype(np.float32)
    (got,) = run_partitioned(module, [x], forms)
    np.testing.assert_array_equal(got, x.transpose(2, 0, 1))
    text = str(jax.make_jaxpr(lambda x: run_partitioned(module, [x], forms))(x))
    assert re.findall(r"f32\[([\d,]+)\] = reduce_scatter", text) == (
        ["4,16,3", "4,4,3"] if are_tpus else ["4,16,3", "3,4,4"]
    )


@pytest.mark.usefixtures("tpus")
def test_what_is_gathered_has_its_operands_in_place():
    """A gradient of experts, each on one device."""
    rng = np.random.default_rng(1)
    x, y = (jnp.asarray(rng.normal(size=(8, 32, n)), jnp.float32) for n in (6, 10))

    def gradient(x, y):
        return jnp.swapaxes(jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))), 1, 2)

    step = sdy.partition(gradient, mesh=LINE, in_shardings=P("x"), out_shardings=P())
    np.testing.assert_allclose(step(x, y), gradient(x, y), rtol=1e-4, atol=1e-5)
    assert re.findall(r"f32\[([\d,]+)\] = dot_general", str(jax.make_jaxpr(step)(x, y))) == ["1,10,6"]


def operand_of(primitive, text):
    """The shape of what an op of a jaxpr takes."""
    (name,) = re.findall(rf"= {primitive}\[.*?\n?\s*\] (\w+)", text, re.DOTALL)
    (shape,) = re.findall(rf"\b{name}:f32\[([\d,]+)\]", text)
    return shape
