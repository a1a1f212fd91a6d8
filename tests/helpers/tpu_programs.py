"""Programs that compile for slices of TPUs; run by `test_tpu_compile`, in a process that has libtpu."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import op_cases
import pytest
import relayout_programs
import reshape_programs
import slice_programs
import uneven_blocks
import written_collectives
from agreement import sorted_downwards
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox import ops as megablox
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec as P
from memory_programs import step_of, unrolled
from tpu_plugin import assert_compiles, failure, shapes, tpu_mesh
from written_collectives import workloads

import sdy_jax as sdy
from sdy_jax.ir.meshes import AxisRef, Mesh
from sdy_jax.lowering.ops.collectives import reductions
from sdy_jax.lowering.targets.tpu import TPU
from sdy_jax.plan.profile import collectives_in_hlo
from sdy_jax.runtime.meshes import RefinedMesh

LAYOUTS = {"8": ((8,), ("a",)), "2x4": ((2, 4), ("a", "b")), "2x2x2": ((2, 2, 2), ("a", "b", "c"))}
WORDS = np.zeros((64, 32), np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", workloads())
def test_models(name, layout):
    sizes, names = LAYOUTS[layout]
    workload, mesh = workloads()[name], tpu_mesh(*sizes, names=names)
    ins, outs = workload.shardings(layout)
    step = sdy.partition(workload.step(mesh, layout), mesh=mesh, in_shardings=ins, out_shardings=outs)
    assert not failure(step, *workload.arguments)


SPECS = [P("x", "y"), P("y"), P(None, "y"), P()]


def fits(spec, shape, mesh):
    return len(spec) <= len(shape) and not any(n % mesh.shape[a] for n, a in zip(shape, spec, strict=False) if a)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", op_cases.CASES)
def test_families(name, spec):
    function, *args = op_cases.CASES[name]
    mesh = tpu_mesh(4, 2, names=("x", "y"))
    if not fits(spec, args[0].shape, mesh):
        pytest.skip("jit does not take such a sharding of the argument")
    problem = failure(sdy.partition(function, mesh=mesh, in_shardings=(spec, *[P()] * (len(args) - 1))), *shapes(args))
    if not problem:
        return
    results = jax.tree.leaves(jax.eval_shape(function, *args))
    for number in range(len(results)):
        one = lambda *given, number=number: jax.tree.leaves(function(*given))[number]  # noqa: E731
        assert_compiles(one, *args, mesh=mesh, in_shardings=(spec, *[P()] * (len(args) - 1)))


TRANSFORMS = {
    "fft": jnp.fft.fft,
    "fft along the first dimension": lambda x: jnp.fft.fft(x, axis=0),
    "fft in two dimensions": lambda x: jnp.abs(jnp.fft.fft2(x)),
    "real fft and back": lambda x: jnp.fft.irfft(jnp.fft.rfft(x.real)),
    "convolution by ffts": lambda x: jnp.fft.ifft(jnp.fft.fft(x) * jnp.fft.fft(x[::-1])),
    "fft of a vector": lambda x: jnp.fft.ifft(jnp.fft.fft(x.ravel())).reshape(x.shape),
    "real vector": lambda x: jnp.fft.irfft(jnp.fft.rfft(x.real.ravel()) * 2).reshape(x.shape),
    "its gradient": jax.grad(lambda x: jnp.sum(jnp.abs(jnp.fft.fft2(x)) ** 2)),
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y"), P(("x", "y"))], ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_split_transforms(name, spec):
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32 if name == "its gradient" else jnp.complex64)
    mesh = tpu_mesh(4, 4, names=("x", "y"))
    assert not failure(sdy.partition(TRANSFORMS[name], mesh=mesh, in_shardings=spec, out_shardings=spec), x)


COMPLEX = {
    "step of a spectral method": lambda x: x + jnp.fft.ifft2(1j * jnp.fft.fft2(x)),
    "product": lambda x: x + 2 * (x @ x.T[:, : x.shape[1]]),
    "update": lambda x: [new := lax.dynamic_update_slice(x, x[:1] * 1j, (3, 0)), (new * x).sum()],
}


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", "y")], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_that_are_combined_with_arguments(name, spec):
    """libtpu (0.0.51) compiles no constraint on the layout of such, as of float32."""
    mesh = tpu_mesh(4, 4, names=("x", "y"))
    x = jax.ShapeDtypeStruct((64, 64), jnp.complex64)
    assert not failure(sdy.partition(COMPLEX[name], mesh=mesh, in_shardings=spec), x)


ORDERS = {
    "scans": lambda x: [f(x, 0, reverse=r) for r in (False, True) for f in (lax.cumprod, lax.cummax, lax.cumlogsumexp)],
    "approximately largest": lambda x: lax.approx_max_k(x, 5, reduction_dimension=0),
    "approximately smallest": lambda x: lax.approx_min_k(x[:61], 20, reduction_dimension=0),
    "sort by a comparator": lambda x: sorted_downwards("false", 2, "64xf32")(x[:, 0], x[:, 1]),
    "medians": lambda x: (jnp.median(x), jnp.median(x[:61], 0), jnp.unique(x, size=5)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(name):
    mesh = tpu_mesh(4, 4, names=("x", "y"))
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    assert not failure(sdy.partition(ORDERS[name], mesh=mesh, in_shardings=P(("y", "x"))), x)


def convolution(x, kernel, stride=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def pool(x, init, combine, window):
    return lax.reduce_window(x, np.float32(init), combine, (1, window, window, 1), (1, 2, 2, 1), "SAME")


def largest(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, *x.shape[1:3], 1), (1,) * 4, "VALID")


SPATIAL = {
    "convolution": convolution,
    "its gradients": jax.grad(lambda x, k: (convolution(x, k) ** 2).sum(), (0, 1)),
    "gradients with stride 2": jax.grad(lambda x, k: (convolution(x, k, 2) ** 2).sum(), (0, 1)),
    "transposed convolution": lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"),
    "gradient of max pooling": jax.grad(lambda x, k: (pool(x, -np.inf, lax.max, 3) ** 2).sum()),
    "gradient of mean pooling": jax.grad(lambda x, k: (pool(x, 0, lax.add, 3) ** 2).sum()),
    "gradient of the largest of everything": jax.grad(lambda x, k: (largest(x) ** 2).sum()),
    "mean of everything": lambda x, k: lax.reduce_window(x, 0.0, lax.add, (1, *x.shape[1:3], 1), (1,) * 4, "VALID"),
}


@pytest.mark.parametrize("spec", [P(None, "x"), P(None, ("y", "x")), P(None, "x", "y")], ids=str)
@pytest.mark.parametrize("name", SPATIAL)
def test_images_split_in_space(name, spec):
    x, kernel = jax.ShapeDtypeStruct((2, 64, 32, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    mesh, costs = tpu_mesh(4, 2, names=("x", "y")), sdy.CostModel.of_platform("tpu")  # by time some are gathered
    assert not failure(sdy.partition(SPATIAL[name], mesh=mesh, in_shardings=(spec, P()), costs=costs), x, kernel)


def test_kernels_split_in_space():
    x, kernel = jax.ShapeDtypeStruct((1, 16, 16, 8), jnp.float32), jax.ShapeDtypeStruct((16, 16, 8, 8), jnp.float32)
    mesh = tpu_mesh(4, 2, names=("x", "y"))
    for function in (convolution, SPATIAL["its gradients"]):
        assert not failure(sdy.partition(function, mesh=mesh, in_shardings=(P(), P("x", "y"))), x, kernel)


def shift_of(x):
    return (x[0, 0] == x[0, 1]).astype(np.int32)


MOVES = {
    "all_gather": (lambda x: x, P("x", "y"), P()),
    "all_slice": (lambda x: x, P(), P("x", "y")),
    "all_to_all": (lambda x: x, P("x"), P(None, "x")),
    "all_to_all of two": (lambda x: x, P("x", "y"), P("y", "x")),
    "all_to_all of a part": (lambda x: x, '[{"x":(1)2}, {}]', '[{}, {"x":(1)2}]'),
    "collective_permute": (lambda x: x, P(("x", "y")), P(("y", "x"))),
    "permute of parts": (lambda x: x, '[{"x":(2)2}, {}]', '[{"x":(1)2}, {}]'),
    "sum": (lambda x: jnp.sum(x, 0), P("x", "y"), P("y")),
    "sum, scattered": (lambda x: jnp.sum(x, 0), P("x"), P("x")),
    "largest": (lambda x: jnp.max(x, 0), P("x", "y"), P("y")),
    "smallest": (lambda x: jnp.min(x, 0), P("x", "y"), P()),
    "product": (lambda x: jnp.prod(x, 0), P("x", "y"), P("y")),
    "sort": (lambda x: jnp.sort(x, 0), P("x", "y"), P("x", "y")),
    "sort of a vector": (lambda x: jnp.sort(x.ravel()), P("x"), P("x")),
    "sort of pairs": (lambda x: lax.sort((x.ravel(), x.ravel() == x[0, 0])), P("x"), P("x")),
    "largest few": (lambda x: lax.top_k(x.real.ravel(), 5), P("x"), P()),
    "cumulative sum": (lambda x: jnp.cumsum(x, 0), P("x", "y"), P("x", "y")),
    "roll": (lambda x: jnp.roll(x, 3, 0), P("x", "y"), P("x", "y")),
    "roll by a traced shift": (lambda x: jnp.roll(x.ravel(), shift_of(x)), P("x"), P("x")),
    "roll of rows by a traced shift": (lambda x: jnp.roll(x, shift_of(x), 0), P("x"), P("x")),
    "rows": (lambda x: x[np.array([1, 5, 63, 2])], P("x", "y"), P(None, "y")),
    "updated rows": (lambda x: x.at[np.array([1, 5, 63, 1])].add(x[:4]), P("x", "y"), P("x", "y")),
    "window": (lambda x: lax.dynamic_slice(x, (3, 1), (20, 8)), P("x", "y"), P()),
    "uneven inside": (lambda x: jnp.concatenate([x[:13], x[14:]]) * 2, P("x", "y"), P()),
}
TYPES = ["float32", "bfloat16", "complex64", "int8", "bool", "float8_e4m3fn", "int64", "uint64", "float64"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", MOVES)
def test_moves_of_every_type(name, dtype):
    function, given, wanted = MOVES[name]
    if (name, dtype) == ("updated rows", "bool"):
        pytest.skip("booleans are not added")
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((64, 32), getattr(jnp, dtype))
        mesh = tpu_mesh(4, 4, names=("x", "y"))
        assert not failure(sdy.partition(function, mesh=mesh, in_shardings=given, out_shardings=wanted), x)


@pytest.mark.parametrize("name", slice_programs.FUNCTIONS)
def test_strips(name):
    mesh = tpu_mesh(2, 4, names=("x", "y"))
    inside = jax.sharding.NamedSharding(mesh, P("x", "y"))
    function = lambda x: slice_programs.FUNCTIONS[name](lax.with_sharding_constraint(x * 2, inside)).sum()  # noqa: E731
    for dtype in (jnp.float32, jnp.int8):
        assert not failure(sdy.partition(function, mesh=mesh), jax.ShapeDtypeStruct((65, 9), dtype))


@pytest.mark.parametrize("name", reshape_programs.ROWS)
def test_merged_dimensions(name):
    before, source, after, target, mesh, _ = reshape_programs.ROWS[name]
    tpus = tpu_mesh(*mesh.devices.shape, names=mesh.axis_names)
    function, args = reshape_programs.reshaped(before, source, after, target, tpus, jnp.float32)
    token = uneven_blocks.PARTITIONED.set(True)
    assert not failure(sdy.partition(function, mesh=tpus), *shapes(args))
    uneven_blocks.PARTITIONED.reset(token)


@pytest.mark.parametrize("name", [*relayout_programs.RELAYOUTS, *relayout_programs.TWO])
def test_dimensions_that_are_relaid(name):
    size, source, target, _ = {**relayout_programs.RELAYOUTS, **relayout_programs.TWO}[name]
    shape, tpus = size if isinstance(size, tuple) else (size, 128), tpu_mesh(2, 4, names=("x", "y"))
    token = uneven_blocks.PARTITIONED.set(True)
    run = sdy.partition(relayout_programs.relaid(source, target, tpus), mesh=tpus)
    assert not failure(run, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    uneven_blocks.PARTITIONED.reset(token)


@pytest.mark.parametrize("name", written_collectives.WRITTEN)
def test_written_collectives(name):
    function, given, wanted, _ = written_collectives.WRITTEN[name]
    mesh = tpu_mesh(2, 4, names=("a", "b"))
    partitioned = sdy.partition(function, mesh=mesh, in_shardings=given, out_shardings=wanted)
    assert not failure(partitioned, *shapes([written_collectives.X]))


def linear_algebra(a):
    """Of a batch of square matrices."""
    values, vectors = jnp.linalg.eigh(a @ a.mT)
    solved = lax.linalg.triangular_solve(a, a, left_side=True, lower=True)
    return (
        jnp.linalg.cholesky(a @ a.mT),
        jnp.linalg.qr(a),
        jnp.linalg.svd(a),
        values,
        vectors,
        solved,
        jnp.linalg.inv(a),
    )


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(None, None, "y")], ids=str)
def test_linear_algebra(spec):
    mesh = tpu_mesh(2, 4, names=("x", "y"))
    a = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    assert not failure(sdy.partition(linear_algebra, mesh=mesh, in_shardings=spec), a)


MATRICES = {
    "cholesky": lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
    "triangular solve": lambda x: lax.linalg.triangular_solve(x, x[:, :9], left_side=True, lower=True),
    "transposed": lambda x: lax.linalg.triangular_solve(x, x[:9], lower=True, transpose_a=True, conjugate_a=True),
    "tall qr": lambda x: jnp.linalg.qr(x[:, :8]),
    "its gradient": jax.grad(lambda x: (jnp.linalg.qr(x[:, :8])[0] ** 3).sum()),
}


@pytest.mark.parametrize("name", MATRICES)
def test_split_matrices(name):
    mesh = tpu_mesh(2, 4, names=("x", "y"))
    split = sdy.partition(MATRICES[name], mesh=mesh, in_shardings=P(("y", "x")))
    assert not failure(split, jax.ShapeDtypeStruct((256, 256), jnp.float32))


def random_bits(x):
    key, other = jax.random.key(3), jax.random.key(7, impl="rbg")
    return x + jax.random.normal(key, x.shape), jax.random.bits(other, x.shape), jax.random.permutation(key, x)


def test_random_bits():
    mesh = tpu_mesh(4, 4, names=("x", "y"))
    assert not failure(sdy.partition(random_bits, mesh=mesh, in_shardings=P("x", "y")), *shapes([WORDS]))


def test_manual_computations():
    mesh = tpu_mesh(2, 4, names=("x", "y"))

    @jax.shard_map(mesh=mesh, in_specs=P("x", "y"), out_specs=P("x"), axis_names={"x", "y"})
    def inner(x):
        return lax.psum(jnp.sin(x) @ x.T, "y") + lax.axis_index("x")

    assert not failure(sdy.partition(lambda x: inner(x * 2), mesh=mesh, in_shardings=P("x", "y")), *shapes([WORDS]))


def test_weights_that_are_freed_are_gathered_again():
    """Arrays that no chip keeps in its scratch memory, and a limit that holding the weights is above."""
    mesh, d, rows = tpu_mesh(8, names=("x",)), 2048, 65536
    arguments = [tuple(jax.ShapeDtypeStruct(size, jnp.float32) for size in ((d, 2 * d), (2 * d, d)))] * 6
    batch = [jax.ShapeDtypeStruct((rows, d), jnp.float32)] * 2
    spec = {"in_shardings": P("x"), "out_shardings": (P("x"), P()), "costs": sdy.CostModel.of_platform("tpu")}

    def found(memory):
        """The copies that are made again, the gathers of the compiled program, and its temporaries."""
        step = sdy.partition(step_of(unrolled), mesh=mesh, **spec, layouts="global", memory=memory)
        compiled, plan = step.lower(arguments, *batch).compile(), step.plan(arguments, *batch)
        gathers = [c for c in collectives_in_hlo(compiled.as_text()) if c.kind == "all-gather"]
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        return sum(c.again for c in plan.collectives), sum(c.count for c in gathers), temporaries, plan.memory.peak

    none, held, much, peak = found("64GiB")
    again, gathered, less, _ = found(int(0.98 * peak))
    assert none == 0 < again
    assert gathered == held + again and less < much


def test_products_run_beside_the_permutes_of_their_rings():
    """Half of the products of a ring at least run between the start and the end of a permute."""
    mesh, rows, weight = tpu_mesh(2, 4, names=("data", "model")), P(("data", "model")), jnp.bfloat16
    args = [jax.ShapeDtypeStruct(shape, weight) for shape in ((8192, 2048), (2048, 2048), (2048, 8192), (8192, 2048))]
    step = sdy.partition(
        lambda x, around, up, down: jax.nn.gelu(jnp.tanh(x @ around) @ up) @ down @ around,
        mesh=mesh,
        in_shardings=(rows, P(), P(None, "model"), P("model")),
        out_shardings=rows,
        costs=sdy.CostModel.of_machine("tpu v5e", mesh.axis_names),
    )
    assert [record.kind for record in step.plan(*args).collectives if record.hidden] == ["all_gather", "reduce_scatter"]
    sent, beside = 0, 0
    for line in step.lower(*args).compile().as_text().partition("\nENTRY ")[2].splitlines():
        sent += ("collective-permute-start(" in line) - ("collective-permute-done(" in line)
        beside += sent > 0 and "estimated_cycles" in line and "kOutput" in line
    assert beside >= 4  # of two rings of four


def test_weights_of_the_next_layer_are_gathered_beside_the_products_of_this_one():
    mesh, layers = tpu_mesh(8, names=("x",)), 4
    row, weight = (jax.ShapeDtypeStruct((n, 4096), jnp.bfloat16) for n in (8192, 4096))

    def deep(weights, x):
        for w in weights:
            x = x + jax.nn.gelu(x @ w)
        return x

    step = sdy.partition(deep, mesh=mesh, in_shardings=([P("x")] * layers, P("x")), out_shardings=P("x"))
    text = step.lower([weight] * layers, row).compile().as_text().partition("\nENTRY ")[2]
    running, beside = 0, 0
    for line in text.splitlines():
        running += "async-collective-start" in line.partition(" = ")[0]
        running -= "async-collective-done" in line.partition(" = ")[0]
        beside += running > 0 and "estimated_cycles" in line and "kOutput" in line
    assert beside >= layers - 1


def test_gradients_that_are_gathered_leave_weights_and_moments_in_place():
    """The compiler would gather columns into a transposed gradient, and copy what is updated with it there and back."""
    weight = jax.ShapeDtypeStruct((512, 1536), jnp.float32)
    x, y = (jax.ShapeDtypeStruct((1024, d), jnp.float32) for d in weight.shape)
    spec = {"in_shardings": ((P(),) * 3, P(), P(None, "x")), "out_shardings": (P(),) * 3, "donate_argnums": 0}

    def step(state, x, y):
        weight, *moments = state
        gradient = x.T @ y
        first, second = 0.9 * moments[0] + 0.1 * gradient, 0.9 * moments[1] + 0.1 * gradient**2
        return weight - 0.1 * first / (jnp.sqrt(second) + 1e-8), first, second

    options = {"xla_msa_enable": False}
    compiled = sdy.partition(step, mesh=tpu_mesh(8, names=("x",)), layouts="local", **spec).lower((weight,) * 3, x, y)
    assert compiled.compile(options).memory_analysis().temp_size_in_bytes < 3 * 4 * np.prod(weight.shape)


@pytest.mark.parametrize(
    ("equation", "operands", "dim"),
    [("egcf,fd->egcd", ((8, 16, 8, 1024), (1024, 256)), 1), ("btf,fhk->bthk", ((16, 32, 1024), (1024, 8, 64)), 2)],
)
def test_sums_along_a_middle_dimension_are_scattered(equation, operands, dim):
    """The compiler would make all-reduces of scatters along dimensions such as those of tokens and heads."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in operands)
    sums = sdy.partition(
        partial(jnp.einsum, equation),
        mesh=tpu_mesh(8, names=("x",)),
        in_shardings=(P(*[None] * (x.ndim - 1), "x"), P("x")),
        out_shardings=P(*[None] * dim, "x"),
    )
    sent = 7 / 8 * 4 * np.prod(jax.eval_shape(partial(jnp.einsum, equation), x, w).shape)
    found = collectives_in_hlo(sums.lower(x, w).compile().as_text())
    assert {c.kind for c in found} == {"reduce-scatter"} and sum(c.wire_bytes for c in found) == sent


@pytest.mark.parametrize("part", [128, 384])
def test_sums_are_scattered_in_parts_of_an_odd_number_of_tiles(part):
    """The compiler would make an all-reduce, here of what is four times as large as what each chip keeps."""
    mesh = RefinedMesh.of(Mesh.of(x=4, y=2), [], TPU.forms)

    def gradient(x, y):
        product = jnp.einsum("tm,tn->mn", x, y)
        return reductions.reduce_scatter(product, ((), (AxisRef("x"),)), "sum", mesh)

    over = tpu_mesh(4, 2, names=("x", "y"))
    split = jax.shard_map(gradient, mesh=over, in_specs=P(("x", "y")), out_specs=P("y", "x"), check_vma=False)
    given = [jax.ShapeDtypeStruct((16384, size), jnp.bfloat16) for size in (1024, 4 * part)]
    found = collectives_in_hlo(jax.jit(split).lower(*given).compile().as_text())
    assert [(c.kind, c.group_size) for c in found] == [("reduce-scatter", 4)]


def test_products_make_what_is_gathered_as_it_is_gathered():
    """The compiler would copy the result of a product before it is gathered, to transpose it."""
    shape, tokens = (8, 256, 1024), (8, 128)
    weight, x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, (*tokens, 256), (*tokens, 1024)))
    spec = {"in_shardings": (P(), P("x"), P("x")), "out_shardings": P(), "donate_argnums": 0}

    def step(weight, x, y):
        gradient = jax.grad(lambda w: (jnp.einsum("egd,edf->egf", x, w) * y).sum())(weight)
        return weight - 0.1 * lax.with_sharding_constraint(gradient, P())

    lowered = sdy.partition(step, mesh=tpu_mesh(8, names=("x",)), layouts="local", **spec).lower(weight, x, y)
    text = lowered.compile({"xla_msa_enable": False}).as_text()
    assert [c.kind for c in collectives_in_hlo(text)] == ["all-gather"] and " copy(" not in text


def doubled(x):
    """A kernel of Pallas, compiled by Mosaic."""

    def kernel(x, out):
        out[...] = x[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def printing(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x + jax.pure_callback(np.asarray, jax.typeof(x), x)


KERNELS = {
    "whole": doubled,
    "on blocks": sdy.custom_op(doubled, "([i, j])->([i, j]) {i=64, j=128}"),
    "callbacks": printing,
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_callbacks(name):
    """jit does not split kernels."""
    function = sdy.partition(KERNELS[name], mesh=tpu_mesh(8, names=("x",)), in_shardings=P("x"), on_unknown="ignore")
    assert not failure(function, jax.ShapeDtypeStruct((64, 128), np.float32))


def ragged_paged(*args):
    return ragged_paged_attention(*args, sm_scale=0.1)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


PAGES = bf16(8, 512, 16, 128)
DECODING = (bf16(64, 32, 128), PAGES, PAGES, i32(64), i32(64, 64))
PACKED = (bf16(512, 32, 128), bf16(512, 16, 16, 128), i32(64), i32(64, 64), i32(65), i32(1))
BY_BATCH = (P("x", "y"), P("y"), P("y"), P("x"), P("x"))
BY_HEADS = (P(None, ("x", "y")), P(None, None, ("x", "y")), P(), P(), P(), P())


PAGED = [{}, {"inline_seq_dim": False}, {"megacore_mode": "batch", "attn_logits_soft_cap": 30.0}]


@pytest.mark.parametrize(
    ("function", "args", "specs", "block"),
    [
        *(
            (partial(paged_attention, pages_per_compute_block=8, **s), DECODING, BY_BATCH, "[2,512,16,128]")
            for s in PAGED
        ),
        (ragged_paged, PACKED, BY_HEADS, "[512,16,2,128]"),
    ],
)
def test_paged_attention_runs_on_blocks_and_sends_nothing(function, args, specs, block):
    mesh = tpu_mesh(2, 4, names=("x", "y"))
    compiled = sdy.partition(function, mesh=mesh, in_shardings=specs).lower(*args).compile()
    text = compiled.as_text()
    (kernel,) = (line for line in text.splitlines() if "tpu_custom_call" in line)
    assert block in kernel and not collectives_in_hlo(text)


@pytest.mark.parametrize(
    ("spec", "block"),
    [
        (P(None, None, ("x", "y")), "[8,1024,256]"),
        (P(None, ("x", "y")), "[8,128,2048]"),
        (P("x", None, "y"), "[4,1024,512]"),
    ],
)
def test_grouped_products_run_on_blocks_of_their_matrices(spec, block):
    """Backward, by rows and by matrices, with sums of what devices have and no matrix that is gathered."""

    def step(rows, matrices, counts):
        def loss(*xs):
            return megablox.gmm(*xs, counts, jnp.bfloat16, (256, 256, 256)).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(rows, matrices)

    args, mesh = (bf16(2048, 1024), bf16(8, 1024, 2048), i32(8)), tpu_mesh(2, 4, names=("x", "y"))
    partitioned = sdy.partition(step, mesh=mesh, in_shardings=(P(), spec, P()), out_shardings=(P(), spec))
    text = partitioned.lower(*args).compile().as_text()
    kernels = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert len(kernels) == 2 and all(block in line for line in kernels)
    assert {c.kind for c in collectives_in_hlo(text)} <= {"all-reduce", "all-gather"}


def pipelined(mesh, count):
    layer = jax.checkpoint(lambda w, x: x + jax.nn.gelu(x @ w["up"]) @ w["down"])
    return lambda w, x: sdy.pipeline(layer, w, x, microbatches=count, loss=lambda y: jnp.mean(y**2), mesh=mesh)


def steady_trip(text):
    """What the loop body with two permutes runs, in order: starts and dones of permutes, and loops over layers."""
    (body,) = [each for each in text.split("\n\n") if each.count(" collective-permute-start(") == 2]
    kinds = re.findall(r" (collective-permute-start|collective-permute-done|while)\(", body)
    return [kind.removeprefix("collective-permute-") for kind in kinds]


def test_pipelines_send_beside_their_layers():
    """Each trip sends a microbatch's cotangents beside a forward pass, and its activations beside a backward pass."""
    mesh, (stages, count, rows, width) = tpu_mesh(4, 4, names=("stage", "data")), (4, 8, 256, 512)
    w = {
        "up": jax.ShapeDtypeStruct((8, width, 2048), jnp.float32),
        "down": jax.ShapeDtypeStruct((8, 2048, width), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((rows * count, width), jnp.float32)
    layout = [jax.sharding.NamedSharding(mesh, P(axis)) for axis in ("stage", "data")]
    step = jax.value_and_grad(pipelined(mesh, count))
    text = jax.jit(step, in_shardings=layout).lower(w, x).compile().as_text()
    sent = sum(each.total_wire_bytes for each in collectives_in_hlo(text) if each.kind == "collective-permute")
    assert sent == (2 * (count + stages) - 3) * rows // 4 * width * 4
    planned = sdy.partition(step, mesh=mesh, in_shardings=layout).lower(w, x).compile().as_text()
    assert steady_trip(text) == steady_trip(planned) == ["start", "while", "start", "done", "while", "done"]
