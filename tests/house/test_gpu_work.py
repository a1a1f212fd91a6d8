"""What instructions compiled for GPUs take, counted by hand."""

from dataclasses import replace

import pytest
from gpu_work import SHARE, GpuWork
from timing import server_time

from sdy_jax.lowering.targets.target import machines
from sdy_jax.plan.hlo_module import HloModule
from sdy_jax.plan.profile import waiting

H100 = machines()["h100"]
FLOPS, MEMORY = H100.chip.flops, H100.chip.memory
KIB = 1024


def work(*lines, chip=H100.chip):
    """The seconds of all instructions that the entry of a module runs."""
    body = "\n".join(f"  {line}" for line in lines)
    text = f"""HloModule m, is_scheduled=true, num_partitions=16
{FUSED}
ENTRY %main (p: bf16[256,512], q: bf16[512,1024]) -> bf16[256,1024] {{
  %p = bf16[256,512]{{1,0}} parameter(0)
  %q = bf16[512,1024]{{1,0}} parameter(1)
  %i = s32[] constant(0)
{body}
}}
"""
    module = HloModule.parse(text)
    return waiting(module, lambda sent: 0.0, GpuWork(module, chip)).work


FUSED = """
%product (a: bf16[256,512], b: bf16[512,1024]) -> bf16[256,1024] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,1024]{1,0} parameter(1)
  ROOT %d = bf16[256,1024]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%slice (a: bf16[64,256,512], i: s32[]) -> bf16[256,512] {
  %a.1 = bf16[64,256,512]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %s = bf16[1,256,512]{2,1,0} dynamic-slice(%a.1, %i.1, %i.1, %i.1), dynamic_slice_sizes={1,256,512}
  ROOT %r = bf16[256,512]{1,0} bitcast(%s)
}
%update (a: bf16[64,256,512], u: bf16[1,256,512], i: s32[]) -> bf16[64,256,512] {
  %a.2 = bf16[64,256,512]{2,1,0} parameter(0)
  %u = bf16[1,256,512]{2,1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %n = bf16[64,256,512]{2,1,0} dynamic-update-slice(%a.2, %u, %i.2, %i.2, %i.2)
}
"""

STACK = "%t = bf16[64,256,512]{2,1,0} parameter(2)"
LAYER = "%u1 = bf16[1,256,512]{2,1,0} bitcast(%p)"
ATTENTION = """%f = (bf16[2,8,64,128]{3,2,1,0}, u8[0]{0}) custom-call(%h, %h, %h), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"intermediate_tensor_shape": {"element_type": "BF16", \
"dimensions": ["2", "8", "64", "64"]}, "mask_type": "CAUSAL"}"""
HEADS = "%h = bf16[2,64,8,128]{3,2,1,0} parameter(2)"
IMAGES = "%x = bf16[8,16,16,64]{3,2,1,0} parameter(2)"
KERNEL = "%k = bf16[3,3,64,128]{3,2,1,0} parameter(3)"
CONVOLVED = """%c = (bf16[8,16,16,128]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward\""""


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["%made = bf16[256,1024]{1,0} fusion(%p, %q), kind=kCustom, calls=%product"], 1792 * KIB / MEMORY),
        (["%made = bf16[256,512]{1,0} fusion(%t, %i), kind=kLoop, calls=%slice", STACK], (512 * KIB + 4) / MEMORY),
        (
            ["%made = bf16[64,256,512]{2,1,0} fusion(%t, %u1, %i), kind=kLoop, calls=%update", STACK, LAYER],
            (512 * KIB + 4) / MEMORY,
        ),
        (["%c = bf16[256,512]{1,0} copy(%p)"], 512 * KIB / MEMORY),
        ([HEADS, ATTENTION], 2 * (2 * 64 * 8 * 128 * 2) / MEMORY),
        ([IMAGES, KERNEL, CONVOLVED], (8 * 16 * 16 * 64 + 9 * 64 * 128 + 8 * 16 * 16 * 128) * 2 / MEMORY),
        (['%c = bf16[256,512]{1,0} custom-call(%p), custom_call_target="attend"'], 512 * KIB / MEMORY),
        (["%b = bf16[512,256]{1,0} bitcast(%p)"], 0.0),
    ],
)
def test_what_moves_more_than_it_computes_takes_what_memory_does(lines, seconds):
    assert work(*lines, chip=replace(H100.chip, flops=1e6 * FLOPS)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("lines", "operations"),
    [
        (["%made = bf16[256,1024]{1,0} fusion(%p, %q), kind=kCustom, calls=%product"], 2 * 256 * 512 * 1024),
        ([HEADS, ATTENTION], 0.5 * 2 * 2 * (2 * 8 * 64 * 64) * 128 / SHARE),
        ([IMAGES, KERNEL, CONVOLVED], 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)),
    ],
)
def test_what_computes_more_takes_what_the_peak_does(lines, operations):
    assert work(*lines, chip=replace(H100.chip, memory=1e6 * MEMORY)) == pytest.approx(operations / FLOPS)


LOOP = """HloModule m, is_scheduled=true, num_partitions=16
%less (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  ROOT %c = pred[] constant(true)
}
%body (p: bf16[256,512]) -> bf16[256,512] {
  %p = bf16[256,512]{1,0} parameter(0)
  %s = (bf16[256,512], bf16[4096,512]) all-gather-start(%p), replica_groups=[1,16]<=[16], dimensions={0}
  %c = bf16[256,512]{1,0} copy(%p)
  %d = bf16[4096,512]{1,0} all-gather-done(%s)
}
ENTRY %main (p: bf16[256,512]) -> bf16[256,512] {
  %x = bf16[256,512]{1,0} parameter(0)
  ROOT %w = bf16[256,512]{1,0} while(%x), condition=%less, body=%body, backend_config={"known_trip_count":{"n":"5"}}
}
"""


def test_a_programs_time_is_its_work_and_what_it_waits_for_as_it_is_scheduled():
    found = server_time(LOOP, H100)
    assert found.work == pytest.approx(5 * 512 * KIB / MEMORY)
    assert found.exposed == pytest.approx(found.sent - found.work) and found.scheduled == pytest.approx(found.sent)
