"""What runs beside collectives in scheduled programs, counted by hand."""

import pytest

from sdy_jax.plan.hlo_module import HloModule
from sdy_jax.plan.profile import estimated_cycles, kernels_in_hlo, overlapped, waiting

CYCLES = 'backend_config={{"estimated_cycles":"{}"}}'


def seconds(collective):
    """A byte takes a second."""
    return collective.wire_bytes


def cycles(instruction):
    """Ten in a second."""
    return instruction.cycles / 10


def parsed(*lines, more=""):
    return HloModule.parse(module(*lines, more=more))


def module(*lines, more=""):
    """A module of four devices; `N cycles` in a line states what it takes."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule m, is_scheduled=true, num_partitions=4
{more}
ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
{body}
}}
"""


def work(name, cycles):
    return f"%{name} = f32[4]{{0}} fusion(%p), kind=kLoop, calls=%none, " + CYCLES.format(cycles)


def start(name):
    """16 bytes to three others: 48 seconds."""
    return f"%{name} = (f32[4], f32[16]) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={{0}}"


def done(name, of):
    return f"%{name} = f32[16]{{0}} all-gather-done(%{of})"


REDUCED = "%r = f32[4]{0} all-reduce(%p), replica_groups=[1,4]<=[4], to_apply=%none"  # 24 bytes
NONE = "%none (x: f32[4]) -> f32[4] {\n  ROOT %x = f32[4]{0} parameter(0)\n}\n"


@pytest.mark.parametrize(
    ("lines", "sent", "exposed"),
    [
        ([REDUCED, work("a", 100)], 24, 24),  # nothing runs beside what has no start
        ([start("s"), work("a", 300), done("d", "s")], 48, 18),  # 300 cycles at 10 per second
        ([start("s"), work("a", 600), done("d", "s")], 48, 0),
        ([work("a", 300), start("s"), done("d", "s"), work("b", 300)], 48, 48),
        ([start("s"), start("t"), work("a", 600), done("d", "s"), work("b", 100), done("e", "t")], 96, 26),
        ([start("s"), start("t"), work("a", 300), done("e", "t"), done("d", "s")], 96, 66),  # the first one goes first
        ([start("s"), work("a", 100), REDUCED, work("b", 100), done("d", "s")], 72, 24 + 28),
    ],
)
def test_work_hides_what_started_before_it(lines, sent, exposed):
    found = waiting(parsed(*lines, more=NONE), seconds, cycles)
    assert (found.sent, found.exposed) == pytest.approx((sent, exposed))


FUSED = """
%gather (x: f32[4]) -> f32[16] {
  %x = f32[4]{0} parameter(0)
  ROOT %g = f32[16]{0} all-gather(%x), replica_groups=[1,4]<=[4], dimensions={0}
}

%ended (y: f32[16]) -> f32[16] {
  %y = f32[16]{0} parameter(0)
  ROOT %h = f32[16]{0} all-gather(%y), replica_groups=[1,4]<=[4], dimensions={0}
}
"""


def test_fusions_start_and_end_collectives_on_tpus():
    lines = (
        "%async-collective-start.3 = (f32[4], f32[16]) fusion(%p), kind=kCustom, calls=%gather",
        work("a", 300),
        "%async-collective-done.3 = f32[16]{0} fusion(%p), kind=kCustom, calls=%ended",
    )
    text = module(*lines, more=NONE + FUSED)
    found = waiting(HloModule.parse(text), seconds, cycles)
    assert (found.sent, found.exposed) == pytest.approx((48, 18))
    assert overlapped(text).by_kind == {"all-gather": (1, 48.0)}


LOOP = """
%less (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %n = s32[] constant(3)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

%body (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %s = (f32[4], f32[16]) all-gather-start(%p), replica_groups=[1,4]<=[4], dimensions={0}
  WORK
  %d = f32[16]{0} all-gather-done(%s)
}
"""


def test_loops_wait_in_each_trip_and_hide_what_runs_around_them():
    """Three trips of 18 seconds of waiting after 30 of work, 144 in all, which hide a gather around them."""
    loop = '%w = f32[4]{0} while(%p), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
    more = NONE + LOOP.replace("WORK", work("a", 300))
    found = waiting(parsed(start("t"), loop, done("e", "t"), more=more), seconds, cycles)
    assert (found.sent, found.exposed) == pytest.approx((4 * 48, 3 * 18))


KERNEL = """%attend.2 = f32[4]{0} custom-call(%p), custom_call_target="tpu_custom_call", \
operand_layout_constraints={f32[4]{0}}, frontend_attributes={kernel_metadata={
"xprof":"{\\"block\\": 4}"
}}, backend_config={"custom_call_config":{"body":"YXR0ZW5k","cost_estimate":{"flops":"600",\
"transcendentals":"0","bytes_accessed":"32"}}}
  %copied = f32[4]{0} copy(%attend.2), frontend_attributes={kernel_metadata={
"xprof":"{\\"block\\": 4}"
}}, backend_config={"estimated_cycles":"100"}"""


def test_kernels_take_what_the_caller_says_of_their_calls_and_hide_collectives():
    """The metadata of a kernel breaks its line, and those of what is made of its result: 20 and 10 seconds."""
    text = module(start("s"), KERNEL, done("d", "s"))
    assert waiting(HloModule.parse(text), seconds, cycles).exposed == pytest.approx(38)
    assert waiting(
        HloModule.parse(text), seconds, lambda each: each.cycles / 10 or each.stated_work[0] / 30
    ).exposed == pytest.approx(18)
    ((call, count),) = kernels_in_hlo(text)
    assert (call.kernel_body, count, call.stated_work) == (b"attend", 1, (600, 32)) and estimated_cycles(text) == 100
