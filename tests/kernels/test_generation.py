"""Selection of a GPU's tile tables by its tensor cores and its shared memory; and rejected GPUs."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import fusedmoe.kernels.triton
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import INTERPRET, TABLE_SHARED_BYTES, generation, generation_of
from fusedmoe.kernels.triton.grouped.configs import OPERATIONS, candidates

KIB = 1024


@pytest.mark.parametrize(
    ("capability", "shared_kib", "table"),
    [
        ((8, 0), 163, (8, 0)),  # A100
        ((8, 6), 99, (8, 0)),  # A10, RTX 3090
        ((8, 7), 163, (8, 0)),  # Orin
        ((8, 9), 99, (8, 0)),  # L40S, RTX 4090
        ((9, 0), 227, (9, 0)),  # H100, H200
        ((10, 0), 227, (10, 0)),  # B200
        ((10, 3), 227, (10, 0)),  # B300
        ((11, 0), 227, (10, 0)),  # Thor
        ((12, 0), 99, (8, 0)),  # RTX 5090, RTX PRO 6000
        ((12, 1), 99, (8, 0)),  # GB10
        ((10, 0), 99, (8, 0)),
        ((9, 0), 163, (8, 0)),
        ((13, 0), 512, (8, 0)),
    ],
)
def test_tile_table_follows_capability_and_shared_memory(
    capability: tuple[int, int], shared_kib: int, table: tuple[int, int]
) -> None:
    assert generation(capability, shared_kib * KIB) == table
    assert TABLE_SHARED_BYTES[table] <= shared_kib * KIB


@pytest.mark.parametrize(("capability", "shared_kib"), [((7, 5), 64), ((7, 0), 96), ((7, 5), 512), ((8, 6), 64)])
def test_gpu_with_too_little_shared_memory_raises(capability: tuple[int, int], shared_kib: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"compute capability {capability[0]}.{capability[1]} with {shared_kib * KIB}"
    ):
        generation(capability, shared_kib * KIB)


@pytest.mark.skipif(INTERPRET, reason="the interpreter has no device")
def test_device_candidates_fit_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(major=12, minor=0, shared_memory_per_block_optin=99 * KIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    table = generation_of(torch.device("cuda", 0))
    # Operands of all steps but one are in shared memory, in half precision.
    for operation in OPERATIONS:
        for config, *_ in candidates(operation, torch.bfloat16, table):
            assert (config.stages - 1) * (config.bm + config.bn) * config.bk * 2 <= 99 * KIB


@pytest.mark.skipif(INTERPRET, reason="the interpreter needs no GPU")
def test_amd_gpu_raises_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with pytest.raises(ConfigError, match=r"AMD GPUs \(ROCm 6.4.43482\)"):
        runpy.run_path(fusedmoe.kernels.triton.__file__)
