"""The fence between asynchronous copies and products on Hopper and Blackwell: its absence is detected and repaired."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.aot import compiling, standin
from bench.aot.machine_code import judge, unfenced
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.kernels.backend import INTERPRET
from fusedmoe.kernels.experts import Weights
from fusedmoe.kernels.layout import Layout
from fusedmoe.kernels.triton.gate.router import logits
from fusedmoe.kernels.triton.grouped.autotune import untuned_choice
from fusedmoe.kernels.triton.grouped.call import GroupedCall
from fusedmoe.kernels.triton.grouped.dweight import dweight
from fusedmoe.kernels.triton.grouped.up import up
from fusedmoe.kernels.triton.jit import insert_fences
from tests.kernels.aot import ROOT

compiles = pytest.mark.skipif(INTERPRET, reason="kernels are interpreted here")

COPY, COMMIT = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", "cp.async.commit_group;"
WAIT, BARRIER = "cp.async.wait_group 1;", "bar.sync 0;"
FENCE, MULTIPLY = "fence.proxy.async.shared::cta;", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd2;"


def code(*lines: str) -> str:
    return "\n".join((".visible .entry some_kernel(", ")", "{", *lines, "ret;", "}"))


@pytest.mark.parametrize(
    ("lines", "bad"),
    [
        ((COPY, COMMIT, WAIT, BARRIER, MULTIPLY), True),
        ((COPY, COMMIT, WAIT, BARRIER, FENCE, MULTIPLY), False),
        ((COPY, COMMIT, WAIT, FENCE, BARRIER, MULTIPLY, MULTIPLY), False),
        # A fence before the copies have completed does not cover them.
        ((COPY, COMMIT, FENCE, WAIT, BARRIER, MULTIPLY), True),
        ((COPY, COMMIT, WAIT, FENCE, "cp.async.wait_all;", MULTIPLY), True),
        ((COPY, COMMIT, WAIT, "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;", MULTIPLY), True),
        ((WAIT, BARRIER, MULTIPLY), False),
        # In a loop: a step's copies are read in the next step.
        (("$L1:", WAIT, FENCE, MULTIPLY, COPY, COMMIT, "@%p1 bra $L1;"), False),
        (("$L1:", WAIT, MULTIPLY, FENCE, COPY, COMMIT, "@%p1 bra $L1;"), True),
        # One of two paths has no fence, and that path can be taken.
        ((COPY, WAIT, "@%p1 bra $L1;", FENCE, "$L1:", MULTIPLY), True),
        ((COPY, WAIT, FENCE, "bra.uni $L2;", "$L1:", WAIT, "$L2:", MULTIPLY), False),
        (("@%p1 cp.async.ca.shared.global [%r1], [%rd1], 4;", WAIT, MULTIPLY.replace("wgmma", "@%p2 wgmma")), True),
        ((COPY, WAIT, "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r3, %p2;"), True),
    ],
)
def test_missing_fence_is_detected_and_inserted(lines: tuple[str, ...], bad: bool) -> None:
    assert bool(unfenced(code(*lines))) == bad
    assert not unfenced(insert_fences(code(*lines)))


def test_code_without_wgmma_is_unchanged() -> None:
    text = code(COPY, COMMIT, WAIT, BARRIER, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1};")
    assert insert_fences(text) == text and not unfenced(text)


def test_unrecognized_wgmma_raises() -> None:
    with pytest.raises(ValueError, match="unexpected places"):
        unfenced(code(COPY, "{ .reg .pred p; " + MULTIPLY + " }"))


def gathering_launches(target: int) -> list[standin.Launch]:
    """One launch of each kernel whose tensor cores multiply gathered rows, and of the gate's kernel."""

    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    layout = Layout(
        empty(4, dtype=torch.int64),
        empty(5, dtype=torch.int32),
        empty(999, dtype=torch.int64),
        empty(999, dtype=torch.int64),
        empty(333, 3, dtype=torch.int64),
    )
    with standin.recording(target) as launches:
        call = GroupedCall(layout, empty(0), untuned_choice(standin.table_of(target)), True)
        up(call, empty(333, 512), Weights(empty(4, 2, 256, 512), empty(4, 512, 256)), ACTIVATIONS["swiglu"])
        dweight(call, "dw1", empty(999, 512), empty(333, 256), "right")
        logits(empty(333, 512), empty(4, 512))
    return [launch for launch in launches if launch.kernel != "tiles_kernel"]


def ptx(launch: standin.Launch, compiled: Any) -> str:
    assert "error" not in judge(compiled, launch.target)
    return compiled.asm["ptx"]


@compiles
@pytest.mark.parametrize("target", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_compiled_kernels_contain_fence(target: int) -> None:
    """Compiled kernels contain the fence, from Triton or from our repair; the check detects kernels without it."""
    launches = gathering_launches(target)
    assert len(launches) == 3
    for launch in launches:
        done = compiling.compile_one(launch, ptx)
        assert not done.error, done.error
        without = re.sub(r"^\s*fence\.proxy\.async\S*;\n", "", done.found, flags=re.M)
        assert without != done.found and "cp.async.wait_group" in without
        assert not unfenced(done.found) and unfenced(without)
        assert not unfenced(insert_fences(without))


FORGETTING = """
import re
from types import SimpleNamespace

import triton
from triton import knobs
from triton.compiler import compiler

triton.__version__ = "3.6.0"
# Nor does 3.6 ask a hook for a part of the key under which it keeps what it compiles.
compiler.knobs = SimpleNamespace(**{**vars(knobs), "runtime": SimpleNamespace(add_stages_inspection_hook=None)})
from triton.backends.nvidia.compiler import CUDABackend

make_ptx = CUDABackend.make_ptx
CUDABackend.make_ptx = lambda *args: re.sub(r"fence\\.proxy\\.async\\S*;", "", make_ptx(*args))
hits = []
from tests.kernels.test_jit import compiling, gathering_launches, ptx, unfenced

for launch in gathering_launches(90)[:1]:
    for _ in range(2):
        done = compiling.compile_one(launch, ptx)
        assert not done.error, done.error
        assert done.found.count("fence.proxy.async") == done.found.count("cp.async.wait_group") > 0
        hits.append(done.cached)
print(*hits)
"""


@pytest.mark.slow
@compiles
def test_missing_fence_of_old_triton_is_inserted(tmp_path: Any) -> None:
    """Triton 3.6 is repaired, and so is this Triton if altered to behave like 3.6; compiled kernels are cached."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FORGETTING], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


@pytest.mark.slow
def test_old_triton_raises_config_error() -> None:
    line = "import triton; triton.__version__ = '3.5.1'; import fusedmoe.kernels.triton.grouped.up"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "ConfigError: the kernels need Triton 3.6 or newer, found 3.5.1" in done.stderr
