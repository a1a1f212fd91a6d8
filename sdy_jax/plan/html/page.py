"""The page of a plan: a template, with its style, its scripts and the plan's data written into it, as a file or in
a notebook.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import sys
from importlib.resources import files
from typing import Any

from sdy_jax.base.files import write_whole
from sdy_jax.base.tracebacks import api_boundary
from sdy_jax.errors import SdyError, with_article
from sdy_jax.plan.html.data import columns, differences
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


# A plan where its reader is: the page in a notebook, the text in a terminal.

_HEIGHT = 640
"""Pixels. Chosen: the page's panels are usable, and a cell below is still in sight."""


@api_boundary
def show(plan: Any, height: int = _HEIGHT) -> None:
    """Shows a plan: in a notebook (Jupyter, VS Code, Colab) the page to explore, in a frame; else its text.

    Args:
        plan: a `Plan`, or a `PlanRecord` from `load_plan`. A table of one (`plan.table("values")`) is shown as well.
        height: of the frame in a notebook, in pixels.

    Returns:
        None. The text is printed, in colours where standard output is a terminal and `rich` is installed; notebooks
        that do not show HTML keep it beside the page.

    Raises:
        SdyError: it is nothing of a plan, or a function, whose plan was not asked for.

    Example:
        sdy.show(step.plan(state, batch))

    See also:
        `Plan.to_html`: writes the page to a file.
    """
    if not hasattr(plan, "show"):
        raise SdyError(_refused(plan))
    display = _notebook_display()
    if display is None:
        plan.show()
    elif hasattr(plan, "record"):
        display({"text/html": _frame(plan, height), "text/plain": str(plan)}, raw=True)
    else:
        display(plan)


def _refused(given: object) -> str:
    said = f"show got {with_article(type(given))}; expected a plan"
    if callable(given) and hasattr(given, "plan"):
        name = getattr(given, "__name__", "the function")
        return f"{said}; to fix: sdy.show({name}.plan(...)), with the arguments of a call"
    return f"{said}, made by `plan` of a partitioned function or loaded by `load_plan`"


def _notebook_display() -> Any:
    """IPython's `display`, where a notebook's kernel runs us; None in terminals."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return display


def _frame(plan: Any, height: int) -> str:
    """The page in a frame of its own: its style does not reach the notebook, nor that of the notebook the page."""
    record = plan if isinstance(plan, PlanRecord) else plan.record(steps=True)
    return (
        f'<iframe srcdoc="{html.escape(page(record))}" sandbox="allow-scripts" title="plan of '
        f'{html.escape(record.name)}" style="width:100%;height:{int(height)}px;border:1px solid #8884"></iframe>'
    )
