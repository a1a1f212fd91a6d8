"""The scripts of a page, run by node without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from sdy_jax.plan.page.html import _SCRIPTS, _asset, columns
from sdy_jax.plan.record.record import PlanRecord

NODE = shutil.which("node")
READ = "import { readFileSync } from 'node:fs';\nconst given = readFileSync(0, 'utf8');\n"


def opened(record: PlanRecord, body: str, before: str = "") -> Any:
    """What a script says, as JSON, once a page was opened.

    Args:
        record: the plan of the page.
        body: an expression over what the page's scripts define.
        before: statements that run before these.
    """
    given = f"document.getElementById('plans').textContent = given;\n{before}"
    return _said(given, [*_SCRIPTS], body, json.dumps({"plans": [columns(record)]}, default=float))


def shown(record: PlanRecord, body: str) -> Any:
    """The same of the view of time, without the rest of the page."""
    scripts = [name for name in _SCRIPTS if name != "main"]
    show = "app.plan = new Plan(JSON.parse(given));\nshowTime(new Element('div'));"
    return _said("", scripts, body, json.dumps(columns(record), default=float), show)


def _said(before: str, scripts: list[str], body: str, given: str, after: str = "") -> Any:
    assert NODE is not None
    dom = (Path(__file__).parent / "page_dom.mjs").read_text()
    whole = "\n".join([READ, dom, before, *(_asset(f"{name}.js") for name in scripts), after])
    with tempfile.NamedTemporaryFile("w", suffix=".mjs") as script:
        script.write(f"{whole}\nconsole.log(JSON.stringify(({body})));")
        script.flush()
        done = subprocess.run([NODE, script.name], input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
