"""Tiles of the grouped products in Triton's interpreter, and the record of passed tiles."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from bench.aot import __main__ as aot
from bench.aot import values
from fusedmoe.kernels.triton.grouped.configs import OPERATIONS


def test_tile_record_has_every_configuration() -> None:
    wanted = {(operation, str(config)) for operation, config in values.tiles()}
    assert {operation for operation, _ in wanted} == {*OPERATIONS}
    record = values.read()
    assert record
    for version, right in record.items():
        passed = {(operation, name) for operation, names in right.items() for name in names}
        assert passed == wanted, f"{version}: make aot writes bench/tiles.json anew"


def test_write_preserves_record_of_other_triton_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(values, "FILE", tmp_path / "tiles.json")
    assert values.read() == {}
    for version, name in (("3.7.1", "a"), ("3.6.0", "b"), ("3.7.1", "c")):
        values.write(version, {"up": [name]})
    assert values.read() == {"3.6.0": {"up": ["b"]}, "3.7.1": {"up": ["c"]}}


@pytest.mark.slow
def test_random_tile_passes_in_interpreter_process(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.choice(values.tiles())
    monkeypatch.setattr(values, "tiles", lambda: [drawn])
    operation, config = drawn
    assert [*values.check_all(1)] == [(operation, str(config), "")], drawn


def test_wrong_tile_prevents_writing_record(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[tuple[str, dict[str, list[str]]]] = []
    monkeypatch.setattr(values, "write", lambda *given: written.append(given))
    found = [("up", "b", ""), ("up", "a", ""), ("down", "c", "")]
    monkeypatch.setattr(values, "check_all", lambda workers: [*found, ("down", "d", "7 values of it are wrong")])
    assert aot.check_values(None) == ["down d: 7 values of it are wrong"] and not written
    assert "4 tiles, 1 wrong" in capsys.readouterr().out
    monkeypatch.setattr(values, "check_all", lambda workers: found)
    assert aot.check_values(None) == []
    assert written == [(triton.__version__, {"down": ["c"], "up": ["a", "b"]})]
