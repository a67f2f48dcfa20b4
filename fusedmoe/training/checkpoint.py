"""Save and load distributed checkpoints, independent of the number of ranks and their layout.

A checkpoint is a folder of safetensors and JSON files (`checkpoint_index`) with every tensor once, in full, under its
name in the single-rank model. Ranks write disjoint parts in parallel. Loading unpickles nothing.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel

from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.split_optimizers import Optimizers
from fusedmoe.training.checkpoint_folder import path_of_first_rank, write_folder
from fusedmoe.training.checkpoint_index import DAMAGE_FIX, FORMAT
from fusedmoe.training.checkpoint_reader import CheckpointReader, index_digest
from fusedmoe.training.data_parallel import SingleRank
from fusedmoe.training.optimizer_state import GROUPS, EntryFilter, OptimizerState
from fusedmoe.training.plain_values import require_storable
from fusedmoe.training.replicated_parameters import local_part
from fusedmoe.training.shard_spec import expert_number_names, is_writer, plain_name, shard_specs

_MODEL = "model."
EXTRA, ABOUT = "extra", "fusedmoe"
# PyTorch's key of extra state.
_EXTRA_STATE = "_extra_state"


@torch.no_grad()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    topology: Topology,
    extra: dict[str, Any] | None = None,
) -> None:
    """Save model, optimizer and `extra` for loading on any topology. Collective over all ranks.

    A failed or interrupted save leaves an existing checkpoint at `path` intact: ranks write to a hidden sibling folder,
    which is renamed when complete. Tensors are not gathered.

    Args:
        path: on a file system shared by all ranks.
        model: parameters and persistent buffers are saved, without the prefixes of wrappers (DDP, FSDP2, torch.compile,
            activation checkpoints) in their names.
        optimizer: one whose state consists of plain values and tensors shaped like the parameters (AdamW, SGD, …), a
            `PerMatrix`, or a list of optimizers. None saves no optimizer state.
        extra: additional state (step, scheduler, random generators) of rank 0, restored with its types: plain values,
            dates, tensors, NumPy arrays and containers of these, listed in the guide ("Values in a checkpoint").

    Raises:
        ConfigError: `path` exists and is not a checkpoint; the state cannot be resharded or contains an unsupported
            class; another job is saving to `path`.
        RankError: ranks pass different paths or do not share the file system, or saving failed on the rank in the
            message.
    """
    path = Path(path)
    operation = f"saving checkpoint {path_of_first_rank(path, topology, 'saving a checkpoint', must_agree=True)}"

    def entries() -> dict[str, Any]:
        require_extra(extra, operation)
        own = {EXTRA: {} if extra is None else extra, ABOUT: state.about()} if topology.is_first else {}
        return state.entries() | own

    with torch.device("cpu"):  # DTensor creates host-side tensors on the default device
        state = ModelState(model, optimizer, topology, operation)
        write_folder(path, entries, topology, operation)


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, topology: Topology
) -> dict[str, Any]:
    """Load model and optimizer in place and return the `extra` that was saved. Collective over all ranks.

    The number of ranks and their layout may differ from the save. Each rank reads only its own parts; a damaged or
    mismatched checkpoint modifies nothing. Tensors are converted to the model's dtypes; a conversion that changes a
    value by more than rounding (1e300 to float32, 300 to uint8, 2.7 to int64) is an error. Tensors in `extra` are on
    the CPU.

    Args:
        optimizer: of the same kind as at the save. None skips the optimizer state in the checkpoint.
    Raises:
        ConfigError: no checkpoint at `path`; it is damaged or of a later format; its values do not fit the model's
            dtypes; model or optimizer differ; or it was replaced while it was loaded.
        RankError: loading failed on some ranks, or ranks read different checkpoints.
    """
    path = Path(path)
    operation = f"loading checkpoint {path_of_first_rank(path, topology, 'loading a checkpoint')}"
    with torch.device("cpu"):  # as in `save_checkpoint`
        state = ModelState(model, optimizer, topology, operation)
        # Three attempts while other jobs replace the checkpoint.
        for is_last in (False, False, True):
            extra = _load(path, state, optimizer is not None, topology, operation, is_last)
            if extra is not None:
                return extra
    raise AssertionError("the last attempt returns or raises")


def _load(
    path: Path, state: ModelState, has_optimizer: bool, topology: Topology, operation: str, is_last: bool
) -> dict[str, Any] | None:
    """Try to load a checkpoint. If it was replaced before loading began, return None or, if `is_last`, raise."""
    metadata_values: dict[str, Any] = {}
    targets: dict[str, Any] = {}
    folders: list[CheckpointReader] = []
    opened = ExitStack()

    # All ranks finish all checks before any rank reads a tensor: either all ranks load the checkpoint or none does.
    def compare() -> str | None:
        before = index_digest(path)
        try:
            folder = CheckpointReader(path)
            opened.callback(folder.close)
            folders.append(folder)
            _raise_not_loaded(path, state.model_difference(folder.metadata))
            keys = (EXTRA, ABOUT, GROUPS) if has_optimizer else (EXTRA, ABOUT)
            metadata_values.update(dict.fromkeys(key for key in keys if key in folder.metadata.state_dict_metadata))
            folder.check(metadata_values)
            folder.read_values(metadata_values)
            _raise_not_loaded(path, metadata_problem(metadata_values))
            _raise_not_loaded(path, state.optimizer_difference(metadata_values))
            targets.update(state.targets(folder.metadata))
            folder.check(targets)
            folder.check_conversions(targets, state.dtypes(targets))
            folder.read_values(targets)
            return folder.digest
        except Exception:
            if is_last or index_digest(path) == before:
                raise
            return None

    with opened:
        digests = on_all_ranks(topology.world, operation, compare)
        if None in digests or (not is_last and len(set(digests)) > 1):
            return None
        for rank, digest in zip(topology.world.ranks, digests, strict=True):
            if digest != digests[0]:
                raise RankError(
                    f"{operation}: rank {rank} and rank {topology.world.ranks[0]} read different checkpoints; "
                    "nothing was loaded. Pass the path of one save on all ranks.",
                    agreed=True,
                )
        on_all_ranks(topology.world, operation, lambda: folders[0].read_tensors(targets))
    state.install(targets, metadata_values)
    extra: dict[str, Any] = metadata_values[EXTRA]
    return extra


class ModelState:
    """Model and optimizer state of this rank, by unwrapped parameter names. Construction is collective."""

    def __init__(self, model: nn.Module, optimizer: Optimizers | None, topology: Topology, operation: str) -> None:
        while isinstance(model, (DistributedDataParallel, SingleRank)):
            model = model.module
        self._model, self._topology = model, topology
        self._wrapped_names: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        number_names = expert_number_names(model)
        for own_name, value in model.state_dict().items():
            name = plain_name(own_name)
            if name in number_names:
                continue  # expert numbers depend on the layout
            self._wrapped_names[name], self._values[name] = own_name, value
        tensors = {name: value for name, value in self._values.items() if isinstance(value, Tensor)}

        def check() -> None:
            for name, tensor in tensors.items():
                require_storable(local_part(tensor), f"rank {topology.rank}: {operation}: {_MODEL}{name}")

        on_all_ranks(topology.world, operation, check)
        self._specs, self._remote_names = shard_specs(model, tensors, topology, operation)
        self._optimizer: OptimizerState | None = None

        def name_parameters() -> tuple[str | None, list[list[str]]]:
            if optimizer is None:
                return None, []
            self._optimizer = OptimizerState(optimizer, model, self._specs, topology)
            return self._optimizer.kind, self._optimizer.rank_local_names()

        named = on_all_ranks(topology.world, operation, name_parameters)
        # Parameter groups are saved in full: each rank needs the names that only other ranks have.
        self._rank_local_names = [names for _, names in named]
        described = ["None" if kind is None else f"{kind} with {len(names)} parameter groups" for kind, names in named]
        for rank, text in zip(topology.world.ranks, described, strict=True):
            if text != described[0]:
                raise RankError(
                    f"{operation}: the optimizer is {described[0]} on rank {topology.world.ranks[0]} and {text} on "
                    f"rank {rank}. Pass every rank's optimizer, or None on all ranks.",
                    agreed=True,
                )

    def entries(self, includes: EntryFilter = is_writer) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, value in self._values.items():
            spec = self._specs.get(name)
            if includes(_MODEL + name, self._topology.world if spec is None else spec.group):
                entries[_MODEL + name] = value if spec is None else spec.to_sharded(value)
        return (
            entries if self._optimizer is None else entries | self._optimizer.entries(self._rank_local_names, includes)
        )

    def about(self) -> dict[str, Any]:
        return {"format": FORMAT, "optimizer": None if self._optimizer is None else self._optimizer.about()}

    def model_difference(self, metadata: Metadata) -> str | None:
        """Describe up to two tensors of each kind of difference from the checkpoint; return None if all match."""
        saved = {
            key.removeprefix(_MODEL): tuple(value.size) if isinstance(value, TensorStorageMetadata) else None
            for key, value in metadata.state_dict_metadata.items()
            if key.startswith(_MODEL)
        }
        own = {name: spec.shape if (spec := self._specs.get(name)) else None for name in self._values}
        both = [name for name in own if name in saved and saved[name] != own[name] and not _is_extra_state(name)]
        shapes = [
            f"{name} is {_describe_shape(saved[name])} in the checkpoint and {_describe_shape(own[name])} here"
            for name in both
        ]
        missing = [f"{name} is not in the checkpoint" for name in own if name not in saved]
        unknown_names = saved.keys() - own.keys() - self._remote_names
        unknown = [f"{name} is in the checkpoint only" for name in saved if name in unknown_names]
        messages = [*shapes[:2], *missing[:2], *unknown[:2]]
        if not messages:
            return None
        num_omitted = len(shapes) + len(missing) + len(unknown) - len(messages)
        messages += [f"and {num_omitted} more"] if num_omitted else []
        return f"it is of another model: {'; '.join(messages)}. Build the model as it was at the save."

    def optimizer_difference(self, metadata_values: dict[str, Any]) -> str | None:
        if self._optimizer is None:
            return None
        about = metadata_values[ABOUT]["optimizer"]
        if about is None:
            return "it was saved without an optimizer. Pass optimizer=None."
        difference = self._optimizer.compare(about, metadata_values.get(GROUPS, []), self._rank_local_names)
        return difference and f"{difference}. Construct the optimizer as for the save, or pass optimizer=None."

    def targets(self, metadata: Metadata) -> dict[str, Any]:
        """Return the tensor into which each entry is read, by key; None for a plain value."""
        targets: dict[str, Any] = {}
        for name, value in self._values.items():
            spec, saved = self._specs.get(name), metadata.state_dict_metadata[_MODEL + name]
            targets[_MODEL + name] = None if spec is None else spec.to_sharded(value)
            if _is_extra_state(name):
                targets[_MODEL + name] = None
                if isinstance(saved, TensorStorageMetadata):
                    device = value.device if isinstance(value, Tensor) else None
                    targets[_MODEL + name] = torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
        return targets if self._optimizer is None else targets | self._optimizer.targets(metadata)

    def dtypes(self, targets: dict[str, Any]) -> dict[str, torch.dtype]:
        dtypes = {key: target.dtype for key, target in targets.items() if isinstance(target, Tensor)}
        return dtypes if self._optimizer is None else dtypes | self._optimizer.dtypes(dtypes)

    def install(self, targets: dict[str, Any], metadata_values: dict[str, Any]) -> None:
        state = {
            own: self._values[name] if name in self._specs and not _is_extra_state(name) else targets[_MODEL + name]
            for name, own in self._wrapped_names.items()
        }
        self._model.load_state_dict(state)
        if self._optimizer is not None:
            self._optimizer.install(targets, metadata_values[GROUPS])


def _is_extra_state(name: str) -> bool:
    return name.rpartition(".")[2] == _EXTRA_STATE


def _raise_not_loaded(path: Path, difference: str | None) -> None:
    if difference is not None:
        raise ConfigError(f"checkpoint {path} was not loaded: {difference}")


def require_extra(extra: Any, operation: str) -> None:
    if not isinstance(extra, dict | None):
        raise ConfigError(f"{operation}: extra is of class {type(extra).__qualname__}. Pass a dict, or None.")


def metadata_problem(metadata_values: dict[str, Any]) -> str | None:
    """Return an error message if `save_checkpoint` cannot have written this metadata, otherwise None."""
    about, groups = metadata_values.get(ABOUT), metadata_values.get(GROUPS, [])
    if (
        isinstance(metadata_values.get(EXTRA), dict)
        and isinstance(about, dict)
        and isinstance(about.get("optimizer", ()), dict | None)
        and _are_names((about["optimizer"] or {"settings": []}).get("settings"))
        and isinstance((about["optimizer"] or {"kind": ""}).get("kind"), str)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)
    ):
        return None
    return f"it is damaged: its metadata is not as save_checkpoint writes it. {DAMAGE_FIX}"


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"of shape {list(shape)}"
