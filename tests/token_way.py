"""Count the files that a reader opens to follow a token through the library, and the changes from file to file.

    python -m tests.token_way    # the table, for two ranks of this machine

A token's path is one training step (forward and backward) of a layer that has warmed up, on the first of two ranks:
every called Python function of `fusedmoe`, on any thread. A change of file is a call of a function that is defined in
another file than the previously called function.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import fusedmoe
from tests.cluster import Cluster

_ROOT = str(Path(fusedmoe.__file__).parent)
M = 16


class Way(NamedTuple):
    """Files of the library that one step visits, calls of its functions, and changes from file to file."""

    files: int
    calls: int
    changes: int


def walk(step: Callable[[], None]) -> Way:
    """Count one call of `step`."""
    visited: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            visited.append(frame.f_code.co_filename)

    threading.setprofile(look)  # autograd's threads run the backward functions
    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    changes = sum(one != other for one, other in zip(visited, visited[1:], strict=False))
    return Way(len(set(visited)), len(visited), changes)


def _layer(topology: fusedmoe.Topology, schedule: str | fusedmoe.Schedule) -> fusedmoe.MoELayer:
    gate = fusedmoe.gates.TopK(experts=8, k=2)
    return fusedmoe.MoELayer(M, gate, fusedmoe.experts.SwiGLU(32), topology=topology, schedule=schedule)


class _Mix(nn.Module):
    """A dense part that replaces attention in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(M, M)

    def forward(self, x_BLM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y_BLM = self.product(x_BLM)
        return x_BLM, y_BLM


def _model(name: str, topology: fusedmoe.Topology) -> tuple[Callable[[torch.Tensor], torch.Tensor], fusedmoe.MoELayer]:
    if name == "off":
        layer = _layer(topology, "off")
        return layer, layer
    if name == "plan (2, 2)":
        layer = _layer(topology, fusedmoe.Schedule("fsmoe", degrees=(2, 2)))
        return layer, layer
    layer = _layer(topology, "off")
    return fusedmoe.pipeline([(_Mix(), layer)], (2, 2)), layer


SETTINGS = ("off", "plan (2, 2)", "pipeline of one block")


def way_of(rank: int, world: int, name: str) -> Way:
    """Measure a step of one of the settings, on one of two ranks."""
    topology = fusedmoe.Topology.from_sizes(ep=world, timeout_s=30)
    torch.manual_seed(0)
    run, layer = _model(name, topology)

    def step() -> None:
        x_BLM = torch.randn(4, 16, M, requires_grad=True)
        (run(x_BLM).square().mean() + layer.aux_loss).backward()

    for _ in range(3):
        step()
    # A rank that waits long also checks the failure board, and thread timing varies: the shortest of several runs.
    ways = [walk(step) for _ in range(40)]
    topology.close()
    return Way(*map(min, zip(*ways, strict=True)))


def main() -> None:
    """Print a row for each setting."""
    ranks = Cluster()
    print(f"{'':24}{'files':>8}{'calls':>8}{'changes of file':>18}")
    for name in SETTINGS:
        way = ranks.run(2, way_of, name)[0]
        print(f"{name:24}{way.files:8}{way.calls:8}{way.changes:18}")
    ranks.close()


if __name__ == "__main__":
    main()
