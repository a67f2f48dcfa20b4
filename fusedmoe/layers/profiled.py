"""A trace of any training step, by PyTorch's profiler: kernels, operators, and the parts of layers by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from fusedmoe.errors import ConfigError
from fusedmoe.layers.moe import MoELayer, number_layers


@contextmanager
def trace(path: str | os.PathLike[str], model: nn.Module | None = None) -> Iterator[Path]:
    """Writes a trace of what runs inside, for ui.perfetto.dev and chrome://tracing.

        with fusedmoe.trace("step.json", model):
            model(x).sum().backward()

    Beside operators and kernels it shows what layers with experts do as ranges "fusedmoe: dispatch, layer 3, chunk 0,
    forward": gate, permute, dispatch, all-gather, expert, reduce-scatter, combine, unpermute. A profiler of your own
    (`torch.profiler.profile`) shows the same ranges; this one also has those of the threads on which a CPU overlaps
    what travels.

    Args:
        path: of the file; where there are several ranks each writes its own, step.rank0.json and so on. What is
            there is replaced; ".json.gz" compresses.
        model: whose `MoELayer`s are numbered in order, for the ranges; those of `fusedmoe.models` are already.
    Yields:
        The path of this rank's file, which is there afterwards; not if what runs inside raises.
    Raises:
        ConfigError: the folder is not there, or another profiler is on.
    """
    wanted = Path(os.path.expanduser(path))
    if not wanted.parent.is_dir():
        raise ConfigError(f"fusedmoe.trace: there is no folder {wanted.parent}; make it first")
    if torch.autograd.profiler._is_profiler_enabled:
        raise ConfigError("fusedmoe.trace: a profiler is on already, and shows the same ranges: leave one of them out")
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        stem, dot, ending = wanted.name.partition(".")
        wanted = wanted.with_name(f"{stem}.rank{dist.get_rank()}{dot}{ending}")
    if model is not None:
        number_layers(module for module in model.modules() if isinstance(module, MoELayer))
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True)) as found:
        yield wanted
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what was issued inside belongs to it
    found.export_chrome_trace(str(wanted))
