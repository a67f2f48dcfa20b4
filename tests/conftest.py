from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from fusedmoe.kernels.libraries import nvshmem_home
from fusedmoe.runtime.cache import CACHE
from tests.cluster import Cluster


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Nearly all that is imported stays, so nobody looks for garbage in it: that would take half a second each time.

    Once, before the first test: what tests leave must be found.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The campaign's slow tests come last: in their minutes a hundred others end."""
    items.sort(key=lambda item: "tests/chaos/" in item.nodeid and item.get_closest_marker("slow") is not None)


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


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def nvshmem_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the path of modules, in which NVSHMEM's package lies: the installed one, or one that pip fetches."""
    if (home := nvshmem_home()) is not None:
        return home.parents[1]
    site = tmp_path_factory.mktemp("nvshmem")
    pins = Path(__file__).parents[1] / "constraints" / "common.txt"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    try:
        done = subprocess.run(
            [*pip, "-c", str(pins), "--target", str(site), "nvidia-nvshmem-cu13"],
            capture_output=True,
            text=True,
            timeout=100,
        )
    except subprocess.TimeoutExpired:
        pytest.skip("NVSHMEM's package is not installed, and pip did not fetch it within 100 s")
    if done.returncode:
        pytest.skip(f"NVSHMEM's package is not installed, and pip does not find it: {done.stderr[-300:]}")
    return site
