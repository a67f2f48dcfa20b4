"""The layer over two processes of one device, here a CPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.gpu.process import ROOT


@pytest.mark.slow
def test_two_process_check_passes_on_cpu() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "bench.gpu.two_procs", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: passed" in done.stdout and f"rank {rank} 2 chunks: off by" in done.stdout
