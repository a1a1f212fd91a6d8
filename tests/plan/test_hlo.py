"""The counter of collectives, on hand-written lines and on programs compiled here."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sdy_jax.errors import ParseError
from sdy_jax.plan.hlo_module import HloCollective, bytes_of_type, first_group, group_size
from sdy_jax.plan.profile import collectives_in_hlo, overlapped, totals


def collectives(function, mesh: Mesh, *arguments: tuple[tuple[int, ...], P], out: P = P()) -> list[HloCollective]:
    """What `function`, a body of shard_map, communicates when it is compiled for f32 arguments (shape, spec)."""
    specs = tuple(spec for _, spec in arguments)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, s)) for shape, s in arguments]
    return collectives_in_hlo(jax.jit(mapped).lower(*arrays).compile().as_text())


def module(body: str, header: str = "num_partitions=8") -> str:
    return f"HloModule m, {header}\n\nENTRY %main (p: f32[4,8]) -> f32[4,8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        ("f32[4,8]{1,0}", 128),
        ("f32[]", 4),
        ("bf16[3]", 6),
        ("pred[5]", 5),
        ("c64[2]", 16),
        ("f8e4m3fn[16]", 16),
        ("s4[3]", 2),
        ("token[]", 0),
        ("f32[0,8]", 0),
        ("f32[<=4,8]", 128),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("(f32[2]{0}, /*index=1*/s32[3]{0}, (u8[1]))", 21),
    ],
)
def test_bytes_of_types(type_, expected):
    assert bytes_of_type(type_) == expected


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", 4),
        ("replica_groups={{0,1},{2}}", 2),
        ("replica_groups={}", 8),
        ("replica_groups=[4,2]<=[8]", 2),
        ("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}, dimensions={0}", 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", 4),
        ("channel_id=1, source_target_pairs={{0,1},{1,0},{2,2}}", 2),
        ("source_target_pairs={{0,0}}", 0),
    ],
)
def test_group_sizes(attributes, expected):
    assert group_size(attributes, devices=8) == expected


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ("replica_groups={{1,3},{0,2}}, to_apply=%add", (1, 3)),
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups=[4,2]<=[8]", (0, 1)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", (0, 1)),
        ("source_target_pairs={{0,1},{1,0}}", ()),
    ],
)
def test_first_groups(attributes, expected):
    assert first_group(attributes, devices=8) == expected


def test_unreadable_groups_are_an_error():
    with pytest.raises(ParseError, match="cannot be read"):
        group_size("channel_id=3", devices=8)


def test_all_reduce(mesh):
    found = collectives(lambda x: jax.lax.psum(x, "model"), mesh, ((8, 16), P("data", None)), out=P("data", None))
    assert found == [HloCollective("all-reduce", 4, 4 * 16 * 4, 2 * 3 / 4 * 256, 1)]


def test_all_gather_over_the_slower_axis(mesh):
    gather = lambda x: jax.lax.all_gather(x, "data", tiled=True)  # noqa: E731
    found = collectives(gather, mesh, ((8, 16), P("data", "model")), out=P(None, "model"))
    assert found == [HloCollective("all-gather", 2, 4 * 4 * 4, 64.0, 1)]


def test_reduce_scatter(mesh):
    scatter = lambda x: jax.lax.psum_scatter(x, "model", tiled=True)  # noqa: E731
    found = collectives(scatter, mesh, ((8, 16), P()), out=P("model"))
    assert found == [HloCollective("reduce-scatter", 4, 8 * 16 * 4, 3 / 4 * 512, 1)]


def test_all_to_all(mesh):
    exchange = lambda x: jax.lax.all_to_all(x, "model", 1, 0, tiled=True)  # noqa: E731
    found = collectives(exchange, mesh, ((8, 16), P("model", None)), out=P(None, "model"))
    assert [(c.kind, c.group_size, c.bytes, c.wire_bytes) for c in found] == [("all-to-all", 4, 128, 96.0)]


def test_permute_sends_the_whole_block(mesh):
    shift = lambda x: jax.lax.ppermute(x, "model", [(i, (i + 1) % 4) for i in range(4)])  # noqa: E731
    found = collectives(shift, mesh, ((8, 16), P("model")), out=P("model"))
    assert found == [HloCollective("collective-permute", 8, 2 * 16 * 4, 128, 1)]


def test_several_operands_are_one_collective(mesh):
    both = lambda x, y: jax.lax.psum((x, y), "data")  # noqa: E731
    found = collectives(both, mesh, ((8,), P()), ((6,), P()), out=(P(), P()))
    assert totals(found).wire_bytes == 2 * 1 / 2 * (8 + 6) * 4


def test_loops_count_once_per_trip(mesh):
    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, c: jax.lax.psum(jnp.sin(c), "model"), x)

    found = collectives(loop, mesh, ((8,), P()))
    assert [(c.kind, c.count, c.total_wire_bytes) for c in found] == [("all-reduce", 5, 5 * 48.0)]


def test_nested_loops_multiply(mesh):
    def inner(_, c):
        return jax.lax.psum(jnp.sin(c), "model")

    def loop(x):
        return jax.lax.fori_loop(0, 5, lambda _, c: jax.lax.fori_loop(0, 3, inner, jnp.cos(c)), x)

    assert totals(collectives(loop, mesh, ((8,), P()))).count == 15


def test_a_condition_is_tested_once_more_than_the_loop_runs(mesh):
    def loop(x):
        small = lambda state: (state[0] < 5) | (jax.lax.psum(state[1].sum(), "model") < -1)  # noqa: E731
        return jax.lax.while_loop(small, lambda state: (state[0] + 1, jax.lax.psum(state[1], "data")), (0, x))[1]

    found = collectives(loop, mesh, ((8,), P()))
    assert sorted((c.group_size, c.count) for c in found) == [(2, 1), (4, 2)]  # XLA does not know how often it runs


@pytest.mark.parametrize(
    ("first", "most", "step", "direction", "trips"),
    [(0, 5, 1, "LT", 5), (2, 7, 2, "LT", 3), (7, 7, 1, "LT", 0), (0, 5, 1, "NE", 1), (0, 5, 0, "LT", 1)],
)
def test_loops_whose_counter_runs_from_constant_to_constant(first, most, step, direction, trips):
    """XLA does not say the number of trips on every platform."""
    text = f"""HloModule m, num_partitions=8

%condition (c: (s32[], f32[8])) -> pred[] {{
  %c = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %most = s32[] constant({most})
  ROOT %below = pred[] compare(%i, %most), direction={direction}
}}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %b = (s32[], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %step = s32[] constant({step})
  %k = s32[] add(%j, %step)
  %x = f32[8] get-tuple-element(%b), index=1
  %y = f32[8] all-reduce(%x), replica_groups={{}}, to_apply=%add
  ROOT %next = (s32[], f32[8]) tuple(%k, %y)
}}

%add (l: f32[], r: f32[]) -> f32[] {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum = f32[] add(%l, %r)
}}

ENTRY %main (p: f32[8]) -> (s32[], f32[8]) {{
  %p = f32[8] parameter(0)
  %first = s32[] constant({first})
  %start = s32[] copy(%first)
  %state = (s32[], f32[8]) tuple(%start, %p)
  ROOT %loop = (s32[], f32[8]) while(%state), condition=%condition, body=%body
}}
"""
    assert [c.count for c in collectives_in_hlo(text)] == [trips]


def test_a_collective_in_the_fusions_that_run_meanwhile_counts_once():
    """TPUs' text has it in the fusion that starts it, in those that run beside it, and in the one that ends it."""

    def fused(name):
        return f"""%{name} (p.{name}: f32[4,8]) -> f32[8,8] {{
  %p.{name} = f32[4,8] parameter(0)
  ROOT %g.{name} = f32[8,8] all-gather(%p.{name}), replica_groups=[4,2]<=[8], dimensions={{0}}
}}
"""

    names = "fused_computation", "async_collective_fusion.1", "fused_computation.2"
    text = module(
        """  %p = f32[4,8]{1,0} parameter(0)
  %async-collective-start = f32[8,8] fusion(%p), kind=kCustom, calls=%fused_computation
  %fusion.1 = f32[8,8] fusion(%p), kind=kCustom, calls=%async_collective_fusion.1
  ROOT %async-collective-done = f32[8,8] fusion(%p), kind=kCustom, calls=%fused_computation.2"""
    )
    head, entry = text.split("\n\n")
    text = "\n\n".join([head, *map(fused, names), entry])
    found = totals(collectives_in_hlo(text))
    assert (found.count, found.wire_bytes) == (1, 128)


def test_of_a_conditional_the_largest_branch_counts(mesh):
    def branches(x):
        once = lambda x: jax.lax.psum(jnp.sin(x), "model")  # noqa: E731
        twice = lambda x: jax.lax.psum(jnp.cos(jax.lax.psum(x, "model")), "model")  # noqa: E731
        nothing = lambda x: x  # noqa: E731
        return jax.lax.switch(jnp.int32(x[0]), [once, twice, nothing], x)

    found = collectives(branches, mesh, ((8,), P()))
    assert sorted(c.count for c in found) == [0, 1, 1] and totals(found).count == 2


def test_programs_without_collectives(mesh):
    assert collectives(jnp.sin, mesh, ((8,), P("model")), out=P("model")) == []


def test_asynchronous_forms_count_once():
    text = module(
        """  %p = f32[4,8]{1,0} parameter(0)
  %s = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%p), replica_groups=[4,2]<=[8], dimensions={0}
  %d = f32[8,8]{1,0} all-gather-done(%s)
  %c = (f32[4,8], f32[4,8], u32[], u32[]) collective-permute-start(f32[4,8]{1,0} %p), source_target_pairs={{0,1}}
  ROOT %e = f32[4,8]{1,0} collective-permute-done(%c)"""
    )
    assert [(c.kind, c.bytes, c.wire_bytes) for c in collectives_in_hlo(text)] == [
        ("all-gather", 128, 128.0),
        ("collective-permute", 128, 128),
    ]


def test_wrapped_asynchronous_computations_count_once():
    text = """HloModule m, num_partitions=8

%wrapped (q: f32[4,8]) -> f32[1,8] {
  %q = f32[4,8]{1,0} parameter(0)
  ROOT %r = f32[1,8]{1,0} reduce-scatter(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[4,8]) -> f32[1,8] {
  %p = f32[4,8]{1,0} parameter(0), metadata={op_name="calls=%nothing"}
  %s = ((f32[4,8]{1,0}), f32[1,8]{1,0}) async-start(%p), calls=%wrapped
  ROOT %d = f32[1,8]{1,0} async-done(%s), calls=%wrapped
}
"""
    assert collectives_in_hlo(text.replace(", to_apply=%add", "")) == [HloCollective("reduce-scatter", 4, 128, 96.0, 1)]


def test_unknown_operands_are_an_error():
    text = module("  ROOT %r = f32[4,8]{1,0} all-reduce(%gone), replica_groups=[2,4]<=[8]")
    with pytest.raises(ParseError, match="gone"):
        collectives_in_hlo(text)


def test_totals_by_kind():
    one = HloCollective("all-reduce", 4, 100, 150.0, 2)
    other = HloCollective("all-gather", 2, 10, 10.0, 1)
    summed = totals([one, other])
    assert (summed.count, summed.wire_bytes) == (3, 310.0)
    assert summed.by_kind == {"all-reduce": (2, 300.0), "all-gather": (1, 10.0)}


def test_an_all_reduce_of_which_a_fusion_keeps_a_part_is_a_reduce_scatter():
    """As TPUs run it."""
    found = totals(collectives_in_hlo(SCATTERING))
    assert found.by_kind == {"reduce-scatter": (1, 3 / 4 * 128)}


SCATTERING = """\
HloModule m, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,4]) -> f32[2,4] {
  %input = f32[8,4]{1,0} parameter(0)
  %sum = f32[8,4]{1,0} all-reduce(%input), replica_groups=[1,4]<=[4], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[2,4]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={2,4}
}

ENTRY %main (p: f32[8,4]) -> f32[2,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %r = f32[2,4]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_sends_between_slices_count_and_those_to_hosts_do_not():
    """As a permute over the axis of two slices is compiled for TPUs; a send has a start and a done."""
    found = totals(collectives_in_hlo(BETWEEN_SLICES))
    assert found.by_kind == {"slice-send": (1, 128.0)}
    assert overlapped(BETWEEN_SLICES).by_kind == found.by_kind


BETWEEN_SLICES = """\
HloModule m, is_scheduled=true, num_partitions=16

%double (x: f32[8,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  ROOT %y = f32[8,4]{1,0} add(%x, %x)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %t = token[] after-all()
  %s = (f32[8,4]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target={{100000->200000}}}
  %v = (f32[8,4]{1,0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %host = (f32[8,4]{1,0}, u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="tpu_host"}
  %q = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%double
  %e = token[] send-done(%s), channel_id=2, is_host_transfer=true
  %w = (f32[8,4]{1,0}, token[]) recv-done(%v), channel_id=1, is_host_transfer=true
  ROOT %r = f32[8,4]{1,0} get-tuple-element(%w), index=0
}
"""
