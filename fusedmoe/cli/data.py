"""Text as bytes: which files train, which are held out, and which windows make up a batch.

Everything here is a pure function of its arguments: the split of the files' relative paths and contents, a batch of the
seed, the step and the data-parallel rank. So a job that is stopped and resumed sees the batches it would have seen.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.files import regular_bytes
from fusedmoe.models.transformer import IGNORE

# Folders of the standard library that hold other people's packages, or tests with made-up text.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

# Files as they are read, together, and as a tensor.
_COPIES = 3


@dataclass(frozen=True)
class Corpus:
    """Two strings of bytes (uint8 tensors), one to train on and one held out, and what they were made of."""

    train: Tensor
    held_out: Tensor
    # The folder or file.
    source: str
    train_files: int
    held_out_files: int
    # Of all bytes and the split.
    fingerprint: str


def mix(*parts: int | str) -> int:
    """Returns a 63-bit number that depends on all parts, for seeding a generator."""
    digest = hashlib.blake2b(_encoded("/".join(map(str, parts))), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _encoded(text: str) -> bytes:
    # Names of files may be in no encoding.
    return text.encode("utf-8", "surrogatepass")


def is_held_out(path: str, fraction: float) -> bool:
    """Returns whether the file of a relative path (with forward slashes) is held out: a hash of the path decides."""
    return mix("held out", path) < fraction * 2**63


def random_corpus(size: int) -> Corpus:
    """Makes random bytes, the same on every rank, for steps from which nothing needs to be learned."""
    text = torch.randint(256, (2, size), generator=torch.Generator().manual_seed(0), device="cpu").to(torch.uint8)
    return Corpus(text[0], text[1], "random bytes", 1, 1, hashlib.blake2b(text.numpy().tobytes()).hexdigest())


def load_corpus(source: Path | None, pattern: str, held_out: float) -> Corpus:
    """Reads all text files of a folder into memory and splits them.

    Args:
        source: a folder (read with everything below it) or one file; None: the Python standard library's source.
        pattern: which files of the folder, as `Path.rglob` understands it.
        held_out: the share of the files to hold out, one at least; of a single file its end.
    """
    if not 0 < held_out < 1:
        raise ConfigError(f"held-out fraction {held_out} must lie between 0 and 1")
    root = Path(sysconfig.get_path("stdlib")) if source is None else source
    # A zero byte marks a binary file; it is also the mark that ends each text below.
    texts = {path: text for path, text in _read(root, pattern, library=source is None) if text and b"\0" not in text}
    if not texts:
        raise ConfigError(f"data: no text in {root} (files that match {pattern!r}); see --data and --pattern")
    # By the relative path alone: a file stays on its side whatever else comes or goes.
    out = {path for path in texts if is_held_out(path, held_out)}
    if len(texts) == 1:
        ((path, text),) = texts.items()
        cut = len(text) - max(1, round(held_out * len(text)))
        texts, out = {path: text[:cut], path + " (end)": text[cut:]}, {path + " (end)"}
    # So few files that the hash took none: take the file that is nearest to it.
    elif not out:
        out = {min(texts, key=lambda path: mix("held out", path))}
    elif len(out) == len(texts):
        out.remove(max(out, key=lambda path: mix("held out", path)))
    # The fingerprint covers names, sides and bytes: ranks compare it, and a resumed job its checkpoint's.
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(texts):
        digest.update(_encoded(f"{path}\0{path in out}\0{len(texts[path])}\0"))
        digest.update(texts[path])
    # A zero byte ends every file, so that the model can know where one stops.
    sides = [b"".join(texts[path] + b"\0" for path in sorted(texts) if (path in out) == side) for side in (False, True)]
    train, rest = (torch.frombuffer(bytearray(side), dtype=torch.uint8) for side in sides)
    return Corpus(train, rest, str(root), len(texts) - len(out), len(out), digest.hexdigest())


def _read(root: Path, pattern: str, library: bool) -> Iterator[tuple[str, bytes]]:
    """Yields names and contents of regular files that are not empty; a pipe or a device would be waited for."""
    sizes = {path: size for path in _matches(root, pattern, library) if (size := _size(path))}
    # Told before reading: a process that the kernel kills for its memory says nothing.
    needed, room = _COPIES * sum(sizes.values()), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise ConfigError(
            f"data: reading {root} takes {needed / 1e9:.0f} GB of memory, and this machine has {room / 1e9:.0f} GB; "
            "choose fewer files with --data and --pattern"
        )
    for path, size in sizes.items():
        try:
            # A file may have become a pipe since it was looked at; this read does not wait for one.
            data = regular_bytes(path, size)
        except OSError as error:
            # A folder of text that is not ours may hold files that we must not read.
            if path != root and isinstance(error, FileNotFoundError | PermissionError):
                continue
            raise ConfigError(f"data: {path} cannot be read: {error.strerror or error}") from error
        yield path.name if path == root else path.relative_to(root).as_posix(), data


def _matches(root: Path, pattern: str, library: bool) -> list[Path]:
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        raise ConfigError(f"data: {root} does not exist") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"data: {root} cannot be read: {error}") from error
    if stat.S_ISREG(mode):
        return [root]
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"data: {root} is neither a folder nor a file")
    try:
        found = sorted(root.rglob("*.py" if library else pattern))
    except (IndexError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"--pattern {pattern!r} is none for files below {root} ({error}); give one such as '*.md'"
        ) from error
    except OSError as error:
        raise ConfigError(f"data: {root} cannot be read: {error}") from error
    return [path for path in found if not library or _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts)]


def _size(path: Path) -> int:
    """Returns the bytes of a file; 0 for anything else, and for what cannot be looked at."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


class ByteBatch(NamedTuple):
    """Tokens that a model reads and targets that it should say: both [B, L] int64; `IGNORE` where no target counts."""

    tokens_BL: Tensor
    targets_BL: Tensor


class Batches:
    """Cuts batches out of a string of bytes.

    Args:
        batch, length: B sequences of L bytes.
        mask: the symbol that hides a byte, for a masked model; None: a causal one, whose targets are the next bytes.
    """

    def __init__(self, text: Tensor, batch: int, length: int, *, mask: int | None) -> None:
        self._text, self._batch, self._mask = text, batch, mask
        self._span = length if mask is not None else length + 1
        if len(text) < self._span:
            raise ConfigError(
                f"data: {len(text)} bytes, all there are to train on or all that are held out, are less than one "
                f"sequence of {self._span}; give more text (--data), a shorter --seq-len, or another --held-out"
            )

    def training(self, seed: int, step: int, replica: int) -> ByteBatch:
        """Cuts the batch of a step and a replica: windows at random places."""
        generator = torch.Generator().manual_seed(mix("batch", seed, step, replica))
        starts = torch.randint(len(self._text) - self._span + 1, (self._batch,), generator=generator, device="cpu")
        return self._cut(starts, generator)

    def held_out(self, index: int, of: int) -> ByteBatch:
        """Cuts batch `index` of `of`: together they are the same windows every time, spread evenly over the text."""
        places = torch.arange(index * self._batch, (index + 1) * self._batch, device="cpu")
        last = len(self._text) - self._span
        starts = places * last // max(1, of * self._batch - 1)
        return self._cut(starts, torch.Generator().manual_seed(mix("held out", index, of)))

    def _cut(self, starts: Tensor, generator: torch.Generator) -> ByteBatch:
        windows = self._text[starts[:, None] + torch.arange(self._span, device="cpu")].long()
        if self._mask is None:
            return ByteBatch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        # BERT (Devlin et al. 2019, section 3.1): 15% are asked for; of those 80% are hidden, 10% are another byte.
        chance = torch.rand(windows.shape, generator=generator, device="cpu")
        asked = chance < 0.15
        other = torch.randint(256, windows.shape, generator=generator, device="cpu")
        tokens = torch.where(chance < 0.12, self._mask, torch.where(chance < 0.135, other, windows))
        return ByteBatch(tokens, torch.where(asked, windows, IGNORE))
