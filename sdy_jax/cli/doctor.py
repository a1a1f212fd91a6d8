"""`sdy-jax doctor`: what is installed, which devices there are, and what works on them."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

from sdy_jax.cli import terminal
from sdy_jax.cli.main import DESCRIBED

_PACKAGES = ("sdy_jax", "jax", "jaxlib", "numpy", "ml_dtypes")
_OPTIONAL = {
    "flatbuffers": "reads jax.export files",
    "rich": "progress bars in terminals",
    **{name: use for described in DESCRIBED.values() for name, use in described.compiler.uses.items()},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: `status` is "ok", "missing" for what one can do without, or "broken"."""

    name: str
    status: str
    detail: str


def run(options: argparse.Namespace) -> int:
    """Prints the findings. Returns the exit status: 1 if something is broken."""
    findings = [*_versions(), *_checked(options)]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return int(any(finding.status == "broken" for finding in findings))


def _versions() -> list[Finding]:
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    found += [_version(name, "broken", "is not installed") for name in _PACKAGES]
    return found + [_version(name, "missing", f"optional: {use}") for name, use in _OPTIONAL.items()]


def _version(name: str, otherwise: str, detail: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, otherwise, detail)


def _checked(options: argparse.Namespace) -> list[Finding]:
    try:
        from sdy_jax.cli.doctor_checks import CHECKS, prepare
    except Exception as error:
        return [Finding("import", "broken", f"{type(error).__name__}: {error}")]
    prepare(options)
    return [_found(name, check, options) for name, check in CHECKS.items()]


def _found(name: str, check: Callable[[argparse.Namespace], tuple[bool, str]], options: argparse.Namespace) -> Finding:
    try:
        works, detail = check(options)
    except Exception as error:  # whatever it is, it is what the user wants to know
        first = (str(error).strip() or "no message").splitlines()[0]
        return Finding(name, "broken", f"{type(error).__name__}: {first}")
    return Finding(name, "ok" if works else "missing", detail)


_STYLES = {"ok": "green", "missing": "yellow", "broken": "red"}


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        status = terminal.styled(f"{finding.status:<7}", _STYLES[finding.status], sys.stdout)
        print(f"{finding.name:<{width}}  {status}  {finding.detail}")
