"""Flipped bits and missing files: a load refuses and changes nothing, or loads the right numbers."""

from __future__ import annotations

import os
import random
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import checkpoint_reader, load_checkpoint, save_checkpoint
from fusedmoe.training.checkpoint_folder import write_folder
from fusedmoe.training.shard_spec import RowShard
from tests.cluster import Cluster
from tests.training.planted import rewrite
from tests.training.toy import ONE, Sizes, Toy, make_optimizer, train

CURE = "Copy it again, or load another checkpoint."

slow = partial(pytest.param, marks=pytest.mark.slow)


class Flip(NamedTuple):
    """One bit of one file."""

    file: str
    byte: int
    bit: int

    def apply(self, folder: Path) -> None:
        with (folder / self.file).open("r+b") as file:
            file.seek(self.byte)
            (value,) = file.read(1)
            file.seek(self.byte)
            file.write(bytes([value ^ (1 << self.bit)]))


def draw(seed: int, count: int, folder: Path) -> list[Flip]:
    """Draw files with equal probability, to include the small ones."""
    chance = random.Random(seed)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    files = [chance.choice(list(sizes)) for _ in range(count)]
    return [Flip(file, chance.randrange(sizes[file]), chance.randrange(8)) for file in files]


class Held(NamedTuple):
    """All values that a load could change on a rank."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and _plain([*self]) == _plain([*other])


def _plain(value: Any) -> Any:
    """Tensors as their bits."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def hold(model: Toy, optimizer: torch.optim.Optimizer) -> Held:
    return Held(deepcopy(model.state_dict()), deepcopy(optimizer.state_dict()))


def untrained_copy(sizes: Sizes, rank: int, trained: bool) -> tuple[Toy, torch.optim.Optimizer]:
    """Model and optimizer with numbers other than any saved ones; the optimizer with state or without."""
    model = Toy(sizes, rank)
    optimizer = make_optimizer("adamw", model)
    if trained:
        train(model, optimizer, sizes, rank, range(7, 10))
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    return model, optimizer


def load(path: Path, sizes: Sizes, rank: int, topology: Topology, trained: bool) -> tuple[str | None, Held, Held]:
    """Return a load's error, and the rank's values before and after it."""
    model, optimizer = untrained_copy(sizes, rank, trained)
    before, said = hold(model, optimizer), None
    try:
        load_checkpoint(path, model, optimizer, topology)
    except (ConfigError, RankError) as error:
        said = str(error)
    return said, before, hold(model, optimizer)


def flipped_loads(rank: int, world: int, sizes: Sizes, path: Path, flips: list[Flip]) -> list[str]:
    """Return this rank's error of the load after each single flip."""
    topology = sizes.topology()
    told, _, right = load(path, sizes, rank, topology, trained=True)
    assert told is None
    texts = []
    for number, flip in enumerate(flips):
        if rank == 0:
            flip.apply(path)
        if world > 1:
            torch.distributed.barrier()
        said, before, after = load(path, sizes, rank, topology, trained=number % 2 == 0)
        assert after == (right if said is None else before), f"{flip}: {said}"
        texts.append(said or "")
        if world > 1:
            torch.distributed.barrier()
        if rank == 0:
            flip.apply(path)
    return texts


def save(rank: int, world: int, sizes: Sizes, path: Path) -> None:
    model = Toy(sizes, rank)
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer, sizes, rank, range(2))
    save_checkpoint(path, model, optimizer, sizes.topology(), {"step": 2})


def run_on_world(cluster: Cluster, sizes: Sizes, function: Any, *args: Any) -> list[Any]:
    if sizes.world == 1:
        return [function(0, 1, sizes, *args)]
    return cluster.run(sizes.world, function, sizes, *args, timeout_s=600.0)


GRID = Sizes(4, ep=2, esp=2, mp=2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("saved", "loaded", "count"),
    [
        (ONE, Sizes(2, esp=2), 10),
        slow(GRID, ONE, 200),
        slow(GRID, GRID, 100),
        slow(Sizes(2, ep=2), Sizes(4, ep=4, mp=4), 100),
    ],
    ids=str,
)
def test_flipped_bits_are_rejected_on_all_ranks(
    cluster: Cluster, tmp_path: Path, saved: Sizes, loaded: Sizes, count: int
) -> None:
    """Every flip is refused with the file's name and the fix, equally on all ranks, and nothing has changed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    path = tmp_path / "checkpoint"
    run_on_world(cluster, saved, save, path)
    flips = draw(seed, count, path)
    told = run_on_world(cluster, loaded, flipped_loads, path, flips)
    for flip, *texts in zip(flips, *told, strict=True):
        assert len(set(texts)) == 1, "the same error on every rank"
        assert all(part in texts[0] for part in (str(path), "is damaged", flip.file, CURE)), (flip, texts[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("later", r"has format 4, and this version of fusedmoe reads format 3\. Load it with the version"),
        ("mixed", r"is damaged: rank-00000\.(jsonl|safetensors) (has|does not match its digest)"),
        ("cut", r"is damaged: index\.jsonl does not match its digest"),
        ("empty", r"is damaged: index\.jsonl does not match its digest"),
        ("removed", r"is damaged: rank-00000\.safetensors has 0 bytes of"),
        ("shorter", r"is damaged: rank-00000\.safetensors has \d+ bytes of"),
        ("longer", r"is damaged: rank-00000\.safetensors has \d+ bytes of"),
    ],
)
def test_incomplete_checkpoint_is_rejected(tmp_path: Path, change: str, message: str) -> None:
    path = tmp_path / "checkpoint"
    save(0, 1, ONE, path)
    index, data = path / "index.jsonl", path / "rank-00000.safetensors"
    if change == "later":
        rewrite(path, lambda body: body | {"format": 4})
    elif change == "mixed":  # the index of another save
        kept = index.read_bytes()
        model, optimizer = untrained_copy(ONE, 0, trained=True)
        save_checkpoint(path, model, optimizer, Topology(), {"step": 10})
        index.write_bytes(kept)
    elif change == "cut":
        index.write_bytes(index.read_bytes()[:-40])
    elif change == "empty":
        index.write_bytes(b"")
    elif change == "removed":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[:-40] if change == "shorter" else data.read_bytes() + b"0")
    said, before, after = load(path, ONE, 0, Topology(), trained=True)
    assert after == before
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(said)


@pytest.mark.parametrize("most_open", [256, 1])
@pytest.mark.parametrize("when", ["before", "after"])
def test_checkpoint_replaced_during_load_is_consistent_or_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, most_open: int
) -> None:
    """Another job saves to the path between checks and reading: open files are read to the end, and others are
    detected.
    """
    path, reads = tmp_path / "checkpoint", []
    save(0, 1, ONE, path)
    _, _, right = load(path, ONE, 0, Topology(), trained=True)
    monkeypatch.setattr(checkpoint_reader, "_MAX_OPEN_FILES", most_open)
    read_tensors = checkpoint_reader.CheckpointReader.read_tensors

    def read(*args: Any) -> Any:
        reads.append(when)
        if when == "before":
            save_checkpoint(path, *untrained_copy(ONE, 0, trained=True), Topology(), {"step": 10})
        return read_tensors(*args)

    monkeypatch.setattr(checkpoint_reader.CheckpointReader, "read_tensors", read)
    if when == "after":
        resolve = checkpoint_reader.PlainPlanner.resolve_tensor

        def resolved(*args: Any) -> Any:
            if reads == [when]:
                reads.append("saved")
                save_checkpoint(path, *untrained_copy(ONE, 0, trained=True), Topology(), {"step": 10})
            return resolve(*args)

        monkeypatch.setattr(checkpoint_reader.PlainPlanner, "resolve_tensor", resolved)
    said, _, held = load(path, ONE, 0, Topology(), trained=True)
    if most_open > 1:
        assert said is None and held == right
    else:
        assert said is not None and "was replaced while it was loaded" in said and "Load it again" in said


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00000.jsonl"])
def test_bytes_corrupted_by_disk_during_save_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk that stores other bytes than were written."""
    path, true_call, changed = tmp_path / "checkpoint", os.fsync, []

    def fsync(file: int) -> None:
        here = Path(os.readlink(f"/proc/self/fd/{file}"))
        if here.name == name:
            Flip(name, here.stat().st_size - 9, 0).apply(here.parent)
            changed.append(name)
        true_call(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        save(0, 1, ONE, path)
    said, before, after = load(path, ONE, 0, Topology(), trained=True)
    assert changed == [name] and after == before
    assert said is not None and f"is damaged: {name} does not match its digest" in said


def test_load_reads_and_checks_only_needed_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is checked as it is read, once: loading a model alone skips the optimizer's parts."""
    path, looked = tmp_path / "checkpoint", []
    save(0, 1, ONE, path)
    check = checkpoint_reader.require_intact

    def watched(path: Path, file: Any, file_part: Any) -> None:
        looked.append(file_part)
        check(path, file, file_part)

    monkeypatch.setattr(checkpoint_reader, "require_intact", watched)
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != "index.jsonl")
    model, optimizer = untrained_copy(ONE, 0, trained=True)
    load_checkpoint(path, model, optimizer, Topology())
    assert len(set(looked)) == len(looked) and sum(file_part.length for file_part in looked) == size
    looked.clear()
    load_checkpoint(path, model, None, Topology())
    data = [file_part for file_part in looked if file_part.offset or not file_part.file.endswith("safetensors")]
    assert len(set(looked)) == len(looked) and 0 < sum(file_part.length for file_part in data) < size / 3


def test_row_shards_round_trip_in_any_order(tmp_path: Path) -> None:
    """Consecutive rows form one part; a second part of a tensor is in a separate file, which other tools read."""
    path, whole = tmp_path / "checkpoint", torch.arange(24.0).view(8, 3)
    numbers = (5, 6, 2, 3, 4, 0, 7, 1)
    rows = RowShard(whole[list(numbers)].clone(), numbers, whole.shape, (0, 0))
    write_folder(path, lambda: {"rows": rows}, Topology(), "saving")
    names = sorted(file.name for file in path.iterdir())
    assert names == ["index.jsonl", *(f"rank-00000-{n}.safetensors" for n in range(1, 5)), "rank-00000.safetensors"]
    other_way = RowShard(torch.zeros(4, 3), (3, 4, 5, 0), whole.shape, (0, 0))
    folder = checkpoint_reader.CheckpointReader(path)
    for target in (other_way, torch.zeros(8, 3)):
        folder.check({"rows": target})
        folder.read_tensors({"rows": target})
        found = target.part if isinstance(target, RowShard) else target
        assert torch.equal(found, whole[list(other_way.numbers)] if isinstance(target, RowShard) else whole)
    folder.close()
    read = {"rows": torch.zeros(8, 3)}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert torch.equal(read["rows"], whole)
