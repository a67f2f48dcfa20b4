"""Progress of long work without a terminal."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from fusedmoe.runtime.progress import ProgressBar, RemainingColumn, make_display


@pytest.mark.parametrize(
    ("done", "budget_s", "shown"), [(9, None, "9%"), (10, None, "10%, 0:27 left"), (9, 60.0, "9%, at most 1:00 in all")]
)
def test_remaining_time_is_estimated_from_a_tenth_of_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: int, budget_s: float | None, shown: str
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressBar("planning", budget_s) as bar:
        now[0] = 3.0
        bar.show(done, 100)
    assert capsys.readouterr().err == f"fusedmoe: planning: {shown}\n"


def test_training_lines_estimate_from_a_tenth_of_the_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = make_display(0, 101, 0)
    for step in (1, 10, 11):
        now[0] = 16.0 * step
        display.show_step(step, 1.0, 5.0)
    lines = capsys.readouterr().out.splitlines()
    assert ["left" in line for line in lines] == [False, False, True] and "24:00 left" in lines[-1]


@pytest.mark.parametrize("done", [9, 10])
def test_bar_on_a_terminal_estimates_from_a_tenth_of_the_work(done: int) -> None:
    bar = Progress(RemainingColumn(" left"))
    bar.add_task("planning", total=100, completed=done)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(bar.get_renderable())
    assert ("left" in console.export_text()) == (done == 10)


@pytest.mark.parametrize("seconds", [1.0, 17.2])
def test_end_of_shown_progress_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressBar("measuring", 30.0) as bar:
        now[0] = seconds
        bar.show(53, 100)
        bar.finish("measured", ", cached in costs.json")
    lines = capsys.readouterr().err.splitlines()
    shown = ["fusedmoe: measuring: 53%, at most 0:30 in all", "fusedmoe: measured in 17 s, cached in costs.json"]
    assert lines == (shown if seconds > 2 else [])


def test_progress_without_terminal_prints_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ProgressBar("counting [sheep]") as bar:
        for seconds, done in ((0.0, 1), (1.0, 2), (5.0, 3), (1.0, 4), (14.5, 8), (0.5, 9), (90.0, 9)):
            now[0] += seconds
            bar.show(done, 9)
            if seconds < 2:
                assert "sheep" not in capsys.readouterr().err
            elif done < 9:
                said = {3: "33%, 0:12 left", 8: "89%, 0:03 left"}[done]
                assert capsys.readouterr() == ("", f"fusedmoe: counting [sheep]: {said}\n")
    assert capsys.readouterr() == ("", "")  # finished work has nothing left
