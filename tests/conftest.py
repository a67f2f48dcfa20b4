from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ranks on loopback; see tests/cluster.py."""
    ranks = Cluster()
    yield ranks
    ranks.close()
