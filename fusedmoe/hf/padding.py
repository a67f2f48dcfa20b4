"""Routing of padding tokens to no expert, in transformers' models."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, PreTrainedModel

from fusedmoe.autograd.checks import require_values
from fusedmoe.compat.torch import checkpoints
from fusedmoe.compat.transformers import implementation_of, is_expert_parallel
from fusedmoe.engine.dispatcher import is_recomputing
from fusedmoe.engine.recomputation import CheckpointedValues
from fusedmoe.errors import ConfigError
from fusedmoe.hf.callbacks import expert_inputs, find_experts
from fusedmoe.hf.module_experts import NAME
from fusedmoe.layers.scheduled_exchange import EXCHANGE

# Additive masks use at most −10,000 for masked keys, rounded to any dtype.
_MASKED_BELOW = -9e3


def mask_padding(model: Any) -> Any:
    """Route no token that the model's `attention_mask` masks. Modifies the model and returns it.

    Masked tokens are not sent, have zero expert output, and are excluded from `MetricsCallback`. A shared expert still
    computes them. Transformers' balance loss already uses the same mask.

    Args:
        model: a model with this library's experts (`fusedmoe.hf.apply`, `experts_implementation="fusedmoe"`), bare or
            wrapped. Masks may be [batch, tokens] (with a cache, the call's tokens are last); [batch, heads, queries,
            keys], a `BlockMask` of flex attention, or a dict of these per kind of layer, where tokens that do not
            attend to themselves are padding. Without a mask there is no padding.
    Raises:
        ConfigError: no experts, or experts of another implementation. From a forward: an unsupported mask, a
            mask for other tokens than the experts', or a mask that does not determine the padding.
    """
    experts = find_experts(model)
    outer = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if not experts or outer is None:
        raise ConfigError(f"fusedmoe.hf.mask_padding: {type(model).__name__} has no experts of transformers")
    for name, module in experts.items():
        if not (EXCHANGE in vars(module) if is_expert_parallel(module) else implementation_of(module) == NAME):
            raise ConfigError(
                f"fusedmoe.hf.mask_padding: {name} ({type(module).__name__}) is not computed by this library; call "
                "fusedmoe.hf.apply first, and with expert parallelism choose ep_implementation='fusedmoe'"
            )
    if any("_fusedmoe_padding" in vars(module) for module in experts.values()):
        return model
    padding = _PaddingTracker(outer)
    outer.register_forward_pre_hook(padding.begin, with_kwargs=True)
    outer.register_forward_hook(padding.end, always_call=True)
    for module in experts.values():
        module._fusedmoe_padding = _RoutingMask(padding)
        # Runs before the hooks that count the experts' inputs.
        module.register_forward_pre_hook(module._fusedmoe_padding.mask, with_kwargs=True, prepend=True)
    return model


class _PaddingTracker:
    """Mask [batch, tokens] of real tokens in the current call of a model; None if all are real."""

    mask: Tensor | None = None

    def __init__(self, model: nn.Module) -> None:
        # Compilers do not inspect signatures.
        self._arguments = [*inspect.signature(model.forward).parameters]

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._arguments, args, strict=False)) | kwargs
        masks = given.get("attention_mask")
        # transformers 5.24 renamed `past_key_values` to `cache`; models still accept the earlier name.
        cache = next((given[name] for name in ("cache", "past_key_values") if given.get(name) is not None), None)
        # Models with several kinds of layers take one mask per kind, with equal padding. Prefer a mask of queries and
        # keys: the mask of recurrent layers concerns their state.
        by_kind = masks if isinstance(masks, dict) else {None: masks}
        kinds = sorted((kind for kind, mask in by_kind.items() if mask is not None), key=lambda k: _is_2d(by_kind[k]))
        if not kinds:
            self.mask = None
            return
        types = getattr(model.config.get_text_config(), "layer_types", None) or ()
        tokens = next(given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None)
        layers = [index for index, kind in enumerate(types) if kind == kinds[0]]
        self.mask = _real_tokens(by_kind[kinds[0]], tokens.shape[1], cache, layers).expand(len(tokens), -1)

    def end(self, *_: Any) -> None:
        self.mask = None


def _is_2d(mask: Any) -> bool:
    return len(getattr(mask, "shape", ())) == 2


def _real_tokens(mask: Any, tokens: int, cache: Any, layers: list[int]) -> Tensor:
    """Return a mask [batch, tokens], True for a call's real tokens; if it is longer, it ends with the call's tokens.

    In a mask of queries and keys a token is padding if it does not attend to itself: transformers masks the keys of
    padding, and no other transformers mask excludes a token's own key. Raises `ConfigError` for unsupported masks and
    for unknown or ambiguous padding.

    Args:
        mask: one of the masks that `mask_padding` supports. The batch may be 1.
        tokens: sequence length of this call.
        cache: the call's cache, or None.
        layers: indices of the layers that use the mask; empty if unknown.
    """
    shape = tuple(getattr(mask, "shape", ()))
    if _is_2d(mask) and isinstance(mask, Tensor):
        # The mask ends with the call's tokens, unless it has the length of a static cache.
        if not isinstance(cache, Cache) or shape[1] <= tokens:
            return mask != 0
        first = torch.as_tensor(cache.get_query_offset(layers[0] if layers else 0), device=mask.device)
        own = torch.arange(tokens, device=mask.device)
        return mask.index_select(1, own + first.clamp(max=shape[1] - tokens)) != 0
    dense = isinstance(mask, Tensor) and len(shape) == 4 and (mask.is_floating_point() or mask.dtype == torch.bool)
    if not (dense or isinstance(mask, BlockMask)):
        got = f"{mask.dtype} {list(shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            "fusedmoe.hf.mask_padding: attention_mask must be [batch, tokens], or [batch, heads, queries, keys] of "
            f"booleans or of floats that are added to logits, or a BlockMask of flex attention, got {got}"
        )
    first = _first_key(cache, tokens, shape[3], layers)
    if first is None or shape[2] != tokens:
        raise ConfigError(
            f"fusedmoe.hf.mask_padding: attention_mask is {list(shape)} for {tokens} tokens, and neither they nor "
            "the cache explain its number of keys, so the key of each token is unknown; pass a mask "
            "[batch, tokens]"
        )
    query_Q = torch.arange(tokens, device=mask.device if dense else mask.kv_num_blocks.device)
    own_Q = query_Q + first
    if dense:
        attends_BQQ = (mask if mask.dtype == torch.bool else mask > _MASKED_BELOW).any(1).index_select(2, own_Q)
        real_BQ, seen_BQ = attends_BQQ.diagonal(dim1=1, dim2=2), attends_BQQ.any(1)
    else:
        batch_B1, head = torch.arange(shape[0], device=own_Q.device)[:, None], torch.zeros_like(own_Q[:1])
        # Queries that could see a token's key: its own, the next one, and the last.
        each = (query_Q, (query_Q + 1).clamp(max=tokens - 1), torch.full_like(query_Q, tokens - 1))
        real_BQ, *others = (mask.mask_mod(batch_B1, head, by_Q, own_Q).expand(shape[0], tokens) for by_Q in each)
        seen_BQ = others[0] | others[1]
    require_values(
        "fusedmoe.hf.mask_padding",
        (real_BQ | ~seen_BQ).all(),
        "attention_mask has tokens that do not attend to themselves, and others attend to them, so the padding is "
        "ambiguous; pass a mask [batch, tokens]",
    )
    return real_BQ


def _first_key(cache: Any, tokens: int, keys: int, layers: list[int]) -> Any:
    """Return the index of the call's first token in a mask of `keys` keys; None if no layer has as many keys."""
    if not isinstance(cache, Cache):
        return 0 if keys == tokens else None
    for layer in layers or range(max(1, len(cache.layers))):
        try:
            length, offset = cache.get_mask_sizes(tokens, layer)
            first = cache.get_query_offset(layer)
        except ValueError:  # a layer without keys
            continue
        if length == keys:
            return first - offset
    return None


class _RoutingMask:
    """Forward pre-hook of a layer that removes the experts of masked tokens."""

    def __init__(self, padding: _PaddingTracker) -> None:
        self._padding, self._checkpointed_masks = padding, CheckpointedValues[Tensor]()

    def mask(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask_BL = self._mask()
        if mask_BL is None:
            return None
        given = expert_inputs(*args, **kwargs)
        expert_TK = given["top_k_index"]
        last = len(expert_TK) // max(len(mask_BL), 1)
        if last * len(mask_BL) != len(expert_TK) or last > mask_BL.shape[1]:
            raise ConfigError(
                f"fusedmoe.hf.mask_padding: {type(experts).__name__} is called with {len(expert_TK)} tokens, and "
                f"attention_mask is {list(mask_BL.shape)}"
            )
        real_T1 = mask_BL[:, mask_BL.shape[1] - last :].reshape(-1, 1).to(expert_TK.device) != 0
        return (), {**given, "top_k_index": expert_TK.masked_fill(~real_T1, -1)}

    def _mask(self) -> Tensor | None:
        if torch.compiler.is_compiling():
            return self._padding.mask
        around = checkpoints()
        # During a backward pass another batch may be in progress.
        mask = self._padding.mask if around.recomputation is None else self._checkpointed_masks.stored_value(around)
        if mask is None and around.recomputation is None and self._checkpointed_masks and is_recomputing():
            raise ConfigError(
                "fusedmoe.hf.mask_padding: the experts run in a backward pass under an unrecognised checkpoint, so the "
                "mask of their forward is unknown; use torch.utils.checkpoint"
            )
        if mask is not None:
            self._checkpointed_masks.store(mask, around)
        return mask
