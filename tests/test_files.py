"""Files that are damaged, no files, or written by many at once."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedmoe.errors import ConfigError, printable
from fusedmoe.files import MOST_BYTES, parse_json, read_kept, read_text, sealed, write_kept, write_text


def fifo(path: Path) -> None:
    os.mkfifo(path)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)


def kept(change: Callable[[str], str]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write_kept(path, '{"seconds": 1e-05, "name": "a"}')
        path.write_text(change(path.read_text()))

    return make


BAD: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "a pipe": fifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a circle of links": lambda path: path.symlink_to(path.name),
    "too large": huge,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "nothing": Path.touch,
    "deep": lambda path: path.write_text("[" * 100_000),
    "a long number": lambda path: path.write_text("1" * 5000),
    "a list": lambda path: path.write_text("[1]"),
    "no digest": lambda path: path.write_text('{"seconds": 1}'),
    "another number": kept(lambda text: text.replace("1e-05", "1e300")),
    "no number": kept(lambda text: text.replace("1e-05", "NaN")),
    "another name": kept(lambda text: text.replace('"a"', '"b"')),
    "cut": kept(lambda text: text[:-3]),
    "another digest": kept(lambda text: text.replace('"sha256": "', '"sha256": "0')),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_damaged_is_told_by_name_and_written_anew(tmp_path: Path, what: str) -> None:
    path = tmp_path / "kept.json"
    BAD[what](path)
    with pytest.warns(UserWarning, match=f"{path} .*It is ignored"):
        assert read_kept(path) is None
    if path.is_dir():
        with pytest.raises(OSError):
            write_kept(path, "{}")
    else:
        write_kept(path, '{"a": [1, 2.5, "ä"]}')
        assert json.loads(read_kept(path) or "") == {"a": [1, 2.5, "ä"]}
    assert [one.name for one in tmp_path.iterdir()] == ["kept.json"]


def test_what_is_not_there_is_no_news(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_kept(tmp_path / "none.json") is None and read_kept(tmp_path / "file" / "none.json") is None


@pytest.mark.parametrize("name", ["none", "\udcff", "a\0b", "x" * 300])
def test_errors_name_the_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(tmp_path / name)
    assert printable(str(tmp_path / name)) in str(error.value)
    with pytest.raises(ConfigError, match="it: not JSON"):
        parse_json("[" * 100_000, "it")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    write_text(path, "old")
    for step in ("write_text", "replace"):

        def fails(self: Path, *args: object, **how: object) -> None:
            self.write_bytes(b"a part of it")
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(Path, step, fails)
            write_text(path, "new")
        assert path.read_text() == "old" and [one.name for one in tmp_path.iterdir()] == ["text"]


def test_parts_of_writers_that_were_killed_go(tmp_path: Path) -> None:
    (tmp_path / ".0123.part").touch()
    (tmp_path / ".4567.part").touch()
    os.utime(tmp_path / ".0123.part", (time.time() - 7200,) * 2)
    write_kept(tmp_path / "a.json", "{}")
    assert sorted(one.name for one in tmp_path.iterdir()) == [".4567.part", "a.json"]


def test_many_write_at_once(tmp_path: Path) -> None:
    """Every reader finds what one of them wrote, whole."""
    path, pids = tmp_path / "kept.json", []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(50):
                    write_kept(path, json.dumps({"writer": writer, "of": [writer * 100 + number] * 5000}))
            except BaseException as error:
                sys.__stderr__.write(f"{error!r}\n")
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    left, failed = set(pids), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while left:
            text = read_kept(path)
            if text is not None:
                found = json.loads(text)
                assert len(set(found["of"])) == 1 and found["of"][0] // 100 == found["writer"]
            for pid in [*left]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.remove(pid)
                    failed |= status
    assert not failed and [one.name for one in tmp_path.iterdir()] == ["kept.json"]


def test_an_object_with_a_digest_is_checked_and_one_without_is_taken() -> None:
    held = {"seconds": 1e-05, "name": "ä", "list": [1, {"a": None}]}
    text = sealed(held, indent=1)
    assert parse_json(text, "here") == held and parse_json(json.dumps(held), "here") == held
    with pytest.raises(ConfigError, match='here: not as it was written. If you have changed it, take its "sha256" out'):
        parse_json(text.replace("1e-05", "1e-06"), "here")
