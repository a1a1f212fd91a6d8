"""Every mistake of the table gets a message that names the place and says what would be right, in one frame."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import traceback
import warnings

import numpy as np
import pytest
from mistakes import OURS, Mistake, command_lines, functions, grade, models, partitioning, plans, programs

import sdy_jax as sdy
from sdy_jax.cli.main import main, option_parser

MODULES = (partitioning, functions, models, plans, programs)
TABLE = {
    f"{module.__name__.rpartition('.')[2]}, {name.lower()}: {what}": mistake
    for module in MODULES
    for name, table in vars(module).items()
    if name.isupper() and isinstance(table, dict)
    for what, mistake in table.items()
    if isinstance(mistake, Mistake)
}


def said_by(error: BaseException) -> str:
    """What Python prints of an exception: the message, its notes, and a name that is most like a misspelt one."""
    error.__traceback__, error.__cause__, error.__suppress_context__ = None, None, True
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.__excepthook__(type(error), error, None)
    return printed.getvalue()


def test_the_table_is_large():
    assert len(TABLE) + len(command_lines.LINES) >= 200


@pytest.mark.parametrize("mistake", TABLE.values(), ids=TABLE)
def test_a_mistake_is_explained_in_one_frame(mistake):
    said, frames = made(mistake)
    ours = [file for file in frames if file.startswith(OURS)]
    is_ours = issubclass(mistake.kind, (sdy.SdyError, sdy.PartitionWarning))
    assert grade(said, mistake.names, mistake.right, len(ours), is_ours) in "AB", f"{said}\n{frames}"
    if is_ours:  # jax's frames are as jit shows them
        assert {file for file in frames if "/mistakes/" not in file} <= {__file__, *ours}


def made(mistake: Mistake) -> tuple[str, list[str]]:
    """What is said of a mistake, and the files of the frames that are shown."""
    if issubclass(mistake.kind, Warning):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            mistake.make()
        (warning,) = [each for each in found if issubclass(each.category, mistake.kind)]
        return str(warning.message), [warning.filename]
    with pytest.raises(mistake.kind) as caught, warnings.catch_warnings(action="ignore"):
        mistake.make()
    frames = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    return said_by(caught.value), frames


@pytest.mark.parametrize("command", option_parser().commands)
def test_every_misspelt_option_suggests_the_nearest(command, capsys):
    for option in option_parser().commands[command]._option_string_actions:
        misspelt = f"{option[:-2]}{option[-1]}{option[-2]}"
        if option.startswith("--") and misspelt != option:
            with pytest.raises(SystemExit, match="2"):
                main([command, "m.mlir", misspelt])
            assert f"no option is called {misspelt}; did you mean {option}?" in capsys.readouterr().err


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with the files of the command lines."""
    for name, text in command_lines.TEXTS.items():
        (tmp_path / name).write_text(text)
    for name, arrays in command_lines.ARRAYS.items():
        np.savez(tmp_path / name, **arrays)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", command_lines.LINES, ids=lambda line: " ".join(line.arguments))
def test_a_mistake_on_the_command_line_is_explained_without_a_traceback(files, line, capsys):
    try:
        status = main(line.arguments)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr().err
    assert status == line.status, said
    assert re.search(r"(^|: )error: ", said), said
    assert grade(said, line.names, line.right) == "A" and "Traceback" not in said, said
