"""Lines are the user's: outside of libraries, with the library's line and jax's name scopes beside them."""

import importlib.util
import inspect
import re
import textwrap

import jax
import jax.numpy as jnp
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import sdy_jax as sdy
from sdy_jax.ir.locations import place_of, short_source, source_line

X, W = jnp.ones((8, 16)), jnp.ones((16, 16))

LIBRARY = """
    import functools

    import jax

    def dense(x, w):
        with jax.named_scope("dense"):
            return call(x, w)

    def call(x, w):
        return x @ w

    def factor(x):
        return jax.lax.linalg.cholesky(x, symmetrize_input=False)

    def module(fun):
        @functools.wraps(fun)
        def wrapped(*args):
            with jax.named_scope(fun.__name__):
                return fun(*args)
        return wrapped
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A module as packages are installed."""
    file = tmp_path_factory.mktemp("python3") / "site-packages" / "layers" / "linear.py"
    file.parent.mkdir(parents=True)
    file.write_text(textwrap.dedent(LIBRARY))
    spec = importlib.util.spec_from_file_location("layers.linear", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_with(fun, text):
    lines, first = inspect.getsourcelines(fun)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.fixture(scope="module")
def network(library):
    @library.module
    def attention(x, w):
        return library.dense(x, w)

    def net(x, w):
        return jnp.tanh(attention(x, w)) @ w

    return net, line_with(attention, "library.dense(")


def planned(mesh, fun, **options):
    return sdy.partition(fun, mesh=mesh, in_shardings=(P("data", "model"), P("model")), **options).plan(X, W)


def test_records_name_the_users_line_the_librarys_and_the_scope(mesh, network):
    net, line = network
    (record, *_) = planned(mesh, net).collectives
    assert record.source == f"{__file__}:{line}"
    assert re.fullmatch(r".*/site-packages/layers/linear\.py:\d+", record.library)
    assert record.scope == "attention/dense"


def test_records_of_code_without_a_library_name_one_line(mesh):
    (record, *_) = planned(mesh, lambda x, w: x @ w).collectives
    assert record.source.startswith(__file__) and record.library == "" and record.scope == ""


def test_scopes_of_derivatives_are_those_of_the_function(mesh, network):
    net, line = network
    plan = planned(mesh, jax.grad(lambda x, w: net(x, w).sum(), argnums=(0, 1)))
    inside = [record for record in plan.collectives if record.library]
    assert len(inside) > 1 and {record.scope for record in inside} == {"attention/dense"}
    assert {record.source for record in inside} == {f"{__file__}:{line}"}


def test_the_printed_plan_has_all_three(mesh, network):
    net, line = network
    said = str(planned(mesh, net))
    assert re.search(
        rf"test_locations\.py:{line} \(layers/linear\.py:\d+\) .*dot_general in attention/dense$", said, re.MULTILINE
    )


def test_notes_name_all_three(mesh, library):
    @library.module
    def ranked(x, w):
        return library.factor(w)

    with pytest.warns(sdy.PartitionWarning) as caught:
        plan = sdy.partition(ranked, mesh=mesh, in_shardings=(P(), P("data"))).plan(X, W)
    (note,) = plan.notes
    line = line_with(ranked, "factor")
    assert note.source == f"{__file__}:{line}" and note.scope == "ranked"
    wanted = rf"test_locations\.py:{line} \(layers/linear\.py:\d+\): (stablehlo\.cholesky|lapack_\w+) in ranked: "
    assert re.search(wanted, str(caught[0].message)) and re.search(wanted, str(plan))


def test_values_are_found_by_both_lines(mesh, network):
    net, line = network
    plan = planned(mesh, net)
    (record, *_) = plan.collectives
    mine, theirs = plan.why(f"test_locations.py:{line}"), plan.why(short_source(record.library))
    assert str(mine) == str(theirs)
    assert re.search(
        rf"dot_general at \S*test_locations\.py:{line} \(layers/linear\.py:\d+\) in \S*attention", str(mine)
    )


def test_a_program_all_of_whose_files_are_installed_keeps_the_innermost_line(mesh, library):
    place = place_of(parse('"f"("/v/site-packages/a.py":3:1)'))
    assert (place.line, place.library, place.function) == ("/v/site-packages/a.py:3", "", "f")


def parse(text):
    with mlir.make_ir_context():
        return ir.Module.parse(f"module {{}} loc({text})").operation.location


FRAMES = (
    'callsite("Dense.__call__"("/v/site-packages/flax/linear.py":287:8) at callsite("f.<locals>.g"("/u/m.py":13:15) at '
)
FRAMES += '"<module>"("/u/train.py":2:1)))'
PLACES = {
    "a call": (f'"jit(f)/Net/out/dot_general"({FRAMES})', "/u/m.py:13", "g", "Net/out", "dot_general"),
    "a derivative": (f'"jit(f)/transpose(jvp(Net))/out/mul"({FRAMES})', "/u/m.py:13", "g", "Net/out", "mul"),
    "nothing inside": (f'"jit(f)/jvp()/mul"({FRAMES})', "/u/m.py:13", "g", "", "mul"),
    "a loop": (f'"jit(f)/while/body/closed_call/Block/mul"({FRAMES})', "/u/m.py:13", "g", "Block", "mul"),
    "a branch": (f'"jit(f)/cond/branch_1_fun/Block/mul"({FRAMES})', "/u/m.py:13", "g", "Block", "mul"),
    "an inner jit": (f'"jit(f)/Block/jit(relu)/max"({FRAMES})', "/u/m.py:13", "g", "Block", "max"),
    "one frame": ('"jit(f)/mul"("f"("/u/m.py":4:5))', "/u/m.py:4", "f", "", "mul"),
    "no frames": ('"jit(f)/Net/mul"("/u/m.py":4:5)', "/u/m.py:4", "", "Net", "mul"),
    "named twice": ('"mul:"("jit(f)/Net/mul"("/u/m.py":4:5))', "/u/m.py:4", "", "Net", "mul"),
    "outside of its stack": ('"mul"("jit(f)/Net"("/u/m.py":4:5))', "/u/m.py:4", "", "Net", "mul"),
    "a file": ('"m.mlir":7:3', "m.mlir:7", "", "", ""),
    "nothing": ("unknown", "an unknown line", "", "", ""),
    "no file": ('"jit(f)/Net/mul"(unknown)', '"jit(f)/Net/mul"', "", "Net", "mul"),
    "a name": ('"return at x"', '"return at x"', "", "", ""),
}


@pytest.mark.parametrize("text, line, function, scope, primitive", PLACES.values(), ids=PLACES)
def test_what_a_location_says(text, line, function, scope, primitive):
    location = parse(text)
    place = place_of(location)
    assert (place.line, place.function, place.scope, place.primitive) == (line, function, scope, primitive)
    assert source_line(location) == line and place.backward == ("transpose" in text)


def test_lines_without_full_tracebacks(mesh, network):
    """Where the user has switched them off, there is one line."""
    net, _ = network
    jax.config.update("jax_include_full_tracebacks_in_locations", False)
    try:
        (record, *_) = planned(mesh, net).collectives
    finally:
        jax.config.update("jax_include_full_tracebacks_in_locations", True)
    assert re.search(r"site-packages/layers/linear\.py:\d+", record.source) and record.scope == "attention/dense"
