"""An optimizer's state, by the names of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.training.layout import Layouts, plain_name, writes

STATE = "optimizer.state."
GROUPS = "optimizer.param_groups"


class OptimizerState:
    """What an optimizer keeps for this rank's parameters, and the parameters of each of its groups by name.

    Raises:
        ConfigError: the optimizer has a parameter that the model's state has not.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, layouts: Layouts, topology: Topology) -> None:
        self._optimizer, self._topology, self._layouts = optimizer, topology, layouts.own
        known = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        packed = optimizer.state_dict()
        self._groups: list[dict[str, Any]] = packed["param_groups"]
        self.names: list[list[str]] = []
        self._parameters: dict[str, Tensor] = {}
        self._index: dict[str, int] = {}
        self._state: dict[str, dict[str, Any]] = {}
        for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            self.names.append([])
            for parameter, index in zip(group["params"], packed_group["params"], strict=True):
                name = known.get(parameter)
                if name is None or name not in self._layouts:
                    raise ConfigError(
                        f"rank {topology.rank}: group {number} of the optimizer has a parameter of shape "
                        f"{list(parameter.shape)} that is not in the model's state. Give the model that it trains."
                    )
                self.names[number].append(name)
                self._parameters[name], self._index[name] = parameter, index
                self._state[name] = dict(packed["state"].get(index, {}))

    def names_of_some(self) -> list[list[str]]:
        """For each group, the names that not all ranks have."""
        return [[name for name in names if not self._layouts[name].everywhere] for names in self.names]

    def entries(self, scattered: list[list[list[str]]]) -> dict[str, Any]:
        """What this rank has to write.

        Args:
            scattered: every rank's `names_of_some()`.
        Raises:
            ConfigError: state of a split parameter that has another shape than the parameter.
        """
        entries: dict[str, Any] = {}
        for name, values in self._state.items():
            layout, shape = self._layouts[name], self._parameters[name].shape
            for key, value in values.items():
                entry = f"{STATE}{name}.{key}"
                if isinstance(value, Tensor) and value.shape == shape:
                    if writes(entry, layout.group):
                        entries[entry] = layout.spread(value)
                    continue
                if isinstance(value, Tensor) and value.numel() > 1 and layout.split:
                    raise ConfigError(
                        f"rank {self._topology.rank}: the optimizer's {key} for {name} has shape {list(value.shape)}, "
                        f"the parameter {list(shape)}. It cannot be split over another number of ranks; use an "
                        "optimizer whose state is shaped like the parameters."
                    )
                if writes(entry, self._topology.world if layout.everywhere else layout.group):
                    entries[entry] = value
        if writes(GROUPS, self._topology.world):
            entries[GROUPS] = [
                _settings(group) | {"params": names}
                for group, names in zip(self._groups, self._all_names(scattered), strict=True)
            ]
        return entries

    def about(self) -> dict[str, Any]:
        """What tells one kind of optimizer from another."""
        return {"kind": type(self._optimizer).__name__, "settings": sorted(self._optimizer.defaults)}

    def compare(
        self, about: dict[str, Any], groups: list[dict[str, Any]], scattered: list[list[list[str]]]
    ) -> str | None:
        """The first thing in which a saved optimizer differs from this one, None if nothing does."""
        kind = type(self._optimizer).__name__
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
        """For every saved value of this rank's parameters, what it is to be read into; None for plain values."""
        names = {f"{STATE}{name}": name for name in self._parameters}
        targets: dict[str, Any] = {}
        for entry, saved in metadata.state_dict_metadata.items():
            prefix, _, key = entry.rpartition(".")
            if prefix not in names:
                continue
            if not isinstance(saved, TensorStorageMetadata):
                targets[entry] = None
                continue
            name, dtype = names[prefix], saved.properties.dtype
            layout, parameter, value = self._layouts[name], self._parameters[name], self._state[name].get(key)
            if tuple(saved.size) != layout.shape:
                targets[entry] = torch.empty(saved.size, dtype=dtype)
                continue
            if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dtype != dtype:
                value = self._state[name][key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            targets[entry] = layout.spread(value)
        return targets

    def install(self, targets: dict[str, Any], groups: list[dict[str, Any]]) -> None:
        """Hands the optimizer what was read into `targets`, and the saved settings of its groups."""
        state: dict[int, dict[str, Any]] = {}
        for name, index in self._index.items():
            prefix = f"{STATE}{name}."
            for key in [entry[len(prefix) :] for entry in targets if entry.startswith(prefix)]:
                value, layout = targets[prefix + key], self._layouts[name]
                if isinstance(value, Tensor) and tuple(value.shape) == layout.shape:
                    value = self._state[name][key]  # the same memory, not as a DTensor over the ranks
                state.setdefault(index, {})[key] = value
        merged = [own | _settings(group) for own, group in zip(self._groups, groups, strict=True)]
        self._optimizer.load_state_dict({"state": state, "param_groups": merged})

    def _all_names(self, scattered: list[list[list[str]]]) -> list[list[str]]:
        """For each group, the names that any rank has."""
        return [
            list(dict.fromkeys([*own, *(name for on_rank in scattered for name in on_rank[number])]))
            for number, own in enumerate(self.names)
        ]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
