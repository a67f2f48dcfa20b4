"""Checkpoints that any number of ranks saves and any other number loads.

A checkpoint is a folder in the format of torch.distributed.checkpoint. Every tensor is in it once, whole, under the
name it has in a model on one rank, in pieces that the ranks write side by side; PyTorch's own tools read it, too.
Beside them is a file of checksums: what a rank loads it has checked before.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fusedmoe.comm.collectives import on_all_ranks
from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training.checkpoint_checks import CHECKSUMS, CURE, FORMAT, check_value, unknown_class
from fusedmoe.training.checkpoint_folder import Folder, first_path, index_digest, write_folder
from fusedmoe.training.data_parallel import SingleRank
from fusedmoe.training.optimizers import JoinedOptimizers, Optimizers, PerMatrix, require_plain
from fusedmoe.training.shard_spec import ShardSpec, ShardSpecs, number_names, plain_name, shard_specs, writes

_MODEL = "model."

EXTRA, ABOUT = "extra", "fusedmoe"
STATE = "optimizer.state."
GROUPS = "optimizer.param_groups"

# A load starts again where the checkpoint was replaced.
_ATTEMPTS = 3

#: Of a key and the ranks that hold it, whether this rank's entries have it.
Wanted = Callable[[str, Group], bool]


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
        extra: whatever else the run needs: step, scheduler, generators; anything that `torch.load` reads with
            `weights_only=True`. Rank 0's is kept: gather into it what differs between ranks.
    Raises:
        ConfigError: `path` is something else than a checkpoint, the state cannot be split over other ranks, or holds
            values that could not be loaded without running code; another job is saving to `path`.
        RankError: ranks give different paths, or do not see one folder, or saving failed on some rank; the message
            names it and says why. The checkpoint that stood at `path` is as it was.
    """
    path = Path(path)
    operation = f"saving checkpoint {first_path(path, topology, 'saving a checkpoint', one_place=True)}"
    state = ModelState(model, optimizer, topology, operation)
    entries: dict[str, Any] = {}

    def collect() -> None:
        # Each rank pickles its own values once here: what a load would refuse is refused before a file is made.
        entries.update(state.entries())
        if topology.is_first:
            entries.update({EXTRA: extra or {}, ABOUT: state.about()})
        for key, value in entries.items():
            if not isinstance(value, Tensor):
                check_plain(key, value, operation)

    on_all_ranks(topology.world, operation, collect)
    write_folder(path, entries, _place, topology, operation)


@torch.no_grad()
def load_checkpoint(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, topology: Topology
) -> dict[str, Any]:
    """Loads model and optimizer in place and returns the `extra` of the save. Collective over all ranks.

    The number of ranks and their layout may differ from those of the save. Each rank reads what it holds. All is
    compared first, and every byte that will be loaded is checked: of a checkpoint that does not fit, or is damaged,
    nothing is loaded. One of the format before checksums loads, too, with a warning. Dtypes may differ; numbers are
    converted, and what that would change by more than rounding (1e300 to float32, 300 to uint8, 2.7 to int64) is
    refused.

    Nothing runs that the checkpoint says: what is no tensor is read with `weights_only=True`.

    Args:
        optimizer: as it was for the save; None leaves the optimizer's part of the checkpoint unread.
    Raises:
        ConfigError: there is no checkpoint at `path`, it is damaged, holds objects of classes that need code to load,
            has numbers that the model's dtypes cannot hold, or is of another
            model or optimizer; the message names the first tensors that differ.
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
        folder.read(small)
        _refuse(path, _unknown(small, folder))
        _refuse(path, state.optimizer_difference(small))
        targets.update(state.targets(folder.metadata))
        folder.check(targets)
        folder.check_numbers(targets, state.dtypes(targets))
        return folder.digest

    digests = on_all_ranks(topology.world, operation, compare)
    if None in digests or not is_last and len(set(digests)) > 1:
        return None
    for rank, digest in zip(topology.world.ranks, digests, strict=True):
        if digest != digests[0]:
            raise RankError(
                f"{operation}: there is another checkpoint on rank {rank} than on rank {topology.world.ranks[0]}; "
                "nothing was loaded. Give all ranks the path of one save.",
                agreed=True,
            )
    # Now that nothing speaks against it: a warning before a refusal would be read as its reason.
    if folders[0].digests is None and topology.is_first:
        warnings.warn(
            f"checkpoint {path} is of format 1, without checksums: damage to its data is noticed in most places, and "
            "damage to its index is not. Save it again with save_checkpoint.",
            stacklevel=4,  # torch.no_grad() stands between
        )
    on_all_ranks(topology.world, operation, lambda: folders[0].read(targets))
    state.install(targets, small)
    extra: dict[str, Any] = small[EXTRA]
    return extra


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
        self._specs: ShardSpecs = shard_specs(model, tensors, topology, operation)
        self._optimizer: OptimizerState | None = None

        def name_parameters() -> list[list[str]]:
            for name, tensor in tensors.items():
                if tensor.is_meta:
                    raise ConfigError(
                        f"rank {topology.rank}: {operation}: {name} is on the meta device. Give the model memory "
                        "first: model.to_empty(device=…)."
                    )
            if optimizer is None:
                return []
            self._optimizer = OptimizerState(optimizer, model, self._specs, topology)
            return self._optimizer.names_of_some()

        # Groups of parameters are saved whole, by name, so each rank has to know the names that it lacks.
        self._scattered = on_all_ranks(topology.world, operation, name_parameters)

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
        both = [name for name in own if name in saved and saved[name] != own[name]]
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
        found = self._optimizer.compare(about, small[GROUPS], self._scattered)
        return found and f"{found}. Make the optimizer as it was made for the save, or pass optimizer=None."

    def targets(self, metadata: Metadata) -> dict[str, Any]:
        """Lists what this rank has to read, and for each entry the tensor to read it into; None for plain values."""
        targets: dict[str, Any] = {}
        for name, value in self._values.items():
            spec = self._specs.own.get(name)
            targets[_MODEL + name] = None if spec is None else spec.spread(value)
        return targets if self._optimizer is None else targets | self._optimizer.targets(metadata)

    def dtypes(self, targets: dict[str, Any]) -> dict[str, torch.dtype]:
        """Returns the dtype that each tensor of `targets` has in the end."""
        dtypes = {key: target.dtype for key, target in targets.items() if isinstance(target, Tensor)}
        return dtypes if self._optimizer is None else dtypes | self._optimizer.dtypes(dtypes)

    def install(self, targets: dict[str, Any], small: dict[str, Any]) -> None:
        """Completes what reading in place has begun."""
        # Tensors were read into the model's own memory; this hands over other state and runs the modules' hooks.
        names = self._own_names.items()
        state = {own: self._values[name] if name in self._specs.own else targets[_MODEL + name] for name, own in names}
        self._model.load_state_dict(state)
        if self._optimizer is not None:
            self._optimizer.install(targets, small[GROUPS])


def check_plain(key: str, value: Any, operation: str) -> None:
    """Raise `ConfigError` for a value that a load would refuse."""
    data = BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        check_value(data)
        data.seek(0)
        torch.load(data, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ConfigError(
            f"{operation}: {key} holds {unknown_class(error)}, and reading more than tensors and plain values would "
            "run code. Keep its state_dict() there, or convert it to plain values."
        ) from error
    except Exception as error:  # whatever pickling and parsing raise
        raise ConfigError(f"{operation}: {key} cannot be saved ({error}). Convert it to plain values.") from error


def _refuse(path: Path, difference: str | None) -> None:
    if difference is not None:
        raise ConfigError(f"checkpoint {path} was not loaded: {difference}")


def _unknown(small: dict[str, Any], folder: Folder) -> str | None:
    """Says why the checkpoint is none that `save_checkpoint` left behind; None if it is one."""
    if ABOUT not in small:
        return "save_checkpoint did not write it. Read it with torch.distributed.checkpoint."
    about, groups = small[ABOUT], small.get(GROUPS, [])
    if not (
        isinstance(small.get(EXTRA), dict)
        and isinstance(about, dict)
        and isinstance(about.get("format"), int)
        and isinstance(about.get("optimizer", ()), dict | None)
        and _are_names((about["optimizer"] or {"settings": []}).get("settings"))
        and isinstance((about["optimizer"] or {"kind": ""}).get("kind"), str)
        and isinstance(groups, list)
        and all(isinstance(group, dict) and _are_names(group.get("params")) for group in groups)
    ):
        return f"it is damaged: what it says of itself is not what save_checkpoint writes. {CURE}"
    if folder.digests is None and small[ABOUT]["format"] > 1:
        return f"it is damaged: {CHECKSUMS} is missing. {CURE}"
    return None


def _are_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _told(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"of shape {list(shape)}"


def _place(key: str) -> tuple[str, ...]:
    """Returns the keys under which PyTorch's tools put an entry in the nested dictionary they make of a checkpoint."""
    if key.startswith(_MODEL):
        return "model", key.removeprefix(_MODEL)
    if key.startswith(STATE):
        # Names of parameters have dots in them, names of state have none.
        name, _, value = key.removeprefix(STATE).rpartition(".")
        return "optimizer", "state", name, value
    return tuple(key.split("."))


class OptimizerState:
    """State of an optimizer for this rank's parameters, and the parameters of each of its groups by name."""

    def __init__(self, optimizers: Optimizers, model: nn.Module, specs: ShardSpecs, topology: Topology) -> None:
        optimizer = JoinedOptimizers(optimizers)
        self._optimizer, self._topology, self._specs = optimizer, topology, specs.own
        known = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        packed = optimizer.state_dict()
        self._groups: list[dict[str, Any]] = packed["param_groups"]
        self.names: list[list[str]] = []
        self._parameters: dict[str, Tensor] = {}
        self._index: dict[str, int] = {}
        self._state: dict[str, dict[str, Any]] = {}
        # `state_dict()` knows parameters by number; names are the same on any number of ranks.
        for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            self.names.append([])
            for parameter, index in zip(group["params"], packed_group["params"], strict=True):
                name = known.get(parameter)
                if name is None or name not in self._specs:
                    raise ConfigError(
                        f"rank {topology.rank}: group {number} of the optimizer has a parameter of shape "
                        f"{list(parameter.shape)} that is not in the model's state. Give the model that it trains."
                    )
                self.names[number].append(name)
                self._parameters[name], self._index[name] = parameter, index
                self._state[name] = dict(packed["state"].get(index, {}))

    def names_of_some(self) -> list[list[str]]:
        """Lists the names of each group that not all ranks have."""
        return [[name for name in names if not self._specs[name].everywhere] for names in self.names]

    def entries(self, scattered: list[list[list[str]]], wanted: Wanted) -> dict[str, Any]:
        """Collects what this rank has to write, by key; `scattered`: every rank's `names_of_some()`."""
        entries: dict[str, Any] = {}
        for name, values in self._state.items():
            spec, shape = self._specs[name], self._parameters[name].shape
            for key, value in values.items():
                entry = f"{STATE}{name}.{key}"
                if spec.split:
                    require_plain(value, key, self._of(name))
                spread = self._spec_of(name, value.shape, shape) if isinstance(value, Tensor) else None
                if spread is not None:
                    if wanted(entry, spec.group):
                        entries[entry] = spread.spread(value)
                    continue
                # Factored state (Adafactor's rows and columns) says nothing of how it splits with the parameter.
                if isinstance(value, Tensor) and value.numel() > 1 and spec.split:
                    raise ConfigError(
                        f"rank {self._topology.rank}: the optimizer's {key} for {name} has shape {list(value.shape)}, "
                        f"the parameter {list(shape)}. It cannot be split over another number of ranks; use an "
                        "optimizer whose state is shaped like the parameters, or for the experts' matrices "
                        f"fusedmoe.training.PerMatrix(…, {type(self._of(name)).__name__})."
                    )
                if wanted(entry, self._topology.world if spec.everywhere else spec.group):
                    entries[entry] = value
        if wanted(GROUPS, self._topology.world):
            groups = zip(self._groups, self._all_names(scattered), strict=True)
            entries[GROUPS] = [_settings(group) | {"params": names} for group, names in groups]
        return entries

    def about(self) -> dict[str, Any]:
        """Returns what tells one kind of optimizer from another."""
        return {"kind": self._optimizer.kind, "settings": sorted(self._optimizer.defaults)}

    def compare(
        self, about: dict[str, Any], groups: list[dict[str, Any]], scattered: list[list[list[str]]]
    ) -> str | None:
        """Names the first thing in which a saved optimizer differs from this one, None if nothing does."""
        kind = self._optimizer.kind
        for setting in about["settings"]:
            if setting not in self._optimizer.defaults:
                return f"it is of {about['kind']}, whose setting {setting!r} {kind} does not have"
        if len(groups) != len(self._groups):
            return f"it has {len(groups)} parameter groups, this optimizer {len(self._groups)}"
        for number, (group, names) in enumerate(zip(groups, self._all_names(scattered), strict=True)):
            theirs, ours = set(group["params"]), set(names)
            for name in sorted(theirs ^ ours):
                where = "this optimizer" if name in ours else "the checkpoint"
                return f"only {where} has {name} in parameter group {number}"
        return None

    def targets(self, metadata: Metadata) -> dict[str, Any]:
        """Lists the saved values of this rank's parameters, and what each is to be read into; None for plain values."""
        targets: dict[str, Any] = {}
        for entry, saved in metadata.state_dict_metadata.items():
            prefix, _, key = entry.rpartition(".")
            name = prefix.removeprefix(STATE)
            if not prefix.startswith(STATE) or name not in self._parameters:
                continue
            if not isinstance(saved, TensorStorageMetadata):
                targets[entry] = None
                continue
            dtype, spec = saved.properties.dtype, self._specs[name]
            parameter, value = self._parameters[name], self._state[name].get(key)
            spread = self._spec_of(name, saved.size, spec.shape)
            if spread is None:  # a count, say, which every rank holds whole
                if spec.split and saved.size.numel() > 1:
                    raise ConfigError(
                        f"checkpoint entry {entry} has shape {list(saved.size)}, the parameter {list(spec.shape)}: it "
                        "cannot be split over ranks. Load with optimizer=None, and train with an optimizer whose state "
                        "is shaped like the parameters, or with fusedmoe.training.PerMatrix."
                    )
                targets[entry] = torch.empty(saved.size, dtype=dtype)
                continue
            # An optimizer that has not stepped yet has no memory for its state: it is made here, to be read into.
            shape = parameter.shape
            if isinstance(self._of(name), PerMatrix):
                shape = torch.Size((*shape[:-2], *saved.size[len(shape) - 2 :]))
            if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
                like = parameter if shape == parameter.shape else parameter.new_empty(shape)
                value = self._state[name][key] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
            targets[entry] = spread.spread(value)
        return targets

    def _of(self, name: str) -> Optimizer:
        return self._optimizer.of(self._parameters[name])

    def _spec_of(self, name: str, size: Sequence[int], shape: Sequence[int]) -> ShardSpec | None:
        """Returns the spread of state of a size, kept for a parameter of a shape; None: every rank holds all of it."""
        spec, lead = self._specs[name], len(shape) - 2
        if isinstance(self._of(name), PerMatrix):
            return spec.stacked(lead, size[lead:]) if tuple(size[:lead]) == tuple(shape[:lead]) else None
        return spec if tuple(size) == tuple(shape) else None

    def dtypes(self, keys: Iterable[str]) -> dict[str, torch.dtype]:
        """Returns the dtypes that `Optimizer.load_state_dict` gives what is read under `keys`: the parameters'."""
        dtypes = {}
        for entry in keys:
            prefix, _, key = entry.rpartition(".")
            parameter = self._parameters.get(prefix.removeprefix(STATE)) if prefix.startswith(STATE) else None
            if (
                parameter is None
                or type(self._optimizer.of(parameter)).load_state_dict is not Optimizer.load_state_dict
            ):
                continue  # its own rule
            # PyTorch keeps `step` as it is: counts in bfloat16 would stand still at 256.
            if parameter.is_floating_point() and key != "step":
                dtypes[entry] = parameter.dtype
        return dtypes

    def install(self, targets: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Hands the optimizer what was read into `targets`, and the saved settings of its groups."""
        state: dict[int, dict[str, Any]] = {}
        for entry, value in targets.items():
            prefix, _, key = entry.rpartition(".")
            name = prefix.removeprefix(STATE)
            if prefix.startswith(STATE) and name in self._index:
                if isinstance(value, Tensor) and self._spec_of(name, value.shape, self._specs[name].shape) is not None:
                    value = self._state[name][key]  # the same memory, not as a DTensor over the ranks
                state.setdefault(self._index[name], {})[key] = value
        # Settings of the save win; what a later PyTorch has added keeps the value that it has here.
        merged = [own | _settings(group) for own, group in zip(self._groups, groups, strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": merged})

    def _all_names(self, scattered: list[list[list[str]]]) -> list[list[str]]:
        """Lists the names of each group that any rank has."""
        return [
            list(dict.fromkeys([*own, *(name for on_rank in scattered for name in on_rank[number])]))
            for number, own in enumerate(self.names)
        ]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
