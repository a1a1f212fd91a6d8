"""What a checkout and `pip install` hold: one package, whole in place, under the one name `sdy_jax`."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from benchmarks import loaded
from places import ROOT
from setuptools import find_packages

import sdy_jax as sdy

# isort: split
from distributions import first_plan, sdist_problems, wheel_problems

FIND = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]


def modules():
    for folder, _, files in os.walk(ROOT / "sdy_jax", followlinks=True):
        yield from (Path(folder) / name for name in files if name.endswith(".py"))


def test_every_module_lies_in_a_package_that_is_installed():
    installed = set(find_packages(str(ROOT), **FIND))
    assert {".".join(path.parent.relative_to(ROOT).parts) for path in modules()} == installed


@pytest.mark.parametrize("wing", ["lowering", "runtime"])
def test_the_wings_are_part_of_the_package_in_place(wing):
    assert (ROOT / "sdy_jax" / wing).samefile(ROOT / wing)


def test_it_runs_from_the_root_without_an_install():
    code = "import sdy_jax.lowering, sdy_jax.runtime; print(sdy_jax.lowering.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(ROOT / "sdy_jax" / "lowering")


def test_what_is_no_module_is_installed_as_well():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {path for name, globs in data.items() for glob in globs for path in folder(name).glob(glob)}
    there = {path for path in (ROOT / "sdy_jax").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert there == installed and len(there) > 10


def folder(package):
    return ROOT / package.replace(".", "/")


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sdy_jax.base.version.__version__"}
    assert f"\nversion: {sdy.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest == "Unreleased" or newest.startswith(f"sdy_jax {sdy.__version__} (")


# What is built --------------------------------------------------------------------------------------------------------

BUILD = """
import sys
from setuptools import build_meta
print((build_meta.build_sdist if sys.argv[1] == "sdist" else build_meta.build_wheel)(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of this checkout, and the wheel that is built of it."""
    place = tmp_path_factory.mktemp("built")
    (place / "checkout").mkdir()
    for name in ("sdy_jax", "lowering", "runtime"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, place / "checkout" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "checkout")
    sdist = place / build(place / "checkout", "sdist", place)
    shutil.unpack_archive(sdist, place, filter="data")
    return sdist, place / build(place / sdist.name.removesuffix(".tar.gz"), "wheel", place)


def build(folder, kind, into):
    command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(into)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.more("builds the distributions, some ten seconds")
def test_the_distributions_hold_the_package_and_nothing_else(built):
    sdist, wheel = built
    assert [*sdist_problems(sdist), *wheel_problems(wheel)] == []
    assert wheel.name == f"sdy_jax-{sdy.__version__}-py3-none-any.whl"


@pytest.mark.more("builds the distributions, and installs the wheel")
def test_a_wheel_makes_a_first_plan_by_itself(built, tmp_path):
    into = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(into)]
    subprocess.run([*install, str(built[1])], check=True, capture_output=True)
    said = first_plan([sys.executable], tmp_path / "work", os.environ | {"PYTHONPATH": str(into)})
    assert said.startswith(f"{sdy.__version__} {into}") and "plan of layer on mesh data=2, model=4" in said


# scripts/release ------------------------------------------------------------------------------------------------------


@pytest.fixture
def release():
    return loaded("release")


def test_a_release_is_of_a_new_version_that_the_pages_say(release):
    assert list(release.version_problems("0.1.0", [])) == list(release.version_problems("0.2.0", ["v0.1.9", "x"])) == []
    assert "0.10.0 has a tag; to fix: raise it" in next(release.version_problems("0.2.0", ["v0.10.0", "v0.1.0"]))
    assert "expected X.Y.Z" in next(release.version_problems("0.2", []))
    changes, citation = "# Change log\n\n## sdy_jax 0.2.0 (May 3, 2027)\n", "title: x\nversion: 0.2.0\nlicense: y\n"
    assert list(release.page_problems("0.2.0", changes, citation)) == []
    for wrong in ("(Unreleased)", "(2027-05-03)"):
        (said,) = release.page_problems("0.2.0", changes.replace("(May 3, 2027)", wrong), citation)
        assert "expected 'sdy_jax 0.2.0 (Month D, YYYY)'" in said
    assert len(list(release.page_problems("0.3.0", changes, citation))) == 2


def test_a_release_says_what_the_distributions_lack(tmp_path):
    shutil.make_archive(str(tmp_path / "x"), "zip", ROOT / "docs", "reference")
    problems = list(wheel_problems(tmp_path / "x.zip"))
    assert len(problems) == 3 and "x.zip lacks sdy_jax/" in problems[0]
    assert "has, beside the package, reference" in problems[1] and "lacks the licence" in problems[2]


def test_a_release_is_not_tagged_where_something_is_wrong(release, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(release, "output_of", lambda *command: ran.append(command) or " M file\n")
    monkeypatch.setattr(release, "build", lambda _: (ROOT / "s.tar.gz", ROOT / "w.whl"))
    monkeypatch.setattr(release, "built_problems", lambda *_: ["the wheel is empty"])
    assert release.main(["--tag"]) == 1
    said = capsys.readouterr().err
    assert "error: the tree is not clean: file" in said and "error: the wheel is empty" in said
    assert not [command for command in ran if "--annotate" in command]


def test_a_release_is_tagged_where_asked_to(release, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(release, "output_of", lambda *command: ran.append(command) or "")
    monkeypatch.setattr(release, "page_problems", lambda *_: [])
    monkeypatch.setattr(release, "build", lambda _: (ROOT / "s.tar.gz", ROOT / "w.whl"))
    monkeypatch.setattr(release, "built_problems", lambda *_: [])
    assert release.main([]) == 0 and not [command for command in ran if "--annotate" in command]
    assert "git tag --annotate" in capsys.readouterr().out
    assert release.main(["--tag"]) == 0
    assert ran[-1] == ("git", "tag", "--annotate", f"v{sdy.__version__}", "--message", f"sdy_jax {sdy.__version__}")
