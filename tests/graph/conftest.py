from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist


@pytest.fixture
def world() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Nothing of another test is left in the compiler, nor anything there for the next one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
