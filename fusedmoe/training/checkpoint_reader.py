"""Checkpoint reader: verify the digests of all required bytes, then copy them into tensors."""

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
from fusedmoe.training.checkpoint_folder import find_checkpoint, local_tensor, require_writable
from fusedmoe.training.checkpoint_index import (
    DAMAGE_FIX,
    FilePart,
    damage_error,
    read_index,
    require_intact,
    stored_digest,
    tensor_key,
)
from fusedmoe.training.lossless_conversion import is_lossy, require_convertible, require_lossless
from fusedmoe.training.plain_values import byte_buffer, decode_value

# The default limit is 1,024 open files per process.
_MAX_OPEN_FILES = 256


def index_digest(path: Path) -> str | None:
    folder = find_checkpoint(path)
    try:
        return None if folder is None else stored_digest(folder)
    except OSError:
        return None


class CheckpointReader:
    """Open checkpoint. Call `close` after use.

    Up to 256 files stay open, whose bytes remain available if another save replaces the checkpoint.

    Attributes:
        metadata: entries by key, as in torch.distributed.checkpoint.
        digest: digest of the index, unique to each save.
    Raises:
        ConfigError: no checkpoint at `path`, a later format, or a damaged checkpoint.
    """

    def __init__(self, path: Path) -> None:
        folder = find_checkpoint(path)
        if folder is None:
            raise ConfigError(f"there is no checkpoint at {path}; pass the path of a save that all ranks can access")
        self._path, self._folder = path, folder
        index = read_index(path, folder)
        self.metadata, self.digest, self._written = index.metadata, index.digest, index.written
        self._headers = {file_part.file: file_part for file_part in index.written.headers}
        self._files: dict[str, BufferedReader] = {}
        self._checked: set[str] = set()
        self._check_sizes()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def check(self, targets: dict[str, Any]) -> None:
        """Verify the digests of all file parts required for `targets`.

        Raises:
            ConfigError: a part is damaged, or a target tensor cannot be written in place.
        """
        tensors = self._tensor_targets(targets)
        for key, target in tensors.items():
            require_writable(local_tensor(target), f"checkpoint {self._path} was not loaded: {key}")
        file_parts = {self._stored_part(item) for item in self._plan_reads(tensors, PlainPlanner())}
        for key in targets:
            if key in self._written.values:
                file_part, count = self._written.values[key]
                owned = [tensor_key(key, number) for number in range(count)]
                file_parts |= {
                    file_part,
                    *(self._stored_part(item) for item in self._plan_reads(self._empty_tensors(owned), PlainPlanner())),
                }
        for file_part in sorted(file_parts):
            with self._open_file(file_part.file) as file:
                if file_part.file in self._headers.keys() - self._checked:
                    require_intact(self._path, file, self._headers[file_part.file])
                    self._checked.add(file_part.file)
                require_intact(self._path, file, file_part)

    def check_conversions(self, targets: dict[str, Any], target_dtypes: dict[str, torch.dtype]) -> None:
        saved: dict[str, Any] = self.metadata.state_dict_metadata
        error_prefix = f"checkpoint {self._path} was not loaded"
        for key, dtype in target_dtypes.items():
            require_convertible(error_prefix, key, saved[key].properties.dtype, dtype)
        narrowed = {
            key: targets[key] for key, dtype in target_dtypes.items() if is_lossy(saved[key].properties.dtype, dtype)
        }
        if narrowed:
            self._read_tensors(narrowed, _ConversionPlanner(target_dtypes, error_prefix))

    def read_values(self, targets: dict[str, Any]) -> None:
        for key in targets:
            if key in self._written.values:
                targets[key] = self._read_value(key)

    def read_tensors(self, targets: dict[str, Any]) -> None:
        """Read into the tensors in `targets`. Raise `ConfigError` if the checkpoint was replaced meanwhile."""
        replaced = ConfigError(
            f"the checkpoint {self._path} was replaced while it was loaded, and some tensors may have new values. "
            "Load it again; save to another path while a load is running."
        )
        try:
            self._read_tensors(self._tensor_targets(targets), PlainPlanner())
        except (OSError, ConfigError) as error:
            if index_digest(self._path) == self.digest:
                raise
            raise replaced from error
        # Beyond the limit, files are reopened by name and may be from a later save.
        if len(self._files) == _MAX_OPEN_FILES and index_digest(self._path) != self.digest:
            raise replaced

    def _tensor_targets(self, targets: dict[str, Any]) -> dict[str, Any]:
        return {key: target for key, target in targets.items() if key not in self._written.values}

    def _read_value(self, key: str) -> Any:
        file_part, count = self._written.values[key]

        def fetch(number: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
            own = tensor_key(key, number)
            saved: Any = self.metadata.state_dict_metadata.get(own)
            if number >= count or saved.properties.dtype != dtype or saved.size != shape:
                raise ValueError("a tensor has another dtype or shape")
            target = self._empty_tensors([own])
            self._read_tensors(target, PlainPlanner())
            return target[own]

        try:
            line = json.loads(self._read_bytes(file_part).numpy().tobytes())
            return decode_value(json.dumps(line["value"]), fetch)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ConfigError(f"{damage_error(self._path, file_part)} ({error})") from error

    def _read_tensors(self, targets: dict[str, Any], planner: PlainPlanner) -> None:
        file_part, whole = None, torch.empty(0, device="cpu")
        # Sorted: a stored part that overlaps several target parts is read once.
        for item in sorted(self._plan_reads(targets, planner), key=self._stored_part):
            if file_part != self._stored_part(item):
                file_part = self._stored_part(item)
                whole = self._read_elements(item, file_part)
            value = whole
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)

    def _empty_tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        entries: Any = self.metadata.state_dict_metadata
        return {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype, device="cpu") for key in keys}

    def _read_elements(self, item: ReadItem, file_part: FilePart) -> Tensor:
        entry: Any = self.metadata.state_dict_metadata[item.storage_index.fqn]
        sizes = entry.chunks[item.storage_index.index].sizes
        return self._read_bytes(file_part).view(entry.properties.dtype).view(sizes)

    def _read_bytes(self, file_part: FilePart) -> Tensor:
        data = torch.empty(file_part.length, dtype=torch.uint8, device="cpu")
        with self._open_file(file_part.file) as file:
            file.seek(file_part.offset)
            if file.readinto(byte_buffer(data)) != file_part.length:
                raise damage_error(self._path, file_part)
        return data

    def _plan_reads(self, targets: dict[str, Any], planner: PlainPlanner) -> list[ReadItem]:
        planner.set_up_planner(targets, self.metadata, True)
        return planner.create_local_plan().items

    def _stored_part(self, item: ReadItem) -> FilePart:
        offset = item.storage_index.offset
        assert offset is not None
        return self._written.parts[item.storage_index.fqn, tuple(offset)]

    @contextmanager
    def _open_file(self, name: str) -> Iterator[BufferedReader]:
        file = self._files.get(name)
        if file is not None:
            yield file
        elif len(self._files) < _MAX_OPEN_FILES:
            self._files[name] = (self._folder / name).open("rb")
            yield self._files[name]
        else:
            with (self._folder / name).open("rb") as opened:
                yield opened

    def _check_sizes(self) -> None:
        damaged = f"the checkpoint {self._path} is damaged:"
        ends: dict[str, int] = {}
        for file_part in sorted(self._written.all()):
            # Parts that share bytes would let a small file fill any amount of memory.
            if file_part.offset < ends.get(file_part.file, 0):
                raise ConfigError(f"{damaged} two parts overlap in {file_part.file}. {DAMAGE_FIX}")
            ends[file_part.file] = file_part.offset + file_part.length
        for name, end in ends.items():
            file = self._folder / name
            size = file.stat().st_size if file.is_file() else 0
            if size != end:
                raise ConfigError(f"{damaged} {name} has {size} bytes of {end}. {DAMAGE_FIX}")


class PlainPlanner(DefaultLoadPlanner):
    """Load planner for flat state dicts."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class _ConversionPlanner(PlainPlanner):
    """Planner that reads tensors in their stored dtype, checks the conversion of each value, and discards them."""

    def __init__(self, target_dtypes: dict[str, torch.dtype], error_prefix: str) -> None:
        super().__init__()
        self._target_dtypes, self._error_prefix = target_dtypes, error_prefix

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        saved: Any = self.metadata
        dtype = saved.state_dict_metadata[read_item.dest_index.fqn].properties.dtype
        return torch.empty(read_item.lengths, dtype=dtype, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        key = read_item.dest_index.fqn
        require_lossless(self._error_prefix, key, tensor, self._target_dtypes[key])
