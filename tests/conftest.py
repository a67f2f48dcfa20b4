from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fusedmoe.runtime.cache import CACHE
from tests.cluster import Cluster


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where tests, their ranks and the commands that they start keep profiles: not in the home directory."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, str(folder))
        yield folder


@pytest.fixture(scope="session")
def cluster(cache: Path) -> Iterator[Cluster]:
    """Ranks on loopback; see tests/cluster.py."""
    ranks = Cluster()
    yield ranks
    ranks.close()
