"""`fusedmoe profile`: the lines measured with one and with several ranks, and their output."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusedmoe.cli import profile as module
from fusedmoe.cli.main import main
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.profiler import Profile
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from tests.cli.on_ranks import command
from tests.cluster import Cluster


def test_single_rank_profile_measures_gemm_and_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--budget", "0.2", "--json", "costs.json"]) == 0
    out = capsys.readouterr().out
    (kept,) = (tmp_path / "kept").iterdir()
    assert str(kept) in out and "1 rank on 1 host" in out and "gemm" in out and "contention" not in out
    assert Profile.from_json((tmp_path / "costs.json").read_text()) == Profile.from_json(kept.read_text())
    assert list(Profile.from_json(kept.read_text()).costs.lines) == ["gemm", "copy"]

    before = kept.read_text()
    assert main(["profile"]) == 0
    assert kept.read_text() == before and capsys.readouterr().out == out
    assert main(["profile", "--budget", "0.2", "--again"]) == 0
    assert kept.read_text() != before
    assert main(["profile", "--budget", "0.2", "--dtype", "fp64"]) == 0
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.slow
def test_multi_rank_profile_measures_every_cost_line(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["profile", "--budget", "1", "--again", "--ranks-per-node", "2", "--json", "costs.json"]
    (code, out, error), *others = cluster.run(4, command, str(tmp_path), *flags)
    assert code == 0, error
    assert others == [(0, "", "")] * 3
    assert all(name in out for name in LINES) and "contention" in out
    found = Profile.from_json((tmp_path / "costs.json").read_text())
    assert tuple(found.costs.lines) == LINES and "ep 2, esp 2, mp 2, dp 2" in found.costs.machine


def test_profile_prints_units(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = {"all-to-all/ep": Line(1.25e-3, 1 / 2.5e9, 0.98765), "all-gather/esp": Line(0.0, 1 / 3.0)}
    lines["gemm"] = Line(4e-5, 1e-12)
    points = {name: ((1.0, 1.0), (2.5e7, 2.0)) for name in lines}
    module._show(Profile(CostModel(lines, Contention.between_links(0.625), "[some] machine"), points, 1.0), tmp_path)
    out = capsys.readouterr().out
    for part in ("1.25 ms", "2.5 GB/s", "0.9877", "0 µs", "3 B/s", "40 µs", "1 TFLOP/s", "25 MB", "25 MFLOP", "62%"):
        assert part in out, part
    assert "[some] machine" in out and f"; cached in {tmp_path}" in out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--budget", "0"], "more than 0 and less than 100"),
        (["--budget", "100"], "more than 0 and less than 100"),
        (["--json", "there/is/none.json"], "folder there/is does not exist"),
        (["--ranks-per-node", "3", "--ep", "2"], "cannot be split into nodes of 3"),
    ],
)
def test_profile_rejects_invalid_flags(capsys: pytest.CaptureFixture[str], flags: list[str], says: str) -> None:
    try:
        code = main(["profile", *flags])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    error = capsys.readouterr().err
    assert code == 2 and says in " ".join(error.split())
