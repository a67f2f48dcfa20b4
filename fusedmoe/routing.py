"""Routing replay: record the experts that a model's tokens choose, and replay recorded choices.

    with routing.record(model) as choices:
        model(x)
    with routing.replay(model, choices):
        loss(model(x)).backward()

In reinforcement learning, training is unstable if its router chooses other experts than the generation's (rollout
routing replay). `read_vllm` and `read_sglang` read the choices that these engines return.

Supported are the routers of `MoELayer` (also under `fusedmoe.pipeline`), transformers, torchtitan, Megatron and
`fusedmoe.tutel`, with any implementation of their experts. Compiled models run eagerly inside both contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.compat.torch import WRAPPED_NAMES
from fusedmoe.errors import ConfigError
from fusedmoe.gates import ExpertChoice, SoftMoE
from fusedmoe.gates.choice_override import ChoiceOverride, RouterTap
from fusedmoe.layers.moe import MoELayer

__all__ = ["read_sglang", "read_vllm", "record", "replay"]

# Attributes under which DDP, PEFT and the wrappers in `compat` hold the wrapped module.
_WRAPPED = {"module", "base_layer", *WRAPPED_NAMES}


class _Router(NamedTuple):
    """Router of another library.

    Attributes:
        path, module: the module whose forward chooses experts.
        num_experts: E.
        dims: number of dimensions of the scores.
        used_experts: returns the used experts from the forward's output; None if the output does not contain them.
        experts: a module that the forward calls with global expert indices; None if there is none.
    """

    path: str
    module: nn.Module
    num_experts: int
    dims: int = 2
    used_experts: Callable[[Any], Tensor] | None = None
    experts: Any = None


@contextmanager
def record(model: nn.Module, device: torch.device | str | None = None) -> Iterator[dict[str, Tensor]]:
    """Record the experts that a model's tokens choose. Recomputations of activation checkpoints are not recorded.

    Args:
        model: with MoE layers of any supported kind, bare or wrapped (DDP, FSDP, torch.compile, PEFT).
        device: where the choices are stored; None: the device that computes them.
    Yields:
        A dictionary, filled when the context ends: by layer [T, K] global expert indices, int16, or int32 for more than
            32,767 experts, for all T tokens of this rank's router, over all forwards in order. (With a mask passed to
            `MoELayer`, tokens without padding.)
    Raises:
        ConfigError: a model without MoE layers, or with a layer whose choices cannot be recorded; a layer without a
            forward, or whose router does not use the top-k of its scores; nested records.
    """
    choices: dict[str, Tensor] = {}
    by_name = find_routers(model)
    if any(tap is not None and tap.recorded is not None for tap in map(_tap, by_name.values())):
        raise ConfigError("routing.record: the model's choices are already being recorded")
    taps = {name: _get_or_create_tap(name, router) for name, router in by_name.items()}
    for tap in taps.values():
        tap.record(device)
    # Graphs of compiled models contain the router's own choice.
    with torch.compiler.set_stance("force_eager"), _stop_on_error(taps, RouterTap.drop_recording):
        yield choices
        choices |= {name: tap.stop_recording() for name, tap in taps.items()}


@contextmanager
def replay(model: nn.Module, choices: Mapping[str, Tensor] | Sequence[Tensor]) -> Iterator[None]:
    """Make a model's tokens use the given experts, with weights, losses and gradients from the model's own logits.

    Each forward of a layer consumes the next rows, one per token of its router. Recomputing an activation checkpoint
    reuses the rows that its forward used, even after the context has ended. Each rank passes the choices of its own
    tokens.

    Args:
        choices: by layer as from `record`, or for all layers in the order of `model.named_modules()`: [T, K] integers
            on any device. In rows that contain −1 the router chooses the experts itself.
    Raises:
        ConfigError: other layers than the model's; invalid or repeated experts of a token; nested replays; from a
            forward, another number of tokens or experts than the router's; at the end of the context, unused rows, or a
            layer without a forward.
    """
    by_name = find_routers(model)
    given = _choices_by_layer(list(by_name), choices)
    num_experts = {name: r.gate.experts if isinstance(r, MoELayer) else r.num_experts for name, r in by_name.items()}
    some_live = {name: _validate_choices(name, given[name], num_experts[name]) for name in by_name}
    if any(tap is not None and tap.replayed is not None for tap in map(_tap, by_name.values())):
        raise ConfigError("routing.replay: the model's choices are already being replayed")
    taps = {name: _get_or_create_tap(name, router) for name, router in by_name.items()}
    for name, tap in taps.items():
        tap.replay(given[name], some_live[name])
    with torch.compiler.set_stance("force_eager"), _stop_on_error(taps, RouterTap.stop_replaying):
        yield
        for name, tap in taps.items():
            total, left = len(given[name]), tap.stop_replaying()
            if left:
                raise ConfigError(f"routing.replay: {name} has routed {total - left} tokens, but {total} were given")


def read_vllm(
    sequences: Sequence[tuple[Any, Any]],
    tokens: Sequence[int],
    *,
    moe_layers: Sequence[int] | None = None,
    padded_to: int | None = None,
    left: bool = False,
    sequence_first: bool = False,
) -> list[Tensor]:
    """Read the experts that vLLM's tokens chose (`enable_return_routed_experts`), for `replay`.

    Args:
        sequences: per sequence the choices of its prompt [P, L, K] and generated tokens [G, L, K], integers (vLLM:
            int16), as NumPy arrays or tensors.
        tokens: trained length of each sequence: P + G, or one more if vLLM never routed the last token.
        moe_layers: indices of the layers with experts, if L includes dense layers (DeepSeek-V3: `range(3, 61)`);
            None: all.
        padded_to: padded length of each sequence, with padding on the right, or on the `left`. None: sequences are
            packed.
        sequence_first: True if tokens are laid out [length, batch] (Megatron), else [batch, length].
    Returns:
        Per layer [T, K]. Tokens without recorded experts (padding, an unrouted last token) have −1: in `replay`, the
        router chooses their experts.
    Raises:
        ConfigError: shapes that do not match each other or `tokens`; a sequence longer than `padded_to`; a layer index
            that does not exist; `sequence_first` without `padded_to`.
    """
    joined = [_join_prompt(number, parts) for number, parts in enumerate(sequences)]
    return read_sglang(
        joined, tokens, moe_layers=moe_layers, padded_to=padded_to, left=left, sequence_first=sequence_first
    )


def read_sglang(
    sequences: Sequence[Any],
    tokens: Sequence[int],
    *,
    layers_and_k: tuple[int, int] | None = None,
    moe_layers: Sequence[int] | None = None,
    padded_to: int | None = None,
    left: bool = False,
    sequence_first: bool = False,
) -> list[Tensor]:
    """Read the experts that SGLang's tokens chose (`return_routed_experts`), for `replay`.

    Args:
        sequences: per sequence [tokens − 1, L, K] int32, prompt and generated tokens without the last, whose experts
            the router chooses itself; a NumPy array or a tensor.
        layers_and_k: L and K, for flat arrays (SGLang's bytes, after `numpy.frombuffer(base64.b64decode(…), "int32")`).
        tokens, moe_layers, padded_to, left, sequence_first: see `read_vllm`.
    Returns, Raises: as `read_vllm`.
    """
    shaped = []
    for number, sequence in enumerate(map(torch.as_tensor, sequences)):
        if layers_and_k is not None and sequence.dim() == 1:
            if sequence.numel() % (layers_and_k[0] * layers_and_k[1]):
                raise ConfigError(
                    f"routing: sequence {number} has {sequence.numel()} values, not a multiple of L·K = {layers_and_k}"
                )
            sequence = sequence.view(-1, *layers_and_k)
        shaped.append(sequence)
    if len(sequences) != len(tokens) or not len(tokens):
        raise ConfigError(f"routing: {len(sequences)} sequences, but {len(tokens)} entries in tokens")
    if sequence_first and padded_to is None:
        raise ConfigError("routing: packed sequences have no batch, so sequence_first needs padded_to")
    shape, rows = shaped[0].shape[1:], []
    for number, (sequence, count) in enumerate(zip(shaped, tokens, strict=True)):
        if sequence.dim() != 3 or sequence.shape[1:] != shape or sequence.is_floating_point():
            raise ConfigError(
                f"routing: sequence {number} must be integers [tokens, L, K] = [·, {', '.join(map(str, shape))}] as "
                f"the first, got {sequence.dtype} {list(sequence.shape)}"
            )
        if len(sequence) not in (count, count - 1) or (padded_to is not None and count > padded_to):
            limit = "" if padded_to is None else f" (at most {padded_to})"
            raise ConfigError(f"routing: sequence {number} has {len(sequence)} rows for {count} tokens{limit}")
        after = count - len(sequence)
        before = 0
        if padded_to is not None:
            before = padded_to - count if left else 0
            after = padded_to - before - len(sequence)
        rows.append(nn.functional.pad(sequence, (0, 0, 0, 0, before, after), value=-1))
    if sequence_first:
        rows = [torch.stack(rows, 1).flatten(0, 1)]
    expert_TLK = torch.cat(rows)
    numbers = range(expert_TLK.shape[1]) if moe_layers is None else moe_layers
    for layer in numbers:
        if not 0 <= layer < expert_TLK.shape[1]:
            raise ConfigError(f"routing: there is no layer {layer} among the {expert_TLK.shape[1]} that were read")
    return [expert_TLK[:, layer].contiguous() for layer in numbers]


def _join_prompt(number: int, parts: Any) -> Tensor:
    prompt, generated = (part if isinstance(part, Tensor) else torch.as_tensor(part, device="cpu") for part in parts)
    if prompt.dim() != 3 or generated.dim() != 3 or prompt.shape[1:] != generated.shape[1:]:
        raise ConfigError(
            f"routing: of sequence {number} prompt and generated tokens must be [P, L, K] and [G, L, K], got "
            f"{list(prompt.shape)} and {list(generated.shape)}"
        )
    return torch.cat([prompt, generated])


def _choices_by_layer(names: list[str], choices: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    if not isinstance(choices, Mapping):
        if len(choices) != len(names):
            lacks = f"; {names[len(choices)]} is the first without" if len(choices) < len(names) else ""
            raise ConfigError(
                f"routing.replay: the model has {len(names)} layers with experts, but {len(choices)} were given{lacks}"
            )
        return dict(zip(names, choices, strict=True))
    for name in (*names, *choices):
        if name not in names or name not in choices:
            whose = "the model has" if name in names else "the choices have"
            raise ConfigError(f"routing.replay: only {whose} a layer {name!r}; the model's are {', '.join(names)}")
    return dict(choices)


def _validate_choices(name: str, expert_TK: Tensor, experts: int) -> bool:
    """Raise `ConfigError` for invalid choices. Return whether the router chooses the experts of some rows itself."""
    if not isinstance(expert_TK, Tensor) or expert_TK.dim() != 2 or expert_TK.is_floating_point():
        got = f"{expert_TK.dtype} {list(expert_TK.shape)}" if isinstance(expert_TK, Tensor) else type(expert_TK)
        raise ConfigError(f"routing.replay: choices of {name} must be integers [T, K], got {got}")
    if not expert_TK.numel():
        return False
    lowest, highest = (int(end) for end in expert_TK.aminmax())
    if lowest < -1 or highest >= experts:
        raise ConfigError(
            f"routing.replay: choices of {name} must be numbers from 0 to {experts - 1}, or -1, got {lowest} to "
            f"{highest}"
        )
    sorted_TK = expert_TK.sort(1).values
    if ((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, :1] >= 0)).any():
        raise ConfigError(f"routing.replay: choices of {name} have an expert twice for one token")
    return lowest < 0


@contextmanager
def _stop_on_error(taps: Mapping[str, RouterTap], stop: Callable[[RouterTap], object]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for tap in taps.values():
            stop(tap)
        raise


def _tap(router: MoELayer | _Router) -> RouterTap | None:
    if isinstance(router, MoELayer):
        return router.gate.tap
    own = vars(router.module).get("forward")
    return own.tap if isinstance(own, _TappedForward) else None


def _get_or_create_tap(name: str, router: MoELayer | _Router) -> RouterTap:
    """Return a router's tap. Creating it replaces the forward of another library's router."""
    if (tap := _tap(router)) is not None:
        return tap
    if isinstance(router, MoELayer):
        gate = router.gate
        tap = gate.tap = RouterTap(name, gate.experts, partial(vars(gate).pop, "tap", None))
        return tap
    forward = _TappedForward(router, router.module.forward, "forward" in vars(router.module))
    tap = forward.tap = RouterTap(name, router.num_experts, forward.remove)
    router.module.forward = forward
    return tap


class _TappedForward:
    """Router's forward whose choices are recorded or replayed."""

    tap: RouterTap | None = None  # None for a copy

    def __init__(self, router: _Router, forward: Callable[..., Any], own: bool) -> None:
        self._router, self._forward, self._had_own_forward = router, forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        router, tap = self._router, self.tap
        if tap is None:
            return self._forward(*args, **kwargs)
        seen: list[Tensor] = []

        def save_indices(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

        hook = None
        if router.experts is not None:
            hook = router.experts.register_forward_pre_hook(save_indices, with_kwargs=True)
        try:
            with ChoiceOverride(router.num_experts, tap.next_experts, router.dims) as choice:
                output = self._forward(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        used_TK = router.used_experts(output) if router.used_experts is not None else seen[0] if seen else None
        tap.record_choice(choice.chosen_TK, used_TK)
        return output

    def remove(self) -> None:
        # If another library has wrapped this forward since, it stays as a no-op.
        if vars(self._router.module).get("forward") is self:
            if self._had_own_forward:
                self._router.module.forward = self._forward
            else:
                del self._router.module.forward


def find_routers(model: nn.Module) -> dict[str, MoELayer | _Router]:
    """Return the routers of MoE layers by layer name, without the names of wrappers.

    Raises:
        ConfigError: the model has no such layers, or a layer whose choices cannot be recorded.
    """
    by_name: dict[str, MoELayer | _Router] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if (router := _router(path, module, modules)) is None:
            continue
        path = router.path if isinstance(router, _Router) else path
        name = ".".join(part for part in path.split(".") if part not in _WRAPPED) or type(module).__name__
        if name in by_name:
            raise ConfigError(f"fusedmoe.routing: {name} has two routers, so the router of each token is ambiguous")
        by_name[name] = router
    if not by_name:
        raise ConfigError(f"fusedmoe.routing: {type(model).__name__} has no MoE layers of a supported kind")
    return by_name


def _router(path: str, module: Any, modules: Mapping[str, nn.Module]) -> MoELayer | _Router | None:
    """Return the router if `module` is one, or if it is a transformers module of experts, their router; else None.

    Raises `ConfigError` for a gate that chooses no experts.
    """
    if isinstance(module, MoELayer):
        if isinstance(module.gate, (ExpertChoice, SoftMoE)):
            gate = type(module.gate).__name__
            raise ConfigError(f"fusedmoe.routing: {path or 'the layer'} has a {gate} gate, which chooses no experts")
        return module
    if {"is_transposed", "is_concatenated"} <= vars(module).keys():  # transformers'
        from fusedmoe.compat.transformers import is_expert_parallel

        while path.rpartition(".")[2] in _WRAPPED:
            path = path.rpartition(".")[0]
        around = path.rpartition(".")[0]
        # With expert parallelism num_experts is local, parameters are global, and calls may have local indices.
        split = is_expert_parallel(module)
        num_experts = len(module.down_proj) if split else int(module.num_experts)
        return _Router(around, modules[around], num_experts, experts=None if split else module)
    # Without importing the libraries.
    kind = type(module).__name__
    if kind == "TokenChoiceTopKRouter":  # torchtitan's, which returns (weights, indices, scores)
        return _Router(path, module, int(module.num_experts), 3, lambda output: _flatten_tokens(output[1]))
    if kind == "TopKRouter" and hasattr(module, "routing"):  # Megatron's
        return _Router(path, module, int(module.num_experts))
    if hasattr(module, "num_global_experts") and hasattr(module, "gates"):  # Tutel's
        return _Router(path, module, int(module.num_global_experts))
    return None


def _flatten_tokens(ids: Tensor) -> Tensor:
    return (ids.to_local() if hasattr(ids, "to_local") else ids).flatten(0, -2)
