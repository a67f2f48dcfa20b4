"""The integrations with other versions of their libraries than the pinned ones, if packages are available."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# (package, version) -> pytest's arguments.
MATRIX = {
    ("transformers", "5.24.0"): [
        ["test_hf_experts.py", "test_hf_parallel.py", "test_hf_metrics.py", "-m", "not slow"],
        ["test_hf_classes.py", "-m", "slow"],
    ],
    ("megatron-core", "0.16.0"): [["test_megatron.py", "-m", "not slow"]],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("package", "version"), MATRIX, ids=str)
def test_integration_tests_pass_with_other_versions(package: str, version: str, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    made = subprocess.run([*pip, f"{package}=={version}"], capture_output=True, text=True, timeout=300)
    if made.returncode:
        pytest.skip(f"{package} {version} cannot be had here: {made.stderr[-300:]}")
    # Precedes the environment's own packages.
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    for arguments in MATRIX[package, version]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
        ran = subprocess.run(command, cwd=HERE, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-3000:]
