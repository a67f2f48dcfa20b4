"""The suites in processes of their own, as `make bench-gpu` runs them, on a CPU that pretends to be a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.gpu import run
from bench.gpu.kernels import KERNELS, PASSES
from bench.gpu.results import document
from bench.gpu.run import Run
from bench.gpu.spool import Spool
from bench.gpu.spread import PARTS
from bench.gpu.rehearsal import TINY


def test_spool(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with spool.work("passes", "tiny", "quick"):
        pass
    with pytest.raises(ValueError), spool.work("passes", "tiny", "failing"):
        raise ValueError
    spool.add("begin", suite="passes", shape="odd", name="hung")
    spool.add("done", suite="kernels", shape="tiny")
    with (tmp_path / "spool").open("a") as file:
        file.write('{"event": "half a li')
    again = Spool(tmp_path / "spool")
    assert again.records == spool.records
    assert [work["name"] for work in again.unfinished()] == ["hung"]
    assert again.is_done("kernels", "tiny") and not again.is_done("passes", "tiny")


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p tests.bench.fake_gpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run, "SHAPES", TINY)


@pytest.mark.slow
def test_kernels_are_called_as_they_want(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All of them, in Triton's interpreter; one shape's tensors are gone before the next."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, make bench-gpu calls them")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert Run(600).measure("kernels", tmp_path / "spool", 300, 100)
    spool = Spool(tmp_path / "spool")
    assert sorted(row["name"] for row in spool.of("row")) == sorted(2 * [name for name in KERNELS if name not in PARTS])
    assert [record["when"] for record in spool.of("ceilings")] == ["start", "end"]
    found = document(spool, [], TINY)
    assert all(row["fraction"] > 0 for row in found["rows"])


def test_a_shape_that_fails(fake_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told, once, and its tensors are gone all the same."""
    monkeypatch.setenv("FAKE_FAILURE", "1")
    assert not Run(600).measure("passes", tmp_path / "spool", 100, 50)
    spool = Spool(tmp_path / "spool")
    assert {row["shape"] for row in spool.of("row")} == {"odd"}
    assert len(spool.of("environment")) == 1 and spool.unfinished() == []


@pytest.mark.slow
def test_a_peer_that_hangs(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is left out, from there on; nothing else is lost or measured twice."""
    monkeypatch.setenv("FAKE_SLEEPER", "1")
    assert Run(600).measure("passes", tmp_path / "spool", 120, patience_s=6)
    spool = Spool(tmp_path / "spool")
    rows = [(row["shape"], row["variant"], row["name"]) for row in spool.of("row")]
    tiny = [("tiny", variant, name) for variant in ("fusedmoe", "torch._grouped_mm", "liger_kernel") for name in PASSES]
    odd = [("odd", variant, name) for variant in ("fusedmoe", "torch._grouped_mm") for name in PASSES]
    assert rows == tiny + odd
    words = {(record["shape"], record["name"]): record["word"] for record in spool.of("skipped")}
    assert words["odd", "liger_kernel"].startswith("did not come back")
    assert words["tiny", "scattermoe"] == "not installed"
    out = capfd.readouterr().out
    assert "liger_kernel at odd did not come back" in out and "its process was ended; not measured: odd" in out
    json.dumps(document(spool, [], TINY))
