"""The scripts of the facade: Tutel's helloworld, with the losses of Tutel 0.3.3, and the benchmark against it."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import bench_tutel
from bench.bench_tutel import Shape, compare
from fusedmoe.tutel import moe
from fusedmoe.tutel.experts.ffn import FusedExpertsNetwork

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "tutel_helloworld.py"


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2])
def test_helloworld_losses_equal_tutel(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    flags = f"--dtype float64 --batch_size 1 --num_tokens 1024 --num_steps {steps} --init 0.3 --device cpu"
    losses = main(flags.split())
    assert [f"{loss:.5f}" for loss in losses] == ["27.44839", "16.62704"][:steps]
    assert "[Summary] Average synchronized step_time = " in capsys.readouterr().out


def test_helloworld_uses_tutel_arguments_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: set[str] = set()

    class Tutels(FusedExpertsNetwork):
        def __init__(self, **options: Any) -> None:
            seen.update(options)
            super().__init__(**options)

    monkeypatch.setattr("fusedmoe.tutel.experts.ffn.ExpertModule", Tutels)
    main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
    small = "--batch_size 1 --num_tokens 4 --model_dim 8 --hidden_size 8 --num_steps 1 --device cpu"
    main(small.split())
    ours = {"num_experts_per_device", "hidden_size_per_expert", "model_dim", "sharded_count", "activation_fn"}
    assert seen == ours
    perf = re.findall(r"perf = (\S+) tflops", capsys.readouterr().out)
    assert len(perf) == 1 and float(perf[0]) > 0, "a CPU's rate is not rounded to 0"


SMALL = Shape(S=64, M=16, H=32, E=4)


class Twice(moe.MOELayer):
    """A module that runs its computation twice."""

    def forward(self, *args: Any, **more: Any) -> Any:
        super().forward(*args, **more)
        return super().forward(*args, **more)


class Wrong(moe.MOELayer):
    def forward(self, *args: Any, **more: Any) -> Any:
        return super().forward(*args, **more) * 1.1


def test_benchmark_compares_and_checks_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, forward, calls = torch.get_num_threads(), moe.MOELayer.forward, [0]

    def counted(self: moe.MOELayer, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        return forward(self, *args, **more)

    def seconds(work: Callable[[], object]) -> float:
        before = calls[0]
        work()
        return float(calls[0] - before)

    monkeypatch.setattr(moe.MOELayer, "forward", counted)
    monkeypatch.setattr(bench_tutel, "seconds", seconds)  # a clock that counts calls
    try:
        found = compare(SimpleNamespace(moe_layer=Twice), "twice", SMALL, threads=1, rounds=3)
        assert (found.ours_s, found.theirs_s, found.ratio) == (1.0, 2.0, 2.0)
        with pytest.raises(AssertionError):
            compare(SimpleNamespace(moe_layer=Wrong), "wrong", SMALL, threads=1, rounds=1)
    finally:
        torch.set_num_threads(threads)
