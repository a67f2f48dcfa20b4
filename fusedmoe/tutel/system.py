"""Processes and devices: initialisation, timing, utilities. Imports torch lazily."""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusedmoe.environment import read_integer
from fusedmoe.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fusedmoe.tutel.impls.communicate import ParallelEnv

_NODES = "/sys/devices/system/node"


def init_affinity_at_program_beginning() -> None:
    """Bind this process to the NUMA node of its LOCAL_RANK (NUMA_TYPE ranks per node, default 1).

    Does nothing for NUMA_TYPE = 0 or with TUTEL_CUDA_SANDBOX, and warns if the node is unknown.
    """
    per_node = read_integer("NUMA_TYPE", 1)
    if read_integer("TUTEL_CUDA_SANDBOX", 0) or per_node <= 0:
        return
    rank = read_integer("LOCAL_RANK", 0, 0)
    try:
        nodes = _numbers(_NODES, "node")
        node = nodes[rank // per_node % len(nodes)]
        os.sched_setaffinity(0, _numbers(f"{_NODES}/node{node}", "cpu"))
    except (OSError, IndexError, ZeroDivisionError) as error:
        logging.warning("rank %d stays on all CPUs: %s", rank, error)


def _numbers(folder: str, name: str) -> list[int]:
    matches = (re.fullmatch(rf"{name}(\d+)", entry) for entry in os.listdir(folder))
    return sorted(int(match[1]) for match in matches if match)


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> ParallelEnv:
    """Initialise torch.distributed and split the world into groups, with `communicate.create_groups_from_world`."""
    from fusedmoe.tutel.impls.communicate import create_groups_from_world

    env = create_groups_from_world(group_count, include_init=backend)
    if not hasattr(init_data_model_parallel, "default_env"):
        # An undestroyed process group may block process exit.
        atexit.register(_leave)
    init_data_model_parallel.default_env = env  # type: ignore[attr-defined]
    return env


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def get_local_session() -> ParallelEnv:
    """Return the last result of `init_data_model_parallel`. Raise `ConfigError` if there is none."""
    env: ParallelEnv | None = getattr(init_data_model_parallel, "default_env", None)
    if env is None:
        raise ConfigError("call system.init_data_model_parallel() first (record_time works without: is_cuda=False)")
    return env


def record_time(is_cuda: bool | None = None) -> float:
    """Return the time in seconds, after synchronising with the GPU if `is_cuda` (default: the session's)."""
    if get_local_session().is_cuda if is_cuda is None else is_cuda:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def perform(fn: Callable[[], Any], num_runs: int = 100) -> float:
    """Print and return the mean time of a call in seconds (at least 1e-6), after five warm-up calls."""
    for _ in range(5):
        fn()
    start = record_time()
    for _ in range(num_runs):
        fn()
    seconds = (record_time() - start) / num_runs
    print(f"Function Latency = {seconds:.8f} sec\n")
    return max(seconds, 1e-6)


class LocalCache:
    """Process-wide key-value cache."""

    _values: dict[Any, Any] = {}

    @classmethod
    def reset(cls) -> None:
        cls._values.clear()

    @classmethod
    def set(cls, key: Any, val: Any) -> None:
        cls._values[key] = val

    @classmethod
    def get(cls, key: Any = None) -> Any:
        """Return the value of a key, or all values for an unknown key."""
        return cls._values[key] if key in cls._values else list(cls._values.values())


def cache() -> type[LocalCache]:
    return LocalCache


def save(t: torch.Tensor, path: str) -> None:
    import numpy as np

    np.save(path, t.detach().cpu().numpy())


def load(path: str, device: torch.device | str | None = None) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.tensor(np.load(path), device=device)


def from_url(link: str, path: str | None = None) -> str:
    """Download a file to `path` unless it exists, by default the last component of the URL. Returns the path."""
    from urllib.request import urlretrieve

    path = path or link.rstrip("/").rsplit("/", 1)[-1]
    if not os.path.exists(path):
        # Other ranks may check for the file concurrently.
        urlretrieve(link, f"{path}.part")
        os.replace(f"{path}.part", path)
    return path


def apply_rank_size_from_pattern(filename: str, rank: int, size: int, create_dir: bool = True) -> str:
    """Substitute `{rank}` and `{size}` in a file name, and create its folder. Warns without `{rank}`."""
    if "{rank}" not in filename:
        logging.warning("no {rank} in the file name %s: ranks would write to one file", filename)
    filename = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir and os.path.dirname(filename):
        os.makedirs(os.path.dirname(filename), exist_ok=True)
    return filename
