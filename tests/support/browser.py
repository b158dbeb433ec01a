"""ComfyUI's page in headless Chromium."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = [
    "--no-sandbox",  # tests run as root in CI
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
_READY = """() => window.app?.graph && window.app.extensionManager && document.querySelector('canvas')
    && 'FerryParallelSampler' in (window.LiteGraph?.registered_node_types ?? {})"""
# While the page starts, a mask over everything swallows clicks; its animation has to end.
_UNCOVERED = "() => !document.querySelector('.p-blockui-mask, .p-progressspinner')"
FIT_VIEW = "() => app.extensionManager.command.execute('Comfy.Canvas.FitView')"
"""Script that shows the whole graph."""


def find_browser() -> str | None:
    """Return Chromium's path, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def wait_until_ready(page: Any) -> None:
    """Return when the page takes input; after it was opened or reloaded."""
    page.wait_for_function(_READY, timeout=60_000)
    page.wait_for_function(_UNCOVERED, timeout=60_000)


@contextlib.contextmanager
def open_page(url: str, *, size_px: tuple[int, int] = (1920, 1080)) -> Iterator[Any]:
    """Yield the page of a ComfyUI server, ready for input.

    Args:
        url: The server's address.
        size_px: Width and height of the window.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), headless=True, args=_FLAGS)
        try:
            page = _new_page(browser, {"width": size_px[0], "height": size_px[1]})
            load(page, url)
            yield page
        finally:
            browser.close()


def page_beside(page: Any) -> Any:
    """Return another page of the same browser that shares nothing with `page`; it shows nothing yet."""
    return _new_page(page.context.browser, page.viewport_size)


def load(page: Any, url: str) -> None:
    """Show ComfyUI in the page and return when it takes input.

    Args:
        page: A page of any content.
        url: The server's address.
    """
    page.goto(f"{url}/", wait_until="domcontentloaded")
    wait_until_ready(page)


def _new_page(browser: Any, viewport: dict[str, int]) -> Any:
    return browser.new_context(viewport=viewport, locale="en-US").new_page()
