"""What compilers do that decides which arrays a device holds."""

from __future__ import annotations

from dataclasses import dataclass

from sdy_jax.representation.sdy_collectives import KINDS


@dataclass(frozen=True, slots=True)
class Compiler:
    """What a kind of device's compiler does.

    Attributes:
        products_fuse: products and convolutions compute their operands as they read them, as on TPUs, instead of
            reading them from memory. There they round them, too, arrays lie in tiles, and independent all_reduces run
            as one.
        copies_gathered: collectives join blocks along the major dimension only, as on GPUs: what is gathered along
            another one is transposed before a loop reads it, and a whole stack of which a loop gathers layers so.
        reduces_late: it runs reductions when their results are needed, as on GPUs, where it looks for work to do beside
            them: what they reduce is there until then.
        starts: the kinds of collectives that it starts before other work, and waits for after it.
    """

    products_fuse: bool = False
    copies_gathered: bool = False
    reduces_late: bool = False
    starts: frozenset[str] = frozenset()

    @classmethod
    def of_platform(cls, platform: str) -> Compiler:
        """That of a kind of devices, as jax names it. For TPUs XLA starts gathers and permutes (libtpu 0.0.51)."""
        starts = {"tpu": {"all_gather", "collective_permute"}, "gpu": KINDS}.get(platform, ())
        on_gpu = platform == "gpu"
        return cls(platform == "tpu", on_gpu, on_gpu, frozenset(starts))
