"""Progress of long work without a terminal."""

from __future__ import annotations

import time

import pytest

from fusedmoe.runtime.progress import WorkBar


def test_without_a_terminal_long_work_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with WorkBar("counting [sheep]") as bar:
        for seconds, done in ((0.0, 1), (1.0, 2), (5.0, 3), (1.0, 4), (14.5, 8), (0.5, 9), (90.0, 9)):
            now[0] += seconds
            bar.show(done, 9)
            if seconds < 2:
                assert "sheep" not in capsys.readouterr().err
            elif done < 9:
                said = {3: "33%, 0:12 left", 8: "89%, 0:03 left"}[done]
                assert capsys.readouterr() == ("", f"fusedmoe: counting [sheep]: {said}\n")
    assert capsys.readouterr() == ("", "")  # what is done has nothing left
