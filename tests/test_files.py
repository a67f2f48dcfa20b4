"""Files that are damaged, of the wrong kind, or written by many processes at once."""

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
from fusedmoe.files import (
    MAX_TEXT_BYTES,
    dump_with_digest,
    parse_json,
    read_cache_file,
    read_text,
    write_cache_file,
    write_text,
)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def oversized_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)


def damaged_cache_file(change: Callable[[str], str]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        write_cache_file(path, '{"seconds": 1e-05, "name": "a"}')
        path.write_text(change(path.read_text()))

    return make


BAD: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "named_pipe": fifo,
    "device_file": lambda path: path.symlink_to("/dev/zero"),
    "symlink_cycle": lambda path: path.symlink_to(path.name),
    "too_large": oversized_file,
    "invalid_utf8": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "empty_file": Path.touch,
    "deeply_nested": lambda path: path.write_text("[" * 100_000),
    "long_number": lambda path: path.write_text("1" * 5000),
    "list": lambda path: path.write_text("[1]"),
    "no_digest": lambda path: path.write_text('{"seconds": 1}'),
    "changed_number": damaged_cache_file(lambda text: text.replace("1e-05", "1e300")),
    "nan": damaged_cache_file(lambda text: text.replace("1e-05", "NaN")),
    "changed_name": damaged_cache_file(lambda text: text.replace('"a"', '"b"')),
    "truncated": damaged_cache_file(lambda text: text[:-3]),
    "changed_digest": damaged_cache_file(lambda text: text.replace('"sha256": "', '"sha256": "0')),
}


@pytest.mark.parametrize("what", BAD)
def test_damaged_cache_file_is_named_and_rewritten(tmp_path: Path, what: str) -> None:
    path = tmp_path / "kept.json"
    BAD[what](path)
    with pytest.warns(UserWarning, match=f"{path} .*The file is ignored"):
        assert read_cache_file(path) is None
    if path.is_dir():
        with pytest.raises(OSError):
            write_cache_file(path, "{}")
    else:
        write_cache_file(path, '{"a": [1, 2.5, "ä"]}')
        assert json.loads(read_cache_file(path) or "") == {"a": [1, 2.5, "ä"]}
    assert [one.name for one in tmp_path.iterdir()] == ["kept.json"]


def test_missing_cache_file_is_silent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            read_cache_file(tmp_path / "none.json") is None and read_cache_file(tmp_path / "file" / "none.json") is None
        )


@pytest.mark.parametrize("name", ["none", "\udcff", "a\0b", "x" * 300])
def test_read_errors_name_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_text(tmp_path / name)
    assert printable(str(tmp_path / name)) in str(error.value)
    with pytest.raises(ConfigError, match="it: not JSON"):
        parse_json("[" * 100_000, "it")


def test_failed_write_preserves_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_stale_partial_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".0123.part").touch()
    (tmp_path / ".4567.part").touch()
    os.utime(tmp_path / ".0123.part", (time.time() - 7200,) * 2)
    write_cache_file(tmp_path / "a.json", "{}")
    assert sorted(one.name for one in tmp_path.iterdir()) == [".4567.part", "a.json"]


def test_concurrent_writers_never_mix_content(tmp_path: Path) -> None:
    """Every reader reads one writer's complete content."""
    path, pids = tmp_path / "kept.json", []
    for writer in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                for number in range(50):
                    write_cache_file(path, json.dumps({"writer": writer, "of": [writer * 100 + number] * 5000}))
            except BaseException as error:
                sys.__stderr__.write(f"{error!r}\n")
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    left, failed = set(pids), 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while left:
            text = read_cache_file(path)
            if text is not None:
                found = json.loads(text)
                assert len(set(found["of"])) == 1 and found["of"][0] // 100 == found["writer"]
            for pid in [*left]:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.remove(pid)
                    failed |= status
    assert not failed and [one.name for one in tmp_path.iterdir()] == ["kept.json"]


def test_json_digest_is_verified_if_present() -> None:
    held = {"seconds": 1e-05, "name": "ä", "list": [1, {"a": None}]}
    text = dump_with_digest(held, indent=1)
    assert parse_json(text, "here") == held and parse_json(json.dumps(held), "here") == held
    with pytest.raises(
        ConfigError, match=r'here: damaged or edited \(digest mismatch\). If you edited it, remove its "sha256"'
    ):
        parse_json(text.replace("1e-05", "1e-06"), "here")
    with pytest.raises(ConfigError, match="^here: damaged or edited"):
        parse_json(text.replace("1e-05", "1e-06").replace("sha256", "Sha256"), "here")
