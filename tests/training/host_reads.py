"""Count the host's waits for a device, without a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """Count reads of values (`.item()`, `.tolist()`, `bool()`) and copies from tensors on the fake GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        elif func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            left = any(isinstance(one, torch.Tensor) and one.is_cuda for one in args[:2])
            self.count += left and not result.is_cuda
        return result


@contextmanager
def fake_gpu() -> Iterator[HostReads]:
    """Tensors made inside may be on CUDA: they have no values, and reading one raises."""
    with FakeTensorMode(allow_non_fake_inputs=True), HostReads() as reads:
        yield reads
