"""The gallery: each program of examples/ runs alone, checks its numbers, and ends with what was to be seen.

The first and the last of the cases are the quickest; `scripts/test` runs these.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import EXAMPLES, ROOT

SEEN = {
    "spatial_convolution": r"halos: 17 KiB per device in 3 collective_permutes;\nto gather the image .* 168 KiB",
    "data_parallel": r"sums 17408 bytes of gradients.* 4 all_reduces .*\n.* 30471 bytes, 1\.75 times the gradients",
    "fsdp": r"on a device: 1\.2 MiB, with whole weights 9\.\d MiB\nsent .* 5\.3 MiB, with whole weights 5\.3 MiB",
    "megatron": r"in 2 all_reduces: 458752 bytes per device,\nand its 786432 bytes of weights stay where they are",
    "two_d": r"loss (\S+), on one device \1\n.* take 0\.25 of the memory of whole weights",
    "sequence_parallel": r"8 heads of keys: 56 KiB by all_to_all; .*\n2 heads of keys: 56 KiB by all_gather; .*",
    "experts": r"in 2 all_to_alls of 28672 bytes per device,\n7/8 of 32768; 1048576 bytes of experts stay",
    "graph_network": r"sends 44 KiB per device, .* 25 KiB of nodes;\nits 512 KiB of messages stay",
    "decoding": r"63 tokens of 4 sequences are those of one device; .*\na token sends 1584 bytes per device; .*",
    "processes": r"losses of both processes are those of one device: [\d., ]+",
    "exported_program": r"sends 3072 bytes .* 16 rows, 12288 bytes .* 64 rows; its results are those of one device",
    "auto_memory": r"the loss is \S+ in each layout, and no layout holds less than \d\.\d MiB",
    "unwanted_gather": r"before *992 KiB sent .* 1216 KiB of arguments.*\nafter *224 KiB sent .* 448 KiB of arguments",
    "pallas_kernel": r"3 kernels run on blocks of f32\[2048@.*,128\], .*\n.* is that of plain jax\.numpy",
    "stencil": r"each of 50 steps sends 700 bytes per device in collective_permutes;\n.* a block of 6144 bytes",
}
"""How the output of each ends."""

OLDER = {"train_lm", "pipeline", "resume_elsewhere"}
"""Trained whole elsewhere: longer, and not of the gallery's form."""

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
QUICK = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ["XLA_FLAGS"])
"""The flags by which tests compile quickly, without the devices, of which each program says how many it needs."""


def output_of(program: Path, folder: Path) -> str:
    """What a program prints, run in a folder by a process of its own that finds eight devices by itself."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": QUICK}
    done = subprocess.run([sys.executable, str(program)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.dear(cases=15)
@pytest.mark.parametrize("name", SEEN)
def test_each_ends_with_what_was_to_be_seen(name: str, tmp_path: Path) -> None:
    out = output_of(EXAMPLES / f"{name}.py", tmp_path)
    assert re.search(rf"{SEEN[name]}[^\n]*\n\Z", out), out[-1000:]
    assert str(ROOT) not in out.replace(str(EXAMPLES), "")


def test_the_gallery_is_whole_and_short() -> None:
    table = (EXAMPLES / "README.md").read_text()
    programs = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(SEEN) == set(programs) - OLDER
    for name in SEEN:
        text = programs[name]
        assert len(text.splitlines()) < 120 and f"python examples/{name}.py" in text.split('"""')[1], name
    for path in (*EXAMPLES.glob("*.py"), *NOTEBOOKS):
        assert f"]({path.name})" in table, path.name
    for target in re.findall(r"\]\(([^)#]+)", table):
        assert (EXAMPLES / target).exists(), target


def test_readme_names_the_gallery_and_shows_a_plan_in_both_themes() -> None:
    text = (ROOT / "README.md").read_text()
    assert "(examples/README.md)" in text and len(text.splitlines()) <= 150
    pictures = re.findall(r'(?:srcset|src)="([^"]+)"', text)
    assert sorted(Path(each).stem for each in pictures) == ["plan-dark", "plan-light"]
    for each in pictures:
        picture = (ROOT / each).read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) < 150_000


# Notebooks.


def cells_of(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def printed(cells: list[dict[str, Any]]) -> str:
    """What cells print, without what versions of jax differ in: numbers of operations."""
    text = "".join("".join(output["text"]) for cell in cells for output in cell["outputs"])
    return re.sub(r"[\d.]+ ([kM]?flop)", r"\1", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.more("notebooks; the programs of the gallery are quicker")
def test_notebooks_run_as_they_show(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _has_kernel():
        program = tmp_path / f"{path.stem}.py"
        program.write_text("\n\n".join("".join(cell["source"]) for cell in cells_of(path)))
        output_of(program, tmp_path)
        return
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("XLA_FLAGS", QUICK)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    assert printed(cells_of(tmp_path / "executed.ipynb")) == printed(cells_of(path))


def _has_kernel() -> bool:
    """Whether notebooks can be executed here; else their cells run as a program."""
    try:
        import ipykernel  # noqa: F401
        import nbclient  # noqa: F401
    except ImportError:
        return False
    return True
