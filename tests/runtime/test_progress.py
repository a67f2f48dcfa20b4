from __future__ import annotations

import time

import pytest

from fusedmoe.runtime.progress import WorkBar


def test_without_a_terminal_long_work_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with WorkBar("counting [sheep]") as bar:
        bar.show(1, 9)
        now[0] += 1.0
        bar.show(2, 9)
        assert capsys.readouterr() == ("", "")
        now[0] += 5.0
        bar.show(3, 9)
        bar.show(9, 9)
    out, error = capsys.readouterr()
    assert not out and error == "fusedmoe: counting [sheep] …\n"
