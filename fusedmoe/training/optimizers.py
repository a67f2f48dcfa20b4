"""`PerMatrix`, which steps on single matrices, and a check of each optimizer before its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import product
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fusedmoe.errors import ConfigError
from fusedmoe.experts.split_optimizers import MatrixOptimizer, require_elementwise_part, require_plain
from fusedmoe.training.replicated_parameters import Replica

# Name and sharding of sharded parameters whose optimizer has not stepped yet.
_unchecked_parameters: Any = WeakIdKeyDictionary()
_registered_models: WeakSet[nn.Module] = WeakSet()
# Handle of the global pre-step hook while parameters are unchecked.
_step_hooks: list[Any] = []


class PerMatrix(MatrixOptimizer):
    """Apply a matrix optimizer (Muon, Adafactor, 8-bit Adam) to each matrix of stacked experts separately.

        matrices = [matrix for layer in layers for matrix in (layer.experts.w1, layer.experts.w2)]
        optimizer = PerMatrix(matrices, torch.optim.Muon, lr=0.02, adjust_lr_fn="match_rms_adamw")

    A parameter [experts, …, A, B] is treated as independent parameters [A, B]: the result does not depend on the number
    of ranks. The state has the tensors of `kind`, stacked to [experts, …, *shape]. Each matrix's state moves with its
    expert and is saved under the expert's number. Each step is local to the expert's owner. Schedulers and gradient
    scalers use the settings of `kind`.

    Args:
        params: parameters, or groups of them, with at least three dimensions, experts first.
        kind: optimizer class, instantiated in each step with the settings of the group.
        settings: arguments of `kind` other than the parameters.
    Raises:
        ConfigError: a parameter with fewer dimensions (biases, dense layers) or sharded by FSDP; or a `kind` whose
            state contains tensor subclasses (torchao's 8-bit optimizers; bitsandbytes' are supported). In the first
            step: matrices split over esp.
    """

    def __init__(self, params: Any, kind: Callable[..., Optimizer], **settings: Any) -> None:
        self._kind, self._settings = kind, settings
        # A probe step yields the default settings and the state of a matrix large enough to be quantised.
        small = nn.Parameter(torch.zeros(64, 64, device="cpu"))
        probe = kind([small], **settings)
        small.grad = torch.zeros_like(small)
        with suppress(RuntimeError):  # the optimizer supports only GPUs
            probe.step()
        for key, value in probe.state.get(small, {}).items():
            require_plain(value, key, probe)
        super().__init__(params, probe.defaults)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_kind": self._kind, "_settings": self._settings}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() < 3 or isinstance(parameter, DTensor):
                shape = f"one of shape {list(parameter.shape)}" + " that FSDP shards" * isinstance(parameter, DTensor)
                raise ConfigError(
                    f"PerMatrix takes parameters [experts, …, rows, columns] and was given {shape}. Pass biases and "
                    "dense parameters to another optimizer, and do not shard experts with FSDP."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stacks = {p: _matrices(p) for p in group["params"] if p.grad is not None}
            if not stacks:
                continue
            all_matrices = [matrix for matrices in stacks.values() for matrix in matrices.values()]
            inner = self._make_matrix_optimizer(group, all_matrices)
            for parameter, matrices in stacks.items():
                for index, matrix in matrices.items():
                    inner.state[matrix] = _matrix_state(self.state[parameter], index, parameter.dim() - 2)
            given = {matrix: dict(state) for matrix, state in inner.state.items()}
            inner.step()
            for parameter, matrices in stacks.items():
                self._stack_states(parameter, [(given[matrix], inner.state[matrix]) for matrix in matrices.values()])
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`; `kind` determines the dtypes. Raise `ConfigError` if it is of other experts."""
        super().load_state_dict(state_dict | {"state": {}})
        for group, packed in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                if number not in state_dict["state"]:
                    continue
                matrices, saved = _matrices(parameter), state_dict["state"][number]
                for key, value in saved.items():
                    if isinstance(value, Tensor) and value.shape[: parameter.dim() - 2] != parameter.shape[:-2]:
                        raise ConfigError(
                            f"PerMatrix: {key} of shape {list(value.shape)} is of other experts than a parameter of "
                            f"shape {list(parameter.shape)}. To load on another number of ranks, use load_checkpoint."
                        )
                inner = self._make_matrix_optimizer(group, list(matrices.values()))
                states = {i: _matrix_state(saved, index, parameter.dim() - 2) for i, index in enumerate(matrices)}
                inner.load_state_dict(inner.state_dict() | {"state": states})
                self._stack_states(parameter, [({}, inner.state[matrix]) for matrix in matrices.values()])

    def _make_matrix_optimizer(self, group: dict[str, Any], matrices: list[nn.Parameter]) -> Optimizer:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return self._kind([settings | {"params": matrices}], **self._settings)

    def _stack_states(self, parameter: Tensor, states: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Stack the new states of a parameter's matrices, unless the step updated the existing stack in place.

        `states` has the state of each matrix before and after the step.
        """
        kept, lead = self.state[parameter], parameter.shape[:-2]
        for key, value in states[0][1].items():
            if not isinstance(value, Tensor):
                kept[key] = value  # a step count, equal for all matrices
            elif any(given.get(key) is not state[key] for given, state in states):
                stack = torch.stack([state[key] for _, state in states])
                kept[key] = stack[: lead.numel()].reshape(*lead, *value.shape)
                # Fused steps require the parameter's memory layout.
                if not parameter.is_contiguous() and kept[key].shape == parameter.shape:
                    kept[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(kept[key])


def _matrices(parameter: Tensor) -> dict[tuple[int, ...], nn.Parameter]:
    """Return views of the matrices of a parameter [experts, …, A, B], with their gradients, by index.

    If this rank has no experts: one zero matrix, whose state defines the shapes for experts that arrive later.
    """
    matrices = {index: nn.Parameter(parameter.detach()[index]) for index in product(*map(range, parameter.shape[:-2]))}
    for index, matrix in matrices.items():
        matrix.grad = None if parameter.grad is None else parameter.grad[index]
    if not matrices:
        matrices[()] = nn.Parameter(parameter.new_zeros(parameter.shape[-2:]))
        matrices[()].grad = torch.zeros_like(matrices[()])
    return matrices


def _matrix_state(state: dict[str, Any], index: tuple[int, ...], lead: int) -> dict[str, Any]:
    def part(value: Tensor) -> Tensor:
        return value[index] if index else value.new_zeros(value.shape[lead:])

    return {key: part(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def check_first_step(model: nn.Module, copies: Iterable[Replica]) -> None:
    """Schedule `require_elementwise_part` before the first step of each optimizer with sharded parameters."""
    if model in _registered_models:
        if _step_hooks and not _unchecked_parameters:  # not removed in the step, which iterates over the hooks
            _step_hooks.pop().remove()
        return
    _registered_models.add(model)
    for each in copies:
        if each.sharding and each.parameter.requires_grad:
            _unchecked_parameters[each.parameter] = each.name, each.sharding
    if _unchecked_parameters and not _step_hooks:
        _step_hooks.append(register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    first = [p for group in optimizer.param_groups for p in group["params"] if p in _unchecked_parameters]
    for parameter in first:
        require_elementwise_part(optimizer, parameter, *_unchecked_parameters[parameter])
    for parameter in first:
        del _unchecked_parameters[parameter]
