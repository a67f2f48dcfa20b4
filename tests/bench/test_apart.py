"""Processes that check configurations: hanging, dying, and reporting a fault."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu import apart
from bench.gpu.apart import Case, check_apart, described, parsed
from fusedmoe.kernels.triton.grouped.configs import Config, HopperConfig, Variant

VARIANT = Variant("down", "bfloat16", "ieee", "", False, False, True, True)
FIRST, SECOND, THIRD = (HopperConfig(128, 64 * 2**i, 64) for i in range(3))
CPU = torch.device("cpu")

# Stands for the checking program: it acts on each configuration by `how`, keyed by its columns.
PROGRAM = """
import json, os, sys, time
how = json.loads(sys.argv[1])
if how.get("all") == "die":
    os._exit(7)
print("started", flush=True)
what = how.get(str(json.load(sys.stdin)["config"]["bn"]), "")
print("a compiler says something", flush=True)
if what == "die":
    print("it was me", file=sys.stderr)
    os._exit(7)
if what == "compile":
    time.sleep(600)
if what.startswith("until "):
    while not os.path.exists(what.removeprefix("until ")):
        time.sleep(0.01)
    what = ""
print("launched", flush=True)
if what == "hang":
    time.sleep(600)
print("checked: " + json.dumps(None if what == "no memory" else what), flush=True)
"""


def cases(*configs: Config) -> list[Case]:
    return [Case(VARIANT, config) for config in configs]


def run_checks(**how: str) -> dict[Config, str | None]:
    told = {name.removeprefix("columns"): what for name, what in how.items()}
    program = [sys.executable, "-S", "-c", PROGRAM, json.dumps(told)]
    return {case.config: fault for case, fault in check_apart(cases(FIRST, SECOND, THIRD), CPU, program=program)}


def test_verdict_is_returned_for_every_configuration() -> None:
    assert run_checks() == {FIRST: "", SECOND: "", THIRD: ""}
    assert run_checks(columns128="3 values are wrong") == {FIRST: "", SECOND: "3 values are wrong", THIRD: ""}


def test_process_crash_fails_one_configuration_only() -> None:
    found = run_checks(columns128="die")
    assert found.keys() == {FIRST, SECOND, THIRD} and found[FIRST] == found[THIRD] == ""
    assert found[SECOND] == "the process that checks it ended with 7: it was me"


def test_exception_is_fault_and_out_of_memory_is_unknown() -> None:
    assert run_checks(columns64="RuntimeError: illegal", columns256="no memory") == {
        FIRST: "RuntimeError: illegal",
        SECOND: "",
        THIRD: None,
    }


def test_hanging_process_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_LAUNCHED_S", 3.0)
    found = run_checks(columns128="hang")
    assert found[FIRST] == found[THIRD] == "" and "for 3 seconds after its launch" in str(found[SECOND])


@pytest.mark.slow
def test_compile_timeout_is_unknown_not_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_COMPILE_S", 1.0)
    assert run_checks(columns128="compile") == {FIRST: "", SECOND: None, THIRD: ""}


def test_process_start_failure_gives_no_verdicts() -> None:
    assert run_checks(all="die") == {FIRST: None, SECOND: None, THIRD: None}


def test_checks_run_concurrently_and_yield_as_completed(tmp_path: Path) -> None:
    """The first process compiles until the second one's verdict has been returned."""
    program = [sys.executable, "-S", "-c", PROGRAM, json.dumps({"64": f"until {tmp_path / 'told'}"})]
    first, second = cases(FIRST, SECOND)
    verdicts = check_apart([first, second], CPU, program=program)
    assert next(verdicts) == (second, "")
    (tmp_path / "told").touch()
    assert [*verdicts] == [(first, "")]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (None, ""),
        (RuntimeError("illegal access"), "RuntimeError: illegal access"),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
    ],
)
def test_check_process_prints_verdict_as_json(
    raised: Exception | None, told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**described(Case(VARIANT, FIRST)), "device": "cpu"}

    def check(*args: Any, launched: Any) -> str:
        assert args == (VARIANT, FIRST, CPU)
        launched()
        if raised is not None:
            raise raised
        return ""

    monkeypatch.setattr(apart, "check", check)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    apart.main()
    *before, said = capsys.readouterr().out.splitlines()
    assert before == ["started", "launched"] and json.loads(said.removeprefix("checked: ")) == told


@pytest.mark.slow
def test_real_check_process_reports_error_without_gpu() -> None:
    """Without a GPU the program cannot launch and reports an error for each configuration."""
    found = dict(check_apart(cases(FIRST, SECOND), CPU))
    assert {*found} == {*cases(FIRST, SECOND)} and all("Error" in str(fault) for fault in found.values()), found


@pytest.mark.parametrize("config", [FIRST, Config(64, 128, 64, 8, 3, registers=128)], ids=str)
def test_case_json_round_trip(config: Config) -> None:
    again = parsed(json.loads(json.dumps(described(Case(VARIANT, config)))))
    assert again == Case(VARIANT, config) and type(again.config) is type(config)
