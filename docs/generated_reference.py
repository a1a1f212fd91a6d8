"""Reference pages that are made of the code: commands and their options, passes and pipelines and theirs, machines."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from sdy_jax.base.extensions import load_extensions
from sdy_jax.cli.main import option_parser
from sdy_jax.lowering.targets.family import GIB, Machine
from sdy_jax.lowering.targets.target import machines
from sdy_jax.shardy.passes.pipelines import PIPELINES
from sdy_jax.shardy.passes.registry import PASSES, declared_options

_UNDOCUMENTED = {
    "cse": "MLIR's pass: of ops without effects that compute the same, one stays.",
    "sdy-remove-sharding-groups": "Erases all `sdy.sharding_group` ops.",
}
"""What passes do whose functions are made of others."""


def commands() -> dict[str, argparse.ArgumentParser]:
    """The commands of `sdy-jax`, by name."""
    (found,) = (action for action in option_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def command_text(name: str) -> list[str]:
    """What the reference says of a command: what it does, and each of its options."""
    parser = commands()[name]
    lines = ["```text", *(parser.description or "").rstrip().splitlines(), "```", ""]
    for action in parser._actions:
        if action.dest == "help":
            continue
        shown = [" ".join(filter(None, (option, _value(action)))) for option in action.option_strings]
        lines += [", ".join(f"`{text}`" for text in shown or [_value(action)]), f": {_markdown(action.help)}", ""]
    return lines


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    value = str(action.metavar or action.dest.upper())
    return f"[{value}]" if action.nargs == "?" and action.option_strings else value


def _markdown(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").replace("<", "\\<").replace("*", "\\*").split())


def passes_text(known: Mapping[str, Callable[..., Any]]) -> list[str]:
    """What the reference says of passes or pipelines: what each does, and what its options may be."""
    lines: list[str] = []
    for name, function in known.items():
        done = re.sub(rf"^`{name}`: ", "", _summary(function)) or _UNDOCUMENTED[name]
        lines += [f"`{name}`", f": {_markdown(done[0].upper() + done[1:])}", ""]
        for option, allowed in declared_options(function).items():
            values = " or ".join(f"`{value}`" for value in allowed) if allowed else "text"
            lines += [f"  - `{option}`: {values}"]
        lines.append("")
    return lines


def _summary(function: Callable[..., Any]) -> str:
    """The first paragraph of its docstring; of a `partial`, of the function's own."""
    return (inspect.getdoc(getattr(function, "func", function)) or "").partition("\n\n")[0]


_COLUMNS = (
    "machine",
    "bfloat16",
    "other types",
    "memory",
    "its rate",
    "links",
    "join",
    "a link's rate",
    "network",
    "host",
)


def machines_text() -> list[str]:
    """What the reference says of machines: a row each."""
    rows = [_machine_row(name, machine) for name, machine in machines().items()]
    return [f"| {' | '.join(cells)} |" for cells in (_COLUMNS, ["---"] * len(_COLUMNS), *rows)]


def _machine_row(name: str, machine: Machine) -> list[str]:
    chip, links = machine.chip, machine.links
    others = ", ".join(f"{kind} {_tera(peak)}" for kind, peak in chip.peaks.items())
    return [
        ", ".join(f"`{each}`" for each in (name, *machine.also)),
        f"{_tera(chip.flops)} TFLOP/s",
        others,
        f"{chip.capacity / GIB:.6g} GiB",
        f"{_tera(chip.memory)} TB/s",
        links.name.rstrip(","),
        f"{links.joins} devices",
        f"{links.bandwidth / 1e9:.6g} GB/s",
        f"{links.network.bandwidth / 1e9:.6g} GB/s",
        f"{links.host / 1e9:.6g} GB/s" if links.host else "",
    ]


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.6g}"


class _Generated(SphinxDirective):
    def parsed(self, lines: Iterable[str]) -> list[nodes.Node]:
        found = nodes.container()
        self.state.nested_parse(StringList(list(lines), source=self.env.docname), self.content_offset, found)
        return found.children


class Command(_Generated):
    """```` ```{command} plan ````: what a command does, and its options."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parsed(command_text(self.arguments[0]))


class Passes(_Generated):
    """```` ```{passes} ````: the passes and their options; ```` ```{passes} pipelines ````: the pipelines."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        load_extensions()
        return self.parsed(passes_text(PIPELINES if self.arguments else PASSES))


class Machines(_Generated):
    """```` ```{machines} ````: the machines with published rates."""

    def run(self) -> list[nodes.Node]:
        return self.parsed(machines_text())


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("command", Command)
    app.add_directive("passes", Passes)
    app.add_directive("machines", Machines)
    return {"parallel_read_safe": True}
