from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.libraries import nvshmem_home
from fusedmoe.runtime.cache import CACHE
from tests.beside import Beside, Elsewhere
from tests.cluster import Cluster


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Freeze imported objects, which are permanent: collecting garbage among them takes half a second each time.

    Once, before the first test: the garbage of tests must be collected.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_KERNELS = Path(__file__).parent / "kernels" / "device"
#: Another process takes as long to start as some hundred tests take.
_MANY = 300


def _of_kernels(item: pytest.Item) -> bool:
    return item.path.is_relative_to(_KERNELS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests of other processes last: this process runs its own tests before it waits for them."""
    items.sort(key=_of_kernels)


def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the processes alongside this one; tests/beside.py gives the reasons."""
    config = session.config
    alone = INTERPRET or torch.cuda.is_available() or config.pluginmanager.has_plugin("tests.beside")
    if alone or config.option.collectonly:
        return
    options = ["-o", f"faulthandler_timeout={config.getini('faulthandler_timeout')}"]
    if (timeout_s := config.getoption("timeout")) is not None:
        options += ["--timeout", str(timeout_s)]
    elsewhere = Elsewhere()
    config.pluginmanager.register(elsewhere)

    def begin(items: list[pytest.Item], *more: Any) -> None:
        beside = Beside([item.nodeid for item in items], options, *more)
        config.add_cleanup(beside.close)
        elsewhere.add(items, beside)

    if kernels := [item for item in session.items if _of_kernels(item)]:
        begin(kernels, {"TRITON_INTERPRET": "1"})
    rest = [item for item in session.items if not _of_kernels(item)]
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and len(rest) > _MANY and not config.option.usepdb:
        claims = tempfile.TemporaryDirectory()
        config.add_cleanup(claims.cleanup)
        files = [list(file) for _, file in groupby(rest, lambda item: item.path)]
        begin([item for file in reversed(files) for item in file], {}, Path(claims.name))


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of tests, their ranks and the commands that they start: not in the home directory."""
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
    """A folder for the module path with NVSHMEM's package: the installed one, or one that pip downloads."""
    if (home := nvshmem_home()) is not None:
        return home.parents[1]
    site = tmp_path_factory.mktemp("nvshmem")
    pins = Path(__file__).parents[1] / "constraints" / "cpu.txt"
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
