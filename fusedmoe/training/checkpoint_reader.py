"""Reads checkpoints in parts: first checks every byte that is to be read, then copies it into tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from fusedmoe.errors import ConfigError
from fusedmoe.training.checkpoint_folder import own_part, require_writable, saved_at
from fusedmoe.training.checkpoint_index import (
    CURE,
    INDEX,
    FilePart,
    check_part,
    damaged_at,
    ends_of_files,
    read_index,
    stated_digest,
    tensor_key,
)
from fusedmoe.training.kept_numbers import may_lose, refuse_lost, require_convertible
from fusedmoe.training.plain_values import byte_buffer, decode_value

# Open files of a checkpoint: a process may have 1,024 by default.
_MOST_OPEN = 256


def index_digest(path: Path) -> str | None:
    """Return the digest of the index at `path`, which changes with each save; None where none can be read."""
    folder = saved_at(path)
    try:
        return None if folder is None else stated_digest(folder)
    except OSError:
        return None


class Folder:
    """The folder with the checkpoint saved to `path`, opened for loading.

    Files stay open from their check to their reading, up to a number of files: a save that replaces the checkpoint
    meanwhile removes names, and the bytes of open files remain. Close it after use.

    Attributes:
        metadata: entries by key, as torch.distributed.checkpoint has them.
        digest: of the index, which no two saves have in common.
    Raises:
        ConfigError: there is none, it is of another format, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        folder = saved_at(path)
        if folder is None:
            raise ConfigError(f"there is no checkpoint at {path}; give the path of a save, one that all ranks can see")
        if not (folder / INDEX).is_file():
            raise ConfigError(
                f"the checkpoint {path} is of an earlier format, which holds pickles. Convert it: fusedmoe "
                f"convert-checkpoint {path} NEW"
            )
        self._path, self._folder = path, folder
        index = read_index(path, folder)
        self.metadata, self.digest, self._written = index.metadata, index.digest, index.written
        self._headers = {stretch.file: stretch for stretch in index.written.headers}
        self._files: dict[str, BufferedReader] = {}
        self._checked: set[str] = set()
        self._check_sizes()

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()

    def check(self, targets: dict[str, Any]) -> None:
        """Raises `ConfigError` if a part of the files that `read` would read is damaged."""
        for key, target in self._tensors(targets).items():
            require_writable(own_part(target), f"checkpoint {self._path} was not loaded: {key}")
        stretches = {self._part(item) for item in self._plan(self._tensors(targets), PlainPlanner())}
        for key in targets:
            if key in self._written.values:
                stretch, count = self._written.values[key]
                owned = [tensor_key(key, number) for number in range(count)]
                stretches |= {stretch, *(self._part(item) for item in self._plan(self._empty(owned), PlainPlanner()))}
        for stretch in sorted(stretches):
            with self._opened(stretch.file) as file:
                if stretch.file in self._headers.keys() - self._checked:
                    check_part(self._path, file, self._headers[stretch.file])
                    self._checked.add(stretch.file)
                check_part(self._path, file, stretch)

    def check_numbers(self, targets: dict[str, Any], become: dict[str, torch.dtype]) -> None:
        """Raises `ConfigError` if some number that `read` would read is lost in the dtype it is to have, by key."""
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        refused = f"checkpoint {self._path} was not loaded"
        for key, dtype in become.items():
            require_convertible(refused, key, saved[key].properties.dtype, dtype)
        # Most loads convert nothing, and read nothing twice.
        narrowed = {key: targets[key] for key, dtype in become.items() if may_lose(saved[key].properties.dtype, dtype)}
        if narrowed:
            self._read_tensors(narrowed, _NumberPlanner(become, refused))

    def read_values(self, targets: dict[str, Any]) -> None:
        """Reads the values whose keys are in `targets`. `ConfigError` for one that is none."""
        for key in targets:
            if key in self._written.values:
                targets[key] = self._value(key)

    def read_tensors(self, targets: dict[str, Any]) -> None:
        """Reads the tensors and DTensors in `targets` in place.

        Raises:
            ConfigError: the checkpoint was replaced or removed since it was opened.
        """
        replaced = ConfigError(
            f"the checkpoint {self._path} was replaced while it was loaded, and some tensors may have its numbers. "
            "Load it again; save to another path as long as others load."
        )
        try:
            self._read_tensors(self._tensors(targets), PlainPlanner())
        except (OSError, ConfigError) as error:
            if index_digest(self._path) == self.digest:
                raise
            raise replaced from error
        # A file that was opened by its name again may be another one.
        if len(self._files) == _MOST_OPEN and index_digest(self._path) != self.digest:
            raise replaced

    def _tensors(self, targets: dict[str, Any]) -> dict[str, Any]:
        return {key: target for key, target in targets.items() if key not in self._written.values}

    def _value(self, key: str) -> Any:
        stretch, count = self._written.values[key]

        def fetch(number: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
            own = tensor_key(key, number)
            saved: Any = self.metadata.state_dict_metadata.get(own)
            if number >= count or saved.properties.dtype != dtype or saved.size != shape:
                raise ValueError("one of its tensors is another")
            target = self._empty([own])
            self._read_tensors(target, PlainPlanner())
            return target[own]

        try:
            line = json.loads(self._bytes(stretch).numpy().tobytes())
            return decode_value(json.dumps(line["value"]), fetch)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ConfigError(f"{damaged_at(self._path, stretch)} ({error})") from error

    def _read_tensors(self, targets: dict[str, Any], planner: PlainPlanner) -> None:
        stretch, whole = None, torch.empty(0, device="cpu")
        # Several parts of this rank may lie in one that was written: it is read once.
        for item in sorted(self._plan(targets, planner), key=self._part):
            if stretch != self._part(item):
                stretch = self._part(item)
                whole = self._elements(item, stretch)
            value = whole
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)

    def _empty(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return tensors to read those of values into."""
        entries: Any = self.metadata.state_dict_metadata
        return {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype, device="cpu") for key in keys}

    def _elements(self, item: ReadItem, stretch: FilePart) -> Tensor:
        entry: Any = self.metadata.state_dict_metadata[item.storage_index.fqn]
        sizes = entry.chunks[item.storage_index.index].sizes
        return self._bytes(stretch).view(entry.properties.dtype).view(sizes)

    def _bytes(self, stretch: FilePart) -> Tensor:
        data = torch.empty(stretch.length, dtype=torch.uint8, device="cpu")
        with self._opened(stretch.file) as file:
            file.seek(stretch.offset)
            if file.readinto(byte_buffer(data)) != stretch.length:
                raise damaged_at(self._path, stretch)
        return data

    def _plan(self, targets: dict[str, Any], planner: PlainPlanner) -> list[ReadItem]:
        planner.set_up_planner(targets, self.metadata, True)
        return planner.create_local_plan().items

    def _part(self, item: ReadItem) -> FilePart:
        offset = item.storage_index.offset
        assert offset is not None
        return self._written.parts[item.storage_index.fqn, tuple(offset)]

    @contextmanager
    def _opened(self, name: str) -> Iterator[BufferedReader]:
        file = self._files.get(name)
        if file is not None:
            yield file
        elif len(self._files) < _MOST_OPEN:
            self._files[name] = (self._folder / name).open("rb")
            yield self._files[name]
        else:
            with (self._folder / name).open("rb") as opened:
                yield opened

    def _check_sizes(self) -> None:
        for name, end in ends_of_files(self._path, (stretch[:3] for stretch in self._written.all())).items():
            file = self._folder / name
            size = file.stat().st_size if file.is_file() else 0
            if size != end:
                raise ConfigError(f"the checkpoint {self._path} is damaged: {name} has {size} bytes of {end}. {CURE}")


class PlainPlanner(DefaultLoadPlanner):
    """Plan of a load whose entries are not nested."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class _NumberPlanner(PlainPlanner):
    """Reads tensors in the dtype in which they were saved, looks at their numbers, and keeps nothing."""

    def __init__(self, become: dict[str, torch.dtype], refused: str) -> None:
        super().__init__()
        self._become, self._refused = become, refused

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        saved: Any = self.metadata
        dtype = saved.state_dict_metadata[read_item.dest_index.fqn].properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = read_item.dest_index.fqn
        refuse_lost(self._refused, key, tensor, self._become[key])
