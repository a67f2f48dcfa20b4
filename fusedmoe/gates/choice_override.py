"""Recording and replay of expert choices.

Replay overrides only the top-k selection of a router. Scores, weights, losses and gradients stay the router's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedmoe.compat.torch import checkpoints, disable_current_modes
from fusedmoe.engine.dispatcher import is_recomputing
from fusedmoe.engine.recomputation import CheckpointedValues
from fusedmoe.errors import ConfigError

_TOP_K = (torch.topk, Tensor.topk)


class _ThreadState(threading.local):
    """Per-thread active `ChoiceOverride`; None: routers select experts themselves."""

    override: ChoiceOverride | None = None


THREAD_STATE = _ThreadState()


class GivenExperts(NamedTuple):
    """Experts to select.

    `expert_TK`: [T, K] int; in live rows, which have a negative value, the router selects. `has_live_rows`: such rows
    exist.
    """

    expert_TK: Tensor
    has_live_rows: bool

    def with_live_rows(self, live_TK: Tensor) -> Tensor:
        """Return the given experts, and in live rows those of `live_TK`."""
        expert_TK = self.expert_TK.to(live_TK.device, live_TK.dtype)
        if not self.has_live_rows:
            return expert_TK
        return torch.where((expert_TK < 0).any(1, keepdim=True), live_TK, expert_TK)


# (number of tokens, k) -> experts to select; None: the router selects.
ExpertSource = Callable[[int, int], GivenExperts | None]


class ChoiceOverride(TorchFunctionMode):
    """Context that overrides and records the first selection among all experts.

    A selection is `top_experts` or `torch.topk` of scores with `dims` dimensions, the last over experts. Later
    selections, for losses or statistics, are unaffected. `chosen_TK`: experts selected on this rank; None before.
    """

    def __init__(self, experts: int, next_experts: ExpertSource, dims: int = 2) -> None:
        super().__init__()
        self._experts, self._next_experts, self._score_dims = experts, next_experts, dims
        self.chosen_TK: Tensor | None = None

    def __enter__(self) -> ChoiceOverride:
        self._outer, THREAD_STATE.override = active_override(), self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        THREAD_STATE.override = self._outer
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K or not self._is_top_k_selection(*args, **kwargs):
            return func(*args, **kwargs)
        score, k = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["k"]
        index = self.select(score, k, lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((score.gather(-1, index), index))

    def _is_top_k_selection(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any) -> bool:
        return largest and dim in (-1, input.dim() - 1) and self.is_selection(input)

    def is_selection(self, score: Tensor) -> bool:
        return self.chosen_TK is None and score.dim() == self._score_dims and score.shape[-1] == self._experts

    def select(self, score: Tensor, k: int, select_live: Callable[[], Tensor]) -> Tensor:
        """Return [..., k] int64 for scores [..., E]: the given experts, or those selected by `select_live`."""
        own = _local(score)
        given = self._next_experts(own.shape[:-1].numel(), k)
        if given is None:
            index = select_live()
        else:
            index = given.expert_TK.to(own.device, torch.long).view(*own.shape[:-1], k)
            if given.has_live_rows:
                index = torch.where((index < 0).any(-1, keepdim=True), _local(select_live()), index)
            if own is not score:  # a DTensor over tokens: each rank has its own shard
                shape = torch.Size((*score.shape[:-1], k))
                whole: Any = score
                stride = torch.empty(shape, device="meta").stride()
                index = whole.from_local(index, whole.device_mesh, whole.placements, shape=shape, stride=stride)
        self.chosen_TK = _local(index).flatten(0, -2)
        return index


def _local(tensor: Any) -> Tensor:
    # Duck-typed: importing DTensor is slow.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def active_override() -> ChoiceOverride | None:
    """Return this thread's innermost `ChoiceOverride`; None in a compiled graph."""
    return None if torch.compiler.is_compiling() else THREAD_STATE.override


class RouterTap:
    """Records the choices of one router, or replays given choices.

    Each forward consumes the next given rows. Enclosing checkpoints keep them for recomputation, even after the replay.
    `on_unused` is called once neither this object nor any checkpoint needs the tap.
    """

    def __init__(self, name: str, experts: int, on_unused: Callable[[], None]) -> None:
        self.name, self.experts, self._on_unused = name, experts, on_unused
        self.recorded: list[Tensor] | None = None
        self.replayed: GivenExperts | None = None
        self._next_row, self._is_checked = 0, False
        self._device: torch.device | str | None = None
        self._checkpointed: CheckpointedValues[GivenExperts] = CheckpointedValues()

    def __reduce__(self) -> Any:
        return type(None), ()  # copies of a model neither record nor replay

    def record(self, device: torch.device | str | None) -> None:
        self.recorded, self._device, self._is_checked = [], device, False

    def replay(self, expert_TK: Tensor, has_live_rows: bool) -> None:
        self.replayed, self._next_row, self._is_checked = GivenExperts(expert_TK, has_live_rows), 0, False

    def drop_recording(self) -> None:
        self.recorded = None
        self._release()

    def stop_recording(self) -> Tensor:
        """Stop and return the choices of all forwards, [T, K]. Raise `ConfigError` if there are none, or K varies."""
        assert self.recorded is not None
        recorded, self.recorded = self.recorded, None
        self._release()
        if not recorded:
            raise ConfigError(f"routing.record: {self.name} ran no forward")
        if len({chosen.shape[1] for chosen in recorded}) > 1:
            raise ConfigError(
                f"routing.record: {self.name} selected different numbers of experts in different forwards"
            )
        return torch.cat(recorded)

    def stop_replaying(self) -> int:
        left = 0 if self.replayed is None else len(self.replayed.expert_TK) - self._next_row
        self.replayed = None
        self._release()
        return left

    def _release(self) -> None:
        if self.recorded is None and self.replayed is None:
            # Checkpoints that are still to be recomputed need the tap.
            self._checkpointed.on_release(self._free_if_unused)

    def _free_if_unused(self) -> None:
        if self.recorded is None and self.replayed is None:
            self._on_unused()

    def next_experts(self, tokens: int, k: int) -> GivenExperts | None:
        """Return the experts for this forward, or for the forward that is recomputed; None: the router selects.

        Raises:
            ConfigError: too few rows, rows without k experts, or a backward pass outside of a checkpoint.
        """
        # Selective checkpoints must not see these operations.
        with disable_current_modes():
            enclosing = checkpoints()
            if enclosing.recomputation is not None:
                given = self._checkpointed.stored_value(enclosing)
            elif self.replayed is None and not self._checkpointed:
                return None
            elif is_recomputing():
                raise ConfigError(
                    f"routing.replay: {self.name} is called in a backward pass outside of a checkpoint that replay "
                    "recognizes, so the forward it repeats is unknown; use torch.utils.checkpoint"
                )
            elif self.replayed is None:
                return None
            else:
                given = self._next_rows(tokens, k)
            if given is not None:
                self._checkpointed.store(given, enclosing)
            return given

    def _next_rows(self, tokens: int, k: int) -> GivenExperts:
        assert self.replayed is not None
        expert_TK, has_live_rows = self.replayed
        left, width = len(expert_TK) - self._next_row, expert_TK.shape[1]
        if width != k:
            raise ConfigError(f"routing.replay: {self.name} selects {k} experts per token, but {width} were given")
        if tokens > left:
            raise ConfigError(
                f"routing.replay: {self.name} routes {tokens} tokens, but only {left} of {len(expert_TK)} given "
                "rows are left"
            )
        self._next_row += tokens
        return GivenExperts(expert_TK[self._next_row - tokens : self._next_row], has_live_rows)

    def record_choice(self, chosen_TK: Tensor | None, used_TK: Tensor | None = None) -> None:
        """Record the experts selected in a forward; a no-op in recomputations. `used_TK`: the experts used, if known.

        Raises:
            ConfigError: the router does not select by `top_experts` or `torch.topk`, or its first forward uses other
                experts than selected.
        """
        if (self.replayed is None and self.recorded is None) or is_recomputing():
            return
        with disable_current_modes():
            same = chosen_TK is not None
            if chosen_TK is not None and used_TK is not None and not self._is_checked:
                self._is_checked, same = True, torch.equal(chosen_TK, used_TK.to(chosen_TK.dtype))
            # Used experts can be recorded however they were selected.
            elsewhere = chosen_TK is None and used_TK is not None and self.replayed is None
            if not same and not elsewhere:
                raise ConfigError(
                    f"fusedmoe.routing: {self.name} uses experts other than the top-k of its scores, so they cannot be "
                    "recorded or replayed; disable a fused top-k (Megatron's moe_router_fusion), and use "
                    "fusedmoe.gates.top_experts in custom gates"
                )
            if self.recorded is not None:
                chosen_TK = chosen_TK if used_TK is None else used_TK
                assert chosen_TK is not None
                number = torch.int16 if self.experts <= torch.iinfo(torch.int16).max else torch.int32
                self.recorded.append(chosen_TK.to(self._device or chosen_TK.device, number))
