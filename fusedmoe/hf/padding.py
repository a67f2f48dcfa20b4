"""Padding that goes to no expert, in models of Hugging Face transformers."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fusedmoe.dispatchers import Remembered, enclosing_checkpoints
from fusedmoe.errors import ConfigError
from fusedmoe.hf.callbacks import named_input, registered_experts


def mask_padding(model: Any) -> Any:
    """Has tokens that a model's `attention_mask` leaves out go to no expert, from now on; returns the model.

    Such a token has no row in experts, and none travels; `MetricsCallback` leaves it out, and experts give it zero. (A
    shared expert is the model's own, and computes padding as before. Transformers' own balance loss takes the same
    mask by itself.)

    Args:
        model: with this library's experts (`fusedmoe.hf.apply`, `experts_implementation="fusedmoe"`), bare or in
            wrappers. Masks are [batch, tokens]; with a cache, the last tokens are those of a call. A call without a
            mask has no padding.
    Raises:
        ConfigError: a model without experts, or with experts of another implementation, named; from a forward, a mask
            of another kind, or of other tokens than the experts'.
    """
    experts = registered_experts(model)
    # Of models in each other the outermost, which comes first, is the one that is called.
    outer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if not experts or outer is None:
        raise ConfigError(f"fusedmoe.hf.mask_padding: {type(model).__name__} has no experts of transformers")
    for name, module in experts.items():
        if not _ours(module):
            raise ConfigError(
                f"fusedmoe.hf.mask_padding: {name} ({type(module).__name__}) is not computed by this library; call "
                "fusedmoe.hf.apply first, and with expert parallelism choose ep_implementation='fusedmoe'"
            )
    if any("_fusedmoe_padding" in vars(module) for module in experts.values()):
        return model
    padding = _Padding(outer)
    outer.register_forward_pre_hook(padding.begin, with_kwargs=True)
    outer.register_forward_hook(padding.end, always_call=True)
    for module in experts.values():
        module._fusedmoe_padding = _Masked(padding)
        # Before hooks that count what experts are called with.
        module.register_forward_pre_hook(module._fusedmoe_padding.mask, with_kwargs=True, prepend=True)
    return model


def _ours(experts: Any) -> bool:
    if not experts._is_expert_parallel:
        return bool(experts.config._experts_implementation == "fusedmoe")
    # Transformers keeps what it calls in a closure.
    cells = getattr(experts.forward, "__closure__", None) or ()
    return any(type(cell.cell_contents).__module__.startswith("fusedmoe.") for cell in cells)


class _Padding:
    """The mask of the call of a model that is under way."""

    mask: Tensor | None = None

    def __init__(self, model: nn.Module) -> None:
        # Asked once: compilers do not ask a function for its arguments.
        arguments = [*inspect.signature(model.forward).parameters]
        self._position = arguments.index("attention_mask") if "attention_mask" in arguments else len(arguments)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = args[self._position] if len(args) > self._position else kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ConfigError(f"fusedmoe.hf.mask_padding: attention_mask must be [batch, tokens], got {got}")
        self.mask = mask

    def end(self, *_: Any) -> None:
        self.mask = None


class _Masked:
    """A layer's hook, which gives masked tokens no expert."""

    def __init__(self, padding: _Padding) -> None:
        self._padding, self._kept = padding, Remembered[Tensor]()

    def mask(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask_BL = self._mask()
        if mask_BL is None:
            return None
        given = named_input(*args, **kwargs)
        number_TK = given["top_k_index"]
        last = len(number_TK) // max(len(mask_BL), 1)
        if last * len(mask_BL) != len(number_TK) or last > mask_BL.shape[1]:
            raise ConfigError(
                f"fusedmoe.hf.mask_padding: {type(experts).__name__} is called with {len(number_TK)} tokens, and "
                f"attention_mask is {list(mask_BL.shape)}"
            )
        real_T1 = mask_BL[:, mask_BL.shape[1] - last :].reshape(-1, 1).to(number_TK.device) != 0
        return (), {**given, "top_k_index": number_TK.masked_fill(~real_T1, -1)}

    def _mask(self) -> Tensor | None:
        if torch.compiler.is_compiling():
            return self._padding.mask
        around = enclosing_checkpoints()
        # By the time of a backward pass another batch may be under way.
        mask = self._padding.mask if around.again is None else self._kept.again(around)
        if mask is not None:
            self._kept.keep(mask, around)
        return mask
