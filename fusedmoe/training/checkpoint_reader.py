"""Checkpoint reader: verify digests and conversions of all required bytes, then copy them into tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
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
from fusedmoe.training.plain_values import byte_buffer, decode_value, dtype_name

# Elements converted to float64 at once.
_CHUNK_ELEMENTS = 2**20
# Integers up to this bound are exact in float64.
_MAX_EXACT_INTEGER = 2**53
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
        file_parts = self._stored_parts(tensors)
        for key in targets:
            if key in self._written.values:
                file_part, count = self._written.values[key]
                owned = self._empty_tensors(tensor_key(key, number) for number in range(count))
                file_parts |= {file_part, *self._stored_parts(owned)}
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
        for item, value in self._values(PlainPlanner(narrowed, self.metadata)):
            key = item.dest_index.fqn
            require_lossless(error_prefix, key, value, target_dtypes[key])

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
            self._read_tensors(self._tensor_targets(targets))
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
            self._read_tensors(target)
            return target[own]

        try:
            line = json.loads(self._read_bytes(file_part).numpy().tobytes())
            return decode_value(json.dumps(line["value"]), fetch)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ConfigError(f"{damage_error(self._path, file_part)} ({error})") from error

    def _read_tensors(self, targets: dict[str, Any]) -> None:
        planner = PlainPlanner(targets, self.metadata)
        for item, value in self._values(planner):
            planner.copy(item, value)

    def _values(self, planner: PlainPlanner) -> Iterator[tuple[ReadItem, Tensor]]:
        # Sorted: a stored part that overlaps several target parts is read once.
        for file_part, group in groupby(sorted(planner.items, key=self._stored_part), self._stored_part):
            items = list(group)
            index = items[0].storage_index
            entry: Any = self.metadata.state_dict_metadata[index.fqn]
            sizes = entry.chunks[index.index].sizes
            whole = self._read_bytes(file_part).view(entry.properties.dtype).view(sizes)
            for item in items:
                yield item, item_elements(item, whole)

    def _empty_tensors(self, keys: Iterable[str]) -> dict[str, Tensor]:
        entries: Any = self.metadata.state_dict_metadata
        return {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype, device="cpu") for key in keys}

    def _read_bytes(self, file_part: FilePart) -> Tensor:
        data = torch.empty(file_part.length, dtype=torch.uint8, device="cpu")
        with self._open_file(file_part.file) as file:
            file.seek(file_part.offset)
            if file.readinto(byte_buffer(data)) != file_part.length:
                raise damage_error(self._path, file_part)
        return data

    def _stored_parts(self, targets: dict[str, Any]) -> set[FilePart]:
        return set(map(self._stored_part, PlainPlanner(targets, self.metadata).items))

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
    """Load planner for a flat state dict.

    Attributes:
        items: the reads required for `targets`.
    """

    def __init__(self, targets: dict[str, Any], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner(targets, metadata, True)
        self.items = self.create_local_plan().items

    def copy(self, item: ReadItem, value: Tensor) -> None:
        """Copy the elements of an item to its target."""
        target = self.resolve_tensor(item).detach()
        target.copy_(value)
        self.commit_tensor(item, target)


def item_elements(item: ReadItem, whole: Tensor) -> Tensor:
    """Return the elements of an item, given the stored part that contains them."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        whole = whole.narrow(dim, offset, length)
    return whole


def is_lossy(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether converting `source` to `target` can change a value by more than rounding.

    Such changes are overflow, a lost fraction, and a lost imaginary part.
    """
    if source == target:
        return False
    if source.is_complex and target.is_complex:
        source, target = source.to_real(), target.to_real()
    if source.is_floating_point and target.is_floating_point:
        # Some one-byte dtypes lack a sign, zero or infinities.
        return torch.finfo(source).max > torch.finfo(target).max or target.itemsize == 1
    return source not in (target, torch.bool)


def describe_lost_value(value: Tensor, dtype: torch.dtype) -> str | None:
    """Describe the first value that the conversion to `dtype` would not preserve; None without one.

    Preserved are floating-point numbers up to rounding (including underflow to zero), infinities and NaN if `dtype` has
    them, integers exactly, and 0 or 1 as bool.
    """
    if not is_lossy(value.dtype, dtype):
        return None
    if value.is_complex():
        parts = torch.view_as_real(value.detach().resolve_conj())
        if dtype.is_complex:
            return describe_lost_value(parts, dtype.to_real())
        lost = parts[..., 1] != 0
        return _describe_value(value[lost][0], dtype) if lost.any() else describe_lost_value(parts[..., 0], dtype)
    if dtype.is_complex:
        dtype = dtype.to_real()
    for chunk in value.detach().reshape(-1).split(_CHUNK_ELEMENTS):
        lost = ~_is_preserved(chunk, dtype)
        if lost.any():
            return _describe_value(chunk[lost][0], dtype)
    return None


def require_convertible(operation: str, key: str, source: torch.dtype, target: torch.dtype) -> None:
    if source == target:
        return
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.zeros(1, dtype=source, device="cpu")).to(torch.float32)
        torch.zeros(1, dtype=source, device="cpu").double()
    except (RuntimeError, NotImplementedError) as error:
        names = [dtype_name(one) for one in (source, target)]
        raise ConfigError(
            f"{operation}: {key} is {names[0]}, which PyTorch does not convert to {names[1]}. Use the dtype of "
            "the save."
        ) from error


def require_lossless(operation: str, key: str, value: Tensor, dtype: torch.dtype) -> None:
    lost = describe_lost_value(value, dtype)
    if lost is not None:
        raise ConfigError(f"{operation}: {key} {lost}. Use a wider dtype, or convert the saved value.")


def _is_preserved(value: Tensor, dtype: torch.dtype) -> Tensor:
    exact = value.double()  # represents all values of all floating-point dtypes
    if dtype == torch.bool:
        return (exact == 0) | (exact == 1)
    if not value.is_floating_point():
        return _are_integers_preserved(value, dtype)
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        return (exact == exact.trunc()) & (exact >= float(bounds.min)) & (exact < float(bounds.max + 1))
    after, eps, least = value.to(dtype).double(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    rounded = exact.isfinite() & ((after - exact).abs() <= eps * exact.abs().clamp_min(least))
    return (after == exact) | (after.isnan() & exact.isnan()) | rounded


def _are_integers_preserved(value: Tensor, dtype: torch.dtype) -> Tensor:
    # PyTorch supports few operations on unsigned integers. uint64 values from 2^63 are negative as int64.
    wide = value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
    small = wide >= 0 if value.dtype == torch.uint64 else torch.ones_like(wide, dtype=torch.bool)
    if dtype.is_floating_point:
        return small & (wide.abs() <= _MAX_EXACT_INTEGER) & (wide.to(dtype).double() == wide.double())
    bounds = torch.iinfo(dtype)
    return small & (wide >= bounds.min) & (wide <= min(bounds.max, torch.iinfo(torch.int64).max))


def _describe_value(number: Tensor, dtype: torch.dtype) -> str:
    source, target = map(dtype_name, (number.dtype, dtype))
    return f"has the {source} number {number.item()}, which {target} cannot hold"
