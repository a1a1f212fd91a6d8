"""What a checkout and `pip install` hold: one package, whole in place, under the one name `sdy_jax`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from places import ROOT
from setuptools import find_packages

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
