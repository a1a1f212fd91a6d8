"""The plugin for pytest that comes with the package: its option accepts plans as they are now.

It is loaded before the tests, which may still have to say how many devices there are; so it imports no jax.
"""

from __future__ import annotations

import os
from typing import Any

UPDATE_PLANS = "SDY_JAX_UPDATE_PLANS"
"""The environment variable that says the same without the plugin, and to other processes."""


def pytest_addoption(parser: Any) -> None:
    """Adds `--sdy-update-plans`."""
    about = "write the files of sdy_jax.testing.assert_plan anew where the plan differs, instead of failing"
    parser.getgroup("sdy_jax").addoption("--sdy-update-plans", action="store_true", help=about)


def pytest_configure(config: Any) -> None:
    """Passes the option on."""
    if config.getoption("--sdy-update-plans"):
        os.environ[UPDATE_PLANS] = "1"


def pytest_unconfigure(config: Any) -> None:
    """A later run in the same process has an option of its own."""
    if config.getoption("--sdy-update-plans"):
        os.environ.pop(UPDATE_PLANS, None)
