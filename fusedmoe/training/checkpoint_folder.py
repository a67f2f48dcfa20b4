"""Checkpoint folders: exclusive, atomic replacement and parallel writes.

Planners of torch.distributed.checkpoint assign tensor parts to ranks. Its savers and loaders are not used, because
their collectives have no timeout.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from fusedmoe.comm.collectives import all_gather_object, on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError, warn
from fusedmoe.training.checkpoint_index import (
    INDEX,
    FilePart,
    FileParts,
    TensorPart,
    has_elements,
    tensor_key,
    write_index,
    write_parts,
)
from fusedmoe.training.plain_values import EncodedValue, encode_value, require_storable
from fusedmoe.training.replicated_parameters import has_shared_elements, local_part
from fusedmoe.training.shard_spec import RowShard


def resolve_links(path: Path) -> Path:
    return Path(os.path.realpath(path))


def path_of_first_rank(path: Path, topology: Topology, operation: str, must_agree: bool = False) -> str:
    """Return rank 0's path, for the errors of all ranks. Collective.

    With `must_agree`, raise `RankError` if the ranks' paths lead to different folders.
    """
    written = os.fspath(path), os.path.abspath(path), str(resolve_links(path))
    (first, *places), *others = all_gather_object(topology.world, written, operation)
    for rank, (_, *other) in zip(topology.world.ranks[1:], others, strict=True):
        if must_agree and not {*other} & {*places}:
            raise RankError(
                f"rank {topology.rank}: {operation} over the {topology.world} ended because rank "
                f"{topology.world.ranks[0]} passes {places[0]} and rank {rank} {other[0]}. "
                "Pass the same path on all ranks: broadcast rank 0's, in particular if it contains the time.",
                agreed=True,
            )
    return str(first)


def require_shared(folder: Path, mark: str, path: Path) -> None:
    if not os.path.lexists(folder / mark):
        raise ConfigError(
            f"{path} is a different folder than on rank 0: the disk is local to a node. Save to a file system shared "
            "by all ranks. The previous checkpoint is unchanged."
        )


def sibling_path(path: Path, suffix: str) -> Path:
    """Return a hidden path in the folder of `path`, hence on the same file system."""
    return path.parent / f".{path.name}.{suffix}"


def is_checkpoint(path: Path) -> bool:
    return (path / INDEX).is_file()


def find_checkpoint(path: Path) -> Path | None:
    path = resolve_links(path)
    if is_checkpoint(path):
        return path
    # A save was interrupted between its two renames; the previous checkpoint is complete under its temporary name.
    previous = sibling_path(path, "previous")
    return None if path.exists() or not is_checkpoint(previous) else previous


@contextmanager
def exclusive_folder(path: Path, folder: Path) -> Iterator[str]:
    """Lock saves to `path` and create the empty temporary folder `folder`; both until the context ends.

    Yield the name of a random file in `folder`, by which other ranks recognise it. Raise `ConfigError` if another job
    is saving to `path`, or if `path` exists and is not a checkpoint.
    """
    busy = ConfigError(f"another job is saving to {path}. Save to another path, or wait until it is done.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if isinstance(error, FileExistsError | FileNotFoundError) and (folder.is_dir() or not os.path.lexists(folder)):
            raise busy from error
        with suppress(OSError):
            folder.rmdir()
        raise

    def is_own_folder() -> bool:  # another job may replace a locked folder
        with suppress(OSError):
            return os.path.samestat(os.fstat(descriptor), folder.lstat())
        return False

    try:
        with suppress(OSError):  # without locks in the file system
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy from None
        if not is_own_folder():
            raise busy
        try:
            if path.exists() and not is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
                raise ConfigError(
                    f"{path} exists and is not a checkpoint; it will not be replaced. Save to another path."
                )
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            # Random: a folder of this name on another disk may contain the mark of an earlier save.
            mark = secrets.token_hex(8)
            (folder / mark).touch()
            yield mark
        finally:
            if is_own_folder():
                _remove(folder, f"saving to {path}: the temporary folder")
    finally:
        os.close(descriptor)


def replace_checkpoint(partial: Path, path: Path) -> None:
    """Rename the finished folder `partial` to `path`; a crash leaves this or the previous checkpoint complete."""
    previous = sibling_path(path, "previous")
    _fsync_folder(partial)
    _fsync_folder(path.parent)
    # A non-empty folder cannot be replaced in one step; between these renames `find_checkpoint` returns `previous`.
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    try:
        partial.rename(path)
    except BaseException:
        with suppress(OSError):
            previous.rename(path)
        raise
    try:
        _fsync_folder(path.parent)
    except OSError as error:
        warn(f"checkpoint {path} is in place, and may be lost if the system fails now: {error}", stacklevel=2)
    _remove(previous, f"checkpoint {path} is in place. The previous one")


def _remove(folder: Path, label: str) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)  # continues after errors
        if os.path.lexists(folder):
            warn(f"{label} could not be removed from {folder}: {error}. Remove that folder.", stacklevel=2)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(path: Path, entries: Callable[[], dict[str, Any]], topology: Topology, operation: str) -> None:
    """Write all ranks' entries to `path`, replacing an existing checkpoint. Collective over all ranks.

    `entries` returns tensors, DTensors and plain values by key; exactly one rank returns each entry.
    """
    path = resolve_links(path)  # the target of a symbolic link is replaced
    temporary = sibling_path(path, "partial")
    unfinished = temporary / "checkpoint"
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    first = topology.is_first
    values: dict[str, EncodedValue] = {}

    def plan() -> SavePlan:
        tensors, values_of_rank = split_entries(entries(), operation)
        values.update(values_of_rank)
        # PyTorch's planner would deduplicate entries; `is_writer` has already assigned each entry to one rank.
        planner.set_up_planner(tensors, None, first)
        return planner.create_local_plan()

    def write(own: SavePlan) -> FileParts:
        unfinished.mkdir(parents=True, exist_ok=True)
        return write_parts(unfinished, topology.world.index, _tensor_parts(own, planner), values)

    def finish(plans: list[SavePlan], written_by_rank: list[FileParts]) -> None:
        for rank, written in zip(topology.world.ranks, written_by_rank, strict=True):
            _require_complete(unfinished, written.all(), rank)
        _, metadata = planner.create_global_plan(plans)
        write_index(unfinished, metadata, written_by_rank)
        replace_checkpoint(unfinished, path)

    on_all: Callable[[Callable[[], Any]], list[Any]] = partial(on_all_ranks, topology.world, operation)
    with ExitStack() as own:
        plans = on_all(plan)
        marks = on_all(lambda: own.enter_context(exclusive_folder(path, temporary)) if first else "")
        on_all(lambda: require_shared(temporary, marks[0], path))
        written_by_rank = on_all(lambda: write(plans[topology.world.index]))
        on_all(lambda: finish(plans, written_by_rank) if first else None)


def split_entries(entries: dict[str, Any], operation: str) -> tuple[dict[str, Tensor], dict[str, EncodedValue]]:
    """Separate tensors, including tensors inside values, from encoded values.

    Raises:
        ConfigError: an entry has an unsupported type.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, EncodedValue] = {}
    for key, entry in entries.items():
        if isinstance(entry, Tensor):
            require_writable(local_tensor(entry), f"{operation}: {key}")
            tensors[key] = entry
        else:
            values[key] = encode_value(entry, f"{operation}: {key}")
            tensors |= {tensor_key(key, number): one for number, one in enumerate(values[key].tensors)}
    return tensors, values


def local_tensor(entry: Tensor) -> Tensor:
    return entry.part if isinstance(entry, RowShard) else local_part(entry)


def require_writable(tensor: Tensor, label: str) -> None:
    """Raise `ConfigError`, prefixed with `label`, for a tensor that cannot be stored or written in place."""
    require_storable(tensor, label)
    if tensor.numel() and has_shared_elements(tensor):
        raise ConfigError(f"{label} is expanded: several elements share memory. Copy it with clone().")


def _tensor_parts(plan: SavePlan, planner: DefaultSavePlanner) -> Iterator[tuple[TensorPart, Callable[[], Any]]]:
    for item in plan.items:
        data = item.tensor_data
        assert data is not None
        if has_elements(data.chunk.sizes, data.size):
            place = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            yield TensorPart(item.index.fqn, *place, data.properties.dtype), partial(planner.resolve_data, item)


def _require_complete(partial: Path, items: Iterable[FilePart], rank: int) -> None:
    for name, of_file in groupby(sorted(items), key=lambda item: item.file):
        file, end = partial / name, max(item.offset + item.length for item in of_file)
        try:
            with file.open("rb") as opened:  # opening revalidates cached attributes on a network file system
                size = os.fstat(opened.fileno()).st_size
        except FileNotFoundError:
            size = 0
        if size < end:
            raise ConfigError(
                f"{name}, written by rank {rank}, has {size} bytes of {end} on rank 0. Save to a file system shared by "
                "all ranks. The previous checkpoint is unchanged."
            )
