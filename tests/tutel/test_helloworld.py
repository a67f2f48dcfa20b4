"""The example's losses, step by step, are those of Tutel 0.3.3's helloworld."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "tutel_helloworld.py"


def test_losses(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    flags = "--dtype float64 --batch_size 1 --num_tokens 1024 --num_steps 2 --init 0.3 --device cpu"
    losses = main(flags.split())
    assert [f"{loss:.5f}" for loss in losses] == ["27.44839", "16.62704"]
    assert "[Summary] Average synchronized step_time = " in capsys.readouterr().out
