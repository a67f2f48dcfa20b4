"""Joining of several optimizers into one, and the check that optimizers of sharded parameters are elementwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import NAMED
from fusedmoe.experts.sharding import active_shardings

Optimizers = Optimizer | Sequence[Optimizer]

# Per optimizer: (number of dimensions, split dimension) -> whether it is elementwise.
_elementwise_results: WeakKeyDictionary[Optimizer, dict[tuple[int, int], bool]] = WeakKeyDictionary()

# Maximum relative difference that rounding may cause, including bfloat16.
_TOLERANCE = 0.1
_NUM_STEPS = 8


class MatrixOptimizer(Optimizer):
    """Base class of optimizers that update each matrix of stacked experts separately, with state [experts, …]."""


class JoinedOptimizers:
    """Presents one or several optimizers with disjoint parameters as one."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not self.optimizers:
            raise ConfigError("no optimizer in the list; pass None for a model without one")
        self.kind = "+".join(type(optimizer).__name__ for optimizer in self.optimizers)
        self.defaults = {key for optimizer in self.optimizers for key in optimizer.defaults}
        self._by_parameter: dict[int, Optimizer] = {}
        self._num_groups = 0
        self.optimizer_of(torch.empty(0, device="cpu"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def optimizer_of(self, parameter: Tensor) -> Optimizer:
        """Return the optimizer of a parameter, by default the last. Raises `ConfigError` if two share it."""
        if self._num_groups != len(self.param_groups):  # first call, or groups were added
            self._num_groups = len(self.param_groups)
            self._by_parameter = {}
            for optimizer in self.optimizers:
                own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                if own & self._by_parameter.keys():
                    raise ConfigError(
                        f"{self.kind}: two optimizers have the same parameter. Use one for each parameter."
                    )
                self._by_parameter |= dict.fromkeys(own, optimizer)
        return self._by_parameter.get(id(parameter), self.optimizers[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict with parameters numbered consecutively over all optimizers."""
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        for optimizer in self.optimizers:
            packed, first = optimizer.state_dict(), sum(len(group["params"]) for group in joined["param_groups"])
            joined["state"] |= {number + first: values for number, values in packed["state"].items()}
            for group in packed["param_groups"]:
                joined["param_groups"].append(group | {"params": [number + first for number in group["params"]]})
        return joined

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups, first = iter(state_dict["param_groups"]), 0
        for optimizer in self.optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            count = sum(len(group["params"]) for group in own)
            optimizer.load_state_dict(
                {
                    "state": {n - first: v for n, v in state_dict["state"].items() if first <= n < first + count},
                    "param_groups": [group | {"params": [n - first for n in group["params"]]} for group in own],
                }
            )
            first += count


def require_plain(value: Any, key: str, optimizer: Optimizer) -> None:
    """Raise `ConfigError` if the optimizer state `key` is a tensor subclass (not `DTensor`), which cannot be split."""
    if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter, DTensor):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}, quantised in blocks, which can neither "
            "be split over ranks nor moved with experts. Use an optimizer whose state is plain tensors, or "
            "fusedmoe.training.PerMatrix(…, bitsandbytes.optim.AdamW8bit) for 8 bits; or save without the optimizer "
            "and keep experts with their owners (placement='ep', or reshard=False)."
        )


def require_elementwise(optimizers: JoinedOptimizers, model: nn.Module, topology: Topology) -> None:
    """Raise `ConfigError` if a step on this rank's shards would differ from a step on whole parameters.

    The check steps an optimizer of the same kind on a small tensor and on its halves. Optimizers that cannot be
    constructed this way pass.
    """
    trained = {id(parameter) for group in optimizers.param_groups for parameter in group["params"]}
    shardings, _ = active_shardings(model, topology)
    for name, parameter in model.named_parameters():
        if id(parameter) in trained:
            require_elementwise_part(optimizers.optimizer_of(parameter), parameter, name, shardings.get(name, {}))


def require_elementwise_part(optimizer: Optimizer, parameter: Tensor, name: str, sharding: dict[str, int]) -> None:
    """Check one parameter as `require_elementwise`. `sharding`: axis -> split dimension."""
    for axis, dim in sharding.items():
        if dim == NAMED:
            continue
        if isinstance(optimizer, MatrixOptimizer):
            fits = dim < parameter.dim() - 2
        else:
            results = _elementwise_results.setdefault(optimizer, {})
            if (parameter.dim(), dim) not in results:
                results[parameter.dim(), dim] = _is_elementwise(optimizer, parameter, dim)
            fits = results[parameter.dim(), dim]
        if fits:
            continue
        kind, fix = type(optimizer).__name__, "Use an elementwise optimizer (AdamW, SGD) for it"
        if axis == "ep":
            fix = f"Pass the experts' matrices to fusedmoe.training.PerMatrix(…, {kind}), their biases to AdamW"
        raise ConfigError(
            f"{kind} looks at more of {name} than one rank has: {axis} splits it along dimension {dim}. A step on a "
            f"part differs from a step on the whole, so training would depend on the number of ranks. {fix}."
        )


def similar_optimizer(optimizer: Optimizer, tensor: nn.Parameter) -> Optimizer:
    """Construct an optimizer of the same kind and settings for another tensor, with any error of its constructor."""
    settings = dict(optimizer.defaults)
    if settings.get("lr") is not None:  # warm-up starts at 0, and rounding would dominate tiny steps
        settings["lr"] = 0.1
    # Some settings (AdamW's decoupled_weight_decay) are accepted by parameter groups only.
    named = signature(type(optimizer)).parameters
    arguments = {key: value for key, value in settings.items() if key in named}
    return type(optimizer)([settings | {"params": [tensor]}], **arguments)


def _is_elementwise(optimizer: Optimizer, parameter: Tensor, dim: int) -> bool:
    """Return whether steps on the halves of a tensor equal a step on the whole tensor; True if untestable."""

    def first_half(tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim)[0]

    def second_half(tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim)[1]

    random = torch.Generator().manual_seed(0)
    # The halves differ in all properties that an optimizer may use: value and gradient scale, and its last change.
    value, *gradients = (
        torch.randn([4, 6, 8, 10, 12][: parameter.dim()], generator=random, device="cpu") for _ in range(_NUM_STEPS + 1)
    )
    second_half(value).mul_(0.01)
    for gradient in gradients:
        second_half(gradient).mul_(0.01)
    first_half(gradients[-1]).mul_(100)

    def run_steps(cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
        tensor, steps = nn.Parameter(cut(value).clone().to(parameter.device)), []
        sample_optimizer = similar_optimizer(optimizer, tensor)
        for gradient in gradients:
            before = tensor.detach().clone()
            tensor.grad = cut(gradient).clone().to(parameter.device)
            sample_optimizer.step(lambda: 0.0)
            steps.append((tensor.detach() - before).cpu())
        return steps

    with suppress(Exception), torch.enable_grad():
        whole = run_steps(lambda tensor: tensor)
        # Comparisons with non-finite values are inconclusive.
        return not any(
            bool((half(step) - part).norm() > _TOLERANCE * half(step).norm().maximum(part.norm()))
            for half in (first_half, second_half)
            for step, part in zip(whole, run_steps(half), strict=True)
        )
    return True
