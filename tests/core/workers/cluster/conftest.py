from __future__ import annotations

import importlib.util

import pytest
from ferry_support.ray_cluster import RayCluster


@pytest.fixture(scope="session")
def ray_cluster():
    """Two nodes; a test that ends one puts another in its place."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    cluster = RayCluster(2)
    yield cluster
    cluster.close()
