"""Processes and devices: start, timing, small tools. Imports torch only when something needs it."""

from __future__ import annotations

import atexit
import logging
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusedmoe.environment import integer
from fusedmoe.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from fusedmoe.tutel.impls.communicate import ParallelEnv

_NODES = "/sys/devices/system/node"


def init_affinity_at_program_beginning() -> None:
    """Binds this process to the NUMA node of its LOCAL_RANK (NUMA_TYPE ranks a node, 1 by default; 0 leaves it)."""
    per_node = integer("NUMA_TYPE", 1)
    if integer("TUTEL_CUDA_SANDBOX", 0) or per_node <= 0:
        return
    rank = integer("LOCAL_RANK", 0, 0)
    try:
        # Ranks go round the NUMA nodes in turn, `per_node` consecutive ones on each.
        nodes = _numbers(_NODES, "node")
        node = nodes[rank // per_node % len(nodes)]
        os.sched_setaffinity(0, _numbers(f"{_NODES}/node{node}", "cpu"))
    except (OSError, IndexError, ZeroDivisionError) as error:
        logging.warning("rank %d stays on all CPUs: %s", rank, error)


def _numbers(folder: str, name: str) -> list[int]:
    matches = (re.fullmatch(rf"{name}(\d+)", entry) for entry in os.listdir(folder))
    return sorted(int(match[1]) for match in matches if match)


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> ParallelEnv:
    """Initialises torch.distributed from the launcher's environment, as `net.create_groups_from_world` says."""
    from fusedmoe.tutel.impls.communicate import create_groups_from_world

    env = create_groups_from_world(group_count, include_init=backend)
    if not hasattr(init_data_model_parallel, "default_env"):
        # A process group that nobody ends may block the end of the process.
        atexit.register(_leave)
    init_data_model_parallel.default_env = env  # type: ignore[attr-defined]
    return env


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def get_local_session() -> ParallelEnv:
    """Returns the object that `init_data_model_parallel` returned last; raises `ConfigError` where there is none."""
    env: ParallelEnv | None = getattr(init_data_model_parallel, "default_env", None)
    if env is None:
        raise ConfigError("call system.init_data_model_parallel() first (record_time works without: is_cuda=False)")
    return env


def record_time(is_cuda: bool | None = None) -> float:
    """Returns seconds, after the GPU has finished its work."""
    if get_local_session().is_cuda if is_cuda is None else is_cuda:
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def perform(fn: Callable[[], Any], num_runs: int = 100) -> float:
    """Prints and returns the mean seconds of a call, after five calls that do not count."""
    for _ in range(5):
        fn()
    start = record_time()
    for _ in range(num_runs):
        fn()
    seconds = (record_time() - start) / num_runs
    print(f"Function Latency = {seconds:.8f} sec\n")
    return max(seconds, 1e-6)


class LocalCache:
    """A cache of values by key, for as long as the process lives."""

    _values: dict[Any, Any] = {}

    @classmethod
    def reset(cls) -> None:
        cls._values.clear()

    @classmethod
    def set(cls, key: Any, val: Any) -> None:
        cls._values[key] = val

    @classmethod
    def get(cls, key: Any = None) -> Any:
        """Returns the value of a key; all values where there is none."""
        return cls._values[key] if key in cls._values else list(cls._values.values())


def cache() -> type[LocalCache]:
    return LocalCache


def save(t: torch.Tensor, path: str) -> None:
    """Writes a tensor as .npy."""
    import numpy as np

    np.save(path, t.detach().cpu().numpy())


def load(path: str, device: torch.device | str | None = None) -> torch.Tensor:
    """Reads what `save` wrote."""
    import numpy as np
    import torch

    return torch.tensor(np.load(path), device=device)


def from_url(link: str, path: str | None = None) -> str:
    """Downloads a file unless it is there, and returns its path: by default the URL's last part, in this folder."""
    from urllib.request import urlretrieve

    path = path or link.rstrip("/").rsplit("/", 1)[-1]
    if not os.path.exists(path):
        # Whole or not at all: other ranks may look for the file at the same time.
        urlretrieve(link, f"{path}.part")
        os.replace(f"{path}.part", path)
    return path


def apply_rank_size_from_pattern(filename: str, rank: int, size: int, create_dir: bool = True) -> str:
    """Fills in `{rank}` and `{size}` in a file name, and makes the folder."""
    if "{rank}" not in filename:
        logging.warning("no {rank} in the file name %s: ranks would write to one file", filename)
    filename = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir and os.path.dirname(filename):
        os.makedirs(os.path.dirname(filename), exist_ok=True)
    return filename
