"""Flipped bits, missing files and old formats: a load refuses and touches nothing, or loads the right numbers."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import checkpoint_checks, checkpoint_folder, load_checkpoint, save_checkpoint
from tests.cluster import Cluster
from tests.training.toy import ONE, Sizes, Toy, make_optimizer, part, train

CURE = "Copy it again, or load another."
OLD = Path(__file__).parents[1] / "data" / "checkpoint_format_1"  # of two steps, written before there were checksums

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
    """Of all files alike, so that the small ones get their share."""
    chance = random.Random(seed)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    files = [chance.choice(list(sizes)) for _ in range(count)]
    return [Flip(file, chance.randrange(sizes[file]), chance.randrange(8)) for file in files]


class Held(NamedTuple):
    """All that a load could change on a rank."""

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


def other(sizes: Sizes, rank: int, trained: bool) -> tuple[Toy, torch.optim.Optimizer]:
    """Model and optimizer of other numbers than any that is saved; the optimizer with state or without."""
    model = Toy(sizes, rank)
    optimizer = make_optimizer("adamw", model)
    if trained:
        train(model, optimizer, sizes, rank, range(7, 10))
    for group in optimizer.param_groups:
        group["lr"] = 123.0
    return model, optimizer


def load(path: Path, sizes: Sizes, rank: int, topology: Topology, trained: bool) -> tuple[str | None, Held, Held]:
    """What a load says, and what the rank holds before and after it."""
    model, optimizer = other(sizes, rank, trained)
    before, said = hold(model, optimizer), None
    try:
        load_checkpoint(path, model, optimizer, topology)
    except (ConfigError, RankError) as error:
        said = str(error)
    return said, before, hold(model, optimizer)


def flipped_loads(rank: int, world: int, sizes: Sizes, path: Path, flips: list[Flip]) -> list[str]:
    """What the load after each flip alone says on this rank."""
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


def anywhere(cluster: Cluster, sizes: Sizes, function: Any, *args: Any) -> list[Any]:
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
def test_no_flipped_bit_loads_other_numbers(
    cluster: Cluster, tmp_path: Path, saved: Sizes, loaded: Sizes, count: int
) -> None:
    """Every flip is refused with the file's name and the cure, the same on all ranks, and nothing has changed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    path = tmp_path / "checkpoint"
    anywhere(cluster, saved, save, path)
    flips = draw(seed, count, path)
    told = anywhere(cluster, loaded, flipped_loads, path, flips)
    for flip, *texts in zip(flips, *told, strict=True):
        assert len(set(texts)) == 1, "the same error on every rank"
        assert all(part in texts[0] for part in (str(path), "is damaged", flip.file, CURE)), (flip, texts[0])


def test_the_format_before_loads_with_a_warning(cluster: Cluster, tmp_path: Path) -> None:
    """As it was written then; damage to its data is refused or harmless."""
    path = tmp_path / "checkpoint"
    shutil.copytree(OLD, path)
    with pytest.warns(UserWarning, match=r"of format 1, without checksums: .* Save it again"):
        _, _, right = load(path, ONE, 0, Topology(), trained=True)
    # It was trained by other versions of the kernels, whose sums round in another order.
    trained = Toy()
    train(trained, optimizer := make_optimizer("adamw", trained), ONE, 0, range(2))
    torch.testing.assert_close(right.model, dict(trained.state_dict()), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(right.optimizer["state"], optimizer.state_dict()["state"], rtol=1e-9, atol=1e-12)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    flips = [flip for flip in draw(seed, 20, path) if flip.file != ".metadata"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = flipped_loads(0, 1, ONE, path, flips)
    assert {text for text in texts if text}, "some are refused"
    for text in filter(None, texts):
        # Without checksums a name that was damaged is that of a class nobody knows.
        assert ("is damaged: __0_0.distcp" in text and CURE in text) or "of no known class" in text, text
    cluster.run(2, loads_old, path, right.model)


def loads_old(rank: int, world: int, path: Path, right: dict[str, Tensor]) -> None:
    sizes = Sizes(2, ep=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said, _, held = load(path, sizes, rank, sizes.topology(), trained=False)
    assert said is None and len([one for one in caught if "checksums" in str(one.message)]) == (rank == 0)
    for name, value in right.items():
        assert torch.equal(held.model[name], part(value, name, sizes, rank))


def test_checkpoints_of_records_without_crc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch can be told to leave them out: such a file is not damaged, with checksums or of the format before."""
    monkeypatch.setattr("fusedmoe.training.checkpoint.FORMAT", 1)
    path, trained = tmp_path / "checkpoint", Toy()
    with_crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(path, trained, None, Topology())
    finally:
        torch.serialization.set_crc32_options(with_crc)
    load_checkpoint(path, Toy(), None, Topology())
    (path / ".checksums").unlink()
    loaded, _ = other(ONE, 0, trained=True)
    with pytest.warns(UserWarning, match="of format 1"):
        load_checkpoint(path, loaded, None, Topology())
    assert torch.equal(loaded.dense.weight, trained.dense.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no checksums", r"is damaged: \.checksums is missing\. Copy it again"),
        ("later", r"is of format 3, and this version of fusedmoe reads formats up to 2\. Load it with the version"),
        ("foreign", r"save_checkpoint did not write it\. Read it with torch\.distributed\.checkpoint"),
        ("mixed", r"is damaged: \.metadata is not as it was saved"),
        ("removed", r"is damaged: __0_0\.distcp has 0 bytes of"),
        ("shorter", r"is damaged: __0_0\.distcp has \d+ bytes of"),
    ],
)
def test_what_is_not_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, message: str
) -> None:
    path = tmp_path / "checkpoint"
    if change == "foreign":
        monkeypatch.setattr("fusedmoe.training.checkpoint.ABOUT", "other")
    save(0, 1, ONE, path)
    monkeypatch.undo()
    if change == "no checksums":
        (path / ".checksums").unlink()
    elif change == "later":
        body = (path / ".checksums").read_bytes().split(b"\n")[1]
        body = json.dumps(json.loads(body) | {"format": 3}).encode()
        (path / ".checksums").write_bytes(checkpoint_checks._head(body) + b"\n" + body)
    elif change == "mixed":  # the index of another save of the same
        (path / ".checksums").rename(tmp_path / "kept")
        save(0, 1, ONE, path)
        (tmp_path / "kept").replace(path / ".checksums")
    elif change == "removed":
        (path / "__0_0.distcp").unlink()
    elif change == "shorter":
        (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-40])
    said, before, after = load(path, ONE, 0, Topology(), trained=True)
    assert after == before
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(said)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_replaced_while_it_is_loaded_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Another job saves to the path between checks and reading."""
    path, reads = tmp_path / "checkpoint", []
    save(0, 1, ONE, path)
    read_data = checkpoint_folder.FileSystemReader.read_data

    def read(*args: Any) -> Any:
        reads.append(when)
        if len(reads) == 1:  # what says of which optimizer the checkpoint is
            return read_data(*args)
        if when == "before":
            save(0, 1, ONE, path)
            return read_data(*args)
        result = read_data(*args)
        save(0, 1, ONE, path)
        return result

    monkeypatch.setattr(checkpoint_folder.FileSystemReader, "read_data", read)
    said, _, _ = load(path, ONE, 0, Topology(), trained=True)
    assert said is not None and "was replaced while it was loaded" in said and "Load it again" in said


def test_each_byte_is_read_by_those_who_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked is what is read, once: a model alone has the optimizer's items unread."""
    path, looked = tmp_path / "checkpoint", []
    save(0, 1, ONE, path)
    each = checkpoint_checks._each

    def watched(folder: Path, items: Any) -> Any:
        looked.extend(items)
        return each(folder, items)

    monkeypatch.setattr(checkpoint_checks, "_each", watched)
    size = (path / "__0_0.distcp").stat().st_size
    model, optimizer = other(ONE, 0, trained=True)
    load_checkpoint(path, model, optimizer, Topology())
    assert len(set(looked)) == len(looked) and sum(item.length for item in looked) == size
    looked.clear()
    load_checkpoint(path, model, None, Topology())
    assert len(set(looked)) == len(looked) and 0 < sum(item.length for item in looked) < size / 2
