"""Optimizers over split parameters: a check that each rank may step on its part alone, and steps by single matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from inspect import signature
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import NAMED
from fusedmoe.training.copies import Replica, replicas

#: One optimizer, or several that step one after another.
Optimizers = Optimizer | Sequence[Optimizer]

# Split parameters whose optimizer has not stepped yet: their names, and the dimensions along which ranks split them.
_unchecked: Any = WeakIdKeyDictionary()
_known: WeakSet[nn.Module] = WeakSet()
# The hook of all optimizers' steps, while there is something to look at: PyTorch tells of steps in no other way.
_hooks: list[Any] = []
# By optimizer: of tensors of so many dimensions and a split along one of them, whether it may step on parts.
_tried: WeakKeyDictionary[Optimizer, dict[tuple[int, int], bool]] = WeakKeyDictionary()

# A step on a part and the part of a step may differ by so much of the step: by rounding, in bfloat16 too.
_TOLERANCE = 0.1
_STEPS = 8


class PerMatrix(Optimizer):
    """Steps on each matrix of stacked experts alone, by an optimizer of matrices: Muon, Adafactor, 8-bit Adam.

        matrices = [matrix for layer in layers for matrix in (layer.experts.w1, layer.experts.w2)]
        optimizer = PerMatrix(matrices, torch.optim.Muon, lr=0.02, adjust_lr_fn="match_rms_adamw")

    A parameter [experts, …, A, B] counts as many parameters [A, B], so results are those of `kind` given each matrix of
    each expert as a parameter of its own, on any number of ranks. What `kind` keeps for a matrix moves with its expert
    and is in checkpoints by the expert's number. Muon orthogonalises where the expert's owner is; nothing is sent.

    State: `kind`'s for each matrix, stacked as the matrices are, [experts, …, *its shape]. Schedulers and scalers see
    an optimizer with the settings of `kind`.

    Args:
        params: parameters, or groups of them, of three dimensions or more, the experts' in front.
        kind: the optimizer's class; it is made anew in each step, with the settings of the group.
        settings: what `kind` takes besides parameters.
    Raises:
        ConfigError: a parameter of fewer dimensions (biases, dense layers: give them to an optimizer of their own), one
            that FSDP shards, or a `kind` that keeps something else than tensors of PyTorch's own class and numbers
            (torchao's 8-bit optimizers; bitsandbytes' do). In the first step: matrices that ranks split (esp).
    """

    def __init__(self, params: Any, kind: Callable[..., Optimizer], **settings: Any) -> None:
        self._kind, self._settings = kind, settings
        # It tells the settings that are not given, and what is kept for a matrix large enough to be quantised.
        small = nn.Parameter(torch.zeros(64, 64, device="cpu"))
        probe = kind([small], **settings)
        small.grad = torch.zeros_like(small)
        with suppress(RuntimeError):  # an optimizer for GPUs alone
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
                    f"PerMatrix takes parameters [experts, …, rows, columns] and was given {shape}. Give biases and "
                    "dense parameters to an optimizer of their own, and leave experts out of FSDP."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps on every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            stacks = {p: _matrices(p) for p in group["params"] if p.grad is not None}
            if not stacks:
                continue
            inner = self._inner(group, [matrix for matrices in stacks.values() for matrix in matrices.values()])
            for parameter, matrices in stacks.items():
                for index, matrix in matrices.items():
                    inner.state[matrix] = _of_matrix(self.state[parameter], index, parameter.dim() - 2)
            given = {matrix: dict(state) for matrix, state in inner.state.items()}
            inner.step()
            for parameter, matrices in stacks.items():
                self._keep(parameter, [(given[matrix], inner.state[matrix]) for matrix in matrices.values()])
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` has returned where ranks own the same experts; dtypes are as `kind` has them."""
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
                            f"shape {list(parameter.shape)}. load_checkpoint loads on other numbers of ranks."
                        )
                inner = self._inner(group, list(matrices.values()))
                states = {i: _of_matrix(saved, index, parameter.dim() - 2) for i, index in enumerate(matrices)}
                inner.load_state_dict(inner.state_dict() | {"state": states})
                self._keep(parameter, [({}, inner.state[matrix]) for matrix in matrices.values()])

    def _inner(self, group: dict[str, Any], matrices: list[nn.Parameter]) -> Optimizer:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        return self._kind([settings | {"params": matrices}], **self._settings)

    def _keep(self, parameter: Tensor, states: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Stacks what is kept for the matrices of a parameter, where it was not changed in place."""
        kept, lead = self.state[parameter], parameter.shape[:-2]
        for key, value in states[0][1].items():
            if not isinstance(value, Tensor):
                kept[key] = value  # a count of steps: all matrices have the same
            elif any(given.get(key) is not state[key] for given, state in states):
                stack = torch.stack([state[key] for _, state in states])
                kept[key] = stack[: lead.numel()].reshape(*lead, *value.shape)
                # Fused steps read a state in the order in which its parameter lies in memory.
                if not parameter.is_contiguous() and kept[key].shape == parameter.shape:
                    kept[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(kept[key])


def _matrices(parameter: Tensor) -> dict[tuple[int, ...], nn.Parameter]:
    """Returns the matrices of a stack, in its memory, with their gradients, by index. Without experts: one of zeros,
    whose state says what this rank, too, will have for experts that come."""
    matrices = {index: nn.Parameter(parameter.detach()[index]) for index in product(*map(range, parameter.shape[:-2]))}
    for index, matrix in matrices.items():
        matrix.grad = None if parameter.grad is None else parameter.grad[index]
    if not matrices:
        matrices[()] = nn.Parameter(parameter.new_zeros(parameter.shape[-2:]))
        matrices[()].grad = torch.zeros_like(matrices[()])
    return matrices


def _of_matrix(state: dict[str, Any], index: tuple[int, ...], lead: int) -> dict[str, Any]:
    """Returns the part of a stack's state that belongs to one matrix, in the same memory."""

    def part(value: Tensor) -> Tensor:
        return value[index] if index else value.new_zeros(value.shape[lead:])

    return {key: part(value) if isinstance(value, Tensor) else value for key, value in state.items()}


class JoinedOptimizers:
    """One optimizer or several, each with parameters of its own, as checkpoints and experts that move see them.

    Attributes:
        each: the optimizers, in the order in which they step.
        kind: the names of their classes.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self.each = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        if not self.each:
            raise ConfigError("no optimizer in the list; None is for a model without one")
        self.kind = "+".join(type(optimizer).__name__ for optimizer in self.each)
        self.defaults = {key for optimizer in self.each for key in optimizer.defaults}
        self._of: dict[int, Optimizer] = {}
        self._groups = 0
        self.of(torch.empty(0, device="cpu"))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all, one optimizer's after another's."""
        return [group for optimizer in self.each for group in optimizer.param_groups]

    def of(self, parameter: Tensor) -> Optimizer:
        """Returns the optimizer that has a parameter, or the last one; it raises `ConfigError` where two have one."""
        if self._groups != len(self.param_groups):  # the first time, or groups were added
            self._groups = len(self.param_groups)
            self._of = {}
            for optimizer in self.each:
                own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                if own & self._of.keys():
                    raise ConfigError(f"{self.kind}: two optimizers have the same parameter. Give each to one of them.")
                self._of |= dict.fromkeys(own, optimizer)
        return self._of.get(id(parameter), self.each[-1])

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of all as that of one optimizer, whose parameters are numbered through."""
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        for optimizer in self.each:
            packed, first = optimizer.state_dict(), sum(len(group["params"]) for group in joined["param_groups"])
            joined["state"] |= {number + first: values for number, values in packed["state"].items()}
            for group in packed["param_groups"]:
                joined["param_groups"].append(group | {"params": [number + first for number in group["params"]]})
        return joined

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hands each what it has of `state_dict()`."""
        groups, first = iter(state_dict["param_groups"]), 0
        for optimizer in self.each:
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
    """Raises `ConfigError` for state in a tensor class of its own, whose rows cannot be told apart."""
    if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter, DTensor):
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {key} as {type(value).__name__}, quantised in blocks, which is neither "
            "split over ranks nor moved with experts. Use an optimizer whose state is plain tensors, "
            "fusedmoe.training.PerMatrix(…, bitsandbytes.optim.AdamW8bit) for 8 bits, or leave the optimizer out of "
            "checkpoints and experts with their owners (placement='ep', or reshard=False)."
        )


def check_first_step(model: nn.Module, copies: Iterable[Replica]) -> None:
    """Has the optimizers of a model's split parameters looked at by `require_parts`, each before its first step. Nobody
    hands them to the library before; a model is looked at once."""
    if model in _known:
        # Not in the step itself, which goes through the hooks just then.
        if _hooks and not _unchecked:
            _hooks.pop().remove()
        return
    _known.add(model)
    for each in copies:
        if each.sharding and each.parameter.requires_grad:
            _unchecked[each.parameter] = each.name, each.sharding
    if _unchecked and not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(torch.compiler.disable(_before_step)))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    first = [p for group in optimizer.param_groups for p in group["params"] if p in _unchecked]
    for parameter in first:
        _require_part(optimizer, parameter, *_unchecked[parameter])
    for parameter in first:
        del _unchecked[parameter]


def require_parts(optimizers: JoinedOptimizers, model: nn.Module, topology: Topology) -> None:
    """Raises `ConfigError` for an optimizer whose step on a part of a tensor is not the part of its step on the whole,
    of the parameters of a model that ranks split.

    Found out by trying: another optimizer of its kind steps on a small tensor and on its halves. One that cannot be
    made so is let pass.
    """
    trained = {id(parameter) for group in optimizers.param_groups for parameter in group["params"]}
    for each in replicas(model, topology):
        if id(each.parameter) in trained:
            _require_part(optimizers.of(each.parameter), each.parameter, each.name, each.sharding)


def _require_part(optimizer: Optimizer, parameter: Tensor, name: str, sharding: dict[str, int]) -> None:
    for axis, dim in sharding.items():
        if dim == NAMED:
            continue
        if isinstance(optimizer, PerMatrix):
            fits = dim < parameter.dim() - 2
        else:
            tried = _tried.setdefault(optimizer, {})
            if (parameter.dim(), dim) not in tried:
                tried[parameter.dim(), dim] = _steps_by_part(optimizer, parameter, dim)
            fits = tried[parameter.dim(), dim]
        if fits:
            continue
        kind, cure = type(optimizer).__name__, "Use an optimizer of single elements (AdamW, SGD) for it"
        if axis == "ep":
            cure = f"Give the experts' matrices to fusedmoe.training.PerMatrix(…, {kind}), their biases to AdamW"
        raise ConfigError(
            f"{kind} looks at more of {name} than one rank has: {axis} splits it along dimension {dim}. Steps on parts "
            f"are not those on the whole, and with more ranks the model would train differently. {cure}."
        )


def another(optimizer: Optimizer, tensor: nn.Parameter) -> Optimizer:
    """Makes an optimizer of the same kind and settings for another tensor. It raises what the class raises."""
    settings = dict(optimizer.defaults)
    if settings.get("lr") is not None:  # a warm-up begins with 0, and of tiny steps rounding would be all
        settings["lr"] = 0.1
    # Not all settings are arguments (AdamW's decoupled_weight_decay), but groups take all.
    named = signature(type(optimizer)).parameters
    arguments = {key: value for key, value in settings.items() if key in named}
    return type(optimizer)([settings | {"params": [tensor]}], **arguments)


def _steps_by_part(optimizer: Optimizer, parameter: Tensor, dim: int) -> bool:
    """Tries whether a step on the halves of a tensor is that on the whole; True where it cannot be tried."""

    def first(tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim)[0]

    def second(tensor: Tensor) -> Tensor:
        return tensor.chunk(2, dim)[1]

    random = torch.Generator().manual_seed(0)
    # Halves differ in all that an optimizer may look at: size, gradients, and how these change in the last step.
    value, *gradients = (
        torch.randn([4, 6, 8, 10, 12][: parameter.dim()], generator=random, device="cpu") for _ in range(_STEPS + 1)
    )
    second(value).mul_(0.01)
    for gradient in gradients:
        second(gradient).mul_(0.01)
    first(gradients[-1]).mul_(100)

    def stepped(cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Returns the steps."""
        tensor, steps = nn.Parameter(cut(value).clone().to(parameter.device)), []
        tried = another(optimizer, tensor)
        for gradient in gradients:
            before = tensor.detach().clone()
            tensor.grad = cut(gradient).clone().to(parameter.device)
            tried.step(lambda: 0.0)
            steps.append((tensor.detach() - before).cpu())
        return steps

    with suppress(Exception), torch.enable_grad():
        whole = stepped(lambda tensor: tensor)
        # A comparison with what is not finite says nothing.
        return not any(
            bool((half(step) - part).norm() > _TOLERANCE * half(step).norm().maximum(part.norm()))
            for half in (first, second)
            for step, part in zip(whole, stepped(half), strict=True)
        )
    return True
