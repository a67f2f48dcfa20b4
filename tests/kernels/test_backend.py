"""Every Triton kernel has a contract in plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import fusedmoe.kernels


def test_every_kernel_module_has_plain_contract() -> None:
    """`kernels/triton/X` and `kernels/gluon/X`, files or folders, implement `kernels/X.py`."""
    (folder,) = map(Path, fusedmoe.kernels.__path__)
    contracts = {file.stem for file in folder.glob("*.py")}
    written = [path for form in ("triton", "gluon") for path in (folder / form).glob("[a-z]*")]
    assert {path.stem for path in written} - {"jit", "interpreter"} <= contracts
