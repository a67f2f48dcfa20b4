from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fusedmoe.kernels

WITHOUT_TRITON = """
import sys
from importlib import import_module
from pkgutil import iter_modules
sys.modules["triton"] = None
import torch, fusedmoe, fusedmoe.kernels
layer = fusedmoe.MoELayer(8, fusedmoe.gates.TopK(experts=4, k=2), fusedmoe.experts.SwiGLU(4),
                          hooks=[fusedmoe.hooks.WireFp8()])
layer(torch.randn(5, 8)).sum().backward()
for module in iter_modules(fusedmoe.kernels.__path__, "fusedmoe.kernels."):
    if not module.ispkg:
        import_module(module.name)
"""


def test_a_cpu_needs_no_triton() -> None:
    """Neither for a layer nor for any operation's contract."""
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})


def test_whatever_has_kernels_has_a_contract() -> None:
    """`kernels/triton/X` and `kernels/gluon/X`, files or folders, stand for `kernels/X.py`."""
    (folder,) = map(Path, fusedmoe.kernels.__path__)
    contracts = {file.stem for file in folder.glob("*.py")}
    written = [path for form in ("triton", "gluon") for path in (folder / form).glob("[a-z]*")]
    assert {path.stem for path in written} - {"jit"} <= contracts
