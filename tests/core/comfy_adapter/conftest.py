from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked_group(request):
    """Workers are forked, which saves each file several imports of torch and ComfyUI.

    A file that sets `REAL_WORKERS` starts them afresh, as a person does; so do tests on GPUs.
    """
    from ferry_support import forked_workers

    if getattr(request.module, "REAL_WORKERS", False) or os.environ.get("FERRY_TEST_DEVICE") == "cuda":
        yield
        return
    with forked_workers.forking():
        yield


@pytest.fixture(scope="module")
def workers_of_the_file():
    """Workers serve all tests of a file and end with it."""
    from comfyui_ferry.core.comfy_adapter import close_workers

    yield
    close_workers()


@pytest.fixture
def workers_of_the_test():
    """A test begins without workers and leaves none."""
    from comfyui_ferry.core.comfy_adapter import close_workers

    close_workers()
    yield
    close_workers()
