"""Text with mesh and shard ops becomes text that jaxlib parses.

jaxlib does not know the two dialects. It parses their ops in the generic form, but shows no attributes of theirs that
stand in `<{...}>`. So each op's statement is read here, in whichever form it is, and written anew in the generic form
with its attributes in `{...}`. All else stays, and every op stays on its line.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sdy_jax.representation.brackets import COMMENT, STRING
from sdy_jax.text.assembly import canonical, read_pretty
from sdy_jax.text.cursor import AssemblyError, Cursor, Span
from sdy_jax.text.mesh_ops import NOUNS, OPS
from sdy_jax.text.statement import Statement, generic_form, read_generic

_MENTION = re.compile(r"\b(?:mesh|shard)[.<]")
_SCAN = re.compile(
    rf'"(?P<generic>(?:mesh|shard)\.[\w$.]+)"|{STRING}|{COMMENT}'
    r"|(?<![\w$.#!@%^-])(?:(?P<location>loc\b)|(?P<pretty>(?:mesh|shard)\.[\w$.]+))"
)
_FOREIGN = re.compile(rf"{STRING}|{COMMENT}|[#!](?P<dialect>[A-Za-z_][\w$]*)[.<]")


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A text as jaxlib parses it.

    `starts` are offsets in it, ascending, of pieces that begin there; `origins` are where in the user's text each
    piece comes from, with the number of characters that it has in common with that.
    """

    text: str
    starts: tuple[int, ...] = (0,)
    origins: tuple[tuple[int, int], ...] = ((0, 2**63),)

    def origin(self, offset: int) -> int:
        """Where in the user's text a place comes from."""
        number = bisect_right(self.starts, offset) - 1
        start, common = self.origins[number]
        distance = offset - self.starts[number]
        return start + (distance if distance <= common else 0)


def mentions(text: str) -> bool:
    """Whether a text may have ops, types or attributes of the two dialects."""
    return _MENTION.search(text) is not None


def rewrite(text: str) -> Rewritten:
    """The text as jaxlib parses it.

    Raises:
      AssemblyError: a statement does not fit its op's form, or there is no such op.
    """
    pieces, kept = [], 0
    for start, end, statement in statements(text):
        pieces.append(Span(text[kept:start], kept))
        new = [piece if piece.at >= 0 else Span(piece.text, start) for piece in generic_form(canonical(statement))]
        fewer = text.count("\n", start, end) - sum(piece.text.count("\n") for piece in new)
        pieces += [*new, Span("\n" * fewer, end)]
        kept = end
    return _joined(text, [*pieces, Span(text[kept:], kept)])


def foreign(text: str) -> Iterator[tuple[int, str]]:
    """Where a text has an attribute or type of another dialect than the two, and which dialect that is."""
    for match in _FOREIGN.finditer(text):
        if match["dialect"] and match["dialect"] not in NOUNS:
            yield match.start(), match["dialect"]


def _joined(text: str, pieces: Sequence[Span]) -> Rewritten:
    starts, origins, length = [], [], 0
    for piece in pieces:
        starts.append(length)
        same = text.startswith(piece.text, piece.at)
        origins.append((piece.at, len(piece.text) if same else 0))
        length += len(piece.text)
    return Rewritten("".join(piece.text for piece in pieces), tuple(starts), tuple(origins))


def statements(text: str) -> Iterator[tuple[int, int, Statement]]:
    """The statements of the two dialects' ops: where they start, after their results' names, and end."""
    at = 0
    while match := _SCAN.search(text, at):
        at = match.end()
        cursor = Cursor(text, at)
        if match["location"] and cursor.peek("("):
            at = _after_location(cursor)
            continue
        read = _reader(match, cursor)
        if read is not None:
            yield match.start(), cursor.at, read
            at = cursor.at


def _reader(match: re.Match[str], cursor: Cursor) -> Statement | None:
    """The statement that begins with a name; None if the name stands for something else."""
    name = match["generic"] or match["pretty"]
    if name is None or not _begins(match, cursor):
        return None
    op = OPS.get(name)
    if op is None:
        raise AssemblyError(unknown(name), match.start())
    try:
        return (read_generic if match["generic"] else read_pretty)(op, cursor)
    except AssemblyError as error:
        raise AssemblyError(f"{name}: {error.message}", error.offset) from None


def _begins(match: re.Match[str], cursor: Cursor) -> bool:
    """Whether a name begins a statement: quoted ones are strings elsewhere, bare ones names of attributes."""
    if match["generic"]:
        return cursor.peek("(")
    return not any(map(cursor.peek, ("=", ",", "}", ":")))


def unknown(name: str) -> str:
    """What to say of an op that does not exist."""
    dialect = name.partition(".")[0]
    if dialect not in NOUNS:
        return f"{name}: unknown dialect `{dialect}`"
    names = ", ".join(op.name for op in OPS.values() if op.dialect == dialect)
    return f"{name}: the {dialect} dialect has no such op; it has {names}"


def _after_location(cursor: Cursor) -> int:
    """The end of a location, in which names of ops may stand."""
    with suppress(AssemblyError):
        cursor.bracket()
    return cursor.at
