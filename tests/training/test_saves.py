"""Saves that are killed, run out of space, or race with another save; checkpoints that were tampered with."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import checkpoint_folder, checkpoint_reader, load_checkpoint, save_checkpoint
from tests.cluster import Cluster
from tests.training.planted import rewrite, rewritten
from tests.training.test_checkpoint_folder import load, save
from tests.training.toy import ONE, Sizes, Toy

ALONE = Topology()
slow = pytest.mark.slow


@pytest.mark.parametrize("what", rewritten(Path()))
def test_tampered_index_is_rejected_without_changes(tmp_path: Path, what: str) -> None:
    """An index and values in JSON, with right digests."""
    path = tmp_path / "checkpoint"
    save(0, 1, ONE, path)
    rewrite(path, rewritten(path)[what])
    said, before, after = load(path, ONE, 0, ALONE, trained=True)
    assert said is not None and str(path) in said and len(said) < 1000 and " failed on rank" not in said
    assert after == before and [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


class Own:
    """A user-defined class."""


def test_custom_objects_are_rejected_by_save(tmp_path: Path) -> None:
    """Also classes that PyTorch has been told are safe."""
    refused = pytest.raises(ConfigError, match=r"extra\['mine'\] is of class tests.*\.Own, which .* do not store")
    with torch.serialization.safe_globals([Own]), refused:
        save_checkpoint(tmp_path / "checkpoint", Toy(), None, ALONE, {"mine": Own()})
    assert not any(tmp_path.iterdir())


def model_of_number(number: int) -> Toy:
    model = Toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(number))
    return model


def number_of_checkpoint(path: Path) -> int:
    """Return the number of the checkpoint, after loading and checking every tensor."""
    model = Toy()
    number = load_checkpoint(path, model, None, ALONE)["number"]
    assert all(bool((parameter == number).all()) for parameter in model.parameters())
    return number


def fork_with_pipe(run: Callable[[int], None]) -> tuple[int, int]:
    """Fork a process that calls `run` with a pipe to write a byte for each save; return its id and the reading end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            run(write)
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def save_repeatedly(path: Path, first: int, count: int, acknowledge: int) -> None:
    for number in range(first, first + count):
        save_checkpoint(path, model_of_number(number), None, ALONE, {"number": number})
        os.write(acknowledge, b".")


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=slow)])
def test_killed_save_leaves_old_or_new_checkpoint(tmp_path: Path, kills: int) -> None:
    path, least = tmp_path / "checkpoint", 0
    save_checkpoint(path, model_of_number(0), None, ALONE, {"number": 0})
    began = time.monotonic()
    save_checkpoint(path, model_of_number(0), None, ALONE, {"number": 0})
    one_s = time.monotonic() - began
    for _ in range(kills):
        pid, read = fork_with_pipe(lambda write, least=least: save_repeatedly(path, least + 1, 10_000, write))
        os.read(read, 1)
        time.sleep(2 * one_s * random.random())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        done = 1
        while got := os.read(read, 1000):
            done += len(got)
        os.close(read)
        found = number_of_checkpoint(path)
        assert found in (least + done, least + done + 1)
        least = found
    save_checkpoint(path, model_of_number(7), None, ALONE, {"number": 7})
    assert number_of_checkpoint(path) == 7 and [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "fcntl.flock"}


def run_at_file_access(number: int, folder: str, action: Callable[[], None]) -> None:
    """Run `action` before this process's number-th access to the folder's files. Permanent."""
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and (event == "fcntl.flock" or folder in str(args)):
            left[0] -= 1
            if left[0] == 0:
                action()

    sys.addaudithook(hook)


def raise_disk_full() -> None:
    raise OSError(28, "No space left on device")


@slow
@pytest.mark.parametrize("how", ["killed", "full"])
def test_interruption_before_each_save_step_leaves_checkpoint(tmp_path: Path, how: str) -> None:
    """Killed, or refused by the disk, before each step in turn."""
    path, number = tmp_path / "checkpoint", 0
    save_checkpoint(path, model_of_number(0), None, ALONE, {"number": 0})
    while True:
        number += 1

        def run(write: int, number: int = number) -> None:
            run_at_file_access(
                number,
                str(tmp_path),
                raise_disk_full if how == "full" else lambda: os.kill(os.getpid(), signal.SIGKILL),
            )
            try:
                save_repeatedly(path, number, 1, write)
            except RankError as error:
                left = [one.name for one in tmp_path.iterdir()]
                told = "No space left on device" in str(error) and str(path) in str(error)
                os.write(write, b"e" if told and left == ["checkpoint"] else b"x")

        pid, read = fork_with_pipe(run)
        said = os.read(read, 2)
        _, status = os.waitpid(pid, 0)
        os.close(read)
        found = number_of_checkpoint(path)
        assert found in (number - 1, number)
        if how == "full":
            assert said in (b".", b"e") and found == number - (said == b"e")
        save_checkpoint(path, model_of_number(number), None, ALONE, {"number": number})
        assert number_of_checkpoint(path) == number and [one.name for one in tmp_path.iterdir()] == ["checkpoint"]
        if said == b"." and not status and number > 20:
            break
    assert number > 15


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_full_disk_keeps_last_checkpoint(tmp_path: Path, share: float) -> None:
    path = tmp_path / "checkpoint"
    save_checkpoint(path, model_of_number(1), None, ALONE, {"number": 1})
    size = (path / "rank-00000.safetensors").stat().st_size
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), limits[1]))
    try:
        with pytest.raises(RankError, match=f"saving checkpoint {re.escape(str(path))} failed on rank 0"):
            save_checkpoint(path, model_of_number(2), None, ALONE, {"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert number_of_checkpoint(path) == 1 and [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


@slow
def test_concurrent_saves_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    """The remaining checkpoint is one job's, whole; a rejected job raises."""
    path = tmp_path / "checkpoint"
    save_checkpoint(path, model_of_number(0), None, ALONE, {"number": 0})

    def run(first: int) -> Callable[[int], None]:
        def save_many(write: int) -> None:
            for number in range(first, first + 15):
                try:
                    save_repeatedly(path, number, 1, write)
                except ConfigError as error:
                    os.write(write, b"r" if "another job is saving to" in str(error) else b"x")

        return save_many

    jobs = [fork_with_pipe(run(first)) for first in (1000, 2000, 3000)]
    loads = 0
    while any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for pid, _ in jobs):
        try:
            assert number_of_checkpoint(path) in {0, *range(1000, 1015), *range(2000, 2015), *range(3000, 3015)}
            loads += 1
        except (ConfigError, RankError) as error:
            assert re.search("was replaced while it was loaded|no checkpoint at|is damaged|No such file", str(error))
    said = b""
    for pid, read in jobs:
        os.waitpid(pid, 0)
        said += os.read(read, 100)
        os.close(read)
    assert len(said) == 45 and set(said) <= set(b".r"), said
    number_of_checkpoint(path)
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("call", ["rmdir", "unlink", "fsync"])
def test_cleanup_failure_after_rename_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A system call that fails after the rename: the save returns, and names the remaining folder."""
    path, renames = tmp_path / "checkpoint", []
    save_checkpoint(path, model_of_number(1), None, ALONE, {"number": 1})
    true_call, true_rename = getattr(os, call), Path.rename

    def rename(self: Path, target: Path) -> Path:
        renames.append(target)
        return true_rename(self, target)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if path in renames:
            raise PermissionError(13, "Permission denied", "here")
        return true_call(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        patch.setattr(os, call, failing)
        with pytest.warns(UserWarning, match=f"checkpoint {path} is in place.*Permission denied") as caught:
            save_checkpoint(path, model_of_number(2), None, ALONE, {"number": 2})
    left = sorted(one.name for one in tmp_path.iterdir() if one != path)
    assert all(any(f"from {tmp_path / name}: " in str(one.message) for one in caught) for name in left)
    assert bool(left) == (call != "fsync")
    assert number_of_checkpoint(path) == 2
    save_checkpoint(path, model_of_number(3), None, ALONE, {"number": 3})
    assert number_of_checkpoint(path) == 3 and [one.name for one in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("when", ["before the index", "after the index", "after a check", "between the renames"])
def test_checkpoint_replaced_before_load_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another job saves while a load opens and checks the folder: the load returns the old or the new one, whole."""
    path, moved = tmp_path / "checkpoint", tmp_path / ".checkpoint.previous"
    save_checkpoint(path, model_of_number(1), None, ALONE, {"number": 1})
    name = {"after the index": "read_index", "after a check": "require_intact"}.get(when, "find_checkpoint")
    true_call, calls = getattr(checkpoint_reader, name), []

    def replaced(*args: Any) -> Any:
        calls.append(name)
        if len(calls) == 1 and when == "between the renames":
            path.rename(moved)  # a killed job's, too
            found = true_call(*args)
            moved.rename(path)
            return found
        if len(calls) == 1:
            save_checkpoint(path, model_of_number(2), None, ALONE, {"number": 2})
        return true_call(*args)

    monkeypatch.setattr(checkpoint_reader, name, replaced)
    assert number_of_checkpoint(path) == (1 if when == "between the renames" else 2)


def test_save_to_symlink_replaces_its_target(tmp_path: Path) -> None:
    (tmp_path / "last").symlink_to("runs/7")
    for number in (1, 2, 3):
        save_checkpoint(tmp_path / "last", model_of_number(number), None, ALONE, {"number": number})
        assert number_of_checkpoint(tmp_path / "last") == number_of_checkpoint(tmp_path / "runs" / "7") == number
    assert (tmp_path / "last").is_symlink() and [one.name for one in (tmp_path / "runs").iterdir()] == ["7"]


SAVED = "first"  # of the previous checkpoint


def _save_to_different_folders(rank: int, world: int, folder: Path, how: str) -> tuple[str, str, list[str]]:
    """A save whose ranks write into different folders: return its error, and the result of loading the previous
    checkpoint.
    """
    sizes, path = Sizes(world, ep=2), folder / "here" / "checkpoint"
    topology, model = sizes.topology(), Toy(sizes, rank)
    save_checkpoint(path, model, None, topology, {"saved": SAVED})
    last, own = rank == world - 1, folder / "own"
    with pytest.MonkeyPatch.context() as patch:
        if how == "path" and last:
            path = folder / "here" / f"checkpoint at {rank}"
        elif how == "relative path":
            (own / str(rank)).mkdir(parents=True)
            patch.chdir(own / str(rank))
            path = Path("checkpoint")
        elif how in ("disk", "disk, seen late") and last:
            there = own / "here" / "checkpoint"
            there.parent.mkdir(parents=True, exist_ok=True)
            patch.setattr(checkpoint_folder, "resolve_links", lambda _: there)
        if how == "disk, seen late":
            patch.setattr(checkpoint_folder, "require_shared", lambda *_: None)
        with pytest.raises(RankError) as caught:
            save_checkpoint(path, model, None, topology, {"saved": "second"})
    found = load_checkpoint(folder / "here" / "checkpoint", model, None, topology)
    return str(caught.value), found["saved"], sorted(one.name for one in (folder / "here").iterdir())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("path", r"rank 0 passes \S+/checkpoint and rank 1 \S+/checkpoint at 1\. Pass the same path on all ranks"),
        ("relative path", r"rank 0 passes \S+/own/0/checkpoint and rank 1 \S+/own/1/checkpoint\."),
        ("disk", r"failed on rank 1: \S+ is a different folder than on rank 0.* checkpoint is unchanged"),
        ("disk, seen late", r"failed on rank 0: rank-00001\.safetensors, written by rank 1, has 0 bytes of \d+"),
    ],
)
def test_save_to_different_folders_keeps_last_checkpoint(
    cluster: Cluster, tmp_path: Path, how: str, message: str
) -> None:
    for said, stands, left in cluster.run(2, _save_to_different_folders, tmp_path, how):
        assert re.search(message, said), said
        assert stands == SAVED and left == ["checkpoint"]


def _load_different_checkpoints(rank: int, world: int, folder: Path) -> str:
    sizes = Sizes(world)
    model = Toy(sizes, rank)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RankError) as caught:
        load_checkpoint(folder / str(rank), model, None, sizes.topology())
    assert all(map(torch.equal, before, model.parameters())) and caught.value.agreed
    return str(caught.value)


def test_ranks_loading_different_checkpoints_are_rejected(cluster: Cluster, tmp_path: Path) -> None:
    for number in (0, 1):
        save_checkpoint(tmp_path / str(number), model_of_number(number), None, ALONE, {"number": number})
    for said in cluster.run(2, _load_different_checkpoints, tmp_path):
        assert "rank 1 and rank 0 read different checkpoints" in said


@pytest.mark.parametrize("to", ["missing/../checkpoint", "./a/b/../../checkpoint", "link/../checkpoint", "checkpoint/"])
def test_save_and_load_resolve_paths_equally(tmp_path: Path, to: str) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    for number in (1, 2):
        save_checkpoint(f"{tmp_path}/{to}", model_of_number(number), None, ALONE, {"number": number})
        assert number_of_checkpoint(Path(f"{tmp_path}/{to}")) == number
