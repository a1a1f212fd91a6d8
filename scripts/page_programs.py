"""The programs of pages of documentation, and what is shown as their output.

A block of Python is a part of `model.py`, and runs after those before it; one that begins with a comment that names a
file, as `# train.py`, is that file. Lines `$ ...` of a block `console` are commands. The block without a language that
comes next shows what is printed; `...` stands there for any text. `<!-- needs libtpu -->` above a block says what has
to be installed for it to run.

    python scripts/page_programs.py PAGE ...            # runs pages, and says which outputs are other ones
    python scripts/page_programs.py --update PAGE ...   # writes outputs into the pages
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib.util
import io
import json
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

SHOWN_WITH = "0.10."
"""The version of jax whose outputs pages show. Others name some values otherwise, and fuse and count a little more or
less; there programs run, and nobody compares."""

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"(?:#|//) ([\w/]+\.\w+)\n")
_NEEDS = re.compile(r"<!-- needs (\w+) -->\s*$")
_DEVICES = re.compile(r"^jax\.config\.update\(\"jax_num_cpu_devices\".*", re.MULTILINE)


class Program(NamedTuple):
    """A block that runs: its text, the line at which it begins in `model.py`, and what is shown as its output.

    `file` is the file that it is, if it is one, `needs` the module without which it does not run; it ends at `end` in
    the page, its output is from where to where `output` says.
    """

    text: str
    line: int
    shown: str | None
    command: bool = False
    file: str | None = None
    needs: str | None = None
    end: int = 0
    output: tuple[int, int] | None = None


def programs(page: Path) -> list[Program]:
    """The programs of a page; `model.py` is all of them, with a line in between."""
    text, found, line = page.read_text(), list[Program](), 1
    blocks = list(BLOCK.finditer(text))
    for block, following in zip(blocks, [*blocks, None][1:], strict=True):
        language, program = block.groups()
        file = _FILE.match(program)
        if language not in ("python", "console") and not file:
            continue
        output = following if following and not following[1] and not file else None
        needs = _NEEDS.search(text[: block.start()])
        found.append(
            Program(
                program,
                line,
                output[2] if output else None,
                command=language == "console",
                file=file and file[1],
                needs=needs and needs[1],
                end=block.end(),
                output=output and output.span(),
            )
        )
        if language == "python" and not file:
            line += program.count("\n") + 1
    return found


def printed(program: Program, names: dict[str, Any]) -> str:
    """Runs a program, in the current folder."""
    if program.file:
        Path(program.file).write_text(program.text)
        return ""
    if program.command:
        return "".join(_of_command(line[2:]) for line in _lines(program.text) if line.startswith("$ "))
    out, text = io.StringIO(), program.text
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        text = _DEVICES.sub("", text)  # jax takes it once, and before there are devices
    code = compile("\n" * (program.line - 1) + text, "model.py", "exec", dont_inherit=True)
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def _lines(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def _of_command(line: str) -> str:
    """What a command prints: `sdy-jax` in this process, others in their own, with this Python."""
    words = shlex.split(line)
    if words[0] == "sdy-jax":
        from sdy_jax.cli.main import main

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(words[1:])
        return out.getvalue()
    words = [sys.executable, *(words[1:] if words[0] == "python" else ["-m", *words])]
    done = subprocess.run(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


def environment() -> dict[str, str]:
    """That of a user on a machine without accelerators, who has this checkout installed."""
    paths = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return known | {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "SDY_JAX_CACHE_DIR": "0",
        "TPU_SKIP_MDS_QUERY": "1",
        "COLUMNS": "120",
        "NO_COLOR": "1",
    }


def run(page: Path) -> Iterator[tuple[Program, str | None]]:
    """Runs the programs of a page in the current folder, and gives what each prints; `None` for what cannot run."""
    parts = [program.text for program in programs(page) if not program.command and not program.file]
    Path("model.py").write_text("\n".join(parts))  # what plans show as source
    linecache.clearcache()  # it may have another page's
    names: dict[str, Any] = {"__name__": "model"}
    for program in programs(page):
        if program.needs and importlib.util.find_spec(program.needs) is None:
            yield program, None
            continue
        try:
            yield program, printed(program, names)
        except BaseException as error:
            error.add_note(f"in {page.name}, the program\n{program.text}")
            raise


def run_alone(page: Path, folder: Path) -> list[str | None]:
    """What the programs of a page print in a process of their own; a `RuntimeError` where one fails."""
    command = [sys.executable, __file__, "--json", "--folder", str(folder), str(page)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{page}: {done.stderr[-3000:]}")
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def alike(found: str, shown: str | None) -> bool:
    """Whether an output is the shown one, but for numbers of operations, as far as this version of jax shows it."""
    if not version("jax").startswith(SHOWN_WITH):
        return True
    found, shown = (re.sub(r"[\d.]+ ([kMG]?flop)", r"\1", (text or "").rstrip() + "\n") for text in (found, shown))
    return doctest.OutputChecker().check_output(shown, found, doctest.ELLIPSIS)


def with_outputs(page: Path, outputs: list[str | None]) -> str:
    """The text of a page with these outputs; `None` leaves what is shown."""
    text = page.read_text()
    for program, output in reversed(list(zip(programs(page), outputs, strict=True))):
        if output is None:
            continue
        block = f"```\n{output.rstrip()}\n```" if output.strip() else ""
        start, end = program.output or (program.end, program.end)
        text = text[:start].rstrip() + (f"\n\n{block}" if block else "") + text[end:]
    return text


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    assert len(set(found)) == len(found), f"{page.name} has a heading twice"
    return set(found)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--update", action="store_true", help="write outputs into the pages")
    parser.add_argument("--folder", type=Path, help="where the programs run; a temporary folder if left out")
    parser.add_argument("--json", action="store_true", help="print outputs, of one page, as JSON")
    args = parser.parse_args()
    differ = 0
    for page in [page.resolve() for page in args.pages]:
        if args.json:
            os.chdir(args.folder)
            print(json.dumps([output for _, output in run(page)]))
            continue
        with tempfile.TemporaryDirectory() as folder:
            outputs = run_alone(page, args.folder or Path(folder))
        shown = [program.shown for program in programs(page)]
        outputs = [
            None if found is None or alike(found, said) else found for found, said in zip(outputs, shown, strict=True)
        ]
        for output, said in zip(outputs, shown, strict=True):
            if output is not None:
                differ += 1
                print(f"{page.name}: shows\n{said or ''}\nprints\n{output}")
        if args.update:
            page.write_text(with_outputs(page, outputs))
    sys.exit(1 if differ and not args.update else 0)


if __name__ == "__main__":
    _main()
