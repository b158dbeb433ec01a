from __future__ import annotations

import pytest
from comfyui_ferry.core.workers import WorkerPool
from ferry_support.worker_specs import cpu_spec


@pytest.fixture(scope="session")
def shared_pool():
    """Two CPU ranks for every test that leaves them as they are."""
    with WorkerPool.start(cpu_spec(2, environment={"FERRY_EXTRA": "given"})) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool):
    assert shared_pool.alive, "an earlier test lost the shared pool"
    return shared_pool
