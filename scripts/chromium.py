"""A headless Chromium that is installed already, by playwright, for pages of plans."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def executable() -> str | None:
    """Where it is installed; None where it is not."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def running() -> Iterator[Any]:
    """The browser, as playwright's `Browser`.

    Raises:
        ModuleNotFoundError: playwright is not installed.
        FileNotFoundError: there is no Chromium.
    """
    from playwright.sync_api import sync_playwright

    if executable() is None:
        raise FileNotFoundError(f"found none of {', '.join(NAMES)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), headless=True, args=ARGUMENTS.split())
        yield browser
        browser.close()
