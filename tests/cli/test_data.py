"""The command's training data: the split into training and held-out files, and batches per rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fusedmoe.cli.data import Batches, hash_seed, is_held_out, load_corpus
from fusedmoe.errors import ConfigError
from fusedmoe.models.transformer import IGNORE


def write_files(root: Path, count: int) -> list[str]:
    names = [f"part{i % 3}/text{i}.txt" for i in range(count)]
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"This is {name}.")
    return names


def test_each_file_is_in_exactly_one_split(tmp_path: Path) -> None:
    names = write_files(tmp_path, 40)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\0\0")
    corpus = load_corpus(tmp_path, "*", 0.3)
    sides = [bytes(side.numpy()).decode() for side in (corpus.train, corpus.held_out)]
    for name in names:
        assert [f"This is {name}.\0" in side for side in sides] == [not is_held_out(name, 0.3), is_held_out(name, 0.3)]
    assert corpus.train_files + corpus.held_out_files == 40
    assert "PNG" not in sides[0] + sides[1]

    for name in names[:20]:
        (tmp_path / name).unlink()
    fewer = load_corpus(tmp_path, "*", 0.3)
    held_out = bytes(fewer.held_out.numpy()).decode()
    assert all((name in held_out) == is_held_out(name, 0.3) for name in names[20:])
    assert fewer.fingerprint != corpus.fingerprint
    assert fewer.fingerprint == load_corpus(tmp_path, "*", 0.3).fingerprint


def test_split_change_changes_fingerprint(tmp_path: Path) -> None:
    write_files(tmp_path, 40)
    assert load_corpus(tmp_path, "*", 0.3).fingerprint != load_corpus(tmp_path, "*", 0.6).fingerprint


def test_held_out_share_is_close_to_fraction() -> None:
    share = sum(is_held_out(f"a/{i}.py", 0.05) for i in range(10_000)) / 10_000
    assert 0.04 < share < 0.06


def test_pattern_selects_files(tmp_path: Path) -> None:
    write_files(tmp_path, 6)
    (tmp_path / "notes.md").write_text("A note.")
    (tmp_path / "more.md").write_text("More.")
    assert load_corpus(tmp_path, "*.md", 0.5).train_files == 1


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_both_splits_are_non_empty_for_extreme_fractions(tmp_path: Path, fraction: float) -> None:
    write_files(tmp_path, 3)
    corpus = load_corpus(tmp_path, "*", fraction)
    assert min(corpus.train_files, corpus.held_out_files) == 1


def test_single_file_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 101)))
    for source in (tmp_path, tmp_path / "book.txt"):
        corpus = load_corpus(source, "*", 0.2)
        assert bytes(corpus.train.numpy()) == bytes(range(1, 81)) + b"\0"
        assert bytes(corpus.held_out.numpy()) == bytes(range(81, 101)) + b"\0"


@pytest.mark.slow
def test_default_corpus_is_standard_library_without_packages() -> None:
    corpus = load_corpus(None, "*", 0.05)
    text = bytes(corpus.train.numpy()) + bytes(corpus.held_out.numpy())
    assert len(text) > 2_000_000
    assert b"class OrderedDict" in text  # collections/__init__.py
    assert b"def all_reduce(" not in text  # torch, in site-packages
    assert 0.01 < corpus.held_out_files / (corpus.train_files + corpus.held_out_files) < 0.1


def test_unreadable_corpus_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_corpus(tmp_path / "nowhere", "*", 0.1)
    with pytest.raises(ConfigError, match="no text"):
        load_corpus(tmp_path, "*", 0.1)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        load_corpus(None, "*", 1.0)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path} is neither a folder nor a file"):
            load_corpus(path, "*", 0.1)
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(ConfigError, match=f"data: .*{name[-1]} "):
            load_corpus(tmp_path / name, "*", 0.1)
    (tmp_path / "text").write_text("some text")
    for pattern in ("/etc/*", "", "a**b", "[\0"):
        with pytest.raises(ConfigError, match="--pattern|no text in"):
            load_corpus(tmp_path, pattern, 0.1)
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**43)
    for source in (tmp_path, tmp_path / "huge"):
        with pytest.raises(ConfigError, match=f"reading {source} needs 26388 GB of memory, but this machine has"):
            load_corpus(source, "*", 0.1)
    with pytest.raises(ConfigError, match="less than one sequence"):
        Batches(torch.zeros(10, dtype=torch.uint8), 2, 10, mask=None)


def test_undecodable_file_names_are_read(tmp_path: Path) -> None:
    for name in ("\udcff.txt", "ä.txt", "a.txt"):
        (tmp_path / name).write_text("some text")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "pipe.txt").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe.txt")
    corpus = load_corpus(tmp_path, "*", 0.3)
    assert corpus.train_files + corpus.held_out_files == 3
    assert corpus.fingerprint == load_corpus(tmp_path, "*.txt", 0.3).fingerprint


def test_causal_targets_are_next_bytes() -> None:
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    batch = Batches(text, 4, 9, mask=None).training_batch(1, 2, 3)
    assert batch.tokens_BL.shape == batch.targets_BL.shape == (4, 9)
    assert torch.equal(batch.tokens_BL[:, 1:], batch.targets_BL[:, :-1])
    starts = text.unfold(0, 10, 1).long()
    for tokens, targets in zip(batch.tokens_BL, batch.targets_BL, strict=True):
        window = torch.cat((tokens, targets[-1:]))
        assert (starts == window).all(1).any()


def test_batch_depends_only_on_seed_step_and_replica() -> None:
    text = torch.randint(256, (5000,), dtype=torch.uint8)
    batches = Batches(text, 2, 16, mask=None)
    first = batches.training_batch(1, 2, 3)
    torch.manual_seed(99)
    assert torch.equal(first.tokens_BL, Batches(text, 2, 16, mask=None).training_batch(1, 2, 3).tokens_BL)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first.tokens_BL, batches.training_batch(*other).tokens_BL)


def test_masked_batches_follow_bert_masking_shares() -> None:
    text = torch.randint(256, (5000,), dtype=torch.uint8)
    batch = Batches(text, 50, 400, mask=256).training_batch(1, 2, 3)
    asked = batch.targets_BL != IGNORE
    assert 0.14 < asked.float().mean() < 0.16
    hidden = batch.tokens_BL == 256
    assert 0.78 < (hidden & asked).sum() / asked.sum() < 0.82
    assert not (hidden & ~asked).any()
    kept = batch.tokens_BL == batch.targets_BL
    assert 0.08 < (kept & asked).sum() / asked.sum() < 0.12


def test_held_out_windows_are_fixed_and_cover_text() -> None:
    text = torch.arange(1000) % 256
    batches = Batches(text.to(torch.uint8), 5, 9, mask=None)
    windows = torch.cat([batches.held_out_batch(i, 4).tokens_BL for i in range(4)])
    again = torch.cat([batches.held_out_batch(i, 4).tokens_BL for i in range(4)])
    assert torch.equal(windows, again)
    assert torch.equal(windows[0], text[:9])
    assert torch.equal(windows[-1], text[990:999])
    assert len({tuple(window.tolist()) for window in windows}) == 20


def test_hash_seed_differs_for_different_parts() -> None:
    assert len({hash_seed("a", 1, 2), hash_seed("a", 12), hash_seed("a", 2, 1), hash_seed("b", 1, 2)}) == 4
    assert 0 <= hash_seed("a") < 2**63
