"""Folders in the format of torch.distributed.checkpoint: written whole or not at all, read in parts."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.together import together

# torch.distributed.checkpoint calls collectives of its own, without bounds. Its planners, reader and writer do not;
# they are driven here, so that a rank that fails or does not come ends the others by name.


def write_folder(
    path: Path,
    entries: dict[str, Any],
    place: Callable[[str], tuple[str, ...]],
    topology: Topology,
    operation: str,
) -> None:
    """Writes every rank's entries to `path`, replacing a checkpoint that stands there. Collective over all ranks.

    The folder comes into being beside `path` and is renamed when all is on the disk.

    Args:
        entries: tensors, DTensors and anything that can be pickled, by key; what several ranks hold is in the entries
            of one of them only.
        place: where a key's value stands in the nested dictionary that PyTorch's tools make of the folder.
    """
    partial = _beside(path, "partial")
    writer = FileSystemWriter(partial)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata({})
    first = topology.rank == 0

    def plan() -> Any:
        planner.set_up_planner(entries, None, first)
        writer.set_up_storage_writer(first)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write(plans: list[Any]) -> Any:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        own = writer.prepare_global_plan(plans)[topology.world.index]
        written = writer.write_data(planner.finish_plan(own), planner)
        written.wait()
        return written.value()

    def finish(results: list[Any]) -> None:
        places = {key: place(key) for key in metadata.state_dict_metadata}
        writer.finish(dataclasses.replace(metadata, planner_data=places), results)
        _install(partial, path)

    together(topology, operation, lambda: _make_room(path, partial) if first else None)
    plans = together(topology, operation, plan)
    results = together(topology, operation, lambda: write(plans))
    together(topology, operation, lambda: finish(results) if first else None)


def open_folder(path: Path) -> tuple[Path, Metadata]:
    """The folder with the checkpoint saved to `path`, and what it says it holds.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    folder = path
    if not _is_checkpoint(folder):
        folder = _beside(path, "previous")  # a save was interrupted between its two renames
        if path.exists() or not _is_checkpoint(folder):
            raise ConfigError(f"there is no checkpoint at {path}; give the path of a save, one that all ranks can see")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise ConfigError(f"the checkpoint {path} is damaged: its index cannot be read ({error})") from error
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        size = file.stat().st_size if file.exists() else 0
        if size < end:
            raise ConfigError(
                f"the checkpoint {path} is damaged: {name} has {size} bytes of {end}. Copy it again, or load another."
            )
    return folder, metadata


def read_folder(folder: Path, metadata: Metadata, targets: dict[str, Any]) -> None:
    """Reads the entries whose keys are in `targets`: tensors and DTensors in place, others into the dictionary."""
    reader = FileSystemReader(folder)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()


def _beside(path: Path, suffix: str) -> Path:
    return path.parent / f".{path.name}.{suffix}"


def _is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").is_file()


def _make_room(path: Path, partial: Path) -> None:
    if path.exists() and not _is_checkpoint(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not a checkpoint; it will not be replaced. Save to another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if partial.exists():
        shutil.rmtree(partial)


def _install(partial: Path, path: Path) -> None:
    """Puts the finished folder in its place. At every moment either `path` or the folder beside it is whole."""
    previous = _beside(path, "previous")
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.rename(previous)
    partial.rename(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.rmtree(previous, ignore_errors=True)
