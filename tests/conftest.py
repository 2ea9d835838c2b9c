"""Fixtures that more than one test package uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One small local Ray for all tests of the session that need actors."""
    import ray

    ray.init(num_cpus=2, object_store_memory=256 * 2**20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
