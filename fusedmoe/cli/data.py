"""Text data as bytes: training and held-out files, and the windows that form a batch.

The split depends only on relative paths and contents, and a batch only on seed, step and data-parallel rank: a resumed
job uses the same batches.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.files import read_regular_file
from fusedmoe.models.transformer import IGNORE

# Folders of the standard library with third-party packages, or tests with synthetic text.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# Copies of the text in memory while loading: files, concatenation, tensor.
_MEMORY_COPIES = 3


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text (uint8 tensors) and their origin."""

    train: Tensor
    held_out: Tensor
    source: str
    train_files: int
    held_out_files: int
    # Digest of names, split and all bytes.
    fingerprint: str


def hash_seed(*parts: int | str) -> int:
    digest = hashlib.blake2b(_encoded("/".join(map(str, parts))), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _encoded(text: str) -> bytes:
    # Paths may contain surrogates.
    return text.encode("utf-8", "surrogatepass")


def is_held_out(path: str, fraction: float) -> bool:
    """Return whether a hash of this relative path is in the held-out fraction."""
    return hash_seed("held out", path) < fraction * 2**63


def random_corpus(size: int) -> Corpus:
    """Return random bytes, the same on every rank."""
    text = torch.randint(256, (2, size), generator=torch.Generator().manual_seed(0), device="cpu").to(torch.uint8)
    return Corpus(text[0], text[1], "random bytes", 1, 1, hashlib.blake2b(text.numpy().tobytes()).hexdigest())


def load_corpus(source: Path | None, pattern: str, held_out: float) -> Corpus:
    """Read all text files of a folder into memory and split them into training and held-out text.

    Args:
        source: a folder, read recursively, or one file; None: the source of Python's standard library.
        pattern: glob of the files, as in `Path.rglob`.
        held_out: fraction of the files to hold out, at least one file. A single file is cut at its end.
    Raises:
        ConfigError: invalid arguments, no or unreadable text files, or too little memory.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"held-out fraction {held_out} must be between 0 and 1")
    root = Path(sysconfig.get_path("stdlib")) if source is None else source
    # Files with a zero byte are binary.
    texts = {path: text for path, text in _read(root, pattern, library=source is None) if text and b"\0" not in text}
    if not texts:
        raise ConfigError(f"data: no text files in {root} match {pattern!r}; check --data and --pattern")
    out = {path for path in texts if is_held_out(path, held_out)}
    if len(texts) == 1:
        ((path, text),) = texts.items()
        cut = len(text) - max(1, round(held_out * len(text)))
        texts, out = {path: text[:cut], path + " (end)": text[cut:]}, {path + " (end)"}
    # The hash selected no file.
    elif not out:
        out = {min(texts, key=lambda path: hash_seed("held out", path))}
    elif len(out) == len(texts):
        out.remove(max(out, key=lambda path: hash_seed("held out", path)))
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(texts):
        digest.update(_encoded(f"{path}\0{path in out}\0{len(texts[path])}\0"))
        digest.update(texts[path])
    # The zero byte marks the end of a file for the model.
    sides = [b"".join(texts[path] + b"\0" for path in sorted(texts) if (path in out) == side) for side in (False, True)]
    train, rest = (torch.frombuffer(bytearray(side), dtype=torch.uint8) for side in sides)
    return Corpus(train, rest, str(root), len(texts) - len(out), len(out), digest.hexdigest())


def _read(root: Path, pattern: str, library: bool) -> Iterator[tuple[str, bytes]]:
    sizes = dict[Path, int]()
    for path in _matches(root, pattern, library):
        with suppress(OSError):
            if path.is_file():
                sizes[path] = path.stat().st_size
    # The kernel's out-of-memory killer would leave no message.
    needed, room = _MEMORY_COPIES * sum(sizes.values()), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise ConfigError(
            f"data: reading {root} needs {needed / 1e9:.0f} GB of memory, but this machine has {room / 1e9:.0f} GB; "
            "select fewer files with --data and --pattern"
        )
    for path, size in sizes.items():
        try:
            data = read_regular_file(path, size)
        except OSError as error:
            # The folder may contain unreadable files of other users.
            if path != root and isinstance(error, FileNotFoundError | PermissionError):
                continue
            raise ConfigError(f"data: {path} cannot be read: {error.strerror or error}") from error
        yield path.name if path == root else path.relative_to(root).as_posix(), data


def _matches(root: Path, pattern: str, library: bool) -> list[Path]:
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise ConfigError(f"data: {root} {reason}") from error
    if stat.S_ISREG(mode):
        return [root]
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"data: {root} is neither a folder nor a file")
    try:
        found = sorted(root.rglob("*.py" if library else pattern))
    except OSError as error:
        raise ConfigError(f"data: {root} cannot be read: {error}") from error
    except (IndexError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"--pattern {pattern!r} is not a valid glob for {root} ({error}); use one such as '*.md'"
        ) from error
    return [path for path in found if not library or _EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts)]


class ByteBatch(NamedTuple):
    """Input tokens and targets, both [B, L] int64. `IGNORE` marks positions without a target."""

    tokens_BL: Tensor
    targets_BL: Tensor


class Batches:
    """Cut batches out of a byte tensor. Raises `ConfigError` if it is shorter than one sequence.

    Args:
        text: [bytes] uint8.
        batch: sequences per batch, B.
        length: bytes per sequence, L.
        mask: mask token of a masked model; None for a causal model, whose targets are the next bytes.
    """

    def __init__(self, text: Tensor, batch: int, length: int, *, mask: int | None) -> None:
        self._text, self._batch, self._mask = text, batch, mask
        self._window_bytes = length if mask is not None else length + 1
        if len(text) < self._window_bytes:
            raise ConfigError(
                f"data: the training or held-out text has {len(text)} bytes, less than one sequence of "
                f"{self._window_bytes}; use more text (--data), a shorter --seq-len, or another --held-out"
            )

    def training_batch(self, seed: int, step: int, replica: int) -> ByteBatch:
        generator = torch.Generator().manual_seed(hash_seed("batch", seed, step, replica))
        starts = torch.randint(
            len(self._text) - self._window_bytes + 1, (self._batch,), generator=generator, device="cpu"
        )
        return self._make_batch(starts, generator)

    def held_out_batch(self, index: int, count: int) -> ByteBatch:
        """Return evaluation batch `index` of `count`: fixed windows, evenly spaced over the text."""
        places = torch.arange(index * self._batch, (index + 1) * self._batch, device="cpu")
        last = len(self._text) - self._window_bytes
        starts = places * last // max(1, count * self._batch - 1)
        return self._make_batch(starts, torch.Generator().manual_seed(hash_seed("held out", index, count)))

    def _make_batch(self, starts: Tensor, generator: torch.Generator) -> ByteBatch:
        windows = self._text[starts[:, None] + torch.arange(self._window_bytes, device="cpu")].long()
        if self._mask is None:
            return ByteBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        # BERT (Devlin et al. 2019, §3.1): predict 15% of the bytes; mask 80% of these, replace 10% by a random byte.
        uniform = torch.rand(windows.shape, generator=generator, device="cpu")
        is_predicted = uniform < 0.15
        other = torch.randint(256, windows.shape, generator=generator, device="cpu")
        tokens = torch.where(uniform < 0.12, self._mask, torch.where(uniform < 0.135, other, windows))
        return ByteBatch(tokens, torch.where(is_predicted, windows, IGNORE))
