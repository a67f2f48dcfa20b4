"""Checkpoints that any number of ranks saves and any other number loads.

A checkpoint is a folder of safetensors and JSON files (`checkpoint_index`). Every tensor is in it once, whole, under
the name it has in a model on one rank, in parts that the ranks write side by side. A load checks the digests of all
bytes that it is about to read before it changes the model. Nothing in a checkpoint is unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training.checkpoint_folder import first_path, write_folder
from fusedmoe.training.checkpoint_index import CURE, FORMAT
from fusedmoe.training.checkpoint_reader import Folder, index_digest
from fusedmoe.training.copies import local_part
from fusedmoe.training.data_parallel import SingleRank
from fusedmoe.training.optimizer_state import GROUPS, OptimizerState, Wanted
from fusedmoe.training.optimizers import Optimizers
from fusedmoe.training.plain_values import require_storable
from fusedmoe.training.shard_spec import ShardSpecs, number_names, plain_name, shard_specs, writes

_MODEL = "model."

EXTRA, ABOUT = "extra", "fusedmoe"
# A load starts again where the checkpoint was replaced.
_ATTEMPTS = 3


Given = ParamSpec("Given")
Result = TypeVar("Result")


def _on_host(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a function with the host as default device, on which torch's DTensor makes tensors that it reads."""

    @wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run


@_on_host
@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    topology: Topology,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a folder from which `load_checkpoint` goes on, on any topology. Collective over all ranks.

    The folder is written beside `path` under another name and renamed once it is complete: an interrupted save leaves
    the checkpoint that stood there as it was. A checkpoint at `path` is replaced whole. Nothing is gathered: each part
    is written by one of the ranks that hold it.

    Args:
        path: on a file system that all ranks see.
        model: its parameters and persistent buffers are saved. Wrappers (DistributedDataParallel, FSDP2, torch.compile,
            activation checkpointing) leave no trace in the checkpoint.
        optimizer: any whose state is tensors shaped like the parameters, and plain values (AdamW, SGD, …), or
            `PerMatrix`; or several, in a list.
        extra: other state of the run (step, scheduler, states of generators), loaded with its types. Rank 0's is kept:
            gather into it what differs between ranks. Stored classes, without their subclasses:

            - None, bool, int, float, str, bytes, and paths of this system (`pathlib.Path`);
            - date, timedelta, and datetime with a fixed offset or none;
            - dense Tensor and Parameter, torch.Size, torch.device, and torch.dtype that a stored tensor may have;
            - NumPy arrays of booleans, numbers (complex, too), times, bytes and text; scalars but for bytes and text;
            - list, tuple, set, frozenset, dict, OrderedDict and Counter of these, nested up to 100 deep.

            Any other class is refused with its place and advice: [real, imag] for a complex number, `value` of an enum,
            `asdict` of a dataclass, `state` of NumPy's BitGenerator, `isoformat()` of a time.
    Raises:
        ConfigError: `path` is something else than a checkpoint, the state cannot be split over other ranks, or holds
            an object of a class that checkpoints do not store; another job is saving to `path`.
        RankError: ranks give different paths, or do not see one folder, or saving failed on some rank; the message
            names it and says why. The checkpoint that stood at `path` is as it was.
    """
    path = Path(path)
    operation = f"saving checkpoint {first_path(path, topology, 'saving a checkpoint', one_place=True)}"
    state = ModelState(model, optimizer, topology, operation)

    def entries() -> dict[str, Any]:
        require_extra(extra, operation)
        own = {EXTRA: {} if extra is None else extra, ABOUT: state.about()} if topology.is_first else {}
        return state.entries() | own

    write_folder(path, entries, topology, operation)


@_on_host
@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, topology: Topology
) -> dict[str, Any]:
    """Loads model and optimizer in place and returns the `extra` of the save. Collective over all ranks.

    The number of ranks and their layout may differ from those of the save. Each rank reads what it holds. All is
    compared first, and every byte that will be loaded is checked: of a checkpoint that does not fit, or is damaged,
    nothing is loaded. Dtypes may differ; numbers are converted, and what that would change by more than rounding (1e300
    to float32, 300 to uint8, 2.7 to int64) is refused. `extra` comes back on the CPU.

    Nothing in a checkpoint is executed. Checkpoints of earlier formats, which hold pickles, are converted first:
    `fusedmoe convert-checkpoint OLD NEW`.

    Args:
        optimizer: as it was for the save; None leaves the optimizer's part of the checkpoint unread.
    Raises:
        ConfigError: there is no checkpoint at `path`, it is damaged or of an earlier format, has numbers that the
            model's dtypes cannot hold, or is of another model or optimizer; the message names the first tensors that
            differ.
        RankError: loading failed on some ranks only, or they found different checkpoints; the message names the first
            and says why.
    """
    path = Path(path)
    operation = f"loading checkpoint {first_path(path, topology, 'loading a checkpoint')}"
    state = ModelState(model, optimizer, topology, operation)
    # Another process may replace the checkpoint meanwhile: its new index is read then, before anything is loaded.
    for attempt in range(_ATTEMPTS):
        extra = _load(path, state, optimizer is not None, topology, operation, attempt == _ATTEMPTS - 1)
        if extra is not None:
            return extra
    raise AssertionError("the last attempt returns or raises")


def _load(
    path: Path, state: ModelState, has_optimizer: bool, topology: Topology, operation: str, is_last: bool
) -> dict[str, Any] | None:
    """Load a checkpoint; None if it was replaced before anything was loaded. The last attempt raises instead."""
    small: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    folders: list[Folder] = []

    # All checks come before the first tensor is read, on every rank: then a checkpoint is loaded by all or by none.
    def compare() -> str | None:
        before = index_digest(path)
        try:
            return compare_index()
        except Exception:
            if is_last or index_digest(path) == before:
                raise
            return None

    def compare_index() -> str:
        folder = Folder(path)
        folders.append(folder)
        _refuse(path, state.difference(folder.metadata))
        keys = (EXTRA, ABOUT, GROUPS) if has_optimizer else (EXTRA, ABOUT)
        small.update(dict.fromkeys(key for key in keys if key in folder.metadata.state_dict_metadata))
        folder.check(small)
        folder.read_values(small)
        _refuse(path, unknown_contents(small))
        _refuse(path, state.optimizer_difference(small))
        targets.update(state.targets(folder.metadata))
        folder.check(targets)
        folder.check_numbers(targets, state.dtypes(targets))
        folder.read_values(targets)
        return folder.digest

    with _closed(folders):
        digests = on_all_ranks(topology.world, operation, compare)
        if None in digests or (not is_last and len(set(digests)) > 1):
            return None
        for rank, digest in zip(topology.world.ranks, digests, strict=True):
            if digest != digests[0]:
                raise RankError(
                    f"{operation}: there is another checkpoint on rank {rank} than on rank {topology.world.ranks[0]}; "
                    "nothing was loaded. Give all ranks the path of one save.",
                    agreed=True,
                )
        on_all_ranks(topology.world, operation, lambda: folders[0].read_tensors(targets))
    state.install(targets, small)
    extra: dict[str, Any] = small[EXTRA]
    return extra


@contextmanager
def _closed(folders: list[Folder]) -> Iterator[None]:
    """Close folders at the end, those that the block has opened included."""
    try:
        yield
    finally:
        for folder in folders:
            folder.close()


class ModelState:
    """The state of a model and its optimizer on this rank, by plain names. Making it is collective."""

    def __init__(self, model: nn.Module, optimizer: Optimizers | None, topology: Topology, operation: str) -> None:
        # Names in a checkpoint are those of the bare model, so that a wrapped one loads what a bare one saved.
        while isinstance(model, (DistributedDataParallel, SingleRank)):
            model = model.module
        self._model, self._topology = model, topology
        self._own_names: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        known = number_names(model)
        for own_name, value in model.state_dict().items():
            name = plain_name(own_name)
            if name in known:
                continue  # which experts are here is of this layout alone: specs say it for the layout that loads
            self._own_names[name], self._values[name] = own_name, value
        tensors = {name: value for name, value in self._values.items() if isinstance(value, Tensor)}

        def check() -> None:
            for name, tensor in tensors.items():
                require_storable(local_part(tensor), f"rank {topology.rank}: {operation}: {_MODEL}{name}")

        on_all_ranks(topology.world, operation, check)
        self._specs: ShardSpecs = shard_specs(model, tensors, topology, operation)
        self._optimizer: OptimizerState | None = None

        def name_parameters() -> tuple[str | None, list[list[str]]]:
            if optimizer is None:
                return None, []
            self._optimizer = OptimizerState(optimizer, model, self._specs, topology)
            return self._optimizer.kind, self._optimizer.names_of_some()

        named = on_all_ranks(topology.world, operation, name_parameters)
        # Groups of parameters are saved whole, by name, so each rank has to know the names that it lacks.
        self._scattered = [names for _, names in named]
        described = [_described(kind, len(names)) for kind, names in named]
        for rank, text in zip(topology.world.ranks, described, strict=True):
            if text != described[0]:
                raise RankError(
                    f"{operation}: the optimizer is {described[0]} on rank {topology.world.ranks[0]} and {text} on "
                    f"rank {rank}. Pass every rank's optimizer, or None on all ranks.",
                    agreed=True,
                )

    def entries(self, wanted: Wanted = writes) -> dict[str, Any]:
        """Collects what this rank has to write, by key; `wanted` chooses among what several ranks hold."""
        entries: dict[str, Any] = {}
        for name, value in self._values.items():
            spec = self._specs.own.get(name)
            if wanted(_MODEL + name, self._topology.world if spec is None else spec.group):
                entries[_MODEL + name] = value if spec is None else spec.spread(value)
        return entries if self._optimizer is None else entries | self._optimizer.entries(self._scattered, wanted)

    def about(self) -> dict[str, Any]:
        """Returns what the checkpoint says of itself."""
        return {"format": FORMAT, "optimizer": None if self._optimizer is None else self._optimizer.about()}

    def difference(self, metadata: Metadata) -> str | None:
        """Names the first tensors in which the checkpoint differs from this model, None if it fits."""
        saved = {
            key.removeprefix(_MODEL): tuple(value.size) if isinstance(value, TensorStorageMetadata) else None
            for key, value in metadata.state_dict_metadata.items()
            if key.startswith(_MODEL)
        }
        own = {name: spec.shape if (spec := self._specs.own.get(name)) else None for name in self._values}
        both = [name for name in own if name in saved and saved[name] != own[name] and not _is_extra_state(name)]
        shapes = [f"{name} is {_told(saved[name])} in the checkpoint and {_told(own[name])} here" for name in both]
        missing = [f"{name} is not in the checkpoint" for name in own if name not in saved]
        others = saved.keys() - own.keys() - self._specs.elsewhere
        unknown = [f"{name} is in the checkpoint only" for name in saved if name in others]
        told = [*shapes[:2], *missing[:2], *unknown[:2]]
        if not told:
            return None
        more = len(shapes) + len(missing) + len(unknown) - len(told)
        told += [f"and {more} more"] if more else []
        return f"it is of another model: {'; '.join(told)}. Build the model as it was when it was saved."

    def optimizer_difference(self, small: dict[str, Any]) -> str | None:
        """Names the first thing in which the saved optimizer differs from this one, None if it fits."""
        if self._optimizer is None:
            return None
        about = small[ABOUT]["optimizer"]
        if about is None:
            return "it was saved without an optimizer. Pass optimizer=None."
        found = self._optimizer.compare(about, small.get(GROUPS, []), self._scattered)
        return found and f"{found}. Make the optimizer as it was made for the save, or pass optimizer=None."

    def targets(self, metadata: Metadata) -> dict[str, Any]:
        """Lists what this rank has to read, and for each entry the tensor to read it into; None for plain values."""
        targets: dict[str, Any] = {}
        for name, value in self._values.items():
            spec, saved = self._specs.own.get(name), metadata.state_dict_metadata[_MODEL + name]
            targets[_MODEL + name] = None if spec is None else spec.spread(value)
            if _is_extra_state(name):
                targets[_MODEL + name] = None
                if isinstance(saved, TensorStorageMetadata):
                    device = value.device if isinstance(value, Tensor) else None
                    target = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
                    targets[_MODEL + name] = target
        return targets if self._optimizer is None else targets | self._optimizer.targets(metadata)

    def dtypes(self, targets: dict[str, Any]) -> dict[str, torch.dtype]:
        """Returns the dtype that each tensor of `targets` has in the end."""
        dtypes = {key: target.dtype for key, target in targets.items() if isinstance(target, Tensor)}
        return dtypes if self._optimizer is None else dtypes | self._optimizer.dtypes(dtypes)

    def install(self, targets: dict[str, Any], small: dict[str, Any]) -> None:
        """Completes what reading in place has begun."""
        # Tensors were read into the model's own memory; this hands over other state and runs the modules' hooks.
        state = {
            own: self._values[name] if name in self._specs.own and not _is_extra_state(name) else targets[_MODEL + name]
            for name, own in self._own_names.items()
        }
        self._model.load_state_dict(state)
        if self._optimizer is not None:
            self._optimizer.install(targets, small[GROUPS])


class _WithExtraState(nn.Module):
    def get_extra_state(self) -> None:
        """Have an entry in the state dict, and no other."""


(_EXTRA_STATE,) = _WithExtraState().state_dict()


def _is_extra_state(name: str) -> bool:
    """Return whether an entry is what `get_extra_state` returned: a module may restore any other class or shape."""
    return name.rpartition(".")[2] == _EXTRA_STATE


def _refuse(path: Path, difference: str | None) -> None:
    if difference is not None:
        raise ConfigError(f"checkpoint {path} was not loaded: {difference}")


def require_extra(extra: Any, operation: str) -> None:
    """Raise `ConfigError` for an `extra` that is no dictionary."""
    if not isinstance(extra, dict | None):
        raise ConfigError(f"{operation}: extra is of class {type(extra).__qualname__}. Pass a dict, or None.")


def _described(kind: str | None, groups: int) -> str:
    return "None" if kind is None else f"{kind} with {groups} parameter groups"


def unknown_contents(small: dict[str, Any]) -> str | None:
    """Says why the checkpoint is none that `save_checkpoint` left behind; None if it is one."""
    about, groups = small.get(ABOUT), small.get(GROUPS, [])
    if (
        isinstance(small.get(EXTRA), dict)
        and isinstance(about, dict)
        and isinstance(about.get("optimizer", ()), dict | None)
        and _are_names((about["optimizer"] or {"settings": []}).get("settings"))
        and isinstance((about["optimizer"] or {"kind": ""}).get("kind"), str)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)
    ):
        return None
    return f"it is damaged: what it says of itself is not what save_checkpoint writes. {CURE}"


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _told(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"of shape {list(shape)}"
