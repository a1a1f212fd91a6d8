"""Annotations of the mesh and shard dialects in programs on whole tensors: what SDY they become, and that they run."""

import itertools
import re

import jax
import numpy as np
import pytest
from dialect_texts import in_shard

import sdy_jax as sdy
from sdy_jax.cli.opt import optimize
from sdy_jax.ir.text.modules import SourceError
from sdy_jax.plan.profile import collectives_in_hlo, totals

DIALECTS = ("mesh", "shard")
IMPORT = "import-mesh-annotations"
X = np.random.default_rng(7).normal(size=(8, 16)).astype(np.float32)


def said_in(dialect, text):
    """A text of the mesh dialect, in one of the two."""
    return text if dialect == "mesh" else in_shard(text)


def function(body, arguments="%x: tensor<8x16xf32>", results="tensor<8x16xf32>", mesh="mesh.mesh @m(shape = 2x4)"):
    return f"{mesh}\nfunc.func @main({arguments}) -> ({results}) {{\n{body}\n}}\n"


def sharding(name, lists, rest="", mesh="@m"):
    return f"%{name} = mesh.sharding {mesh} split_axes = {lists} {rest} : !mesh.sharding"


def imported(text, options="", more=""):
    return optimize(text, f"{IMPORT}{options}{more}", "-")


def partitioned(text, mesh=None, strict=True):
    return sdy.partition(sdy.load(text.encode(), strict=strict), mesh=mesh, on_unknown="ignore")


def refused(text, options=""):
    with pytest.raises(SourceError) as caught:
        imported(text, options)
    return str(caught.value)


# What they become -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_annotations_become_constraints(dialect):
    text = f"""
mesh.mesh @grid(shape = 2x4)
func.func @main(%x: tensor<8x16xf32>, %y: tensor<8x4xf32>) -> (tensor<8x16xf32>, tensor<8x4xf32>) {{
  {sharding("s", "[[0]]", mesh="@grid")}
  {sharding("t", "[[0], [1]]", mesh="@grid")}
  {sharding("p", "[[0]]", "partial = sum [1]", mesh="@grid")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %u = mesh.shard %a to %t annotate_for_users : tensor<8x16xf32>
  %v = mesh.shard %y to %p annotate_for_users : tensor<8x4xf32>
  %z = stablehlo.tanh %u : tensor<8x16xf32>
  %w = stablehlo.negate %v : tensor<8x4xf32>
  return %z, %w : tensor<8x16xf32>, tensor<8x4xf32>
}}"""
    assert [line.strip() for line in imported(said_in(dialect, text)).splitlines()[1:9]] == [
        'sdy.mesh @grid = <["axis0"=2, "axis1"=4]>',
        'func.func @main(%arg0: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@grid, [{"axis0"}, {}]>}, '
        "%arg1: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@grid, [{?}, {?}]>}) -> "
        "(tensor<8x16xf32>, tensor<8x4xf32>) {",
        '%0 = sdy.sharding_constraint %arg0 <@grid, [{"axis0"}, {}]> : tensor<8x16xf32>',
        '%1 = sdy.sharding_constraint %arg0 <@grid, [{"axis0"}, {"axis1"}]> : tensor<8x16xf32>',
        '%2 = sdy.sharding_constraint %arg1 <@grid, [{"axis0"}, {}], unreduced={"axis1"}> : tensor<8x4xf32>',
        "%3 = stablehlo.tanh %1 : tensor<8x16xf32>",
        "%4 = stablehlo.negate %2 : tensor<8x4xf32>",
        "return %3, %4 : tensor<8x16xf32>, tensor<8x4xf32>",
    ]


def test_a_plain_shard_is_the_sharding_of_the_value_whatever_its_users_say():
    text = function(
        f"""{sharding("s", "[[0]]")}
  {sharding("t", "[[1]]")}
  {sharding("u", "[[], [0, 1]]")}
  %y = stablehlo.tanh %x : tensor<8x16xf32>
  %a = mesh.shard %y to %s : tensor<8x16xf32>
  %b = mesh.shard %a to %t annotate_for_users : tensor<8x16xf32>
  %c = mesh.shard %y to %u annotate_for_users : tensor<8x16xf32>
  %d = stablehlo.sine %b : tensor<8x16xf32>
  %e = stablehlo.cosine %c : tensor<8x16xf32>
  return %d, %e : tensor<8x16xf32>, tensor<8x16xf32>""",
        results="tensor<8x16xf32>, tensor<8x16xf32>",
    )
    run = partitioned(text)
    propagated = run.plan(X).mlir("propagated")
    assert re.search(
        r'stablehlo.tanh .* \{sdy.sharding = #sdy.sharding_per_value<\[<@m, \[{"axis0"}, {}\]>\]>}', propagated
    )
    assert [str(v.sharding) for v in run.plan(X).results] == ['@m, [{"axis1"}, {}]', '@m, [{}, {"axis0", "axis1"}]']
    np.testing.assert_allclose(run(X), (np.sin(np.tanh(X)), np.cos(np.tanh(X))), atol=1e-6)


def test_trailing_lists_are_empty_and_equal_annotations_are_one():
    text = function(
        f"""{sharding("s", "[[0], []]")}
  {sharding("t", "[[0]]", "halo_sizes = [0, 0]")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %b = mesh.shard %a to %t : tensor<8x16xf32>
  return %b : tensor<8x16xf32>"""
    )
    found = imported(text)
    assert found.count("sdy.sharding_constraint") == 1
    assert "mesh." not in found.replace("sdy.mesh", "")


def test_a_loop_is_annotated_inside_and_outside():
    text = function(
        f"""{sharding("s", "[[0]]")}
  {sharding("t", "[[1]]")}
  %n = stablehlo.constant dense<3> : tensor<i32>
  %o = stablehlo.constant dense<1> : tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %r:2 = stablehlo.while(%i = %z, %v = %x) : tensor<i32>, tensor<8x16xf32> cond {{
    %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %c : tensor<i1>
  }} do {{
    %j = stablehlo.add %i, %o : tensor<i32>
    %w = mesh.shard %v to %t annotate_for_users : tensor<8x16xf32>
    %y = stablehlo.tanh %w : tensor<8x16xf32>
    stablehlo.return %j, %y : tensor<i32>, tensor<8x16xf32>
  }}
  %a = mesh.shard %r#1 to %s : tensor<8x16xf32>
  %b = mesh.shard %a to %t annotate_for_users : tensor<8x16xf32>
  %e = stablehlo.sine %b : tensor<8x16xf32>
  return %e : tensor<8x16xf32>"""
    )
    run = partitioned(text)
    shardings = '@m, []>, <@m, [{"axis0"}, {}]'
    assert f"attributes {{sdy.sharding = #sdy.sharding_per_value<[<{shardings}>]>" in run.plan(X).mlir("propagated")
    np.testing.assert_allclose(run(X), np.sin(np.tanh(np.tanh(np.tanh(X)))), atol=1e-6)


# The examples of the reference ----------------------------------------------------------------------------------------

EXAMPLES = {
    "only_result_annotated": (
        "%arg0: tensor<4x8xf32>",
        ["%s = mesh.sharding @m split_axes = [[0]] : !mesh.sharding", "%0 = mesh.shard %arg0 to %s : tensor<4x8xf32>"],
        ["%arg0 <@m, [{a0}, {}]>"],
    ),
    "only_operand_annotated": (
        "%arg0: tensor<4x8xf32>",
        [
            "%s = mesh.sharding @m split_axes = [[0]] : !mesh.sharding",
            "%0 = mesh.shard %arg0 to %s annotate_for_users : tensor<4x8xf32>",
        ],
        ["%arg0 <@m, [{a0}, {}]>"],
    ),
    "two_operands_annotated": (
        "%arg0: tensor<4x8xf32>, %arg1: tensor<16x8xf32>",
        [
            "%s = mesh.sharding @m split_axes = [[0]] : !mesh.sharding",
            "%0 = mesh.shard %arg0 to %s annotate_for_users : tensor<4x8xf32>",
            "%1 = mesh.shard %arg1 to %s annotate_for_users : tensor<16x8xf32>",
        ],
        ["%arg0 <@m, [{a0}, {}]>", "%arg1 <@m, [{a0}, {}]>"],
    ),
    "both_result_and_multi_operands_annotated": (
        "%arg0: tensor<4x8xf32>",
        [
            "%s = mesh.sharding @m split_axes = [[0]] : !mesh.sharding",
            "%0 = mesh.shard %arg0 to %s : tensor<4x8xf32>",
            "%s1 = mesh.sharding @m split_axes = [[1]] : !mesh.sharding",
            "%1 = mesh.shard %0 to %s1 annotate_for_users : tensor<4x8xf32>",
            "%s2 = mesh.sharding @m split_axes = [[2]] : !mesh.sharding",
            "%2 = mesh.shard %0 to %s2 annotate_for_users : tensor<4x8xf32>",
        ],
        ["%arg0 <@m, [{a0}, {}]>", "%arg0 <@m, [{a1}, {}]>", "%arg0 <@m, [{a2}, {}]>"],
    ),
    "partial": (
        "%arg0: tensor<4x8xf32>",
        [
            "%s2 = mesh.sharding @m split_axes = [[0], []] partial = sum[1] : !mesh.sharding",
            "%0 = mesh.shard %arg0 to %s2 annotate_for_users : tensor<4x8xf32>",
            "%s3 = mesh.sharding @m split_axes = [[0]] partial = max[1] : !mesh.sharding",
            "%sharded0 = mesh.shard %arg0 to %s3 annotate_for_users : tensor<4x8xf32>",
        ],
        [
            "%arg0 <@m, [{a0}, {}], unreduced={a1}>",
            '%arg0 <@m, [{a0}, {}], unreduced={a1}> {sdy.reduction_kind = "max"}',
        ],
    ),
    "replicated and halos": (
        "%arg0: tensor<4x8xf32>, %arg1: tensor<4x8xf32>",
        [
            "%s0 = mesh.sharding @m split_axes = [[]] : !mesh.sharding",
            "%0 = mesh.shard %arg0 to %s0 : tensor<4x8xf32>",
            "%halo_sharding = mesh.sharding @m split_axes = [[0]] halo_sizes = [1, 2] : !mesh.sharding",
            "%sharded1 = mesh.shard %arg1 to %halo_sharding : tensor<4x8xf32>",
        ],
        ["%arg0 <@m, [{}, {}]>", "%arg1 <@m, [{a0}, {}]> {sdy_jax.layout = {halo_sizes = array<i64: 1, 2>}}"],
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_references_examples(name, dialect):
    arguments, body, expected = EXAMPLES[name]
    text = f"mesh.mesh @m(shape = 2x2x4)\nfunc.func @f({arguments}) {{\n" + "\n".join(body) + "\nreturn\n}"
    found = re.findall(r"sdy.sharding_constraint (.*) : tensor", imported(said_in(dialect, text)))
    wanted = [re.sub(r"\ba(\d)", r'"axis\1"', line) for line in expected]
    assert [
        line.replace('unreduced=max{"axis1"}>', 'unreduced={"axis1"}> {sdy.reduction_kind = "max"}') for line in found
    ] == wanted


def test_the_references_example_with_shard_sizes():
    text = function(
        f"""{sharding("s", "[[], [0]]", "sharded_dims_offsets = [0, 2, 5, 9, 14]", "@mesh1d_4")}
  %a = mesh.shard %x to %s : tensor<4x14xf32>
  %b = stablehlo.tanh %a : tensor<4x14xf32>
  return %b : tensor<4x14xf32>""",
        "%x: tensor<4x14xf32>",
        "tensor<4x14xf32>",
        "mesh.mesh @mesh1d_4(shape = 4)",
    )
    assert "sdy_jax.layout = {sharded_dims_offsets = array<i64: 0, 2, 5, 9, 14>}" in imported(text)
    run, x = partitioned(text), X[:4, :14]
    np.testing.assert_allclose(run(x), np.tanh(x), atol=1e-6)
    kept = "[0, 2, 5, 9, 14] are kept by an element-wise op, which every device runs on 5 elements"
    assert f"sharded_dims_offsets = {kept}" in str(run.plan(x))


# Usages that the reference leaves undefined ---------------------------------------------------------------------------


def chain(first, second, of="%a"):
    return function(
        f"""{sharding("s", "[[0]]")}
  {sharding("t", "[[], [1]]")}
  %a = mesh.shard %x to %s {first}: tensor<8x16xf32>
  %b = mesh.shard {of} to %t {second}: tensor<8x16xf32>
  %c = stablehlo.sine %b : tensor<8x16xf32>
  return %c : tensor<8x16xf32>"""
    )


PLAIN, USERS = "", "annotate_for_users "
UNDEFINED = {
    "U1": (chain(PLAIN, PLAIN), "%a is already sharded at FILE:5:8; use annotate_for_users to reshard for its users"),
    "U2": (chain(PLAIN, PLAIN, "%x"), "%x has two different shardings, here and at FILE:5:8"),
    "U3": (
        chain(USERS, USERS),
        "%a is already annotated for its users at FILE:5:8; annotate the value itself a second time for other users",
    ),
    "U4": (
        chain(USERS, PLAIN),
        "%a is annotated for its users at FILE:5:8 and cannot be given another sharding after that",
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", UNDEFINED)
def test_undefined_usages_are_refused(name, dialect):
    text, message = UNDEFINED[name]
    for refuse, file in ((imported, "-"), (partitioned, "<bytes>")):
        with pytest.raises(SourceError) as caught:
            refuse(said_in(dialect, text))
        expected = f"{file}:6:8: error: {dialect}.shard: {message.replace('FILE', file)}\n"
        assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("name", ("U1", "U3"))
def test_two_of_them_are_reshards_where_they_are_tolerated(name):
    text, _ = UNDEFINED[name]
    constraints = re.findall(r"= sdy.sharding_constraint (%\w+) <@m, (.*)> :", imported(text, "{strict=false}"))
    rows, columns = '[{"axis0"}, {}]', '[{}, {"axis1"}]'
    assert constraints == [("%arg0", rows), ("%arg0" if name == "U1" else "%0", columns)]
    run = partitioned(text, strict=False)
    assert str(run.plan(X).results[0].sharding) == f"@m, {columns}"
    np.testing.assert_allclose(run(X), np.sin(X), atol=1e-6)


@pytest.mark.parametrize("name", ("U2", "U4"))
def test_the_others_are_not(name):
    text, message = UNDEFINED[name]
    assert message.replace("FILE", "-") in refused(text, "{strict=false}")


def test_a_value_that_has_an_sdy_sharding_keeps_it():
    text = function(
        f"{sharding('s', '[[0]]')}\n %a = mesh.shard %x to %s : tensor<8x16xf32>\n return %a : tensor<8x16xf32>",
        '%x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {"a"}]>}',
        mesh='sdy.mesh @m = <["a"=2, "b"=4]>\nmesh.mesh @m(shape = 2x4)',
    )
    assert '%x has two different shardings, <@m, [{}, {"a"}]> and here <@m, [{"a"}, {}]>' in refused(text)
    assert imported(text.replace('[{}, {"a"}]', '[{"a"}, {}]'))


def test_local_and_whole_do_not_mix():
    body = f"""{sharding("s", "[[0]]")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %b = mesh.all_reduce %a on @m mesh_axes = [0] : tensor<8x16xf32> -> tensor<8x16xf32>
  return %b : tensor<8x16xf32>"""
    for dialect in DIALECTS:
        with pytest.raises(
            SourceError, match=rf"-:5:\d+: error: {dialect}.all_reduce works on per-device arrays, but @main"
        ):
            imported(said_in(dialect, function(body)))
    place = body.replace(
        "%b = mesh.all_reduce %a on @m mesh_axes = [0]", "%i = mesh.process_linear_index on @m : index //"
    )
    assert "mesh.process_linear_index: it tells a device where it is, but @main is annotated" in refused(
        function(place.replace("%b :", "%a :"))
    )


def test_a_function_does_not_end_with_an_annotation():
    text = function(f"{sharding('s', '[[0]]')}\n  %a = mesh.shard %x to %s : tensor<8x16xf32>")
    assert "-:4:8: error: mesh.shard: it is the last op of its block" in refused(text)


def test_a_program_on_local_arrays_stays_as_it_is():
    text = function(
        "%a = mesh.all_reduce %x on @m mesh_axes = [1] : tensor<8x16xf32> -> tensor<8x16xf32>\n"
        "return %a : tensor<8x16xf32>"
    )
    assert imported(text) == optimize(text, "", "-")


# Meshes ---------------------------------------------------------------------------------------------------------------


def annotated(shape, lists="[[0], [1]]", more=""):
    return function(
        f"{sharding('s', lists)}\n %a = mesh.shard %x to %s : tensor<8x16xf32>\n"
        " %b = stablehlo.tanh %a : tensor<8x16xf32>\n"
        " return %b : tensor<8x16xf32>",
        mesh=f"mesh.mesh @m(shape = {shape})\n{more}",
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_unknown_size_is_that_of_the_devices(dialect):
    run = partitioned(said_in(dialect, annotated("2x?")))
    assert str(run.plan(X).results[0].sharding.mesh) == "m" and "axis0=2, axis1=4 (8 devices)" in str(run.plan(X))
    np.testing.assert_allclose(run(X), np.tanh(X), atol=1e-6)


def test_axes_are_called_as_those_of_the_given_mesh():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    for shape in ("2x4", "?x?"):
        run = partitioned(annotated(shape), mesh)
        assert str(run.plan(X).arguments[0].sharding) == '@m, [{"data"}, {"model"}]'
    np.testing.assert_allclose(run(X), np.tanh(X), atol=1e-6)


def test_axes_are_called_as_an_option_says():
    assert 'sdy.mesh @m = <["x"=2, "y"=4]>' in imported(annotated("2x?"), "{axis-names=x,y devices=8}")
    assert 'sdy.mesh @m = <["axis0"=2, "axis1"=4]>' in imported(annotated("2x?"), "{axis-names=x devices=8}")


def test_an_sdy_mesh_of_the_same_name_is_the_same_mesh():
    found = imported(annotated("2x?", more='sdy.mesh @m = <["p"=2, "q"=4]>'))
    assert found.count("sdy.mesh @m") == 1 and '<@m, [{"p"}, {"q"}]>' in found
    message = refused(annotated("4x2", more='sdy.mesh @m = <["p"=2, "q"=4]>'))
    assert 'mesh.mesh: @m is 4x2, but sdy.mesh @m is <["p"=2, "q"=4]>; they are one mesh' in message


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ("2x?", "{devices=7}", "mesh.mesh: 7 devices do not fill @m = 2x?"),
        ("2x?", "", "mesh.mesh: @m = 2x? has an unknown size; say how many devices there are"),
        ("?x?", "{devices=8}", "mesh.mesh: @m = ?x? has several unknown sizes; pass a mesh"),
        ("2x0", "", "mesh.mesh: axis 1 of @m has size 0"),
        ("2x4", "{devices=x}", "option devices of import-mesh-annotations is 'x'; expected a number"),
    ],
)
def test_meshes_that_do_not_fit_the_devices(shape, options, message):
    assert message in refused(annotated(shape), options)


def test_a_mesh_that_the_given_devices_do_not_form():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(sdy.SdyError, match="@m is 2x4, the devices form 4x2"):
        partitioned(annotated("2x4"), mesh)
    with pytest.raises(sdy.SdyError, match="has several unknown sizes; pass a mesh"):
        partitioned(annotated("?x?"))


def test_meshes_have_the_same_devices():
    assert "mesh.mesh: @m has 8 devices, @b 4; one program runs on one set of devices" in refused(
        annotated("2x4", more="mesh.mesh @b(shape = 4)")
    )
    assert "one program runs on one set of devices" in refused(annotated("2x4", more='sdy.mesh @b = <["x"=4]>'))
    assert imported(annotated("2x4", more="shard.grid @b(shape = 8)"))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_two_meshes_of_the_same_devices(dialect):
    text = function(
        f"""{sharding("s", "[[0], [1]]")}
  {sharding("t", "[[1, 0]]", mesh="@b")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %b = stablehlo.sine %a : tensor<8x16xf32>
  %c = mesh.shard %b to %t : tensor<8x16xf32>
  return %c : tensor<8x16xf32>""",
        mesh="mesh.mesh @m(shape = 2x4)\nmesh.mesh @b(shape = 4x2)",
    )
    np.testing.assert_allclose(partitioned(said_in(dialect, text))(X), np.sin(X), atol=1e-6)
    for shape in ((2, 4), (4, 2)):
        run = partitioned(said_in(dialect, text), jax.make_mesh(shape, ("x", "y")))
        assert f"on mesh x={shape[0]}, y={shape[1]} " in str(run.plan(X))
        np.testing.assert_allclose(run(X), np.sin(X), atol=1e-6)


# Queries --------------------------------------------------------------------------------------------------------------


def asked(body, results, mesh="mesh.mesh @m(shape = 2x2)", arguments="%x: tensor<8x16xf32>"):
    """The numbers that a program computes: of type index, made into a tensor."""
    names = ", ".join(f"%i{n}" for n in range(results))
    casts = [f"%i{n} = arith.index_cast %q#{n} : index to i32" for n in range(results)]
    tensor = f"tensor<{results}xi32>"
    lines = [body, *casts, f"%t = tensor.from_elements {names} : {tensor}", f"return %t : {tensor}"]
    return function("\n".join(lines), arguments, tensor, mesh)


def constants(text):
    """The numbers that `index_cast` gets."""
    found = dict(re.findall(r"(%\w+) = arith.constant (-?\d+) : index", imported(text)))
    return [int(found[name]) for name in re.findall(r"arith.index_cast (%\w+)", imported(text))]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("axes", "sizes"), [("", [2, 4]), (" axes = [1, 0]", [4, 2])])
def test_mesh_shape_is_constants(axes, sizes, dialect):
    text = asked(f"%q:2 = mesh.mesh_shape @m{axes} : index, index", 2, "mesh.mesh @m(shape = 2x4)")
    assert constants(said_in(dialect, text)) == sizes


SHARD_SHAPES = [
    ("4", "10x3", "[[0]]", "", [(3, 3), (3, 3), (3, 3), (1, 3)]),
    (
        "2x2",
        "32x32x32",
        "[[0], [1]]",
        "sharded_dims_offsets = [0, 24, 32, 0, 20, 32]",
        [(24, 20, 32), (24, 12, 32), (8, 20, 32), (8, 12, 32)],
    ),
    ("2x2", "12", "[[1, 0]]", "sharded_dims_offsets = [0, 1, 3, 6, 12]", [(1,), (3,), (2,), (6,)]),
    ("4", "8x16", "[[0]]", "halo_sizes = [2, 1]", [(5, 16)] * 4),
    ("2x4", "10x9", "[[1], [0]]", "", [(rows, columns) for columns in (5, 4) for rows in (3, 3, 3, 1)]),
]


@pytest.mark.dear
@pytest.mark.parametrize(("mesh", "dims", "lists", "rest", "shapes"), SHARD_SHAPES)
def test_shard_shape(mesh, dims, lists, rest, shapes):
    count, mesh = dims.count("x") + 1, f"mesh.mesh @m(shape = {mesh})"
    types = ", ".join(["index"] * count)
    for device, shape in enumerate(shapes):
        body = f"{sharding('s', lists, rest)}\n%d = arith.constant {device} : index\n"
        assert constants(asked(f"{body}%q:{count} = mesh.shard_shape {dims} %s %d : {types}", count, mesh)) == [*shape]
        sizes = f"[{dims.replace('x', ', ')}]"
        text = asked(
            f"{body}%q:{count} = shard.shard_shape dims = {sizes} sharding = %s device = [{device}] : {types}",
            count,
            mesh,
        )
        assert constants(said_in("shard", text)) == [*shape]


@pytest.mark.parametrize(("mesh", "dims", "lists", "rest", "shapes"), SHARD_SHAPES)
def test_shard_shape_of_a_device_known_in_the_run(mesh, dims, lists, rest, shapes):
    count, mesh = dims.count("x") + 1, f"mesh.mesh @m(shape = {mesh})"
    body = f"""{sharding("s", lists, rest)}
  %e = tensor.extract %device[] : tensor<i32>
  %d = arith.index_cast %e : i32 to index
  %q:{count} = mesh.shard_shape {dims} %s %d : {", ".join(["index"] * count)}"""
    run = partitioned(asked(body, count, mesh, "%device: tensor<i32>"))
    assert [tuple(run(np.int32(device)).tolist()) for device in range(len(shapes))] == shapes


def test_shard_shape_of_sizes_known_in_the_run():
    body = f"""{sharding("s", "[[0]]")}
  %e = tensor.extract %size[] : tensor<i32>
  %n = arith.index_cast %e : i32 to index
  %q:2 = shard.shard_shape dims = [%n, %n] sharding = %s device = [2] : index, index"""
    run = partitioned(said_in("shard", asked(body, 2, "mesh.mesh @m(shape = 4)", "%size: tensor<i32>")))
    assert [run(np.int32(size)).tolist() for size in (8, 10, 5, 2)] == [[2, 8], [3, 10], [1, 5], [0, 2]]


def test_shard_shape_of_a_device_that_there_is_not():
    body = f"{sharding('s', '[[0]]')}\n%d = arith.constant 4 : index\n%q:1 = mesh.shard_shape 8 %s %d : index"
    assert "mesh.shard_shape: device 4 is outside 0..3" in refused(asked(body, 1))


def test_get_sharding_of_what_is_annotated():
    text = function(
        f"""{sharding("s", "[[0]]", "partial = max [1]")}
  %a = mesh.shard %x to %s annotate_for_users : tensor<8x16xf32>
  %g = mesh.get_sharding %a : tensor<8x16xf32> -> !mesh.sharding
  %b = stablehlo.tanh %x : tensor<8x16xf32>
  %c = mesh.shard %b to %g annotate_for_users : tensor<8x16xf32>
  return %c : tensor<8x16xf32>"""
    )
    found = imported(text)
    assert len(re.findall(r'sharding_constraint %\w+ <@m, \[{"axis0"}, {}\], unreduced=(max)?{"axis1"}>', found)) == 2


@pytest.mark.parametrize("dialect", DIALECTS)
def test_get_sharding_of_what_is_not(dialect):
    text = function(
        "%g = mesh.get_sharding %x : tensor<8x16xf32> -> !mesh.sharding\n"
        "%a = mesh.shard %x to %g : tensor<8x16xf32>\nreturn %a : tensor<8x16xf32>"
    )
    message = f"the sharding of %x is not known here; annotate it with {dialect}.shard"
    assert f"-:3:6: error: {dialect}.get_sharding: {message}" in refused(said_in(dialect, text))


def of_sdy(text, ops="%y = stablehlo.tanh %x : tensor<8x16xf32>"):
    body = f"""{ops}
  %g = mesh.get_sharding %y : tensor<8x16xf32> -> !mesh.sharding
  %d = arith.constant 1 : index
  %q:2 = mesh.shard_shape 8x16 %g %d : index, index"""
    mesh = 'sdy.mesh @m = <["a"=2, "b"=4]>\nmesh.mesh @m(shape = 2x4)'
    return asked(body, 2, mesh, f"%x: tensor<8x16xf32> {{sdy.sharding = #sdy.sharding<@m, {text}>}}")


def test_get_sharding_after_propagation():
    text = of_sdy('[{"a"}, {"b"}]').replace("%y : tensor<8x16xf32> ->", "%x : tensor<8x16xf32> ->")
    assert constants(text) == [4, 4]
    pipeline = "sdy-user-priority-propagate,sdy-close-shardings," + IMPORT
    text = of_sdy(
        '[{"b"}, {}]',
        "%y = stablehlo.tanh %x {sdy.sharding = #sdy.sharding_per_value<[<@m, [{?}, {?}]>]>} : tensor<8x16xf32>",
    )
    assert re.findall(r"constant (\d+) : index", optimize(text, pipeline, "-")) == ["1", "2", "16"]


def test_get_sharding_of_what_a_mesh_sharding_cannot_say():
    text = of_sdy('[{"b":(1)2}, {}]').replace("%y : tensor<8x16xf32> ->", "%x : tensor<8x16xf32> ->")
    assert 'mesh.get_sharding: axis "b":(1)2 is a sub-axis; mesh shardings have whole axes only' in refused(text)
    text = of_sdy('[{"b", ?}, {}]').replace("%y : tensor<8x16xf32> ->", "%x : tensor<8x16xf32> ->")
    assert 'mesh.get_sharding: <@m, [{"b", ?}, {}]> has an open dimension; mesh shardings are exact' in refused(text)


# Halos, offsets and partial tensors -----------------------------------------------------------------------------------

VALUES = {
    "f32": X,
    "i32": np.random.default_rng(3).integers(-9, 9, (8, 16)).astype(np.int32),
    "i1": X > 0,
}
KINDS = ("sum", "max", "min", "product", "average", "bitwise_and", "bitwise_or", "bitwise_xor")
FITTING = [
    (kind, type_)
    for kind, type_ in itertools.product(KINDS, VALUES)
    if not (kind.startswith("bitwise") and type_ == "f32") and (kind, type_) != ("average", "i1")
]


@pytest.mark.parametrize(("kind", "type_"), FITTING)
def test_partial_values_are_the_values(kind, type_):
    tensor = f"tensor<8x16x{type_}>"
    text = function(
        f"""{sharding("s", "[[0]]", f"partial = {kind} [1]")}
  {sharding("t", "[[], [0]]", f"partial = {kind} [1]")}
  %a = mesh.shard %x to %s : {tensor}
  %b = stablehlo.transpose %a, dims = [1, 0] : ({tensor}) -> tensor<16x8x{type_}>
  %y = stablehlo.not %z : {tensor}
  %c = mesh.shard %y to %t : {tensor}
  %d = stablehlo.xor %c, %c : {tensor}
  %e = mesh.shard %c to %s annotate_for_users : {tensor}
  return %a, %b, %c, %d, %e : {tensor}, tensor<16x8x{type_}>, {tensor}, {tensor}, {tensor}""",
        f"%x: {tensor}, %z: {tensor}",
        f"{tensor}, tensor<16x8x{type_}>, {tensor}, {tensor}, {tensor}",
    )
    x = VALUES[type_]
    if type_ == "f32":
        text = text.replace("stablehlo.not", "stablehlo.tanh").replace("stablehlo.xor", "stablehlo.subtract")
    y = np.tanh(x) if type_ == "f32" else ~x
    run = partitioned(text)
    zero = np.zeros_like(x)
    for found, wanted in zip(run(x, x), (x, x.T, y, zero, y), strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-6)
    assert not any(value.sharding.unreduced_axes for value in (*run.plan(x, x).arguments, *run.plan(x, x).results))
    recorded = "partial = average [1] is not kept: SDY has no partial averages" in str(run.plan(x, x))
    assert recorded == (kind == "average")


def test_partial_terms_that_an_op_makes_are_kept():
    text = function(
        f"""{sharding("r", "[[], [1]]")}
  {sharding("k", "[[1]]")}
  {sharding("p", "[[0]]", "partial = sum [1]")}
  %a = mesh.shard %x to %r : tensor<8x16xf32>
  %b = mesh.shard %w to %k : tensor<16x4xf32>
  %c = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
      : (tensor<8x16xf32>, tensor<16x4xf32>) -> tensor<8x4xf32>
  %d = mesh.shard %c to %p : tensor<8x4xf32>
  %e = stablehlo.transpose %d, dims = [1, 0] : (tensor<8x4xf32>) -> tensor<4x8xf32>
  return %e : tensor<4x8xf32>""",
        "%x: tensor<8x16xf32>, %w: tensor<16x4xf32>",
        "tensor<4x8xf32>",
    )
    run, w = partitioned(text), X[:4].T.copy()
    kinds = [c.kind for c in run.plan(X, w).collectives]
    assert (
        "replicated_to_unreduced" not in kinds and sum(kind in ("all_reduce", "reduce_scatter") for kind in kinds) == 1
    )
    np.testing.assert_allclose(run(X, w), (X @ w).T, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "type_", "message"),
    [
        ("bitwise_or", "f32", "partial = bitwise_or needs integers, got f32"),
        ("max", "complex<f32>", "partial = max needs ordered values, got complex<f32>"),
        ("average", "i1", "partial = average needs numbers, got i1"),
    ],
)
def test_partial_kinds_that_do_not_fit_the_elements(kind, type_, message):
    text = function(
        f"""{sharding("s", "[[0]]", f"partial = {kind} [1]")}
  %a = mesh.shard %x to %s : tensor<8x{type_}>
  return %a : tensor<8x{type_}>""",
        f"%x: tensor<8x{type_}>",
        f"tensor<8x{type_}>",
    )
    assert f"-:4:8: error: mesh.shard: {message}" in refused(text)


def layout(rest, lists="[[0]]", dims="8x16", more=""):
    return function(
        f"""{more}{sharding("s", lists, rest)}
  %y = stablehlo.tanh %x : tensor<{dims}xf32>
  %a = mesh.shard %y to %s : tensor<{dims}xf32>
  %b = stablehlo.sine %a : tensor<{dims}xf32>
  return %b : tensor<{dims}xf32>""",
        f"%x: tensor<{dims}xf32>",
        f"tensor<{dims}xf32>",
    )


@pytest.mark.parametrize("dialect", DIALECTS)
def test_halos_and_offsets_are_noted_and_the_numbers_right(dialect):
    for rest, told in (
        ("halo_sizes = [1, 2]", "halo_sizes = [1, 2] are not kept"),
        ("sharded_dims_offsets = [0, 3, 8]", "sharded_dims_offsets = [0, 3, 8] are kept by an element-wise op"),
    ):
        run = partitioned(said_in(dialect, layout(rest)))
        assert f"<bytes>:5: shard: {told}" in str(run.plan(X))
        np.testing.assert_allclose(run(X), np.sin(np.tanh(X)), atol=1e-6)


FOUR = "mesh.mesh @r(shape = 4)"
RUNS = {
    "a chain, and a sum of it": (
        "[[0]]",
        [0, 2, 5, 9, 14],
        """%a = mesh.shard %x to %s : T
  %b = stablehlo.negate %a : T
  %c = stablehlo.multiply %b, %a : T
  %d = stablehlo.dot_general %c, %c, contracting_dims = [0] x [0] : (T, T) -> tensor<6x6xE>
  return %c, %d : T, tensor<6x6xE>""",
        lambda x: (-x * x, (x * x).T @ (x * x)),
        "2 element-wise ops",
    ),
    "for users": (
        "[[0]]",
        [0, 0, 1, 13, 14],
        """%n = stablehlo.negate %x : T
  %a = mesh.shard %n to %s annotate_for_users : T
  %c = stablehlo.multiply %a, %a : T
  return %c, %n : T, T""",
        lambda x: (x * x, -x),
        "an element-wise op",
    ),
    "two operands, a constant, a comparison": (
        "[[0]]",
        [0, 7, 7, 10, 14],
        """%n = stablehlo.negate %x : T
  %a = mesh.shard %x to %s : T
  %b = mesh.shard %n to %s : T
  %k = stablehlo.constant dense<2> : T
  %c = stablehlo.multiply %a, %k : T
  %d = stablehlo.compare LT, %c, %b : (T, T) -> tensor<14x6xi1>
  %e = stablehlo.select %d, %c, %b : (tensor<14x6xi1>, T, T) -> T
  return %e, %d : T, tensor<14x6xi1>""",
        lambda x: (np.where(2 * x < -x, 2 * x, -x), 2 * x < -x),
        "3 element-wise ops",
    ),
    "the minor dimension": (
        "[[], [0]]",
        [0, 3, 4, 5, 6],
        """%a = mesh.shard %x to %s : T
  %b = stablehlo.abs %a : T
  return %b, %b : T, T""",
        lambda x: (abs(x), abs(x)),
        "an element-wise op",
    ),
}


@pytest.mark.parametrize("type_", ["f32", "i32"])
@pytest.mark.parametrize("name", RUNS)
def test_element_wise_ops_run_on_the_blocks_that_offsets_state(name, type_):
    lists, offsets, body, plain, ops = RUNS[name]
    stated = sharding("s", lists, f"sharded_dims_offsets = {offsets}", "@r")
    results = re.findall(r"tensor<[^>]*>|T", body.rpartition(":")[2])
    text = function(f"{stated}\n  {body}", "%x: T", ", ".join(results), FOUR)
    text = text.replace("dense<2>", "dense<2.0>") if type_ == "f32" else text
    text = re.sub(r"\bT\b", "tensor<14x6xE>", text).replace("E>", f"{type_}>")
    run, x = partitioned(text), (np.arange(14 * 6) - 40).reshape(14, 6).astype(VALUES[type_].dtype)
    for found, wanted in zip(run(x), plain(x), strict=True):
        np.testing.assert_array_equal(found, wanted)
    plan, longest = run.plan(x), max(np.diff(offsets))
    assert f"{offsets} are kept by {ops}, which every device runs on {longest} elements" in str(plan)
    filled = f"tensor<{longest * 4}x6x{type_}>" if lists == "[[0]]" else f"tensor<14x{longest * 4}x{type_}>"
    assert filled in plan.mlir("partitioned")
    compiled = run.lower(x).compile().as_text()
    assert plan.wire_bytes == totals(collectives_in_hlo(compiled)).wire_bytes, plan


def test_two_dimensions_in_stated_blocks():
    text = function(
        f"""{sharding("s", "[[0], [1]]", "sharded_dims_offsets = [0, 3, 8, 0, 1, 2, 3, 16]")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %b = stablehlo.negate %a : tensor<8x16xf32>
  %c = stablehlo.abs %b : tensor<8x16xf32>
  return %c : tensor<8x16xf32>""",
        "%x: tensor<8x16xf32>",
        "tensor<8x16xf32>",
    )
    run = partitioned(text)
    np.testing.assert_array_equal(run(X), abs(X))
    assert "are kept by 2 element-wise ops, which every device runs on 5, 13 elements" in str(run.plan(X))
    assert "stablehlo.abs" in (made := run.plan(X).mlir("partitioned")) and "tensor<10x52xf32>" in made


def test_offsets_of_values_that_no_element_wise_op_takes_are_not_kept():
    text = function(
        f"""{sharding("s", "[[0]]", "sharded_dims_offsets = [0, 3, 8]")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %b = stablehlo.transpose %a, dims = [1, 0] : (tensor<8x16xf32>) -> tensor<16x8xf32>
  return %b : tensor<16x8xf32>""",
        "%x: tensor<8x16xf32>",
        "tensor<16x8xf32>",
    )
    run = partitioned(text)
    assert "[0, 3, 8] are not kept: no element-wise op takes the value" in str(run.plan(X))
    assert "sdy_jax.pieces" not in run.plan(X).mlir("partitioned")
    np.testing.assert_array_equal(run(X), X.T)


def test_what_goes_without_saying_is_not_noted():
    for rest in ("halo_sizes = [0, 0]", "sharded_dims_offsets = [0, 4, 8]"):
        assert "sdy_jax.layout" not in imported(layout(rest))


def test_sizes_that_are_constants_are_known():
    four = "%c = arith.constant 3 : i64\n"
    found = imported(layout("sharded_dims_offsets = [0, %c, 8]", more=four))
    assert "sharded_dims_offsets = array<i64: 0, 3, 8>" in found


def test_sizes_that_are_not():
    text = layout("halo_sizes = [1, %h]", more="%e = tensor.extract %n[] : tensor<i64>\n%h = arith.addi %e, %e : i64\n")
    text = text.replace("@main(", "@main(%n: tensor<i64>, ")
    with jax.enable_x64(True):
        run = partitioned(text)
        assert "halo_sizes = [1, ?] are not kept" in str(run.plan(np.int64(1), X))
        np.testing.assert_allclose(run(np.int64(1), X), np.sin(np.tanh(X)), atol=1e-6)


def test_halos_need_blocks_of_one_length():
    assert "dimension 0 of size 9 does not split evenly; halos need that" in refused(
        layout("halo_sizes = [1, 1]", dims="9x16")
    )


def test_uneven_blocks():
    for lists, dims in (("[[1]]", (10, 16)), ("[[1, 0], []]", (3, 5)), ("[[0], [1]]", (7, 9))):
        x = np.random.default_rng(1).normal(size=dims).astype(np.float32)
        run = partitioned(layout("", lists, "x".join(map(str, dims))))
        np.testing.assert_allclose(run(x), np.sin(np.tanh(x)), atol=1e-6)
        assert "does not divide" not in str(run.plan(x))


# Whole programs -------------------------------------------------------------------------------------------------------


def test_a_manual_computation_communicates():
    lists = '[{"axis0"}, {"axis1"}]'
    text = function(
        f"""{sharding("s", "[[0], [1]]")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %b = sdy.manual_computation(%a) in_shardings=[<@m, {lists}>] out_shardings=[<@m, {lists}>]
      manual_axes={{"axis0", "axis1"}} (%y: tensor<4x4xf32>) {{
    %r = mesh.all_reduce %y on @m mesh_axes = [1] reduction = max : tensor<4x4xf32> -> tensor<4x4xf32>
    sdy.return %r : tensor<4x4xf32>
  }} : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %c = stablehlo.sine %b : tensor<8x16xf32>
  return %c : tensor<8x16xf32>""",
        mesh='sdy.mesh @m = <["axis0"=2, "axis1"=4]>\nmesh.mesh @m(shape = 2x4)',
    )
    assert "mesh.mesh @m(shape = 2x4)" in imported(text)
    np.testing.assert_allclose(partitioned(text)(X), np.sin(np.tile(X.reshape(8, 4, 4).max(1), 4)), atol=1e-6)


def test_arguments_of_the_call_count_more_than_annotations():
    run = sdy.partition(sdy.load(annotated("2x4").encode()), in_shardings=('[{"axis1"}, {}]',))
    assert str(run.plan(X).arguments[0].sharding) == '@m, [{"axis1"}, {}]' and not run.plan(X).collectives
    np.testing.assert_allclose(run(X), np.tanh(X), atol=1e-6)


def test_neighbours_of_a_device_are_known_in_whole_programs_too():
    body = f"""{sharding("s", "[[0]]")}
  %a = mesh.shard %x to %s : tensor<8x16xf32>
  %c = arith.constant 1 : index
  %d = arith.constant 2 : index
  %q:2 = mesh.neighbors_linear_indices on @m[%c, %d] split_axes = [1] : index, index"""
    assert partitioned(asked(body, 2, "mesh.mesh @m(shape = 2x4)"))(X).tolist() == [5, 7]


def test_annotations_in_a_function_that_is_called():
    text = (
        annotated("2x4").replace("@main", "private @f")
        + """
func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
  %a = stablehlo.sine %x : tensor<8x16xf32>
  %b = func.call @f(%a) : (tensor<8x16xf32>) -> tensor<8x16xf32>
  return %b : tensor<8x16xf32>
}"""
    )
    run = partitioned(text)
    assert str(run.plan(X).results[0].sharding) == '@m, [{"axis0"}, {"axis1"}]'
    np.testing.assert_allclose(run(X), np.tanh(np.sin(X)), atol=1e-6)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_shardings_pass_through_calls(dialect):
    text = said_in(
        dialect,
        """
mesh.mesh @m(shape = 2x4)
func.func private @rows() -> !mesh.sharding {
  %s = mesh.sharding @m split_axes = [[0], []] : !mesh.sharding
  return %s : !mesh.sharding
}
func.func @like(%x: tensor<8x16xf32>, %s: !mesh.sharding) -> tensor<8x16xf32> {
  %0 = mesh.shard %x to %s annotate_for_users : tensor<8x16xf32>
  return %0 : tensor<8x16xf32>
}
func.func @main(%x: tensor<8x16xf32>) -> tensor<8x16xf32> {
  %t = mesh.sharding @m split_axes = [[], [1]] : !mesh.sharding
  %s = call @rows() : () -> !mesh.sharding
  %0 = call @like(%x, %s) : (tensor<8x16xf32>, !mesh.sharding) -> tensor<8x16xf32>
  %1 = stablehlo.tanh %0 : tensor<8x16xf32>
  %2 = call @like(%1, %t) : (tensor<8x16xf32>, !mesh.sharding) -> tensor<8x16xf32>
  return %2 : tensor<8x16xf32>
}""",
    )
    assert [line.strip() for line in imported(text).splitlines()[2:7]] == [
        "func.func @main(%arg0: tensor<8x16xf32>) -> tensor<8x16xf32> {",
        '%0 = sdy.sharding_constraint %arg0 <@m, [{"axis0"}, {}]> : tensor<8x16xf32>',
        "%1 = stablehlo.tanh %0 : tensor<8x16xf32>",
        '%2 = sdy.sharding_constraint %1 <@m, [{}, {"axis1"}]> : tensor<8x16xf32>',
        "return %2 : tensor<8x16xf32>",
    ]
    np.testing.assert_allclose(partitioned(text)(X), np.tanh(X), rtol=1e-6)


def test_a_sharding_that_nothing_states():
    text = function(
        "%0 = mesh.shard %x to %s : tensor<8x16xf32>\nreturn %0 : tensor<8x16xf32>",
        "%x: tensor<8x16xf32>, %s: !mesh.sharding",
    )
    message = "-:3:6: error: mesh.shard: what sharding %s is, is not known here; state it by mesh.sharding\n"
    assert refused(text).startswith(message)


def test_annotations_in_python_say_the_same():
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    rows, both = sdy.shard.Sharding([["data"]], partial=("max", "model")), sdy.shard.Sharding([["data"], ["model"]])

    @sdy.partition(mesh=mesh)
    def program(x):
        y = sdy.shard.shard(jax.numpy.tanh(x), both)
        return sdy.shard.shard(y, rows, annotate_for_users=True).T

    text = function(
        f"""{sharding("s", "[[0]]", "partial = max [1]")}
  {sharding("t", "[[0], [1]]")}
  %y = stablehlo.tanh %x : tensor<8x16xf32>
  %a = mesh.shard %y to %t : tensor<8x16xf32>
  %b = mesh.shard %a to %s annotate_for_users : tensor<8x16xf32>
  %c = stablehlo.transpose %b, dims = [1, 0] : (tensor<8x16xf32>) -> tensor<16x8xf32>
  return %c : tensor<16x8xf32>""",
        results="tensor<16x8xf32>",
    )
    plans = program.plan(X), partitioned(text, mesh).plan(X)
    assert len({tuple((c.kind, c.detail) for c in plan.collectives) for plan in plans}) == 1
    assert len({tuple(value.type for value in (*plan.arguments, *plan.results)) for plan in plans}) == 1
    with pytest.warns(UserWarning, match="averages, halos and offsets are of local buffers"):
        average = sdy.shard.Sharding([["data"]], partial=("average", "model"))
        sdy.partition(lambda x: sdy.shard.shard(x, average), mesh=mesh).plan(X)


def test_propagation_leaves_branches_of_other_dialects_alone():
    text = function(
        """  %t = arith.constant true
  scf.if %t {
    scf.yield
  }
  return %x : tensor<8x16xf32>"""
    )
    assert optimize(text, "sdy-user-priority-propagate", "-")


def test_shardings_can_be_dropped():
    text = annotated("4x4")
    with pytest.raises(sdy.SdyError, match="the devices form 2x4"):
        partitioned(text, jax.make_mesh((2, 4), ("data", "model")))
    program = sdy.load(text.encode(), shardings=False)
    run = sdy.partition(program, mesh=jax.make_mesh((2, 4), ("data", "model")))
    assert str(run.plan(X).arguments[0].sharding.axes) == "((), ())"


def random_lists(random, rank):
    """Lists of axes for some dimensions, and the axes that are left."""
    axes = [int(axis) for axis in random.permutation(3)]
    lists = [[] for _ in range(rank)]
    for axis in axes[: random.integers(4)]:
        lists[random.integers(rank)].append(axis)
    return lists, [axis for axis in axes if not any(axis in list_ for list_ in lists)]


def random_shard(random, number, value, dims):
    lists, left = random_lists(random, len(dims))
    rest = ""
    if left and random.random() < 0.4:
        rest = f"partial = {random.choice(['sum', 'max', 'min', 'product'])} [{left[0]}]"
    for_users = random.choice(["", "annotate_for_users "])
    type_ = f"tensor<{'x'.join(map(str, dims))}xf32>"
    return [
        sharding(f"s{number}", lists, rest),
        f"%a{number} = mesh.shard {value} to %s{number} {for_users}: {type_}",
    ]


@pytest.mark.parametrize("seed", range(6))
def test_random_annotations_leave_the_numbers(seed):
    """A chain of products and element-wise ops, annotated everywhere at random."""
    random = np.random.default_rng(seed)
    lines, value, wanted = [], "%x", X
    for number in range(4):
        lines += random_shard(random, number, value, wanted.shape)
        value, (rows, columns) = f"%v{number}", wanted.shape
        if number % 2:
            type_ = f"tensor<{rows}x{columns}xf32>"
            lines.append(f"{value} = stablehlo.tanh %a{number} : {type_}")
            wanted = np.tanh(wanted)
        else:
            types = f"(tensor<{rows}x{columns}xf32>, tensor<{rows}x{columns}xf32>) -> tensor<{rows}x{rows}xf32>"
            other = f"%a{number}"
            lines.append(f"{value} = stablehlo.dot_general %a{number}, {other}, contracting_dims = [1] x [1] : {types}")
            wanted = wanted @ wanted.T
    type_ = "tensor<8x8xf32>"
    text = function("\n".join([*lines, f"return {value} : {type_}"]), results=type_, mesh="mesh.mesh @m(shape = 2x2x2)")
    np.testing.assert_allclose(partitioned(said_in(DIALECTS[seed % 2], text))(X), wanted, rtol=2e-4, atol=2e-4)
