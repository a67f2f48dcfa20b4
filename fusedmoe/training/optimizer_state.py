"""State of optimizers by the names of parameters, as checkpoints have it on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.copies import local_part
from fusedmoe.training.optimizers import JoinedOptimizers, Optimizers, PerMatrix, require_plain
from fusedmoe.training.plain_values import encode_value, require_storable
from fusedmoe.training.shard_spec import ShardSpec, ShardSpecs, plain_name

STATE = "optimizer.state."
GROUPS = "optimizer.param_groups"

#: Of a key and the ranks that hold it, whether this rank's entries have it.
Wanted = Callable[[str, Group], bool]


class OptimizerState:
    """State of an optimizer for this rank's parameters, and the parameters of each of its groups by name."""

    def __init__(self, optimizers: Optimizers, model: nn.Module, specs: ShardSpecs, topology: Topology) -> None:
        optimizer = JoinedOptimizers(optimizers)
        self._optimizer, self._topology, self._specs = optimizer, topology, specs.own
        self.kind = optimizer.kind
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
                if not isinstance(key, str) or "." in key:  # a load finds the parameter's name before the last dot
                    raise ConfigError(
                        f"rank {self._topology.rank}: the optimizer names a state of {name} {key!r}, and checkpoints "
                        "store names without dots. Rename it in the optimizer's state."
                    )
                if spec.split:
                    require_plain(value, key, self._of(name))
                    if isinstance(value, Tensor):
                        require_storable(local_part(value), f"rank {self._topology.rank}: {entry}")
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
                targets[entry] = torch.empty(saved.size, dtype=dtype, device="cpu")
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

    def _follows_torch(self, name: str) -> bool:
        """Return whether a parameter's optimizer loads state by PyTorch's rule."""
        return type(self._of(name)).load_state_dict is Optimizer.load_state_dict

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
            name = prefix.removeprefix(STATE)
            parameter = self._parameters.get(name) if prefix.startswith(STATE) else None
            if parameter is None or not self._follows_torch(name):
                continue  # its own rule
            # PyTorch keeps `step` as it is: counts in bfloat16 would stand still at 256.
            if parameter.is_floating_point() and key != "step":
                dtypes[entry] = parameter.dtype
        return dtypes

    def install(self, targets: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Hands the optimizer what was read into `targets`, and the saved settings of its groups."""
        state: dict[int, dict[str, Any]] = {}
        plain: list[tuple[Tensor, str, Any]] = []
        for entry, value in targets.items():
            prefix, _, key = entry.rpartition(".")
            name = prefix.removeprefix(STATE)
            if prefix.startswith(STATE) and name in self._index:
                if isinstance(value, Tensor):
                    if self._spec_of(name, value.shape, self._specs[name].shape) is not None:
                        value = self._state[name][key]  # the same memory, not as a DTensor over the ranks
                # PyTorch copies containers by type(value)(iterator), which changes text and raises errors for arrays.
                elif (
                    isinstance(value, Iterable) and self._follows_torch(name) and not encode_value(value, entry).tensors
                ):
                    plain.append((self._parameters[name], key, value))
                    continue
                state.setdefault(self._index[name], {})[key] = value
        # Settings of the save win; what a later PyTorch has added keeps the value that it has here.
        merged = [own | _settings(group, own) for own, group in zip(self._groups, groups, strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": merged})
        for parameter, key, value in plain:
            self._optimizer.of(parameter).state[parameter][key] = value

    def _all_names(self, scattered: list[list[list[str]]]) -> list[list[str]]:
        """Lists the names of each group that any rank has."""
        return [
            list(dict.fromkeys([*own, *(name for on_rank in scattered for name in on_rank[number])]))
            for number, own in enumerate(self.names)
        ]


def _settings(group: dict[str, Any], like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings of a group, tensors on the devices of those in `like`."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key, value in settings.items():
        own = None if like is None else like.get(key)
        if isinstance(value, Tensor) and isinstance(own, Tensor):
            settings[key] = value.to(own.device)
    return settings
