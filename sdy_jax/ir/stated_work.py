"""The work of calls that nobody looks into: kernels and functions of libraries, as numbers that stand in the module.

What a call computes and what it moves between the device's memory and its cores is stated on its custom call, as a
dictionary:

    sdy_jax.work = {basis = "counted", bytes = 16777216, efficiency = 6.0e-1 : f64, flops = 34359738368}

It is of the whole call, as its operands and results are; a device that runs a block of it performs its share
(`lowering/strategies/registry.py`). No function of the process is asked, so that a module which is read from text
has the same prices.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from jax.extend.mlir import ir

from sdy_jax.errors import SdyError
from sdy_jax.ir.operations import AnyOp

WORK = "sdy_jax.work"
"""The attribute of a custom call that states its work."""


Uneven = tuple[tuple[int, tuple[tuple[int, float], ...]], ...]
"""Pairs of a factor and pairs: of a number of parts and the share of one of them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one device has of a whole that factors of these sizes share out, in whole elements: the first one's, or
    that with the largest share along factors that are `uneven`.

    >>> Share(24.0, (3, 8))((2, 4))
    4.0
    """

    whole: float
    sizes: tuple[int, ...]
    uneven: Uneven = ()

    def __call__(self, shards: Sequence[int]) -> float:
        """That of a device where each factor is in so many shards."""
        split = [(f, n, count) for f, (n, count) in enumerate(zip(self.sizes, shards, strict=True)) if count > 1 and n]
        known = {factor: dict(shares) for factor, shares in self.uneven}
        return self.whole * math.prod([known.get(f, {}).get(count, -(-n // count) / n) for f, n, count in split])


@dataclass(frozen=True, slots=True)
class StatedWork:
    """What a whole call performs.

    Attributes:
        flops: its floating-point operations; a multiplication with an addition is two. Whole numbers are stored.
        bytes: those that it reads from the device's memory and writes to it, likewise; what stays near its cores counts
            once.
        efficiency: the share of the peak of arithmetic that such calls reach, above 0; where what it moves takes
            longer, that decides.
        basis: where the numbers are from, in words, with what they leave out.
        uneven: the factors of the op's rule along which parts perform unequal shares, as queries under a causal mask:
            per number of parts of one the share of that which performs most. Of others all perform alike.

    Raises:
        SdyError: a number that is negative or not finite, or an efficiency of 0.
    """

    flops: float
    bytes: float
    efficiency: float = 1.0
    basis: str = ""
    uneven: Uneven = ()

    def __post_init__(self) -> None:
        for name in ("flops", "bytes", "efficiency"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name == "efficiency" and not value):
                least = "above 0" if name == "efficiency" else "of at least 0"
                raise SdyError(f"the work of a call has {name}={value}; expected a finite number {least}")

    @property
    def operations(self) -> float:
        """The operations of the cost model that take as long: one is a multiplication with an addition, at peak."""
        return self.flops / 2 / self.efficiency

    def write(self, attributes: MutableMapping[str, ir.Attribute]) -> None:
        """States it among the attributes of a custom call, in the current context."""
        whole = ir.IntegerType.get_signless(64)
        stated: dict[str, ir.Attribute] = {
            "basis": ir.StringAttr.get(self.basis),
            "bytes": ir.IntegerAttr.get(whole, round(self.bytes)),
            "efficiency": ir.FloatAttr.get_f64(float(self.efficiency)),
            "flops": ir.IntegerAttr.get(whole, round(self.flops)),
        }
        if self.uneven:
            stated["uneven"] = ir.DictAttr.get({str(factor): _shares_said(shares) for factor, shares in self.uneven})
        attributes[WORK] = ir.DictAttr.get(stated)


def stated_work(op: AnyOp) -> StatedWork | None:
    """What a call states of its work; None where it states nothing."""
    found = op.attributes.get(WORK)
    if found is None:
        return None
    stated = ir.DictAttr(found)
    flops, size = (float(ir.IntegerAttr(stated[name]).value) for name in ("flops", "bytes"))
    share, basis = ir.FloatAttr(stated["efficiency"]).value, ir.StringAttr(stated["basis"]).value
    uneven = ir.DictAttr(stated["uneven"]) if "uneven" in stated else ()
    factors = sorted((int(entry.name), _shares(ir.DictAttr(entry.attr))) for entry in uneven)
    return StatedWork(flops, size, float(share), str(basis), tuple(factors))


def _shares_said(shares: Sequence[tuple[int, float]]) -> ir.DictAttr:
    return ir.DictAttr.get({str(count): ir.FloatAttr.get_f64(share) for count, share in shares})


def _shares(said: ir.DictAttr) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(entry.name), float(ir.FloatAttr(entry.attr).value)) for entry in said))
