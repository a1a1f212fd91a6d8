"""What a compiler does to a program that decides what a device holds, sends and waits for.

Each attribute is a question that planning asks. Without an answer a compiler does the plain thing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is computed as it is read, and makes no buffer.

    Attributes:
        into_products: products and convolutions compute their operands as they read them, instead of reading them from
            memory.
        dear_again: what is dear to compute, and read by several kernels, is computed in each where that reads less.
        rows: rows of up to so many elements are read once for what is computed of them and of their sums, which is not
            written over them.
    """

    into_products: bool = False
    dear_again: bool = False
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """In which order ops run for which nobody waits.

    Attributes:
        runs_early: an op runs as soon as its operands are there, not when it is needed.
        runs_late: an op runs no sooner than its result is needed.
        reduces_late: so do reductions, beside which the compiler looks for work: what they reduce is there until then.
        multiplies_late: so do products that other products need; those that none needs run at any time.
        keeps_whole: all of a value is kept until a part of it is taken, instead of that part being computed.
    """

    runs_early: bool = False
    runs_late: bool = False
    reduces_late: bool = False
    multiplies_late: bool = False
    keeps_whole: bool = False


@dataclass(frozen=True, slots=True)
class Collectives:
    """What becomes of collectives.

    Attributes:
        starts: the kinds that it starts before other work, and waits for after it.
        combines: the kinds of which it runs small ones that follow each other as one, without copies.
        buckets: the kinds of which small ones run as one unasked; those that it does not combine, as one of a stack of
            their operands, where these have one shape.
        merges: independent all_reduces run as one, whatever their buckets.
        joins_major: blocks are joined along the major dimension only: what is gathered along another one is transposed
            before a loop reads it, and a whole stack of which a loop gathers layers so.
        along_lines: a reduce-scatter runs along one dimension of a torus; of others become all_reduces.
    """

    starts: frozenset[str] = frozenset()
    combines: frozenset[str] = frozenset(("all_reduce",))
    buckets: frozenset[str] = frozenset(("all_reduce",))
    merges: bool = False
    joins_major: bool = False
    along_lines: bool = False


@dataclass(frozen=True, slots=True)
class Compiler:
    """What a kind of device's compiler does."""

    fusion: Fusion = Fusion()
    order: Order = Order()
    collectives: Collectives = Collectives()
