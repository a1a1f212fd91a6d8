"""The plan as text and as records."""

import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.jax_shardings import array_text, bytes_text, type_text
from sdy_jax.ir.locations import is_line, short_source
from sdy_jax.lowering.ops.re_emission import _DTYPES
from sdy_jax.mesh_dialects.meshes import DeviceMesh

X = np.ones((8, 16), np.float32)
W = np.ones((16, 16), np.float32)


def two_layers(x, w):
    return jax.nn.relu(x @ w) @ w.T


def looped(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x)


@pytest.fixture(scope="module")
def layers(mesh):
    specs = (P("data", "model"), P("model", None))
    return sdy.partition(two_layers, mesh=mesh, in_shardings=specs, out_shardings=P("data")).plan(X, W)


@pytest.fixture(scope="module")
def loop(mesh):
    specs = (P("data", "model"), P("model", None))
    return sdy.partition(looped, mesh=mesh, in_shardings=specs, on_unknown="ignore").plan(X, W)


def test_every_collective_has_a_line_with_kind_axes_bytes_and_source(layers):
    lines = str(layers).split("collectives (bytes per device)\n")[1].split("\n\n")[0].splitlines()
    assert len(lines) == len(layers.collectives) > 0
    by_bytes = sorted(layers.collectives, key=lambda record: -record.wire_bytes)
    for line, record in zip(lines, by_bytes, strict=True):
        assert re.search(r"test_plan\.py:\d+", line)
        for word in (record.kind, record.detail, bytes_text(record.wire_bytes), f"for {record.cause}"):
            assert word in line


def test_what_moves_at_the_end_is_for_the_line_that_gives_the_shardings_of_results(mesh):
    f = sdy.partition(lambda x: x, mesh=mesh, in_shardings=P("model"), out_shardings=P("data"))
    line = f._function.source
    (*moved, last) = f.plan(X).collectives
    assert re.search(r"test_plan\.py:\d+$", line)
    assert {(c.source, c.cause) for c in (*moved, last)} == {(line, "func.return")}


def test_the_repr_of_a_plan_is_one_line(layers, mesh):
    count, wire = len(layers.collectives), bytes_text(layers.wire_bytes)
    said = f"two_layers on mesh data=2, model=4 (8 devices): {count} collectives, {wire} on the wire per device"
    assert repr(layers) == f"<plan of {said}>"
    many = sdy.partition(lambda tree: tree, mesh=mesh).plan({f"w{i}": X for i in range(200)})
    assert "\n" not in repr(many) and len(repr(many)) < 200


def test_records(layers):
    assert layers.wire_bytes == sum(c.wire_bytes for c in layers.collectives) > 0
    for record in layers.collectives:
        assert {axis.name for axis in record.axes} <= {"data", "model"} and record.depth == 0
        assert record.dtype == "f32" and len(record.shape) == record.result.rank == 2


def test_head_arguments_and_results(layers):
    text = str(layers)
    count = len(layers.collectives)
    assert text.startswith(f"plan of two_layers on mesh data=2, model=4 (8 devices): {count} collective")
    assert re.search(r"arguments\n  x +f32\[8@data,16@model\]  4x4 on a device .*\n  w +f32\[16@model,16\] .*\n", text)
    assert re.search(r"results\n  result +f32\[8@data,16\]  4x16 on a device  256 B\n", text)


def test_collectives_in_loops_are_marked(loop):
    inside = [c for c in loop.collectives if c.depth]
    assert inside
    assert str(loop).count(" 3 trips x ") == len(inside)


def test_summary_counts_by_kind(layers):
    lines = layers.summary().splitlines()
    assert lines[0] == str(layers).splitlines()[0]
    counts = {m[2]: int(m[1]) for m in (re.match(r" +(\d+) x (\w+) +.* per device$", line) for line in lines[1:])}
    kinds = [c.kind for c in layers.collectives]
    assert counts == {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("stage", ["traced", "imported", "propagated", "partitioned"])
def test_every_stage_parses_back(layers, loop, stage):
    with mlir.make_ir_context():
        for plan in (layers, loop):
            module = ir.Module.parse(plan.mlir(stage))
            assert module.operation.verify()
            collectives = re.findall(r"= sdy\.(all|reduce|collective)_", plan.mlir(stage))
            assert len(collectives) == (len(plan.collectives) if stage == "partitioned" else 0)


def test_an_unknown_stage_lists_the_known_ones(layers):
    with pytest.raises(
        sdy.SdyError, match="no stage 'final'; the stages are traced, imported, propagated, partitioned"
    ):
        layers.mlir("final")


def test_a_plan_without_communication_says_so(mesh):
    plan = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=P("data")).plan(X)
    assert "0 collectives, 0 B" in str(plan) and "collectives: none" in str(plan)


def test_notes_name_the_op_and_the_source_line(mesh):
    svd = sdy.partition(
        lambda x: jnp.linalg.svd(x, compute_uv=False), mesh=mesh, in_shardings=P("data"), on_unknown="ignore"
    )
    assert re.search(r"notes\n  .*test_plan\.py:\d+: .*lapack_sgesdd_ffi", str(svd.plan(X)))
    assert "print the plan" in svd.plan(X).summary()


@pytest.mark.parametrize(
    ("dtype", "text", "expected"),
    [
        ("f32", '[{"data"}, {}]', "f32[8@data,4]"),
        ("f32", '[{"data"}, {}], unreduced={"model"}', "f32[8@data,4]{U:model}"),
        ("i1", '[{"data","model"}, {}]', "bool[8@(data,model),4]"),
        ("ui8", '[{}, {"model":(1)2}]', "u8[8,4@model:(1)2]"),
        ("complex<f32>", "[{}, {}]", "c64[8,4]"),
        ("f8E4M3B11FNUZ", '[{"data"}, {}]', "f8_e4m3b11fnuz[8@data,4]"),
    ],
)
def test_types_read_as_jax_prints_them(dtype, text, expected):
    from sdy_jax.ir.parsers import parse_sharding

    assert type_text(dtype, (8, 4), parse_sharding(text, "mesh")) == expected


def test_types_of_modules_and_of_arrays_read_alike():
    for mlir_name, dtype in _DTYPES.items():
        assert type_text(mlir_name, (8, 4), None) == array_text(jax.ShapeDtypeStruct((8, 4), dtype))


def test_a_shape_of_no_sizes_is_seen():
    assert [str(DeviceMesh("mesh", "m", sizes)) for sizes in ((), (2, None))] == ["[]", "2x?"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (24576, "24.0 KiB"), (1.5 * 2**20, "1.5 MiB"), (2**41, "2.0 TiB")]
)
def test_bytes(count, text):
    assert bytes_text(count) == text


def test_sources_are_named_from_where_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_source(f"{tmp_path}/models/mlp.py:3") == "models/mlp.py:3"
    assert short_source("/usr/lib/python3/site-packages/optax/base.py:7") == "optax/base.py:7"
    assert short_source("/elsewhere/mlp.py:3") == "/elsewhere/mlp.py:3"


def test_in_notebooks_lines_are_those_of_cells(monkeypatch):
    code = (lambda x: jnp.tanh(x)).__code__
    cells = SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]") if file == code.co_filename else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=cells))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert short_source("/elsewhere/mlp.py:3") == "/elsewhere/mlp.py:3"
    line = f"In[3]:{code.co_firstlineno}"
    assert short_source(f"{code.co_filename}:{code.co_firstlineno}") == line
    assert is_line(f"{code.co_filename}:{code.co_firstlineno}", line) and not is_line("/elsewhere/mlp.py:3", "In[3]:3")


def test_the_program_of_a_plan_is_a_program_of_the_api(layers):
    assert isinstance(layers.program, sdy.Program)
    loaded = sdy.loads(str(layers.program.module))
    assert type(loaded) is type(layers.program) is sdy.Program
