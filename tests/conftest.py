from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.libraries import nvshmem_home
from fusedmoe.runtime.cache import CACHE
from tests.beside import Beside, replay
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


_HERE = Path(__file__).parent
_KERNELS = _HERE / "kernels" / "device"
#: About half of the time of all tests.
_HALF = [_HERE / name for name in ("cli", "comm", "integrations", "routing", "training", "tutel")]
#: Another process takes as long to start as a hundred tests.
_FEW = 100
_BESIDE = pytest.StashKey[dict[str, Beside]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The campaign's slow tests come late: in their minutes a hundred others end. Then tests that may run beside these:
    this process does not wait for them while it has tests of its own."""
    items.sort(key=lambda item: "tests/chaos/" in item.nodeid and item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: _in_half(item) + 2 * item.path.is_relative_to(_KERNELS))


def _in_half(item: pytest.Item) -> bool:
    return any(item.path.is_relative_to(folder) for folder in _HALF)


def pytest_runtestloop(session: pytest.Session) -> None:
    """Starts what runs beside this process; tests/beside.py says why."""
    config, option = session.config, session.config.option
    if INTERPRET or torch.cuda.is_available() or option.collectonly or config.pluginmanager.has_plugin("tests.beside"):
        return
    here: dict[str, Beside] = {}
    kernels = [item.nodeid for item in session.items if item.path.is_relative_to(_KERNELS)]
    half = [item.nodeid for item in session.items if _in_half(item)]
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not option.usepdb
    for nodeids, worthwhile, environment in (
        (kernels, bool(kernels), {"TRITON_INTERPRET": "1"}),
        (half, everything and len(half) > _FEW, {}),
    ):
        if worthwhile:
            beside = Beside(nodeids, environment, config.getoption("timeout"))
            config.add_cleanup(beside.close)
            here |= dict.fromkeys(nodeids, beside)
    config.stash[_BESIDE] = here


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    beside = item.config.stash.get(_BESIDE, {}).get(item.nodeid)
    if beside is None:
        return None
    replay(item, beside)
    return True


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
