"""Mistakes in MLIR text that jaxlib's verifiers do not report but die of, and the process with them.

They are looked for in the text. What hides behind an attribute alias is not found, nor a single-device mesh in the
generic form of an op that has its attributes after its region. A value used above its region is said by jaxlib, but
breaks the memory of what is parsed next (jaxlib 0.10). One more kills jaxlib 0.12 alone, and is no mistake for 0.10:
propagation edges on an `sdy.data_flow_edge` of a value that no data-flow op makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from sdy_jax.representation.brackets import NO_BRACKET, STRING_OR_COMMENT
from sdy_jax.representation.dialect_rules import RULES

_NEGATIVE_VALUE = re.compile(rf"{STRING_OR_COMMENT}|(?P<found>\b(?:operand|result)--\d+)")

_SYMBOL = r'@[\w$.]+|@"[^"]*"'
_MESH = re.compile(rf"\bsdy\.mesh\s+({_SYMBOL})\s*=")
_REFERENCE = re.compile(rf"{STRING_OR_COMMENT}|<\s*(?P<found>{_SYMBOL})\s*,\s*\[")

_SINGLE_DEVICE = r"<\s*\[\s*\]\s*,\s*device_ids"
_SINGLE_DEVICE_MESH = re.compile(rf"{_MESH.pattern}\s*{_SINGLE_DEVICE}")
_INLINE = rf"mesh(?=\s*{_SINGLE_DEVICE})"
_MANUAL = re.compile(r'//[^\n]*|(?P<found>\bsdy\.manual_computation\b(?P<generic>")?)')


MOST_NESTED = 256
"""How many brackets may be open at once. Parsers and printers call themselves for what is inside. Measured (2026-11,
jaxlib 0.10): its stack of 8 MB overflows at somewhere between 3,000 and 10,000 brackets, Python's limit at less than
1,000 regions."""

_OWN_REGIONS = re.compile(r"\bsdy\.(?:named|manual)_computation\b")
"""Ops whose own parsers read regions, and let go of them where the text ends or breaks inside."""

_VALUE = r"%[\w$.-]+"
_RESULTS = rf"(?:^|(?<=[{{}}]))[ \t]*(?P<results>{_VALUE}(?::\d+)?(?:[ \t]*,[ \t]*{_VALUE}(?::\d+)?)*)[ \t]*="
_VALUES = re.compile(
    rf"{NO_BRACKET}|(?P<open>{{)|(?P<close>}})|{_RESULTS}|(?P<made>{_VALUE})(?=:[^:\d]|[ \t]*=)|(?P<used>{_VALUE})",
    re.MULTILINE,
)

_BRACKETS = re.compile(rf"{NO_BRACKET}|(?P<open>[(\[{{<])|(?P<close>[)\]}}>])")


def fatal_mistakes(text: str) -> Iterator[tuple[int, str]]:
    """Where in a text such mistakes are, and what to say of them."""
    if (deepest := _too_deep(text)) is not None:
        yield deepest, f"more than {MOST_NESTED} brackets are open here; a module must not be nested so deeply"
    if "propagation_edges" in text:
        yield from _negative_values(text)
        yield from _unknown_meshes(text)
    if "sdy.manual_computation" in text:
        yield from _manual_on_single_device(text)
    if _OWN_REGIONS.search(text):
        yield from _used_above_their_region(text)


def _too_deep(text: str) -> int | None:
    """Where a bracket is opened while as many are as may be."""
    depth = 0
    for match in _BRACKETS.finditer(text):
        depth += {"open": 1, "close": -1}.get(match.lastgroup or "", 0)
        if depth > MOST_NESTED:
            return match.start()
    return None


def _negative_values(text: str) -> Iterator[tuple[int, str]]:
    for match in _NEGATIVE_VALUE.finditer(text):
        if match["found"]:
            yield match.start(), f"[D1] `{match[0]}`: operands and results count from 0; {RULES['D1']}"


def _unknown_meshes(text: str) -> Iterator[tuple[int, str]]:
    known = set(_MESH.findall(text))
    for match in _REFERENCE.finditer(text):
        if match["found"] and match["found"] not in known:
            meshes = ", ".join(sorted(known)) or "none"
            yield match.start("found"), f"[S2] unknown mesh {match['found']}; the meshes are: {meshes}"


def _manual_on_single_device(text: str) -> Iterator[tuple[int, str]]:
    symbols = [rf"{re.escape(name)}(?=\s*,)" for name in _SINGLE_DEVICE_MESH.findall(text)]
    sharding = re.compile(rf"<\s*({'|'.join([*symbols, _INLINE])})")
    for match in _MANUAL.finditer(text):
        if not match["found"]:
            continue
        end = text.find("({" if match["generic"] else "manual_axes", match.end())
        found = sharding.search(text, match.end(), max(end, match.end()))
        if found:
            problem = f"sdy.manual_computation: a sharding is on a single device, {found[1]}"
            yield found.start(1), f"[O2a] {problem}; {RULES['O2a']}"


def _used_above_their_region(text: str) -> Iterator[tuple[int, str]]:
    """Uses of values that only a region below makes; uses outlive the region where the parser lets go of it."""
    regions: list[set[str]] = [set()]
    waiting: dict[str, tuple[int, int]] = {}
    for match in _VALUES.finditer(text):
        match match.lastgroup:
            case "open":
                regions.append(set())
            case "close" if len(regions) > 1:
                regions.pop()
            case "used":
                if not any(match["used"] in region for region in regions):
                    waiting.setdefault(match["used"], (match.start(), len(regions)))
            case "results" | "made" as group:
                names = set(re.findall(_VALUE, match[group]))
                regions[-1] |= names
                for name in sorted(names & waiting.keys()):
                    start, depth = waiting.pop(name)
                    if depth < len(regions):
                        yield start, f"{name} is used here, and made inside of a region below, which alone may use it"
