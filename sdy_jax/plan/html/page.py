"""The page of a plan: a template, with its style, its scripts and the plan's data written into it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from importlib.resources import files
from typing import Any

from sdy_jax.files.whole import write_whole
from sdy_jax.plan.html.columns import columns
from sdy_jax.plan.html.differences import differences
from sdy_jax.plan.record.files import refused
from sdy_jax.plan.record.record import PlanRecord

_SCRIPTS = (
    "basics",
    "layouts",
    "plans",
    "steps",
    "scopes",
    "device_grid",
    "windowed",
    "tree",
    "graph_layout",
    "graph",
    "source",
    "tables",
    "reasons",
    "details",
    "memory",
    "pipelines",
    "compare",
    "search",
    "headline",
    "main",
)
"""The scripts in the order in which they run; each uses those before it, as one module."""

_STYLES = ("page.css", "pipelines.css")


def write_page(record: PlanRecord, path: str | os.PathLike[str], against: PlanRecord | None = None) -> None:
    """Writes the page of a plan.

    Raises:
        SdyError: the file cannot be written.
    """
    text = page(record, against)
    with refused("the page of the plan", path):
        write_whole(path, text)


def page(record: PlanRecord, against: PlanRecord | None = None) -> str:
    """The page of a plan, and of what differs from another one. Only scripts with the hash that the page states run in
    it, whatever the names and lines of the program contain."""
    script = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data: dict[str, Any] = {"plans": [columns(each) for each in (record, against) if each is not None]}
    if against is not None:
        data["differences"] = differences(against, record)
    parts = {
        "title": html.escape(f"{record.name}: plan"),
        "hash": f"sha256-{hashed}",
        "style": "\n".join(map(_asset, _STYLES)),
        "data": _json(data),
        "script": script,
    }
    before, *rest = _asset("page.html").split("{{")
    pieces = [before]
    for each in rest:
        name, _, after = each.partition("}}")
        pieces += [parts[name], after]
    return "".join(pieces)


def _asset(name: str) -> str:
    return files("sdy_jax.plan.html").joinpath("assets", name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    """JSON that may stand inside of a script element: nothing in it looks like a tag."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=float)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
