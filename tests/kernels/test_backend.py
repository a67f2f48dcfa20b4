from __future__ import annotations

import os
import subprocess
import sys

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, fusedmoe
layer = fusedmoe.MoELayer(8, fusedmoe.gates.TopK(experts=4, k=2), fusedmoe.experts.SwiGLU(4),
                          hooks=[fusedmoe.hooks.WireFp8()])
layer(torch.randn(5, 8)).sum().backward()
"""


def test_a_cpu_needs_no_triton() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})
