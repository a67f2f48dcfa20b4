"""From a tiny shape to a results file, its table and its picture, on a CPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import report
from bench.gpu.case import make_case
from bench.gpu.device import environment
from bench.gpu.kernels import PASSES, gate_steps, kernel_costs, pass_costs, row_steps
from bench.gpu.limits import Ceilings, limit_s
from bench.gpu.ours import NAME, fusedmoe_layer
from bench.gpu.peers import torch_grouped
from bench.gpu.reference import make_reference
from bench.gpu.rehearsal import TINY, FakeClock
from bench.gpu.results import RESULTS, document, save
from bench.gpu.shapes import SHAPES
from bench.gpu.spool import Spool
from bench.gpu.suite import measure_kernels, measure_passes, pass_steps, ready_layers
from bench.gpu.with_router import measure_with_router
from bench.provenance import ROOT
from bench.report import PUBLISHED

CPU = torch.device("cpu")
CHECKS = [{"name": "tests", "result": "passed", "word": "12 passed", "seconds": 1.0}]


class RouterClock(FakeClock):
    """2, 4, ... ms: forward takes as long as backward. With the state of a GPU."""

    def __init__(self, *times_ms: float) -> None:
        super().__init__(*times_ms)
        state = {"sm_clock_mhz": [1200, 1980], "power_w": 650.0, "temperature_c": 61, "throttled_by": ["power cap"]}
        self.conditions = state


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """Records of a CPU run, without the product kernels, which need Triton."""
    spool = Spool()
    spool.add("environment", **environment(CPU))
    spool.add("ceilings", when="start", flops_per_s=2e9, bytes_per_s=1e9)
    for shape in TINY:
        case = make_case(shape, CPU)
        steps = [*gate_steps(case), *row_steps(case)]
        for row in measure_kernels(shape, steps, FakeClock(0.5, 0.25), 1.0):
            spool.add("row", **row)
        makers = {NAME: fusedmoe_layer, torch_grouped.NAME: torch_grouped.make}
        ready = ready_layers(case, makers, make_reference(case, torch.float64), spool)
        steps = [step for layer, _ in ready for step in pass_steps(layer, case)]
        for row in measure_passes(shape, ready, steps, FakeClock(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), 1.0):
            spool.add("row", **row)
        for row in measure_with_router(case, RouterClock(2.0), spool, set()):
            spool.add("row", **row)
    spool.add("skipped", suite="passes", shape="tiny", name="sonicmoe", word="not installed")
    spool.add("ceilings", when="end", flops_per_s=1e9, bytes_per_s=3e9, sm_clock_mhz=1500.0)
    return document(spool, CHECKS, TINY)


def test_rows_use_highest_ceilings_and_step_order(results: dict[str, Any]) -> None:
    """The limit uses the highest P and B; times are listed in step order."""
    best = Ceilings(2e9, 3e9)
    assert results["limit"] == best._asdict()
    given = [row for row in results["rows"] if row["kind"] != "with router"]
    rows = {(row["shape"], row["variant"], row["name"]): row for row in given}
    times = {NAME: (1.0, 2.0, 3.0), torch_grouped.NAME: (4.0, 5.0, 6.0)}
    for shape in TINY:
        for variant, expected in times.items():
            for name, ms in zip(PASSES, expected, strict=True):
                row = rows[shape.name, variant, name]
                limit_ms = 1e3 * limit_s(pass_costs(shape, name), best)
                assert (row["measured_ms"], row["limit_ms"]) == (ms, pytest.approx(limit_ms))
                assert row["fraction"] == pytest.approx(limit_ms / ms)
                assert row["tflops"] == pytest.approx(shape.flops(name) / ms / 1e9)
        order = rows[shape.name, NAME, "order"]  # no FLOP
        assert order["limit_ms"] == pytest.approx(1e3 * kernel_costs(shape)["order"].bytes / 3e9)


def test_rows_with_router_have_the_difference_of_two_means(results: dict[str, Any]) -> None:
    rows = [row for row in results["rows"] if row["kind"] == "with router"]
    times = [(row["shape"], row["name"], row["measured_ms"]) for row in rows]
    assert times == [(shape.name, name, 2.0) for shape in TINY for name in ("forward", "backward")]
    for row, shape in zip(rows, [shape for shape in TINY for _ in range(2)], strict=True):
        assert (row["variant"], row["tflops"]) == (NAME, pytest.approx(shape.flops(row["name"]) / 2.0 / 1e9))
        gate = kernel_costs(shape)[f"gate {row['name']}"]
        assert row["parts"] == [list(gate), *(list(cost) for cost in pass_costs(shape, row["name"]))]
    skipped = {record["name"]: record["word"] for record in results["skipped"]}
    assert skipped["sonicmoe with router"] == "not installed"


def test_cpu_results_are_not_saved_in_repository(results: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no GPU"):
        save(results, RESULTS)
    assert save(results, tmp_path / "new").parent == tmp_path / "new"


@pytest.mark.slow
def test_report_prints_limits_times_and_checks(
    results: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save(results, tmp_path)
    assert report.main([str(file)]) == 0
    text = capsys.readouterr().out
    row = next(row for row in results["rows"] if (row["shape"], row["name"]) == ("tiny", "forward"))
    cells = ["tiny (24, 32, 16, 6, 2)", "forward", f"{row['limit_ms']:.3f}", "1.000", "0.900–1.100"]
    assert f"| {' | '.join(cells)} | {row['fraction']:.0%} |" in text
    assert "- tests: passed (12 passed)" in text and "left out: sonicmoe (not installed): tiny" in text
    assert "| tiny | with router | 1200–1980 | 650 | 61 | power cap |" in text
    assert "0.00 TB/s" in text and "| end | 0 | 0.00 | 1500 | – | – | – |" in text
    image = file.with_suffix(".png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20_000


def test_published_tflops_cover_every_shape() -> None:
    names = [shape.name for shape in SHAPES]
    assert set().union(*(published.tflops for published in PUBLISHED.values())) == set(names)


def test_newest_results_are_chosen_by_name_not_mtime(tmp_path: Path) -> None:
    """The file's modification time is irrelevant: a checkout resets it."""
    names = ("gpu_nvidia-h100_20261127T012657.json", "gpu_nvidia-h200_20261126T211316.json")
    for name in names:
        (tmp_path / name).write_text("{}")
    assert report.newest(tmp_path) == tmp_path / names[0]


@pytest.mark.parametrize(
    "module",
    ["report", "cluster.report", "cluster.link_bytes", "cluster.survive", "placement.__main__", "reproduce.__main__"],
)
def test_measured_code_paths_exist(module: str) -> None:
    """Git reports no change for a path that does not exist."""
    for path in import_module(f"bench.{module}").MEASURED:
        assert (ROOT / path.removeprefix(":(exclude)")).exists(), path
