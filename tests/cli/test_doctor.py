"""`fusedmoe doctor`: reports on this machine and fake machines, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedmoe.cli import doctor
from fusedmoe.cli.main import main
from fusedmoe.comm.one_sided import heaps
from fusedmoe.files import CACHE, write_cache_file
from fusedmoe.schedule.cost import CostModel, Line
from tests.lifetime import left_in_shared_memory

NAMES = ["gloo", "nccl", "host", "symm", "nvshmem"]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent tables from wrapping lines."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


def parse_rows(out: str) -> dict[str, list[str]]:
    """Parse the tables' rows, keyed by their first column."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {first: rest for first, *rest in cells}


def fake_transports(monkeypatch: pytest.MonkeyPatch, **reasons: Any) -> None:
    """Fake all transports as working, except the named ones, whose probes return this reason or call this function."""
    probes = {name: reasons.get(name, "") for name in NAMES}
    made = tuple(
        doctor.TransportProbe(one.name, one.kind, one.carries, probe if callable(probe) else lambda said=probe: said)
        for one, probe in zip(doctor.TRANSPORTS, probes.values(), strict=True)
    )
    monkeypatch.setattr(doctor, "TRANSPORTS", made)


@pytest.fixture
def longer_probe_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the limit for working probes, which a busy machine may slow beyond a user's patience."""
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 100.0)
    monkeypatch.setattr(doctor, "run_probe", partial(doctor.run_probe, limit_s=100.0))


def test_doctor_table_lists_versions_and_transports(
    longer_probe_timeout: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    found = parse_rows(capsys.readouterr().out)
    assert found["torch"] == [torch.__version__] and found["fusedmoe"] == ["0.1.0"]
    assert not left_in_shared_memory()
    for name in NAMES:
        _, works, reason = found[name]
        assert works == ("no" if reason else "yes"), name
    for name in ("gloo", "host"):
        assert found[name][1] == "yes"
    if not torch.cuda.is_available():
        assert not any("/dev/shm" in name for name in found)
        assert found["GPUs"] == ["none"] and found["cuda of torch"] == [torch.version.cuda or "not installed"]
        for name in ("nccl", "symm", "nvshmem"):
            assert "driver" in found[name][2] or "CUDA" in found[name][2]


def test_doctor_json_has_every_section_and_transport(
    longer_probe_timeout: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stdout contains only JSON, also from native code."""
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    sections = ["host", "versions", "gpus", "cpu", "cache", "shared_memory", "transports", "warnings"]
    assert list(found) == sections
    assert found["versions"]["torch"] == torch.__version__
    assert (found["shared_memory"] is None) != torch.cuda.is_available()
    assert [one["name"] for one in found["transports"]] == NAMES
    for one in found["transports"]:
        assert one["works"] == (not one["reason"]) and one["kind"] in ("collectives", "symmetric memory")


def test_doctor_lists_processors_and_measured_costs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Damaged files, and files of other kinds, are left out."""
    fake_transports(monkeypatch)
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["doctor"]) == 0
    found = parse_rows(capsys.readouterr().out)
    assert found["none"] == ["measure them with fusedmoe profile", "", ""]
    assert found["CPU cores"] == [str(os.cpu_count())] and found["cache folder"] == [str(tmp_path)]
    assert found["threads of torch"] == [f"{torch.get_num_threads()} (OMP_NUM_THREADS 3)"]
    lines = {"gemm": Line(1e-5, 1e-12, 0.99), "copy": Line(1e-5, 1e-10, 0.58)}
    for number in range(10):
        path = tmp_path / f"costs-{number}.json"
        write_cache_file(path, CostModel(lines, machine=f"[{number}] ranks").to_json())
        os.utime(path, (time.time() - 3600 * (number + 2),) * 2)
    (tmp_path / "costs-x.json").write_text("{}")
    (tmp_path / "plan-y.json").write_text("{}")
    assert main(["doctor"]) == 0
    found = parse_rows(capsys.readouterr().out)
    assert found["costs-0.json"] == ["[0] ranks", "2 h", "0.58 (copy)"] and "costs-8.json" not in found
    assert "2 older files" in found
    assert main(["doctor", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["cache"]["costs"]
    assert [file["file"] for file in costs] == [f"costs-{number}.json" for number in range(10)]
    assert (costs[0]["worst_line"], costs[0]["worst_r2"]) == ("copy", 0.58)


def test_failed_probe_is_reported_and_others_continue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise OSError("[out] of luck")

    fake_transports(monkeypatch, gloo="no [interface]; name one", nccl=broken, symm="apart")
    assert main(["doctor"]) == 0
    found = parse_rows(capsys.readouterr().out)
    assert found["gloo"][1:] == ["no", "no [interface]; name one"]
    assert found["nccl"][1:] == ["no", "OSError: [out] of luck"]
    assert found["nvshmem"][1:] == ["yes", ""]
    assert main(["doctor", "--json"]) == 0
    told = {one["name"]: one["reason"] for one in json.loads(capsys.readouterr().out)["transports"]}
    assert told == {name: "" for name in NAMES} | {
        "gloo": "no [interface]; name one",
        "nccl": "OSError: [out] of luck",
        "symm": "apart",
    }


def test_one_sided_guide_lists_same_transports() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/one-sided.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page.partition("## Transports")[2].partition("##")[0], re.MULTILINE)
    assert named == ["host", "symm", "nvshmem"] and set(named) == set(heaps.BACKENDS) and set(named) < set(NAMES)


def test_symmetric_memory_probes_cover_heap_backends() -> None:
    """Probing other heaps could report working transports, with exit code 0, to a job that can open none."""
    known = [one.name for one in doctor.TRANSPORTS if one.kind == doctor.SYMMETRIC]
    assert known == list(heaps.BACKENDS)


def test_no_working_transport_exits_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_transports(monkeypatch, **{name: "broken" for name in NAMES})
    assert main(["doctor"]) == 1
    assert "No transport works" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("value", ["1", "8", ""])
def test_doctor_warns_of_one_queue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    fake_transports(monkeypatch)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert ("Warning: CUDA_DEVICE_MAX_CONNECTIONS=1: one hardware queue" in out) == (value == "1")
    assert main(["doctor", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["warnings"]) == (value == "1")


def test_hanging_probe_times_out() -> None:
    ends = threading.Event()
    assert doctor.run_probe(lambda: str(ends.wait(60)), 0.2) == "the probe timed out after 0.2 s"
    ends.set()


def test_heap_probes_return_backend_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes report the reason that opening the heap would, on the heap's device types."""
    asked = []
    for name, backend in heaps.BACKENDS.items():

        def unavailable_reason(device: torch.device, name: str = name) -> str:
            asked.append((name, device.type))
            return f"no {name}"

        monkeypatch.setattr(backend, "unavailable_reason", staticmethod(unavailable_reason))
    said = {one.name: one.unavailable_reason() for one in doctor.TRANSPORTS if one.name in heaps.BACKENDS}
    assert said == {name: f"no {name}" for name in ("host", "symm", "nvshmem")}
    assert asked == [("host", "cpu"), ("symm", "cuda"), ("nvshmem", "cuda")]


def test_failed_memfd_create_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> int:
        raise OSError("no more files")

    assert doctor.no_heap_reason("host", "cpu") == ""
    monkeypatch.setattr(os, "memfd_create", refuses)
    assert "cannot be created or opened through /proc (no more files)" in doctor.no_heap_reason("host", "cpu")


def test_shared_memory_size_is_reported_only_with_nccl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake_transports(monkeypatch)
    assert main(["doctor"]) == 0
    assert "GiB free" in parse_rows(capsys.readouterr().out)["/dev/shm (NCCL)"][0]
    fake_transports(monkeypatch, nccl="none")
    assert main(["doctor"]) == 0
    assert "/dev/shm" not in capsys.readouterr().out
    monkeypatch.setattr(doctor, "SHARED_MEMORY", str(tmp_path / "none"))
    assert doctor.shared_memory() is None


def test_gloo_probe_reports_unresolved_host_and_missing_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.no_gloo_reason() == ""

    def refuses(*arguments: Any) -> None:
        raise RuntimeError("Unable to resolve hostname")

    monkeypatch.setattr(doctor.dist, "ProcessGroupGloo", refuses)
    assert (
        doctor.no_gloo_reason() == "Unable to resolve hostname; set GLOO_SOCKET_IFNAME to the network interface to use"
    )
    monkeypatch.setattr(doctor.dist, "is_gloo_available", lambda: False)
    assert "lacks Gloo" in doctor.no_gloo_reason()


def with_gpus(monkeypatch: pytest.MonkeyPatch, pairs: set[tuple[int, int]], count: int = 3) -> None:
    """Fake `count` GPUs; `pairs` reach each other."""
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    for place, name, value in (
        (doctor, "no_gpu_reason", lambda: ""),
        (heaps, "no_gpu_reason", lambda: ""),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: count),
        (torch.cuda, "get_device_properties", lambda index: properties),
        (torch.cuda, "can_device_access_peer", lambda one, other: (min(one, other), max(one, other)) in pairs),
        (torch.cuda.nccl, "version", lambda: (2, 28, 9)),
        (doctor.dist, "is_nccl_available", lambda: True),
    ):
        monkeypatch.setattr(place, name, value)


def test_gpu_properties_and_peer_access_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch, {(0, 1), (0, 2), (1, 2)})
    assert doctor.no_heap_reason("symm", "cuda") == doctor.no_nccl_reason() == ""
    with_gpus(monkeypatch, {(0, 1)})
    assert doctor.no_heap_reason("symm", "cuda").startswith("GPUs 0 and 2 have no peer access")
    fake_transports(monkeypatch)
    assert main(["doctor"]) == 0
    found = parse_rows(capsys.readouterr().out)
    assert found["GPU 0"] == ["Some GPU, compute capability 9.0, 80 GiB, peer access to 1"]
    assert found["GPU 2"] == ["Some GPU, compute capability 9.0, 80 GiB, no peer access"]
    assert found["nccl"][1] == "yes" and "GPUs" not in found
    assert doctor.versions()["nccl"] == "2.28.9"
    with_gpus(monkeypatch, set(), 1)
    assert doctor.no_heap_reason("symm", "cuda") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch for CUDA 13.0 finds no GPU" in doctor.no_nccl_reason()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in doctor.no_nccl_reason()


def test_doctor_help_lists_transports_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(name in said.lower() for name in NAMES) and "examples:" in said
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out
