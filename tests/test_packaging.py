"""What `pip install` puts where: every package is listed, under the one name `sdy_jax`."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed():
    found = set()
    for name, wing in SETUPTOOLS["package-dir"].items():
        for init in (ROOT / wing).rglob("__init__.py"):
            found.add(".".join((name, *init.parent.relative_to(ROOT / wing).parts)))
    assert found == set(SETUPTOOLS["packages"])


def test_every_module_lies_in_a_package():
    for wing in SETUPTOOLS["package-dir"].values():
        for module in (ROOT / wing).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_installed_under_one_name():
    assert {name.split(".")[0] for name in SETUPTOOLS["packages"]} == {"sdy_jax"}
