"""What `scripts/bench_models` says of its rows: a table, and what misses a goal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from models.measure import MEMORY_APART, Side
from models.rows import Row

MOST_SECONDS = {1: 30.0}
MOST_SECONDS_OF_AXES = 60.0
"""Per number of mesh axes, the CPU seconds that a scanned model may take to be planned; and of any more."""

BYTES_APART = 1.05
"""How far the plan's bytes may be from the compiled program's: over it, or over its inverse."""

MOST_OF_JIT = {"bytes": 1.0, "time": 1.02}
"""How much of the better one of jit's programs a row may take."""

MOST_OF_JIT_BY_KERNELS = {"bytes": 0.7, "time": 0.97, "work": 0.97, "temporaries": 1.0}
"""The same of a training step with the kernels that people train with; `work` is its time but for what it waits for
collectives, `temporaries` what it holds beside arguments and results. Chosen: what splitting a program well saves."""

HEAD = (
    "row",
    "plan s",
    "plan GiB",
    "of",
    "memory: plan",
    "compiler",
    "jit",
    "temporary",
    "jit",
    "ratio",
    "bytes: plan",
    "compiled",
    "jit",
    "ratio",
    "sending: ours",
    "jit",
    "ratio",
    "time: plan",
    "compiler",
    "jit",
    "ratio",
    "of work",
    "bound",
    "peak: ours",
    "jit",
    "compile s",
    "jit",
)


@dataclass
class Result:
    """The sides of a row, by how it was compiled."""

    row: Row
    how: str
    ours: Side
    jit: Side | None = None
    others: list[Side] = field(default_factory=list)
    """jit's in the other ways."""

    @property
    def name(self) -> str:
        return f"{self.row.name} {self.how}"

    def of_jit(self, what: str) -> float:
        """What it takes over what the better one of jit's programs takes that compile; 0 where there is none."""
        sides = [side for side in (self.jit, *self.others) if side is not None and not side.error]
        best = min((taken for side in sides if (taken := getattr(side, what))), default=0.0)
        return getattr(self.ours, what) / best if best and not self.ours.error else 0.0

    def misses(self) -> Iterator[str]:
        """The goals that it misses, each as a text."""
        ours = self.ours
        if ours.error and not ours.planned:
            yield f"no plan: {ours.error}"
            return
        limit = MOST_SECONDS.get(len(self.row.axes), MOST_SECONDS_OF_AXES)
        if self.row.is_scanned and ours.planned > limit:
            yield f"planned in {ours.planned:.0f} s, for {limit:.0f}"
        if not self.row.is_scanned and self.jit and self.jit.compiled and ours.planned > self.jit.compiled:
            yield f"planned in {ours.planned:.0f} s, XLA compiles in {self.jit.compiled:.0f}"
        if ours.took > 2:
            yield f"planning takes {ours.took:.1f} GiB"
        if ours.error:
            if any(side is not None and not side.error for side in (self.jit, *self.others)):
                yield f"does not compile, jit's does: {ours.error}"
            return
        packed = ours.packed or ours.memory
        if packed and not MEMORY_APART[0] <= ours.plan_memory / packed <= MEMORY_APART[1]:
            yield f"memory by the plan is {ours.plan_memory / packed:.2f} of the compiler's"
        if ours.bytes and not 1 / BYTES_APART <= ours.plan_bytes / ours.bytes <= BYTES_APART:
            yield f"bytes by the plan are {ours.plan_bytes / ours.bytes:.2f} of the compiled program's"
        for what, most in (MOST_OF_JIT_BY_KERNELS if self.row.trains_by_kernels else MOST_OF_JIT).items():
            if self.of_jit(what) > most * (1 + 1e-6):
                yield f"{what} are {self.of_jit(what):.2f} of jit's better program, for {most}"

    def cells(self) -> list[str]:
        ours, jit = self.ours, self.jit or Side(error="-")
        return [
            self.name, *map(_number, (ours.planned, ours.took, ours.available, ours.plan_memory)),
            _held(ours), _held(jit),
            *map(_number, (ours.temporaries, jit.temporaries, self.of_jit("temporaries"))),
            *map(_number, (ours.plan_bytes, ours.bytes, jit.bytes, self.of_jit("bytes"))),
            *map(_number, (ours.sent, jit.sent, self.of_jit("sent"))),
            *map(_number, (ours.plan_time, ours.time, jit.time, self.of_jit("time"), self.of_jit("work"), ours.bound)),
            *map(_number, (ours.share_of_peak, jit.share_of_peak, ours.compiled, jit.compiled)),
        ]  # fmt: skip

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "row": self.name,
            "ours": asdict(self.ours),
            "jit": asdict(self.jit) if self.jit else None,
            "misses": list(self.misses()),
        }


def _number(value: float) -> str:
    return f"{value:.3g}" if value else "-"


def _held(side: Side) -> str:
    """What a program holds, and in parentheses where there is no more; marked where it is more than there is."""
    packed = f" ({_number(side.packed)})" if 0 < side.packed < side.memory else ""
    return f"{_number(side.memory)}{packed}{'!' if side.error and side.memory else ''}"


def means(results: list[Result]) -> list[str]:
    """The geometric means of what is taken over jit's better programs, of training steps by kernels and other rows."""
    return [line for by_kernels in (True, False) for line in _means(results, by_kernels)]


def _means(results: list[Result], by_kernels: bool) -> Iterator[str]:
    ratios = {
        what: [
            ratio for result in results if result.row.trains_by_kernels == by_kernels and (ratio := result.of_jit(what))
        ]
        for what in ("sent", *MOST_OF_JIT_BY_KERNELS)
    }
    said = [f"{what} {geometric_mean(found):.3f} ({len(found)})" for what, found in ratios.items() if found]
    if said:
        yield f"of jit's better program, {'training by kernels' if by_kernels else 'other rows'}: {', '.join(said)}"


def markdown(results: list[Result], versions: Mapping[str, str]) -> str:
    """A table of all rows, GiB and seconds, with the goals that they miss below."""
    rows = [HEAD, ("---",) * len(HEAD), *(result.cells() for result in results)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    missed = [f"- {result.name}: {miss}" for result in results for miss in result.misses()]
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    below = [f"GiB and seconds per device; {said}.", *means(results), "\n".join(missed or ["All goals are met."])]
    return "\n\n".join([table, *below]) + "\n"
