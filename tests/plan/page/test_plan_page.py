"""`print(plan)` is one screen at any size, and says what a call sends, holds and computes; tables have all of it."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import train_lm
from jax.sharding import PartitionSpec as P
from wire_totals import OPTIONS

import sdy_jax as sdy
from sdy_jax.cli.main import main
from sdy_jax.ir.jax_shardings import bytes_text
from sdy_jax.plan.page.page import LINES, Folding, page_of
from sdy_jax.plan.page.tables import table_of
from sdy_jax.plan.page.text import Section, fit_in_lines
from sdy_jax.plan.profile import collectives_in_hlo, totals
from sdy_jax.plan.record.program import RecordedBorder, RecordedTensor


def of(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(layers, x):
    for layer in layers:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


def step(state, x):
    gradients = jax.grad(loss)(state["params"], x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
    return {"params": jax.tree.map(lambda w, m: w - m, state["params"], moments), "moments": moments}, loss


def trained(mesh, layers, **options):
    """A step of many layers, Megatron over `model` and FSDP over `data`, with the state of an optimizer."""
    weights = [{"up": of(32, 64), "down": of(64, 32)}] * layers
    specs = [{"up": P("data", "model"), "down": P("model", "data")}] * layers
    state, placed = ({"params": tree, "moments": tree} for tree in (weights, specs))
    made = sdy.partition(
        lambda state, x: step(state, x)[0],
        mesh=mesh,
        in_shardings=(placed, P("data")),
        out_shardings=placed,
        **{**OPTIONS, **options},
    )
    return made, (state, of(16, 32))


@pytest.fixture(scope="module")
def deep(mesh):
    made, args = trained(mesh, 64, layouts="local")
    return made.plan(*args)


def section(text, title):
    """The lines of a section of a page."""
    (found,) = [part for part in text.split("\n\n") if part.startswith(title)]
    return found.splitlines()[1:]


def test_a_page_of_64_layers_is_one_screen(deep):
    text = str(deep)
    assert len(text.splitlines()) <= LINES == 60 and max(map(len, text.splitlines())) < 200
    assert len(deep.collectives) > 300
    assert "state['params'][0..63]['up']" in text and "x 64" in text
    assert re.search(r"state\['moments'\] +as state\['params'\] +128 arrays", text)
    (result,) = section(text, "results")
    assert result.split()[:3] == ["result", "as", "state"]


def test_layers_that_are_alike_are_one_line_which_adds_up(deep):
    lines = section(str(deep), "collectives")
    assert len(lines) < 20 and any("64 x " in line or "63 x " in line or "128 x" in line for line in lines)
    shares = [int(share) for share in re.findall(r"(\d+)% ", "\n".join(lines))]
    assert shares == sorted(shares, reverse=True) and 95 <= sum(shares) <= 105


def test_what_a_page_says_is_what_a_small_program_sends(mesh):
    made, args = trained(mesh, 2)
    plan = made.plan(*args)
    sent = totals(collectives_in_hlo(made.lower(*args).compile().as_text())).wire_bytes
    assert sent == pytest.approx(plan.wire_bytes) == sum(row.bytes for row in plan.table("collectives"))
    assert f"{bytes_text(sent)} on the wire per device" in str(plan).splitlines()[0]


@pytest.mark.slow
def test_gpt_of_12_layers_under_fsdp_and_megatron(mesh):
    config = train_lm.Config(layers=12, d_model=64, heads=8, sequence=64)
    specs, tokens = train_lm.shardings(config, mesh, fsdp=True)
    made = sdy.partition(
        train_lm.make_train_step(config),
        mesh=mesh,
        in_shardings=(specs, tokens),
        out_shardings=(specs, None),
        **OPTIONS,
    )
    state = jax.eval_shape(lambda: train_lm.init_state(config, jax.random.key(0)))
    args = state, jax.ShapeDtypeStruct((config.batch, config.sequence + 1), jnp.int32)
    plan = made.plan(*args)
    assert len(str(plan).splitlines()) <= 60
    compiled = made.lower(*args).compile()
    assert totals(collectives_in_hlo(compiled.as_text())).wire_bytes == plan.wire_bytes
    held = compiled.memory_analysis()
    held_bytes = held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes
    assert plan.memory.peak == pytest.approx(held_bytes, rel=0.1)


# What the lines say.


def scanned(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w.T, None), x, None, length=16)[0]


def test_loops_are_trips(mesh):
    plan = sdy.partition(scanned, mesh=mesh, in_shardings=(P("data"), P(None, "model"))).plan(of(8, 16), of(16, 32))
    (line,) = section(str(plan), "collectives")
    assert re.search(r"all_reduce \{\"model\"\} +f32\[8@data,16\] +6\.0 KiB +16 trips x 384 B ", line)
    (row,) = plan.table("collectives")
    assert (row.bytes, row.trips) == (6144, "16 trips")


def test_each_device_says_what_it_sends_holds_and_computes(mesh):
    plan = sdy.partition(scanned, mesh=mesh, in_shardings=(P("data"), P(None, "model"))).plan(of(8, 16), of(16, 32))
    sends, holds, computes = section(str(plan), "each device")
    assert sends.split() == ["sends", "6.0", "KiB", "in", "16", "all_reduce"]
    assert f"{bytes_text(plan.memory.peak)} at most" in holds and computes.endswith("flop")


def test_time_is_split_where_the_model_knows_it(mesh):
    costs = sdy.CostModel.of_machine("h100", mesh.axis_names)
    plan = sdy.partition(scanned, mesh=mesh, in_shardings=(P("data"), P(None, "model")), costs=costs).plan(
        of(8, 16), of(16, 32)
    )
    (takes,) = [line for line in section(str(plan), "each device") if line.split()[0] == "takes"]
    assert re.search(r"[\d.]+ us, estimated: [\d.]+ \wm?s compute, [\d.]+ us communication", takes)
    assert "costs in seconds: h100" in str(plan)


def test_the_block_of_a_device_stands_beside_the_type(mesh):
    plan = sdy.partition(lambda x, y: (x, y), mesh=mesh, in_shardings=(P("data", "model"), P())).plan(of(8, 16), of(4))
    split, whole = section(str(plan), "arguments")
    assert split.split() == ["x", "f32[8@data,16@model]", "4x4", "on", "a", "device", "64", "B"]
    assert whole.split() == ["y", "f32[4]", "16", "B"]


def test_what_costs_most_is_said_of_long_plans(deep, mesh):
    assert [line.split()[4] for line in section(str(deep), "costs most")] == ["sends", "holds", "computes"]
    short = sdy.partition(lambda x: x * 2, mesh=mesh, in_shardings=P("data")).plan(of(8, 16))
    assert "costs most" not in str(short)


def attended(x, q, k, v):
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k))
    return jnp.einsum("bhst,bthe->bshe", weights, v)


def test_a_page_of_a_small_program_has_its_fix_its(mesh):
    line = jax.make_mesh((8,), ("s",))
    made = sdy.partition(attended, mesh=line, in_shardings=(P(None, "s"), P(), P(), P()))
    plan = made.plan(of(8, 16, 32), *[of(32, 8, 4)] * 3)
    assert section(str(plan), "fix-its")[0].strip() == str(plan.fixes[0])


def test_a_page_of_a_large_program_looks_for_no_fix_its(deep):
    assert "fix" not in str(deep) and "fixes" not in vars(deep)


# Folding.


def folded(*paths, type_="f32[2]"):
    values = [RecordedBorder(path, RecordedTensor(type_, bytes=8.0)) for path in paths]
    return [(value.path, value.count, value.like) for value in Folding().folded(values)]


def test_entries_of_a_list_are_a_range_where_they_are_one():
    assert folded("w[0]", "w[1]", "w[2]") == [("w[0..2]", 3, "")]
    assert folded("w[0]", "w[2]") == [("w[0, 2]", 2, "")]
    assert folded("w['a']['x']", "w['b']['y']") == [("w['a']['x']", 1, ""), ("w['b']['y']", 1, "")]


def test_a_tree_as_one_before_is_a_line():
    paths = [f"{root}['{key}'][{n}]" for root in ("opt.mu", "p") for key in "ab" for n in range(2)]
    assert folded(*paths) == [("opt.mu", 4, "p"), ("p['a'][0..1]", 2, ""), ("p['b'][0..1]", 2, "")]


def test_odd_paths_stay_as_they_are():
    assert folded("a]b", "constant 0", "x['k.e[y']") == [("a]b", 1, ""), ("constant 0", 1, ""), ("x['k.e[y']", 1, "")]


def test_tables_keep_to_the_width_of_a_terminal(deep, monkeypatch):
    whole = str(deep.table("arguments"))
    monkeypatch.setenv("COLUMNS", "80")
    assert str(deep.table("arguments")) == whole and max(map(len, whole.splitlines())) > 80
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    narrow = str(deep.table("arguments"))
    assert max(map(len, narrow.splitlines()[1:])) <= 80 and len(narrow.splitlines()) == len(whole.splitlines())
    assert "…" in narrow and "'up']  " in narrow
    sizes = [re.findall(r"[\d.]+ (?:B|[KM]iB)", text) for text in (whole, narrow)]
    assert sizes[0] == sizes[1]


def test_long_paths_lose_their_middle_on_a_page(deep):
    path = "state" + "['a_long_name_of_a_module']" * 6 + "['kernel']"
    record = replace(deep.record(), arguments=(replace(deep.record().arguments[0], path=path),))
    [line] = [line for line in page_of(record).splitlines() if line.startswith("  state['a_long_name")]
    shown = line.split()[0]
    assert len(shown) == 72 and shown.endswith("_of_a_module']['kernel']") and "…" in shown


def test_sections_share_a_page():
    sections = [Section("a", [(f"{n}",) for n in range(100)]), Section("b", [("x",)]), Section("c")]
    text = fit_in_lines(sections, 20)
    assert len(text.splitlines()) == 20 and text.endswith("\n\nb\n  x\n\nc") and "and 87 more" in text
    assert fit_in_lines(sections, 1000).count("\n") == 1 + 100 + 1 + 2 + 1 + 1 - 1


def test_any_record_is_a_page(deep):
    record = deep.record()
    many = replace(
        record,
        notes=tuple(
            replace(note, message=f"{note.message} {chr(97 + n % 26) * (n // 26 + 1)}")
            for note in record.notes * 2
            for n in range(99)
        ),
        arguments=tuple(
            replace(a, path=f"a{n}", tensor=replace(a.tensor, type=f"f32[{n}]")) for n, a in enumerate(record.arguments)
        ),
    )
    assert len(page_of(many, [f"fix {n}" for n in range(50)]).splitlines()) <= LINES


# Tables.


def test_tables_have_all_rows(deep):
    record = deep.record()
    counts = {
        "collectives": len(record.collectives),
        "ops": len(record.ops),
        "values": len(record.values),
        "arguments": len(record.arguments) + len(record.results),
        "memory": len(record.memory.largest) + 2,
    }
    for name, count in counts.items():
        table = deep.table(name)
        assert len(table) == len(list(table)) == count == len(str(table).splitlines()) - 2, name
        assert table._repr_html_().count("<tr>") == count + 1
    assert sum(row.bytes for row in deep.table("memory")) == pytest.approx(deep.memory.peak)
    assert str(table_of(record, "ops")) == str(deep.table("ops"))
    assert max(deep.table("arguments"), key=lambda row: row.bytes).path.endswith("['down']")


def test_an_unknown_table_lists_the_known_ones(deep):
    with pytest.raises(sdy.SdyError, match="no table 'op'; the tables are 'collectives', 'ops', 'values', 'arguments'"):
        deep.table("op")


# Drawings.


def drawn(mesh, spec, *shape):
    return str(sdy.partition(lambda x: x + 1, mesh=mesh, in_shardings=spec).plan(of(*shape)).draw("x"))


def test_arrays_are_drawn_as_jax_draws_them(mesh, capsys):
    lines = drawn(mesh, P("data", "model"), 8, 8).splitlines()
    assert lines[2].split() == ["│", "0", "│", "1", "│", "2", "│", "3", "│"] and len(lines) == 6
    assert drawn(mesh, P("model"), 8, 8).splitlines()[2].split() == ["│", "0,4", "│"]
    assert "0..7" in drawn(mesh, P(), 8, 8)


@pytest.mark.parametrize("spec", [P("data"), P("model", "data"), P(None, "model"), P(("model", "data"))])
def test_a_drawing_has_each_device_where_its_block_is(mesh, spec):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    cells = sdy.partition(lambda x: x + 1, mesh=mesh, in_shardings=spec).plan(of(8, 8)).draw("x").cells
    blocks = {}
    for device, (rows, columns) in sharding.devices_indices_map((8, 8)).items():
        row, column = (
            8 if s.start is None else s.start * n // 8 for s, n in ((rows, len(cells)), (columns, len(cells[0])))
        )
        blocks.setdefault((row % 8, column % 8), []).append(device.id)
    for (row, column), devices in blocks.items():
        cell = cells[row][column]
        assert cell in (",".join(map(str, sorted(devices))), f"{min(devices)}..{max(devices)}"), (cell, devices)


def test_what_cannot_be_drawn_is_an_error(mesh):
    plan = sdy.partition(lambda x: x + 1, mesh=mesh, in_shardings=P("data")).plan(of(8, 8))
    with pytest.raises(sdy.SdyError, match="no argument, result or value is called 'y'"):
        plan.draw("y")


# Terminals, the command line and notebooks.


def test_tables_and_fix_its_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layers.py").write_text("def layer(x, w):\n    return (x @ w) @ w.T\n")
    command = ["plan", "layers.py:layer", "--mesh", "x=8", "--args", "f32[64,32], f32[32,64]"]
    command += ["--in-shardings", "P(None, 'x'), P()"]
    assert main([*command, "--table", "collectives"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("collectives of layer") and head.split()[:3] == ["collective", "type", "bytes"] and rows
    assert main([*command, "--fixes"]) == 0
    assert "out_shardings of `x`: P('x') instead of P(None, 'x'): saves " in capsys.readouterr().out


def test_notebooks_and_terminals(mesh, capsys):
    plan = sdy.partition(lambda x: x @ x.T, mesh=mesh, in_shardings=P("data")).plan(of(8, 16))
    assert plan._repr_html_().startswith("<pre") and "<b>arguments</b>" in plan._repr_html_()
    plan.show()
    assert capsys.readouterr().out == f"{plan}\n"
    rich = pytest.importorskip("rich.console")
    console = rich.Console(force_terminal=True, color_system="standard", width=300)
    with console.capture() as captured:
        console.print(plan)
    assert "\x1b[" in captured.get() and re.sub(r"\x1b\[[\d;]*m", "", captured.get()).strip() == str(plan)
