"""Verdicts on configurations of a fake GPU: selection of checks, records, and messages about the table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import checks, verify
from bench.gpu.apart import Case
from bench.gpu.part import Log, Place
from bench.gpu.process import Ended
from bench.gpu.steps import PLANS
from fusedmoe.kernels.triton.grouped import configs as grouped_configs
from fusedmoe.kernels.triton.grouped.configs import OPERATIONS, VERIFIED, Gpu, HopperConfig, is_verified

HOPPER, AMPERE = Gpu((9, 0), 232_448, 132), Gpu((8, 0), 166_912, 108)
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE], ids=str)
def test_cases_cover_every_candidate_and_variant(gpu: Gpu) -> None:
    cases = verify.cases(gpu)
    assert len({*cases}) == len(cases)
    assert {case.variant.operation for case in cases} == {*OPERATIONS}
    assert {case.variant.dtype for case in cases} == {"bfloat16", "float16"}
    assert all(case.variant.bulk == (gpu is HOPPER) for case in cases)
    gluon = [case for case in cases if isinstance(case.config, HopperConfig)]
    assert bool(gluon) == (gpu is HOPPER) and not any(case.config.programs for case in gluon)  # type: ignore[attr-defined]
    assert {case.variant.extra for case in cases if case.variant.operation == "dw1"} == {False, True}
    assert {case.variant.activation for case in cases if case.variant.operation == "up"} == {"swiglu", "gelu"}


def test_cases_cover_every_verified_configuration() -> None:
    names = {(str(case.variant), name) for case in verify.cases(HOPPER) for name in [verify.name_of(case.config)]}
    for entry in VERIFIED:
        for words, configs in entry.configs.items():
            for config in configs:
                assert any(f"{variant} ".startswith(f"{words} ") and name == config for variant, name in names)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> dict[Case, str | None]:
    """Record faults for some cases; the rest pass."""
    faults: dict[Case, str | None] = {}

    def apart(cases: Sequence[Case], device: torch.device, at_once: int) -> Iterator[tuple[Case, str | None]]:
        return ((case, faults.get(case, "")) for case in cases)

    told = {"gpu": {"name": "NVIDIA H200", "capability": "9.0"}, "commit": "abc"}
    monkeypatch.setattr(grouped_configs, "TRITON_VERSION", "3.6.0")
    monkeypatch.setattr(verify, "check_apart", apart)
    monkeypatch.setattr(verify, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(verify, "environment", lambda device: told)
    return faults


def test_verdicts_are_saved_and_compared_with_table(
    checked: dict[Case, str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = verify.cases(HOPPER, ["bfloat16"])
    wrong = next(case for case in cases if is_verified(HOPPER, *case) and isinstance(case.config, HopperConfig))
    new = next(case for case in cases if not is_verified(HOPPER, *case))
    unknown = next(case for case in reversed(cases) if is_verified(HOPPER, *case))
    checked |= {wrong: "3 values are wrong", unknown: None}
    assert verify.verify(DEVICE, tmp_path / "new", ["bfloat16"]) == 1
    (file,) = (tmp_path / "new").glob("configurations_nvidia-h200_*.json")
    found = json.loads(file.read_text())
    assert found["commit"] == "abc" and found["shared_bytes"] == HOPPER.shared_bytes
    verdicts = found["verdicts"]
    assert verdicts[str(wrong.variant)][str(wrong.config)] == "3 values are wrong"
    assert verdicts[str(wrong.variant)][f"{wrong.config} p"] == "3 values are wrong", "it is by fewer programs, too"
    assert verdicts[str(unknown.variant)][str(unknown.config)] is None
    assert verdicts[str(new.variant)][str(new.config)] == ""
    out = capsys.readouterr().out
    assert f"the table has {wrong.config} for {wrong.variant}, which is wrong: 3 values are wrong" in out
    assert f"the table lacks {new.config} for {new.variant}, which is right" in out
    assert f"the table lacks {wrong.config} for {wrong.variant}" not in out and f"has {unknown.config} for" not in out
    assert f"{len(cases)} of {len(cases)} checked, 1 wrong, 1 unknown" in out


def test_verify_without_gpu_exits_with_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["verify"])
    with pytest.raises(SystemExit):
        verify.main()
    assert "requires a GPU" in capsys.readouterr().err


def test_rehearsal_skips_verification(tmp_path: Path) -> None:
    place = Place(tmp_path / "gpu", tmp_path, Log(), 2, rehearsal=True)
    assert checks.configurations(place, 2, ["bfloat16"]).result == "skipped"


@pytest.mark.parametrize(("code", "result"), [(0, "passed"), (1, "failed"), (None, "unfinished")])
def test_run_includes_verification_as_part(
    code: int | None, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    commands: list[list[str]] = []

    def run(self: Place, arguments: list[str], *others: object, **more: object) -> Ended:
        commands.append(arguments)
        return Ended(code, "RIGHT  up\nfile.json: 3 of 3 checked, 0 wrong, 0 unknown\n", 1.0)

    monkeypatch.setattr(Place, "run", run)
    place = Place(tmp_path / "gpu", tmp_path, Log(), cores=4)
    (part,) = [part for together in PLANS["1"].rounds for part in together if part.name == "configurations"]
    outcome = part.do(place)
    assert outcome.result == result and "3 of 3 checked" in outcome.word
    monkeypatch.setattr("sys.argv", ["verify", *commands[0][2:]])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: list[object] = []
    monkeypatch.setattr(verify, "verify", lambda *told: given.append(told) or 0)
    assert commands[0][:2] == ["-m", "bench.gpu.verify"] and verify.main() == 0
    assert given == [(DEVICE, tmp_path, ["bfloat16", "float16"], 4)]
