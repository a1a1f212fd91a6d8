"""Type checkers see the signatures of annotated functions, through the names that are imported when first used."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

PROGRAM = Path("tests", "helpers", "typed_program.py")


def said() -> dict[int, list[str]]:
    """What mypy says by line, types without their modules."""
    done = subprocess.run([sys.executable, "-m", "mypy", str(PROGRAM)], cwd=ROOT, capture_output=True, text=True)
    messages: dict[int, list[str]] = {}
    for line, message in re.findall(rf"^{PROGRAM}:(\d+): (?:note|error): (.*)$", done.stdout, re.MULTILINE):
        messages.setdefault(int(line), []).append(re.sub(r"\b(?:\w+\.)+(?=\w)", "", message))
    assert messages, done.stdout + done.stderr
    return messages


def expected() -> dict[int, str]:
    lines = enumerate((ROOT / PROGRAM).read_text().splitlines(), 1)
    return {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}


@pytest.mark.more("mypy's view, in a process")
def test_annotated_functions_keep_their_signatures() -> None:
    messages, comments = said(), expected()
    assert messages.keys() == comments.keys()
    for line, comment in comments.items():
        is_type = messages[line][0].startswith("Revealed")
        wanted = f'Revealed type is "{comment}"' if is_type else comment
        assert any(m == wanted if is_type else m.startswith(wanted) for m in messages[line]), messages[line]
