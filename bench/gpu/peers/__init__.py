"""Layers of other libraries, built from their public functions, one file each.

Each module has `make(case) -> Layer`, which raises `Unavailable` if the library cannot run.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.gpu.case import Case
from bench.gpu.layer import Layer
from bench.gpu.peers import liger, scattermoe, sonicmoe, torch_grouped

PEERS: dict[str, Callable[[Case], Layer]] = {
    torch_grouped.NAME: torch_grouped.make,
    liger.NAME: liger.make,
    scattermoe.NAME: scattermoe.make,
    sonicmoe.NAME: sonicmoe.make,
}
