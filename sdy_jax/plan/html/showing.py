"""A plan where its reader is: the page in a notebook, the text in a terminal."""

from __future__ import annotations

import html
import sys
from typing import Any

from sdy_jax.errors import SdyError, with_article
from sdy_jax.jax_internals.tracebacks import api_boundary
from sdy_jax.plan.html.page import page
from sdy_jax.plan.record.record import PlanRecord

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
