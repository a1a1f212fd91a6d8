"""Pages whose programs run when the book is built, each in a process of its own; the book shows what they print.

A page that fails, or prints something else than its text says, is a warning. ```` ```{plan-page} step.html ```` shows a
page that its programs have written.
"""

from __future__ import annotations

import fnmatch
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docutils import nodes
from page_programs import alike, programs, run_alone, with_outputs
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

_PLANS = "_plans"
_LOGGER = logging.getLogger(__name__)
_OUTPUTS: dict[str, list[str | None]] = {}


def _execute(app: Any, _env: Any, names: list[str]) -> None:
    """Two pages at a time: each process of jax keeps more than one core busy."""
    executed = [name for name in fnmatch.filter(names, app.config.executed_pages) if programs(_page(app, name))]
    with ThreadPoolExecutor(2) as pool:
        for name, outputs in zip(executed, pool.map(lambda name: _outputs(app, name), executed), strict=True):
            if isinstance(outputs, RuntimeError):
                _LOGGER.warning("a program fails: %s", outputs, location=name)
            else:
                _OUTPUTS[name] = outputs


def _page(app: Any, name: str) -> Path:
    return Path(app.env.doc2path(name))


def _outputs(app: Any, name: str) -> list[str | None] | RuntimeError:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_alone(_page(app, name), Path(folder))
        except RuntimeError as error:
            return error
        for page in Path(folder).glob("*.html"):
            there = Path(app.outdir) / _PLANS / name
            there.mkdir(parents=True, exist_ok=True)
            shutil.copy(page, there)
    return found


def _show(app: Any, name: str, source: list[str]) -> None:
    if name not in _OUTPUTS:
        return
    page = _page(app, name)
    for program, found in zip(programs(page), _OUTPUTS[name], strict=True):
        if found is not None and not alike(found, program.shown):
            _LOGGER.warning("shows\n%s\nbut prints\n%s", program.shown, found, location=name)
    source[0] = with_outputs(page, _OUTPUTS[name])


class PlanPage(SphinxDirective):
    """A page that the programs of this document have written, live, and a link to have it by itself."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        up = "../" * self.env.docname.count("/")
        target = f"{up}{_PLANS}/{self.env.docname}/{self.arguments[0]}"
        frame = f'<iframe class="plan-page" src="{target}" title="{self.arguments[0]}" loading="lazy"></iframe>'
        link = f'<p class="plan-page-link"><a href="{target}">Open this page by itself</a></p>'
        return [nodes.raw("", frame + link, format="html")]


def setup(app: Any) -> dict[str, bool]:
    app.add_config_value("executed_pages", "", "env")  # a pattern of names
    app.add_directive("plan-page", PlanPage)
    app.connect("env-before-read-docs", _execute)
    app.connect("source-read", _show)
    return {"parallel_read_safe": False}
