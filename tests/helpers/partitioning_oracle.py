"""What Shardy's passes and ours make of a module, and what that sends."""

from __future__ import annotations

from sharding_dump import parse, plain_text

from sdy_jax.cli.opt import optimize
from sdy_jax.ir.collectives import COLLECTIVE_OPS
from sdy_jax.lowering.planner.stages.reshards import chains


def ours(text: str, passes: str) -> str:
    """The module after our passes: verified, and read back from its text."""
    return plain_text(parse(optimize(text, passes, "-", strict=False)))


def wire_bytes(text: str) -> float:
    """What a device sends in a module's sdy collectives, those in loops once."""
    module = parse(text)
    found = chains(module.operation, lambda op: False, lambda op: op.name in COLLECTIVE_OPS)
    return sum(chain.wire_bytes() for chain in found)
