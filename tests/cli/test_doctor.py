"""`fusedmoe doctor`: answers about this machine and made-up machines, as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedmoe.cli import doctor
from fusedmoe.cli.main import main
from fusedmoe.comm.one_sided import heaps
from tests.lifetime import left_in_shared_memory

NAMES = ["gloo", "nccl", "host", "symm", "nvshmem"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a table is a line."""
    monkeypatch.setenv("COLUMNS", "250")


def rows(out: str) -> dict[str, list[str]]:
    """The tables' rows by their first column."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {first: rest for first, *rest in cells}


def fake(monkeypatch: pytest.MonkeyPatch, **reasons: Any) -> None:
    """All work but those named, whose probes say, or do, this."""
    probes = {name: reasons.get(name, "") for name in NAMES}
    made = tuple(
        doctor.TransportProbe(one.name, one.kind, one.carries, probe if callable(probe) else lambda said=probe: said)
        for one, probe in zip(doctor.TRANSPORTS, probes.values(), strict=True)
    )
    monkeypatch.setattr(doctor, "TRANSPORTS", made)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For probes that work: on a busy machine one may take longer than a user would wait."""
    monkeypatch.setattr(doctor, "PROBE_S", 100.0)
    monkeypatch.setattr(doctor, "bounded", partial(doctor.bounded, limit_s=100.0))


def test_this_machine(patient: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["torch"] == [torch.__version__] and found["fusedmoe"] == ["0.1.0"]
    assert not left_in_shared_memory()
    for name in NAMES:
        _, works, reason = found[name]
        assert works == ("no" if reason else "yes"), name
    for name in ("gloo", "host"):
        assert found[name][1] == "yes"
    if not torch.cuda.is_available():
        assert not any("/dev/shm" in name for name in found)
        assert found["GPUs"] == ["none"] and found["cuda of torch"] == [torch.version.cuda or "not there"]
        for name in ("nccl", "symm", "nvshmem"):
            assert "driver" in found[name][2] or "CUDA" in found[name][2]


def test_this_machine_as_json(patient: None, capfd: pytest.CaptureFixture[str]) -> None:
    """With nothing on stdout but JSON, of native code either."""
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert list(found) == ["host", "versions", "gpus", "shared_memory", "transports"]
    assert found["versions"]["torch"] == torch.__version__
    assert (found["shared_memory"] is None) != torch.cuda.is_available()
    assert [one["name"] for one in found["transports"]] == NAMES
    for one in found["transports"]:
        assert one["works"] == (not one["reason"]) and one["kind"] in ("collectives", "symmetric memory")


def test_failures_are_told_and_the_rest_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise OSError("[out] of luck")

    fake(monkeypatch, gloo="no [interface]; name one", nccl=broken, symm="apart")
    assert main(["doctor"]) == 0
    found = rows(capsys.readouterr().out)
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


def test_the_guide_has_the_same_names() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/one-sided.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page.partition("## Transports")[2].partition("##")[0], re.MULTILINE)
    assert named == ["host", "symm", "nvshmem"] and set(named) == set(heaps.BACKENDS) and set(named) < set(NAMES)


def test_symmetric_memory_is_what_a_job_can_open() -> None:
    """A probe of anything else would say that transports work, and end with 0, where none does."""
    known = [one.name for one in doctor.TRANSPORTS if one.kind == doctor.SYMMETRIC]
    assert known == list(heaps.BACKENDS)


def test_where_nothing_works(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake(monkeypatch, **{name: "broken" for name in NAMES})
    assert main(["doctor"]) == 1
    assert "Nothing works here" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1
    json.loads(capsys.readouterr().out)


def test_a_probe_that_hangs_is_left() -> None:
    ends = threading.Event()
    assert doctor.bounded(lambda: str(ends.wait(60)), 0.2) == "the probe did not end within 0.2 s"
    ends.set()


def test_heaps_answer_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opening one would say, for the devices that it is for."""
    asked = []
    for name, backend in heaps.BACKENDS.items():

        def why_not(device: torch.device, name: str = name) -> str:
            asked.append((name, device.type))
            return f"no {name}"

        monkeypatch.setattr(backend, "why_not", staticmethod(why_not))
    said = {one.name: one.why_not() for one in doctor.TRANSPORTS if one.name in heaps.BACKENDS}
    assert said == {name: f"no {name}" for name in ("host", "symm", "nvshmem")}
    assert asked == [("host", "cpu"), ("symm", "cuda"), ("nvshmem", "cuda")]


def test_shared_memory_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> int:
        raise OSError("no more files")

    assert doctor.why_no_heap("host", "cpu") == ""
    monkeypatch.setattr(os, "memfd_create", refuses)
    assert "cannot be made or opened through /proc (no more files)" in doctor.why_no_heap("host", "cpu")


def test_what_nccl_shares_is_told_where_it_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake(monkeypatch)
    assert main(["doctor"]) == 0
    assert "GiB free" in rows(capsys.readouterr().out)["/dev/shm (NCCL)"][0]
    fake(monkeypatch, nccl="none")
    assert main(["doctor"]) == 0
    assert "/dev/shm" not in capsys.readouterr().out
    monkeypatch.setattr(doctor, "SHARED_MEMORY", str(tmp_path / "none"))
    assert doctor.shared_memory() is None


def test_no_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.why_not_gloo() == ""

    def refuses(*arguments: Any) -> None:
        raise RuntimeError("Unable to resolve hostname")

    monkeypatch.setattr(doctor.dist, "ProcessGroupGloo", refuses)
    assert doctor.why_not_gloo() == "Unable to resolve hostname; GLOO_SOCKET_IFNAME names the network interface to use"
    monkeypatch.setattr(doctor.dist, "is_gloo_available", lambda: False)
    assert "without Gloo" in doctor.why_not_gloo()


def with_gpus(monkeypatch: pytest.MonkeyPatch, pairs: set[tuple[int, int]], count: int = 3) -> None:
    """As many GPUs; `pairs` reach each other."""
    properties = SimpleNamespace(name="Some GPU", major=9, minor=0, total_memory=80 * 2**30)
    for place, name, value in (
        (doctor, "no_gpu", lambda: ""),
        (heaps, "no_gpu", lambda: ""),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: count),
        (torch.cuda, "get_device_properties", lambda index: properties),
        (torch.cuda, "can_device_access_peer", lambda one, other: (min(one, other), max(one, other)) in pairs),
        (torch.cuda.nccl, "version", lambda: (2, 28, 9)),
        (doctor.dist, "is_nccl_available", lambda: True),
    ):
        monkeypatch.setattr(place, name, value)


def test_gpus_and_how_they_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch, {(0, 1), (0, 2), (1, 2)})
    assert doctor.why_no_heap("symm", "cuda") == doctor.why_not_nccl() == ""
    with_gpus(monkeypatch, {(0, 1)})
    assert doctor.why_no_heap("symm", "cuda").startswith("GPUs 0 and 2 do not reach each other's memory")
    fake(monkeypatch)
    assert main(["doctor"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["GPU 0"] == ["Some GPU, compute capability 9.0, 80 GiB, reaches 1"]
    assert found["GPU 2"] == ["Some GPU, compute capability 9.0, 80 GiB, reaches no other"]
    assert found["nccl"][1] == "yes" and "GPUs" not in found
    assert doctor.versions()["nccl"] == "2.28.9"
    with_gpus(monkeypatch, set(), 1)
    assert doctor.why_no_heap("symm", "cuda") == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "PyTorch for CUDA 13.0 finds no GPU" in doctor.why_not_nccl()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in doctor.why_not_nccl()


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(name in said.lower() for name in NAMES) and "examples:" in said
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "doctor" in capsys.readouterr().out
