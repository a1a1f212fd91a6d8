"""Programs from files and from other people's exports: recognised, partitioned on a mesh of the user's, and run."""

from __future__ import annotations

import io
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.calls import load
from sdy_jax.calls.load import ArtifactKind, recognise
from sdy_jax.shardy.passes.meshes import renumber_devices

pytest.importorskip("flatbuffers")

F32 = jnp.float32
TEXT = """
sdy.mesh @mesh = <["a"=2, "b"=4]>
func.func @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}, {?}]>}, %w: tensor<4x16xf32>)
    -> (tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{?}, {"b"}]>}, tensor<f32>) {
  %0 = func.call @affine(%x, %w) : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0, 1]
      : (tensor<8x16xf32>, tensor<f32>) -> tensor<f32>
  return %0, %1 : tensor<8x16xf32>, tensor<f32>
}
func.func private @affine(%x: tensor<8x4xf32>, %w: tensor<4x16xf32>) -> tensor<8x16xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<8x4xf32>, tensor<4x16xf32>) -> tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}
"""


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


X, W = normal(8, 4), normal(4, 16)
WEIGHTS = {"up": normal(16, 32), "down": normal(32, 16)}
SPECS = (P("data"), {"up": P(None, "model"), "down": P("model")})


def mlp(x, w):
    return jnp.tanh(x @ w["up"]) @ w["down"]


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def exported(fun, *args, platforms=None, **kwargs):
    return export.export(fun if hasattr(fun, "trace") else jax.jit(fun), platforms=platforms)(*args, **kwargs)


def reload(artifact, **options):
    return sdy.load(bytes(artifact.serialize()), **options)


def test_text_runs_on_the_mesh_that_it_names():
    program = sdy.load(TEXT.encode())
    assert program.inputs == ("arg0", "arg1")
    assert str(program.mesh) == '<["a"=2, "b"=4]>'
    product, total = sdy.partition(program)(X, W)
    np.testing.assert_allclose(product, X @ W, rtol=1e-5)
    np.testing.assert_allclose(total, (X @ W).sum(), rtol=1e-4)
    assert product.sharding.spec == P("a", "b")


def test_shardings_that_are_given_replace_those_of_the_program():
    program = sdy.load(TEXT.encode())
    plan = sdy.partition(program, in_shardings=(P("b"), None)).plan(like(X), like(W))
    assert plan.arguments[0].type == "f32[8@b,4]"
    plan = sdy.partition(program, out_shardings=(P("a"), None)).plan(like(X), like(W))
    assert plan.results[0].type == "f32[8@a,16]"


def test_a_plan_names_lines_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.mlir").write_text(TEXT)
    plan = sdy.partition(sdy.load("model.mlir")).plan(like(X), like(W))
    assert {c.source for c in plan.collectives} == {"model.mlir:7"}
    assert "stablehlo.dot_general at model.mlir:12" in str(plan.why("result[0]"))


def test_text_is_loaded_without_a_file():
    program = sdy.loads(TEXT)
    np.testing.assert_allclose(sdy.partition(program)(X, W)[0], X @ W, rtol=1e-5)
    assert "sdy" not in str(sdy.loads(TEXT, shardings=False).module)
    with pytest.raises(sdy.SdyError, match=r"the name of a file; to fix: sdy_jax\.load"):
        sdy.loads("model.mlir")


def test_the_files_program_stays_as_it_is():
    program = sdy.load(TEXT.encode())
    before = str(program.module)
    sdy.partition(program, in_shardings=P())(X, W)
    assert str(program.module) == before


def test_passes_run_on_a_loaded_program():
    program = sdy.passes.run(sdy.load(TEXT.encode()), "propagation-pipeline")
    assert '[{"a"}, {"b"}]' in str(program.module)
    np.testing.assert_allclose(sdy.partition(program)(X, W)[0], X @ W, rtol=1e-5)


def test_another_mesh_is_refused_unless_the_shardings_are_dropped(mesh):
    with pytest.raises(sdy.ShardingError, match=r'on the mesh <\["a"=2, "b"=4\]>.*shardings=False'):
        sdy.partition(sdy.load(TEXT.encode()), mesh=mesh)
    program = sdy.load(TEXT.encode(), shardings=False)
    assert "sdy" not in str(program.module)
    plan = sdy.partition(program, mesh=mesh, in_shardings=(P("data"), P(None, "model"))).plan(like(X), like(W))
    assert plan.results[0].type == "f32[8@data,16@model]"


def test_records_of_an_earlier_propagation_do_no_harm():
    text = """
sdy.mesh @mesh = <["a"=4]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.add %x, %x
      {sdy.propagation_edges = #sdy.propagation_edges<[{step-0 = [{"a" = operand-0 -> [result-0]}]}]>} : tensor<8xf32>
  return %0 : tensor<8xf32>
}"""
    assert sdy.partition(sdy.load(text.encode()))(np.ones(8, np.float32)).tolist() == [2.0] * 8


ORDERED = """
sdy.mesh @mesh = <["a"=4], device_ids=[3, 1, 0, 2]>
sdy.mesh @other = <["b"=2, "c"=2]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}]>]>} : tensor<8xf32>
  return %0 : tensor<8xf32>
}"""


def test_the_order_of_devices_is_that_of_the_programs_mesh():
    x = normal(8)
    ours = sdy.partition(sdy.load(ORDERED.encode()))
    result = ours(x)
    np.testing.assert_allclose(result, np.tanh(x), rtol=1e-5)
    shards = sorted(result.addressable_shards, key=lambda shard: shard.index[0].start)
    assert [shard.device.id for shard in shards] == [3, 1, 0, 2]
    assert not ours.plan(x).collectives


def test_other_meshes_are_of_the_same_devices():
    moved = ORDERED.replace("return %0", '%1 = sdy.reshard %0 <@other, [{"b", "c"}]> : tensor<8xf32>\n  return %1')
    x = normal(8)
    ours = sdy.partition(sdy.load(moved.encode()))
    np.testing.assert_allclose(ours(x), np.tanh(x), rtol=1e-5)
    # There, and back where the result leaves: an array at the border is laid out on the program's own mesh.
    assert [c.kind for c in ours.plan(x).collectives] == ["collective_permute"] * 2


def test_devices_get_other_numbers_in_every_mesh():
    module = sdy.load(
        b"""
sdy.mesh @a = <["a"=4], device_ids=[3, 1, 0, 2]>
sdy.mesh @b = <["b"=4]>
sdy.mesh @maximal = <[], device_ids=[3]>
sdy.mesh @empty = <[]>
sdy.mesh @larger = <["c"=8]>
func.func @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<mesh<["d"=4], device_ids=[1, 0, 2, 3]>, [{"d"}]>}) {
  return
}"""
    ).module
    renumber_devices(module, (3, 1, 0, 2))
    text = str(module)
    assert '@a = <["a"=4]>' in text
    assert '@b = <["b"=4], device_ids=[2, 1, 3, 0]>' in text
    assert "@maximal = <[], device_ids=[0]>" in text
    assert "@empty = <[]>" in text
    assert '@larger = <["c"=8]>' in text
    assert 'mesh<["d"=4], device_ids=[1, 2, 3, 0]>' in text


ANNOTATED = """
sdy.mesh @m = <["a"=2]>
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = sdy.sharding_constraint %x <@m, [{"a"}]> : tensor<8xf32>
  sdy.sharding_group %0 group_id=0 : tensor<8xf32>
  %1 = sdy.named_computation<"f">(%0) in_shardings=[<@m, [{"a"}]>] out_shardings=[<@m, [{"a"}]>] (%y: tensor<8xf32>) {
    %2 = stablehlo.tanh %y {sdy.sharding = #sdy.sharding_per_value<[<@m, [{"a"}]>]>} : tensor<8xf32>
    sdy.return %2 : tensor<8xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
  %3 = sdy.all_gather [{"a"}] %1 out_sharding=<@m, [{}]> : tensor<8xf32>
  return %3 : tensor<8xf32>
}
"""


def test_all_annotations_can_be_dropped(mesh):
    x = normal(8)
    program = sdy.load(ANNOTATED.encode(), shardings=False)
    assert "sdy.mesh" not in str(program.module)
    assert "sharding" not in str(program.module)
    np.testing.assert_allclose(sdy.partition(program, mesh=mesh, in_shardings=P("data"))(x), np.tanh(x), rtol=1e-5)
    manual = """
sdy.mesh @m = <["a"=2]>
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@m, [{"a"}]>] out_shardings=[<@m, [{"a"}]>] manual_axes={"a"}
      (%y: tensor<4xf32>) {
    sdy.return %y : tensor<4xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}"""
    with pytest.raises(sdy.ShardingError, match=r"manual_computation at <bytes>:4 .* cannot be dropped"):
        sdy.load(manual.encode(), shardings=False)


def test_a_loaded_program_runs_inside_another_function(mesh):
    inner = sdy.partition(sdy.load(TEXT.encode(), shardings=False), mesh=mesh, in_shardings=(P("data"), None))

    @sdy.partition(mesh=mesh)
    def outer(x, w):
        return inner(jnp.sin(x), w)[0] + inner(x, w)[0]

    np.testing.assert_allclose(outer(X, W), np.sin(X) @ W + X @ W, rtol=1e-4, atol=1e-5)
    assert [v.type for v in outer.plan(X, W).arguments] == ["f32[8@data,4]", "f32[4,16]"]


# Bytes.


def bytecode(text):
    buffer = io.BytesIO()
    ir.Module.parse(text, mlir.make_ir_context()).operation.write_bytecode(buffer)
    return buffer.getvalue()


def test_every_kind_of_file_is_recognised():
    artifact = exported(mlp, like(X @ W), like(WEIGHTS))
    kinds = {
        ArtifactKind.TEXT: TEXT.encode(),
        ArtifactKind.BYTECODE: bytecode(TEXT),
        ArtifactKind.PORTABLE: artifact.mlir_module_serialized,
        ArtifactKind.EXPORTED: bytes(artifact.serialize()),
    }
    assert {kind: recognise(data, "") for kind, data in kinds.items()} == {kind: kind for kind in ArtifactKind}


def test_bytecode_runs_like_its_text():
    product, _ = sdy.partition(sdy.load(bytecode(TEXT)))(X, W)
    np.testing.assert_allclose(product, X @ W, rtol=1e-5)
    assert product.sharding.spec == P("a", "b")


def test_a_portable_artifact_runs(mesh):
    x = normal(8, 16)
    program = sdy.load(exported(mlp, like(x), like(WEIGHTS)).mlir_module_serialized)
    specs = (SPECS[0], SPECS[1]["down"], SPECS[1]["up"])
    result = sdy.partition(program, mesh=mesh, in_shardings=specs)(x, WEIGHTS["down"], WEIGHTS["up"])
    np.testing.assert_allclose(result, mlp(x, WEIGHTS), rtol=1e-4, atol=1e-4)


# What jax.export makes.


@pytest.mark.parametrize("platforms", [None, ("cuda", "cpu")])
def test_an_exported_function_keeps_its_trees_and_names(mesh, platforms):
    x = normal(8, 16)
    program = reload(exported(mlp, like(x), like(WEIGHTS), platforms=platforms))
    assert program.inputs == ("x", "w['down']", "w['up']")
    ours = sdy.partition(program, mesh=mesh, in_shardings=SPECS)
    np.testing.assert_allclose(ours(x, WEIGHTS), mlp(x, WEIGHTS), rtol=1e-4, atol=1e-4)
    plan = ours.plan(x, WEIGHTS)
    assert [v.type for v in plan.arguments] == ["f32[8@data,16]", "f32[32@model,16]", "f32[16,32@model]"]
    assert [c.kind for c in plan.collectives] == ["all_reduce"]
    assert plan.name == "mlp"


def test_symbolic_sizes_are_those_of_the_call(mesh):
    (size,) = export.symbolic_shape("b")
    program = reload(exported(mlp, jax.ShapeDtypeStruct((2 * size, 16), F32), like(WEIGHTS)))
    ours = sdy.partition(program, mesh=mesh, in_shardings=SPECS)
    for rows in (8, 24):
        x = normal(rows, 16)
        np.testing.assert_allclose(ours(x, WEIGHTS), mlp(x, WEIGHTS), rtol=1e-4, atol=1e-4)
        assert [c.kind for c in ours.plan(x, WEIGHTS).collectives] == ["all_reduce"]
    with pytest.raises(sdy.SdyError, match="Division had remainder 1"):
        ours(normal(9, 16), WEIGHTS)


def test_exported_shardings_hold(mesh):
    named = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS, is_leaf=lambda x: isinstance(x, P))
    x = normal(8, 16)
    program = reload(exported(jax.jit(mlp, in_shardings=named, out_shardings=named[0]), like(x), like(WEIGHTS)))
    ours = sdy.partition(program)
    np.testing.assert_allclose(ours(x, WEIGHTS), mlp(x, WEIGHTS), rtol=1e-4, atol=1e-4)
    plan = ours.plan(x, WEIGHTS)
    assert [v.type for v in plan.arguments] == ["f32[8@data,16]", "f32[32@model,16]", "f32[16,32@model]"]
    assert plan.results[0].type == "f32[8@data,16]"
    replaced = sdy.partition(program, in_shardings=P(), out_shardings=P()).plan(x, WEIGHTS)
    assert {v.type for v in (*replaced.arguments, *replaced.results)} == {"f32[8,16]", "f32[32,16]", "f32[16,32]"}
    assert not replaced.collectives


def test_exported_shardings_belong_to_their_arguments(mesh):
    # The module of this one takes the platform first, and lacks the argument that is not used.
    specs = (P("model"), P("data"), P(None, "model"))
    named = tuple(NamedSharding(mesh, spec) for spec in specs)
    types = like((X, X, W))
    artifact = exported(jax.jit(lambda unused, x, w: x @ w, in_shardings=named), *types, platforms=("cuda", "cpu"))
    plan = sdy.partition(reload(artifact)).plan(*types)
    assert [v.type for v in plan.arguments[1:]] == ["f32[8@data,4]", "f32[4,16@model]"]


def test_keys_keywords_and_unused_arguments(mesh):
    def noisy(x, unused, *, key, scale):
        return {"y": x + scale * jax.random.normal(key, x.shape), "key": jax.random.split(key)[0]}

    key, x = jax.random.key(7), normal(8)
    program = reload(exported(noisy, like(x), like(x), key=key, scale=jnp.float32(1)))
    ours = sdy.partition(program, mesh=mesh, in_shardings=P("data"), on_unknown="ignore")
    with pytest.raises(
        sdy.SdyError, match=r"noisy\(\) takes .*: f32\[8\], .*key: key<fry>\[\], scale: f32\[\]; it got"
    ):
        ours(x, x)
    ours = sdy.partition(program, mesh=mesh, in_shardings=(P("data"), None, None, None), on_unknown="ignore")
    got, wanted = (f(x, x, key=key, scale=np.float32(2)) for f in (ours, noisy))
    np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-5)
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(wanted["key"]).tolist()


def test_an_exported_derivative_is_used(mesh):
    program = sdy.load(bytes(exported(lambda x: jnp.sin(x).sum(), like(normal(8))).serialize(vjp_order=1)))
    x = normal(8)
    np.testing.assert_allclose(jax.grad(sdy.partition(program, mesh=mesh, in_shardings=P("data")))(x), np.cos(x), 1e-5)


@pytest.mark.parametrize("shardings", [True, False])
def test_derivatives_of_a_file_for_several_devices(mesh, shardings):
    def loss(x, w):
        return (jnp.tanh(x @ w) ** 2).sum()

    x, w = normal(8, 16), normal(16, 8)
    specs = [NamedSharding(mesh, spec) for spec in (P("data"), P(None, "model"))]
    data = export.export(jax.jit(loss, in_shardings=specs))(x, w).serialize(vjp_order=2)
    given = {"mesh": mesh, "in_shardings": (P("data"), P(None, "model"))}
    if not shardings:
        four = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
        given = {"mesh": four, "in_shardings": (P("d"), P())}
    f = sdy.partition(sdy.load(bytes(data), shardings=shardings), **given)
    for ours, theirs in ((f, loss), (lambda x, w: jax.grad(f)(x, w).sum(), lambda x, w: jax.grad(loss)(x, w).sum())):
        found, wanted = (jax.grad(each, argnums=(0, 1))(x, w) for each in (ours, theirs))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)


def test_positions_in_programs_from_text_do_not_move(mesh):
    """The largest element comes with its position, and only that is read."""

    def picked(x):
        return x * (jnp.argmax(x, 1)[:, None] == jnp.arange(8))

    x = normal(8, 8)
    f = sdy.partition(sdy.loads(jax.jit(picked).lower(x).as_text()), mesh=mesh, in_shardings=P("data"))
    for push in (lambda f: jax.grad(lambda x: (f(x) ** 2).sum())(x), lambda f: jax.jvp(f, (x,), (x,))[1]):
        np.testing.assert_allclose(push(f), push(picked), rtol=1e-5)


def test_an_op_of_text_that_has_no_derivative_is_named(mesh):
    text = """func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
      %0 = chlo.lgamma %x : tensor<8xf32> -> tensor<8xf32>
      return %0 : tensor<8xf32>
    }"""
    f = sdy.partition(sdy.loads(text), mesh=mesh, in_shardings=P("data"), on_unknown="ignore")
    with pytest.raises(sdy.UnsupportedError, match=r"chlo\.lgamma of a program from text has no derivative"):
        jax.grad(lambda x: f(x).sum())(normal(8))


def test_exported_derivatives_of_second_order_are_read(mesh):
    program = sdy.load(exported(lambda x: (jnp.sin(x) ** 2).sum(), like(normal(8))).serialize(vjp_order=2))
    f, x = sdy.partition(program, mesh=mesh, in_shardings=P("data")), normal(8)
    np.testing.assert_allclose(jax.grad(f)(x), np.sin(2 * x), 1e-4)


@pytest.mark.parametrize("size", [2, 5])
def test_sizes_that_break_a_rule_of_symbolic_ones_are_an_error(mesh, size):
    (n,) = export.symbolic_shape("n", constraints=["n >= 4", "mod(n, 2) == 0"])
    halves = exported(lambda x: x.reshape(x.shape[0] // 2, 2).sum(1), jax.ShapeDtypeStruct((n,), np.float32))
    f = sdy.partition(reload(halves), mesh=mesh)
    np.testing.assert_allclose(f(np.ones(6, np.float32)), np.full(3, 2.0))
    with pytest.raises(
        sdy.SdyError, match=r"sizes do not fit the symbolic ones of an exported function: (number|Input)"
    ):
        f(np.ones(size, np.float32))


@pytest.mark.parametrize("text", [b"func.func", None])
def test_what_is_no_text(text):
    with pytest.raises(sdy.SdyError, match=r"loads got a .*; expected the text of a program"):
        sdy.loads(text)


def test_types_of_64_bits(mesh):
    with jax.enable_x64(True):
        program = reload(exported(lambda x: x + 2.0**-40, jax.ShapeDtypeStruct((8,), jnp.float64)))
        result = sdy.partition(program, mesh=mesh)(np.ones(8))
        assert result.dtype == np.float64
        assert np.asarray(result).tolist() == [1 + 2.0**-40] * 8
    with pytest.raises(sdy.SdyError, match=r"is f32\[8\], the program takes f64\[8\]; 64-bit types need"):
        sdy.partition(program, mesh=mesh)(np.ones(8))


def test_another_platforms_export_runs_if_that_is_wanted(mesh):
    def chosen(x):
        return lax.platform_dependent(x, cuda=jnp.sin, tpu=jnp.cos)

    x = normal(8)
    artifact = exported(chosen, like(x), platforms=("cuda", "tpu"))
    with pytest.raises(
        sdy.UnsupportedError, match=r"exported for cuda, tpu, and the mesh is of cpu .*any_platform=True"
    ):
        sdy.partition(reload(artifact), mesh=mesh)
    got = sdy.partition(reload(artifact, any_platform=True), mesh=mesh)(x)
    np.testing.assert_allclose(got, np.sin(x), rtol=1e-5)


def test_functions_that_custom_calls_name_come_along(mesh):
    """With symbolic sizes, jax makes the functions that compare for approx_max_k private ones of the module."""

    def largest(x):
        return lax.approx_max_k(x, 2), lax.approx_min_k(jnp.sin(x), 3)

    x = normal(8, 16)
    artifact = exported(largest, jax.ShapeDtypeStruct(export.symbolic_shape("n, 16"), jnp.float32))
    call = sdy.partition(reload(artifact), mesh=mesh, in_shardings=P("data"))
    again = sdy.partition(sdy.loads(call.plan(x).mlir("partitioned")), mesh=mesh)
    assert not call.plan(x).collectives
    for found in (call(x), again(x)):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(jax.jit(largest)(x)))


def test_a_function_that_is_named_and_not_defined_is_missed(mesh):
    text = """
    func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
      %0 = stablehlo.custom_call @anything(%x) {called_computations = [@f]} : (tensor<8x16xf32>) -> tensor<8x16xf32>
      return %0 : tensor<8x16xf32>
    }"""
    with pytest.raises(sdy.ShardingError, match=r":3: stablehlo.custom_call refers to @f, which .* does not define"):
        sdy.partition(sdy.loads(text), mesh=mesh, on_unknown="ignore")(normal(8, 16))


def test_effects_in_order_are_refused():
    artifact = exported(mlp, like(normal(8, 16)), like(WEIGHTS))
    object.__setattr__(artifact, "ordered_effects", ("print",))
    with pytest.raises(sdy.UnsupportedError, match=r"mlp has ordered effects \(print\).*yet; to fix: "):
        load._from_exported(artifact, "model.bin", False)


def test_shardings_of_xlas_are_refused(mesh):
    text = """
func.func @main(%x: tensor<8xf32> {mhlo.sharding = "{devices=[8]<=[8]}"}) -> tensor<8xf32> {
  return %x : tensor<8xf32>
}"""
    artifact = exported(lambda x: x, like(normal(8)))
    object.__setattr__(artifact, "mlir_module_serialized", text.encode())
    with pytest.raises(sdy.UnsupportedError, match=r"XLA's form \(mhlo.sharding\)"):
        load._from_exported(artifact, "model.bin", False)


# What cannot be loaded or called.


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04rest", "this is a zip archive, such as numpy's .npz; expected MLIR text, MLIR bytecode, a "),
        (b"\x93NUMPY", "this is a numpy array"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"\x80\x05abc", "a Python pickle"),
        (b"HloModule m", "the text of an HLO module"),
        (b"\xff\xfe\xfd" * 20, "unknown kind of file: byte 0xff at offset 0 is no UTF-8 text"),
        (b"text \0", "unknown kind of file, with NUL characters"),
        (b"\x0a\x00", "unknown kind of file, with NUL"),
        (b"ML\xefR\x0dStableHLO_v9.9.9\0", "this portable artifact of StableHLO 9.9.9 cannot be read: "),
        (b"ML\xefR\x0dMLIR\0", "this MLIR bytecode cannot be read: "),
        (b"ML\xefR", "this MLIR bytecode cannot be read: "),
        (b"", "this is empty"),
        (b"func.func @f() { return }\nfunc.func @g() { return }", "the module has functions @f, @g"),
        (b"func.func @main(", "<bytes>:1:16: error: "),
        (TEXT.replace('[{"a"}, {?}]', '[{"a"}]').encode(), "<bytes>:3:1: error: [S1] func.func, argument 0: "),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_other_files_are_refused_by_what_they_are(data, message):
    with pytest.raises(sdy.SdyError) as caught:
        sdy.load(data)
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    for path, message in ((tmp_path / "none.mlir", "No such file"), (tmp_path, "Is a directory"), ("a\0b", "null")):
        with pytest.raises(sdy.SdyError, match=message):
            sdy.load(path)


def test_flatbuffers_may_be_missing(monkeypatch):
    def missing(_):
        raise ImportError("Please install 'flatbuffers'")

    data = bytes(exported(mlp, like(normal(8, 16)), like(WEIGHTS)).serialize())
    monkeypatch.setattr(export, "deserialize", missing)
    with pytest.raises(sdy.UnsupportedError, match="pip install flatbuffers"):
        sdy.load(data)


def test_arguments_that_do_not_fit_are_named(mesh):
    ours = sdy.partition(sdy.load(TEXT.encode()))
    with pytest.raises(sdy.SdyError, match=r"`arg1` is f32\[4,15\], the program takes f32\[4,16\]"):
        ours(X, W[:, :15])
    with pytest.raises(sdy.SdyError, match=r"`arg0` is i32\[8,4\], the program takes f32\[8,4\]"):
        ours(X.astype(np.int32), W)
    with pytest.raises(sdy.SdyError, match=r"takes arg0: f32\[8,4\], arg1: f32\[4,16\]; it got"):
        ours(X)
    with pytest.raises(sdy.ShardingError, match="in_shardings of main has 1 entry for 2 positional"):
        sdy.partition(sdy.load(TEXT.encode()), in_shardings=(P("a"),))


def test_a_text_must_say_its_ranks():
    program = sdy.load(b"func.func @main(%x: tensor<*xf32>) -> tensor<*xf32> { return %x : tensor<*xf32> }")
    with pytest.raises(sdy.UnsupportedError, match="`arg0` of main is no array: a program"):
        sdy.partition(program, mesh=jax.make_mesh((2,), ("a",)))


def test_a_mesh_of_too_many_devices_is_an_error():
    text = TEXT.replace('"b"=4', '"b"=400')
    with pytest.raises(sdy.ShardingError, match=r"needs 800 devices, 8 are at hand"):
        sdy.partition(sdy.load(text.encode()))


def test_all_ways_to_a_mesh_on_the_first_devices_say_alike_that_they_are_too_few():
    local = """mesh.mesh @m(shape = 2x8)
    func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
      %0 = mesh.all_reduce %x on @m mesh_axes = [0] : tensor<2xf32> -> tensor<2xf32>
      return %0 : tensor<2xf32>
    }"""
    text = TEXT.replace('"b"=4', '"b"=8')
    for use in (
        lambda: sdy.shard.run_local(local),
        lambda: sdy.partition(sdy.loads(text)),
    ):
        with pytest.raises(sdy.ShardingError, match=r"needs 16 devices, 8 are at hand; to fix: .*jax_num_cpu_devices"):
            use()


def test_artifacts_that_are_cut_short_are_errors():
    artifact = exported(mlp, like(normal(8, 16)), like(WEIGHTS))
    for whole in (artifact.mlir_module_serialized, bytecode(TEXT), bytes(artifact.serialize())):
        for length in range(5, len(whole) - 8, len(whole) // 25):
            with pytest.raises(sdy.SdyError):
                sdy.load(whole[:length])


def test_names_that_are_no_text_are_errors():
    # jaxlib would end the process when asked for such a name.
    whole = exported(mlp, like(normal(8, 16)), like(WEIGHTS)).mlir_module_serialized
    assert whole.count(b"jax.result_info") == 1
    with pytest.raises(sdy.SdyError, match=r'damaged: it has the name "jax.\\FFesult_info"'):
        sdy.load(whole.replace(b"jax.result_info", b"jax.\xffesult_info"))


OTHERS_MESH = """
sdy.mesh @m1 = <["x"=4]>
sdy.mesh @m2 = <["x"=2, "y"=4]>
func.func VISIBILITY@other(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@m1, [{"x"}]>}) -> tensor<8xf32> {
  return %a : tensor<8xf32>
}
func.func private @f(%a: tensor<8xf32> {sdy.sharding = #sdy.sharding<@m2, [{"y"}]>}) -> tensor<8xf32> {
  %0 = stablehlo.tanh %a : tensor<8xf32>
  return %0 : tensor<8xf32>
}
func.func @main(%a: tensor<8xf32>) -> tensor<8xf32> {
  %0 = call @f(%a) : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}"""


@pytest.mark.parametrize("visibility", ["", "private "])
def test_a_program_is_on_the_mesh_of_what_main_calls(visibility):
    program = sdy.loads(OTHERS_MESH.replace("VISIBILITY", visibility))
    x = np.linspace(-1, 1, 8, dtype=np.float32)
    run = sdy.partition(program)
    np.testing.assert_allclose(run(x), np.tanh(x), rtol=1e-6)
    assert "8@y" in str(run.plan(x)) and program.mesh.sizes == {"x": 2, "y": 4}


def test_a_program_with_attributes_of_other_dialects_runs():
    text = TEXT.replace(
        "%x: tensor<8x4xf32> {", '%x: tensor<8x4xf32> {ttcore.kind = #ttcore.kind<input>, mhlo.x = "y", ', 1
    )
    text = f'module attributes {{ttcore.meshes = #ttcore.meshes<[<"mesh" = 1x1>]>, enzymexla.f = 1 : i32}} {{{text}}}'
    result, total = sdy.partition(sdy.loads(text))(X, W)
    np.testing.assert_allclose(result, X @ W, rtol=1e-5)
    np.testing.assert_allclose(total, (X @ W).sum(), rtol=1e-4)
