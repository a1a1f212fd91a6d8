"""What sdist and wheel hold, and a plan from a wheel alone: for `scripts/release` and the tests."""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

FIRST_PLAN = """\
import jax, jax.numpy as jnp, sdy_jax as sdy
from jax.sharding import AxisType, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

@sdy.partition(mesh=mesh, in_shardings=(P("data"), P("model")))
def layer(x, w):
    return jax.nn.relu(x @ w)

x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
plan = layer.plan(x, w)
plan.to_html("plan.html")
assert (layer(x, w) == 16).all()
print(sdy.__version__, sdy.__file__)
sdy.show(plan)
"""
"""A newcomer's first program."""


def package_files() -> set[str]:
    """The files of the package in this checkout, its wings among them, as paths in a wheel."""
    found = set()
    for folder, _, names in os.walk(ROOT / "sdy_jax", followlinks=True):
        inside = Path(folder).relative_to(ROOT)
        found |= {str(PurePosixPath(inside, name)) for name in names if not name.endswith(".pyc")}
    return found


def wheel_problems(wheel: Path) -> Iterator[str]:
    """What a wheel lacks, and what it has beside the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        own = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    yield from _differences(wheel, own, package_files())
    if not any(name.endswith("/licenses/LICENSE") for name in names):
        yield f"{wheel.name} lacks the licence"


def sdist_problems(sdist: Path) -> Iterator[str]:
    """What a source distribution lacks, and links in it, which not every system unpacks."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members if member.isfile()}
    links = [member.name for member in members if member.issym() or member.islnk()]
    own = {name for name in names if name.startswith("sdy_jax/")}
    yield from _differences(sdist, own, package_files())
    yield from (
        f"{sdist.name} lacks {name}" for name in ("LICENSE", "README.md", "pyproject.toml") if name not in names
    )
    yield from (f"{sdist.name} has the link {name}" for name in links)


def _differences(archive: Path, found: set[str], wanted: set[str]) -> Iterator[str]:
    for title, names in (("lacks", wanted - found), ("has, beside the package,", found - wanted)):
        if names:
            yield f"{archive.name} {title} {', '.join(sorted(names)[:5])}{' ...' if len(names) > 5 else ''}"


def first_plan(python: Sequence[str], folder: Path, environment: dict[str, str]) -> str:
    """Runs a newcomer's first program in a folder. Returns what it prints.

    Raises:
        subprocess.CalledProcessError: it fails; what it said is in `stderr`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "first.py").write_text(FIRST_PLAN)
    environment = {**environment, "JAX_PLATFORMS": "cpu", "SDY_JAX_CACHE_DIR": "0"}
    done = subprocess.run(
        [*python, "first.py"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert (folder / "plan.html").stat().st_size > 0
    return done.stdout
