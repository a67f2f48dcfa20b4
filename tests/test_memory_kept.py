"""`fusedmoe.keep_memory`: steps request no pages from the system, with equal results. It affects a whole process, so
each test starts a process.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any

import pytest

import fusedmoe

glibc = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="for glibc only"
)

FRESH = """
import json, resource, sys
import torch, fusedmoe

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

torch.set_num_threads(1)
took_effect = [fusedmoe.keep_memory() for _ in range(int(sys.argv[1]))]
"""

TENSORS = """
for _ in range(16):  # a block fits when the heap has a gap for it and for what aligns it
    torch.ones(1 << 24)  # 64 MiB, 16,384 pages
before = faults()
for _ in range(8):
    torch.ones(1 << 24)
print(json.dumps([took_effect, faults() - before]))
"""

STEPS = """
torch.manual_seed(0)
layer = fusedmoe.MoELayer(16, fusedmoe.gates.TopK(4, k=2), fusedmoe.experts.SwiGLU(1024))
counts, digests = [], []
for number in range(5):
    x_SM = torch.randn(4096 + 16 * number, 16, requires_grad=True)
    before = faults()
    layer.zero_grad(set_to_none=True)
    y_SM = layer(x_SM)
    (y_SM.square().sum() + layer.aux_loss).backward()
    counts.append(faults() - before)
    tensors = (y_SM, x_SM.grad, *(parameter.grad for parameter in layer.parameters()))
    digests.append([tensor.double().sum().item() for tensor in tensors])
print(json.dumps([min(counts[2:]), digests]))
"""


def run(program: str, calls: int) -> Any:
    command = [sys.executable, "-c", FRESH + program, str(calls)]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@glibc
@pytest.mark.parametrize("calls", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_large_tensors_reuse_memory_without_page_faults(calls: int) -> None:
    took_effect, faults = run(TENSORS, calls)
    assert took_effect == [True] * calls and faults < 100


@glibc
@pytest.mark.slow
def test_keep_memory_avoids_page_faults_with_equal_results() -> None:
    faults, digests = run(STEPS, 1)
    plain, expected = run(STEPS, 0)
    pages = 2**26 // 4096  # of the pre-activations alone
    assert faults < pages // 10 < plain
    assert digests == expected


def test_keep_memory_returns_false_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # without glibc's functions
    assert fusedmoe.keep_memory() is False

    def no_handle(name: None) -> None:
        raise TypeError

    monkeypatch.setattr(ctypes, "CDLL", no_handle)
    assert fusedmoe.keep_memory() is False
