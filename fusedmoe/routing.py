"""Routing replay: which experts a model's tokens chose is recorded, or given to it.

    with routing.record(model) as choices:
        model(x)
    with routing.replay(model, choices):
        loss(model(x)).backward()

Reinforcement learning generates with one program and trains with another, whose routers choose other experts for some
tokens; that makes it unstable (rollout routing replay). `replay` has the trained model use the experts of the
generation: router weights, losses and gradients are of its own live logits, at the experts given. `read_vllm` and
`read_sglang` take what these engines return.

Served are the routers of `MoELayer` (with `fusedmoe.pipeline`, too), of transformers' models, torchtitan's, Megatron's
and `fusedmoe.tutel`'s layers, whichever library computes their experts. Compiled models run eagerly meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedmoe.compat import megatron, torchtitan
from fusedmoe.compat.torch import WRAPPED_NAMES
from fusedmoe.errors import ConfigError
from fusedmoe.gates import ExpertChoice, SoftMoE
from fusedmoe.gates.choosing import Choosing, RouterTap
from fusedmoe.layers.moe import MoELayer

__all__ = ["read_sglang", "read_vllm", "record", "replay", "routers"]

# Names that wrappers give to the module that they wrap: DDP, PEFT, and those of `compat`.
_WRAPPED = {"module", "base_layer", *WRAPPED_NAMES}


class _Router(NamedTuple):
    """A router of another library.

    Attributes:
        path, module: the module in whose forward experts are chosen.
        num_experts: E.
        dims: of the scores.
        used: tells by the forward's output which experts are used; None: it does not say.
        experts: a module that is called with numbers of all ranks' experts in that forward, if there is one.
    """

    path: str
    module: nn.Module
    num_experts: int
    dims: int = 2
    used: Callable[[Any], Tensor] | None = None
    experts: Any = None


def routers(model: nn.Module) -> list[str]:
    """Names the layers of a model whose choices can be recorded, in order.

    Raises:
        ConfigError: a model without any; a layer whose choices cannot be, named.
    """
    return list(_found(model))


@contextmanager
def record(model: nn.Module, device: torch.device | str | None = None) -> Iterator[dict[str, Tensor]]:
    """Records the experts that a model's tokens choose; forwards that a checkpoint computes again are no others.

    Args:
        model: with layers of experts of any kind, bare or in wrappers (DDP, FSDP, torch.compile, PEFT).
        device: where the choices are kept, "cpu" to have them on the host; None: where they are made.
    Returns:
        A dictionary that is filled at the end: by layer [T, K], int16, or int32 for more than 32,767 experts, of the T
        tokens that this rank's router saw in all forwards, one after the other, before expert parallelism numbers
        experts anew. (With a mask that `MoELayer` was given, tokens without padding.)
    Raises:
        ConfigError: a model without layers of experts, or with one whose choices cannot be recorded, named; a layer
            that had no forward, or whose router takes other experts than a top-k of scores gives; a record in a record.
    """
    choices: dict[str, Tensor] = {}
    by_name = _found(model)
    if any(tap is not None and tap.recorded is not None for tap in map(_tap, by_name.values())):
        raise ConfigError("routing.record: the model's choices are being recorded already")
    taps = {name: _tapped(name, router) for name, router in by_name.items()}
    for tap in taps.values():
        tap.record(device)
    with _eager(), _ending(taps, RouterTap.drop_recording):
        yield choices
        choices |= {name: tap.stop_recording() for name, tap in taps.items()}


@contextmanager
def replay(model: nn.Module, choices: Mapping[str, Tensor] | Sequence[Tensor]) -> Iterator[None]:
    """Has a model's tokens use these experts. Weights and losses are those of the live logits there, with gradients.

    Each forward of a layer takes the next rows, as many as its router sees tokens: with micro-batches the first one
    takes the first rows. A forward that an activation checkpoint computes again takes those that it had, in a backward
    pass after the end of the replay, too. Over ranks each gives its own tokens' choices.

    Args:
        choices: by layer as `record` gives them, or of all layers in the order of `routers`: [T, K] integers, on any
            device; rows with −1 in them choose live.
    Raises:
        ConfigError: other layers than the model's; numbers that are no experts, or twice the same for a token; from a
            forward, other numbers of tokens or of experts than the router's; at the end, rows that are left, or a layer
            that had no forward. All name the layer.
    """
    by_name = _found(model)
    given = _by_layer(list(by_name), choices)
    num_experts = {name: r.gate.experts if isinstance(r, MoELayer) else r.num_experts for name, r in by_name.items()}
    some_live = {name: _check(name, given[name], num_experts[name]) for name in by_name}
    if any(tap is not None and tap.replayed is not None for tap in map(_tap, by_name.values())):
        raise ConfigError("routing.replay: the model's choices are being replayed already")
    taps = {name: _tapped(name, router) for name, router in by_name.items()}
    for name, tap in taps.items():
        tap.replay(given[name], some_live[name])
    with _eager(), _ending(taps, RouterTap.stop_replaying):
        yield
        for name, tap in taps.items():
            total, left = len(given[name]), tap.stop_replaying()
            if left:
                raise ConfigError(f"routing.replay: {name} has routed {total - left} tokens, and {total} were given")


def read_vllm(
    sequences: Sequence[tuple[Any, Any]],
    tokens: Sequence[int],
    *,
    moe_layers: Sequence[int] | None = None,
    padded_to: int | None = None,
    left: bool = False,
    sequence_first: bool = False,
) -> list[Tensor]:
    """Reads the experts that vLLM's tokens chose (`enable_return_routed_experts`), for `replay`.

    Args:
        sequences: of each sequence its prompt's [P, L, K] and its generated tokens' [G, L, K], int16, as arrays of
            NumPy or tensors.
        tokens: of each sequence as it is trained: P + G, or one more where the last token's choice is not among them,
            which was never made. That token chooses live.
        moe_layers: which of L are the model's layers with experts, where dense layers are counted, too (of DeepSeek-V3
            `range(3, 61)`); None: all.
        padded_to: tokens to which each sequence is padded, on the right or on the `left`; padding chooses live. None:
            sequences are packed, one after the other.
        sequence_first: tokens lie [length, batch], as Megatron has them; else [batch, length].
    Returns:
        Of each layer [T, K].
    Raises:
        ConfigError: shapes that do not fit each other, or `tokens`; a number of a layer that does not exist.
    """
    joined = [_join(number, parts) for number, parts in enumerate(sequences)]
    return _arranged(joined, tokens, moe_layers, padded_to, left, sequence_first)


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
    """Reads the experts that SGLang's tokens chose (`return_routed_experts`), for `replay`.

    Args:
        sequences: of each sequence [tokens − 1, L, K] int32, prompt and generated tokens but the last, which chooses
            live; an array of NumPy or a tensor.
        layers_and_k: L and K, of flat arrays (SGLang's bytes, after `numpy.frombuffer(base64.b64decode(…), "int32")`).
        tokens, moe_layers, padded_to, left, sequence_first: see `read_vllm`.
    Returns, Raises: as `read_vllm`.
    """
    shaped = []
    for number, sequence in enumerate(map(torch.as_tensor, sequences)):
        if layers_and_k is not None and sequence.dim() == 1:
            if sequence.numel() % (layers_and_k[0] * layers_and_k[1]):
                raise ConfigError(
                    f"routing: sequence {number} has {sequence.numel()} numbers, no multiple of L·K = {layers_and_k}"
                )
            sequence = sequence.view(-1, *layers_and_k)
        shaped.append(sequence)
    return _arranged(shaped, tokens, moe_layers, padded_to, left, sequence_first)


def _join(number: int, parts: Any) -> Tensor:
    prompt, generated = (part if isinstance(part, Tensor) else torch.as_tensor(part, device="cpu") for part in parts)
    if prompt.dim() != 3 or generated.dim() != 3 or prompt.shape[1:] != generated.shape[1:]:
        raise ConfigError(
            f"routing: of sequence {number} prompt and generated tokens must be [P, L, K] and [G, L, K], got "
            f"{list(prompt.shape)} and {list(generated.shape)}"
        )
    return torch.cat([prompt, generated])


def _arranged(
    sequences: Sequence[Tensor],
    tokens: Sequence[int],
    moe_layers: Sequence[int] | None,
    padded_to: int | None,
    left: bool,
    sequence_first: bool,
) -> list[Tensor]:
    if len(sequences) != len(tokens) or not len(tokens):
        raise ConfigError(f"routing: {len(sequences)} sequences, and numbers of tokens of {len(tokens)}")
    if sequence_first and padded_to is None:
        raise ConfigError("routing: packed sequences have no batch, so sequence_first needs padded_to")
    shape, rows = sequences[0].shape[1:], []
    for number, (sequence, count) in enumerate(zip(sequences, tokens, strict=True)):
        if sequence.dim() != 3 or sequence.shape[1:] != shape or sequence.is_floating_point():
            raise ConfigError(
                f"routing: sequence {number} must be integers [tokens, L, K] = [·, {', '.join(map(str, shape))}] as "
                f"the first, got {sequence.dtype} {list(sequence.shape)}"
            )
        if len(sequence) not in (count, count - 1) or (padded_to is not None and count > padded_to):
            limit = "" if padded_to is None else f" (at most {padded_to})"
            raise ConfigError(f"routing: sequence {number} has {len(sequence)} rows for {count} tokens{limit}")
        # −1 for the last token, where its row is missing, and for padding.
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


def _by_layer(names: list[str], choices: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    if not isinstance(choices, Mapping):
        if len(choices) != len(names):
            lacks = f"; {names[len(choices)]} is the first without" if len(choices) < len(names) else ""
            raise ConfigError(
                f"routing.replay: the model has {len(names)} layers with experts, and {len(choices)} were given{lacks}"
            )
        return dict(zip(names, choices, strict=True))
    for name in (*names, *choices):
        if name not in names or name not in choices:
            whose = "the model has" if name in names else "the choices have"
            raise ConfigError(f"routing.replay: only {whose} a layer {name!r}; the model's are {', '.join(names)}")
    return dict(choices)


def _check(name: str, expert_TK: Tensor, experts: int) -> bool:
    """Checks choices; returns whether there are rows that choose live."""
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
def _eager() -> Iterator[None]:
    """Has compiled models run as they are: their graphs hold a choice of their own."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _ending(taps: Mapping[str, RouterTap], stop: Callable[[RouterTap], object]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for tap in taps.values():
            stop(tap)
        raise


def _tap(router: MoELayer | _Router) -> RouterTap | None:
    """Returns the tap that a router has already."""
    if isinstance(router, MoELayer):
        return router.gate.tap
    own = vars(router.module).get("forward")
    return own.tap if isinstance(own, _TappedForward) else None


def _tapped(name: str, router: MoELayer | _Router) -> RouterTap:
    """Returns a router's tap. Another library's has a forward in place of its own that asks it."""
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
    """A router's forward, with its choice recorded or given."""

    tap: RouterTap | None = None  # None of a copy

    def __init__(self, router: _Router, forward: Callable[..., Any], own: bool) -> None:
        self._router, self._forward, self._own = router, forward, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        router, tap = self._router, self.tap
        if tap is None:
            return self._forward(*args, **kwargs)
        seen: list[Tensor] = []

        def see(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen.append(named["top_k_index"] if "top_k_index" in named else given[1])

        hook = None
        if router.experts is not None:
            hook = router.experts.register_forward_pre_hook(see, with_kwargs=True)
        try:
            with Choosing(router.num_experts, tap.give, router.dims) as choice:
                output = self._forward(*args, **kwargs)
        finally:
            if hook is not None:
                hook.remove()
        used_TK = router.used(output) if router.used is not None else seen[0] if seen else None
        tap.note(choice.chosen_TK, used_TK)
        return output

    def remove(self) -> None:
        # Another library may have put its own forward around this one since: then this stays, and does nothing.
        if vars(self._router.module).get("forward") is self:
            if self._own:
                self._router.module.forward = self._forward
            else:
                del self._router.module.forward


def _found(model: nn.Module) -> dict[str, MoELayer | _Router]:
    """Finds the routers of layers of experts by the layers' names, without those of wrappers."""
    by_name: dict[str, MoELayer | _Router] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if (router := _router(path, module, modules)) is None:
            continue
        path = router.path if isinstance(router, _Router) else path
        name = ".".join(part for part in path.split(".") if part not in _WRAPPED) or type(module).__name__
        if name in by_name:
            raise ConfigError(f"fusedmoe.routing: {name} has two routers, and nobody can say which tokens are whose")
        by_name[name] = router
    if not by_name:
        raise ConfigError(f"fusedmoe.routing: {type(model).__name__} has no layers of experts that it knows")
    return by_name


def _router(path: str, module: Any, modules: Mapping[str, nn.Module]) -> MoELayer | _Router | None:
    """Returns what chooses experts, where a module is a router, or experts that the module around them chooses for."""
    if isinstance(module, MoELayer):
        if isinstance(module.gate, (ExpertChoice, SoftMoE)):
            gate = type(module.gate).__name__
            raise ConfigError(f"fusedmoe.routing: {path or 'the layer'} has a {gate} gate, whose tokens choose nothing")
        return module
    if {"is_transposed", "is_concatenated"} <= vars(module).keys():  # transformers'
        from fusedmoe.compat.transformers import is_expert_parallel

        while path.rpartition(".")[2] in _WRAPPED:
            path = path.rpartition(".")[0]
        around = path.rpartition(".")[0]
        # Where experts are split, their number is one rank's, and the parameters are those of all. What they are called
        # with are numbers of one rank, too.
        split = is_expert_parallel(module)
        num_experts = len(module.down_proj) if split else int(module.num_experts)
        return _Router(around, modules[around], num_experts, experts=None if split else module)
    if torchtitan.is_router(module):
        return _Router(
            path, module, int(module.num_experts), 3, lambda output: _flat(torchtitan.chosen_experts(output))
        )
    if megatron.is_router(module):
        return _Router(path, module, int(module.num_experts))
    if hasattr(module, "num_global_experts") and hasattr(module, "gates"):  # Tutel's
        return _Router(path, module, int(module.num_global_experts))
    return None


def _flat(ids: Tensor) -> Tensor:
    return (ids.to_local() if hasattr(ids, "to_local") else ids).flatten(0, -2)
