"""Optimizer state by parameter name, as stored in checkpoints, independent of the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from fusedmoe.comm.group import Group
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.split_optimizers import JoinedOptimizers, MatrixOptimizer, Optimizers, require_plain
from fusedmoe.training.plain_values import encode_value, require_storable
from fusedmoe.training.replicated_parameters import local_part
from fusedmoe.training.shard_spec import ShardSpec, plain_name

STATE = "optimizer.state."
GROUPS = "optimizer.param_groups"

#: includes(key, holders): whether this rank's entries include `key`, which all ranks of `holders` have.
EntryFilter = Callable[[str, Group], bool]


class OptimizerState:
    """Optimizer state of this rank's parameters, and the parameter names of each group."""

    def __init__(
        self, optimizers: Optimizers, model: nn.Module, specs: dict[str, ShardSpec], topology: Topology
    ) -> None:
        optimizer = JoinedOptimizers(optimizers)
        self._optimizer, self._topology, self._shard_specs = optimizer, topology, specs
        self.kind = optimizer.kind
        name_of = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        packed = optimizer.state_dict()
        self._groups: list[dict[str, Any]] = packed["param_groups"]
        self.names: list[list[str]] = []
        self._parameters: dict[str, Tensor] = {}
        self._number_of_name: dict[str, int] = {}
        self._state: dict[str, dict[str, Any]] = {}
        # `state_dict()` numbers the parameters of one rank; names do not depend on the number of ranks.
        for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            self.names.append([])
            for parameter, index in zip(group["params"], packed_group["params"], strict=True):
                name = name_of.get(parameter)
                if name is None or name not in self._shard_specs:
                    raise ConfigError(
                        f"rank {topology.rank}: group {number} of the optimizer has a parameter of shape "
                        f"{list(parameter.shape)} that is not in the model's state. Pass the model that it trains."
                    )
                self.names[number].append(name)
                self._parameters[name], self._number_of_name[name] = parameter, index
                self._state[name] = dict(packed["state"].get(index, {}))

    def rank_local_names(self) -> list[list[str]]:
        """Return, per group, the parameter names that only some ranks have."""
        return [[name for name in names if not self._shard_specs[name].is_on_all_ranks] for names in self.names]

    def entries(self, names_by_rank: list[list[list[str]]], includes: EntryFilter) -> dict[str, Any]:
        """Return this rank's checkpoint entries; `names_by_rank` has every rank's `rank_local_names()`.

        Raises:
            ConfigError: state that cannot be stored or split over ranks, or whose name contains a dot.
        """
        entries: dict[str, Any] = {}
        for name, values in self._state.items():
            spec, shape = self._shard_specs[name], self._parameters[name].shape
            for key, value in values.items():
                entry = f"{STATE}{name}.{key}"
                if not isinstance(key, str) or "." in key:  # a load splits parameter name and key at the last dot
                    raise ConfigError(
                        f"rank {self._topology.rank}: the optimizer names a state of {name} {key!r}, and checkpoints "
                        "store names without dots. Rename it in the optimizer's state."
                    )
                if spec.is_split:
                    require_plain(value, key, self._optimizer_of(name))
                    if isinstance(value, Tensor):
                        require_storable(local_part(value), f"rank {self._topology.rank}: {entry}")
                state_spec = self._state_spec(name, value.shape, shape) if isinstance(value, Tensor) else None
                if state_spec is not None:
                    if includes(entry, spec.group):
                        entries[entry] = state_spec.to_sharded(value)
                    continue
                # Such as the rows and columns of Adafactor.
                if isinstance(value, Tensor) and value.numel() > 1 and spec.is_split:
                    raise ConfigError(
                        f"rank {self._topology.rank}: the optimizer's {key} for {name} has shape {list(value.shape)}, "
                        f"the parameter {list(shape)}. It cannot be split over another number of ranks; use an "
                        "optimizer whose state is shaped like the parameters, or for the experts' matrices "
                        f"fusedmoe.training.PerMatrix(…, {type(self._optimizer_of(name)).__name__})."
                    )
                if includes(entry, self._topology.world if spec.is_on_all_ranks else spec.group):
                    entries[entry] = value
        if includes(GROUPS, self._topology.world):
            groups = zip(self._groups, self._merge_names(names_by_rank), strict=True)
            entries[GROUPS] = [_settings(group) | {"params": names} for group, names in groups]
        return entries

    def about(self) -> dict[str, Any]:
        return {"kind": self.kind, "settings": sorted(self._optimizer.defaults)}

    def compare(
        self, about: dict[str, Any], groups: list[dict[str, Any]], names_by_rank: list[list[list[str]]]
    ) -> str | None:
        """Describe the first difference from a saved optimizer; None without one."""
        for setting in about["settings"]:
            if setting not in self._optimizer.defaults:
                return f"it is of {about['kind']}, whose setting {setting!r} {self.kind} does not have"
        if len(groups) != len(self._groups):
            return f"it has {len(groups)} parameter groups, this optimizer {len(self._groups)}"
        for number, (group, names) in enumerate(zip(groups, self._merge_names(names_by_rank), strict=True)):
            saved_names, own_names = set(group["params"]), set(names)
            for name in sorted(saved_names ^ own_names):
                where = "this optimizer" if name in own_names else "the checkpoint"
                return f"only {where} has {name} in parameter group {number}"
        return None

    def targets(self, metadata: Metadata) -> dict[str, Any]:
        """Return the tensor into which each saved entry is read; None for plain values. Creates missing state tensors.

        Raises:
            ConfigError: a saved tensor cannot be split over ranks.
        """
        targets: dict[str, Any] = {}
        for entry, name, key in self._own_entries(metadata.state_dict_metadata):
            saved = metadata.state_dict_metadata[entry]
            if not isinstance(saved, TensorStorageMetadata):
                targets[entry] = None
                continue
            dtype, spec = saved.properties.dtype, self._shard_specs[name]
            parameter, value = self._parameters[name], self._state[name].get(key)
            state_spec = self._state_spec(name, saved.size, spec.shape)
            if state_spec is None:  # such as a step count
                if spec.is_split and saved.size.numel() > 1:
                    raise ConfigError(
                        f"checkpoint entry {entry} has shape {list(saved.size)}, the parameter {list(spec.shape)}: it "
                        "cannot be split over ranks. Load with optimizer=None, and train with an optimizer whose state "
                        "is shaped like the parameters, or with fusedmoe.training.PerMatrix."
                    )
                targets[entry] = torch.empty(saved.size, dtype=dtype, device="cpu")
                continue
            shape = parameter.shape
            if isinstance(self._optimizer_of(name), MatrixOptimizer):
                shape = torch.Size((*shape[:-2], *saved.size[len(shape) - 2 :]))
            if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
                like = parameter if shape == parameter.shape else parameter.new_empty(shape)
                value = self._state[name][key] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
            targets[entry] = state_spec.to_sharded(value)
        return targets

    def _own_entries(self, keys: Iterable[str]) -> Iterator[tuple[str, str, str]]:
        """Yield entry, parameter name and state key of the entries that belong to parameters of this rank."""
        for entry in keys:
            prefix, _, key = entry.rpartition(".")
            name = prefix.removeprefix(STATE)
            if prefix.startswith(STATE) and name in self._parameters:
                yield entry, name, key

    def _optimizer_of(self, name: str) -> Optimizer:
        return self._optimizer.optimizer_of(self._parameters[name])

    def _follows_torch(self, name: str) -> bool:
        return type(self._optimizer_of(name)).load_state_dict is Optimizer.load_state_dict

    def _state_spec(self, name: str, size: Sequence[int], shape: Sequence[int]) -> ShardSpec | None:
        """Return the sharding of a parameter's state of shape `size`; None if it is not sharded like the parameter."""
        spec, lead = self._shard_specs[name], len(shape) - 2
        if isinstance(self._optimizer_of(name), MatrixOptimizer):
            return spec.with_trailing_shape(lead, size[lead:]) if tuple(size[:lead]) == tuple(shape[:lead]) else None
        return spec if tuple(size) == tuple(shape) else None

    def dtypes(self, keys: Iterable[str]) -> dict[str, torch.dtype]:
        """Return the dtypes of the entries that PyTorch's `load_state_dict` converts: that of each entry's parameter.

        Omits entries that are not converted: `step`, state of parameters that are not floating point, of optimizers
        with their own `load_state_dict`, and other values.
        """
        # PyTorch does not convert `step`: a bfloat16 count would stop at 256.
        return {
            entry: self._parameters[name].dtype
            for entry, name, key in self._own_entries(keys)
            if self._follows_torch(name) and self._parameters[name].is_floating_point() and key != "step"
        }

    def install(self, targets: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        state: dict[int, dict[str, Any]] = {}
        plain: list[tuple[Tensor, str, Any]] = []
        for entry, name, key in self._own_entries(targets):
            value = targets[entry]
            if isinstance(value, Tensor):
                if self._state_spec(name, value.shape, self._shard_specs[name].shape) is not None:
                    value = self._state[name][key]  # a plain tensor instead of a DTensor
            # PyTorch copies containers as type(value)(iterator), which corrupts strings and fails for arrays.
            elif isinstance(value, Iterable) and self._follows_torch(name) and not encode_value(value, entry).tensors:
                plain.append((self._parameters[name], key, value))
                continue
            state.setdefault(self._number_of_name[name], {})[key] = value
        # Settings added by a later PyTorch keep their current values.
        merged = [own | _settings(group, own) for own, group in zip(self._groups, groups, strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": merged})
        for parameter, key, value in plain:
            self._optimizer.optimizer_of(parameter).state[parameter][key] = value

    def _merge_names(self, names_by_rank: list[list[list[str]]]) -> list[list[str]]:
        return [
            list(dict.fromkeys([*own, *(name for on_rank in names_by_rank for name in on_rank[number])]))
            for number, own in enumerate(self.names)
        ]


def _settings(group: dict[str, Any], like: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a group's settings, with each tensor on the device of the same setting in `like`."""
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key, value in settings.items():
        own = None if like is None else like.get(key)
        if isinstance(value, Tensor) and isinstance(own, Tensor):
            settings[key] = value.to(own.device)
    return settings
