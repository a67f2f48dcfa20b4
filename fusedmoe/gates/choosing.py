"""Choices of experts that are recorded, or given in place of a router's own.

A router scores all experts of a token and takes the k highest. Who gives it experts changes the second step alone, so
that scores, weights and losses stay those of the live logits, with their gradients, whatever the router makes of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fusedmoe.compat.torch import checkpoints, disable_current_modes
from fusedmoe.engine.dispatcher import recomputing
from fusedmoe.engine.recomputation import Remembered
from fusedmoe.errors import ConfigError

_TOP_K = (torch.topk, Tensor.topk)


class _OfThread(threading.local):
    """Holds, for each thread, the `Choosing` in its routers' place; None: they choose themselves."""

    choosing: Choosing | None = None


OF_THREAD = _OfThread()


class GivenExperts(NamedTuple):
    """Experts to choose, [T, K] integers. Rows with a negative one choose live; `some_live`: there are such rows."""

    expert_TK: Tensor
    some_live: bool

    def chosen(self, live_TK: Tensor) -> Tensor:
        """Returns what is to be chosen, like the live choices, which rows with a negative number take."""
        expert_TK = self.expert_TK.to(live_TK.device, live_TK.dtype)
        if not self.some_live:
            return expert_TK
        return torch.where((expert_TK < 0).any(1, keepdim=True), live_TK, expert_TK)


# Returns the experts of a number of tokens, k each; None: all choose live.
Give = Callable[[int, int], GivenExperts | None]


class Choosing(TorchFunctionMode):
    """Has the first choice among all experts that is made within it be the given one, and keeps what was chosen.

    A choice is `top_experts` or `torch.topk` of scores of `dims` dimensions, the last of which is the experts. What a
    router chooses after that, for a loss or for statistics, is its own business.

    Attributes:
        chosen_TK: what was chosen, on this rank; None: nothing yet.
    """

    def __init__(self, experts: int, give: Give, dims: int = 2) -> None:
        super().__init__()
        self._experts, self._give, self._dims = experts, give, dims
        self.chosen_TK: Tensor | None = None

    def __enter__(self) -> Choosing:
        self._before, OF_THREAD.choosing = choosing(), self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        OF_THREAD.choosing = self._before
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOP_K or not self._chooses(*args, **kwargs):
            return func(*args, **kwargs)
        score, k = args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["k"]
        index = self.top(score, k, lambda: func(*args, **kwargs).indices)
        return torch.return_types.topk((score.gather(-1, index), index))

    def _chooses(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, **_: Any) -> bool:
        return largest and dim in (-1, input.dim() - 1) and self.takes(input)

    def takes(self, score: Tensor) -> bool:
        """Tells whether the highest of these scores are the choice."""
        return self.chosen_TK is None and score.dim() == self._dims and score.shape[-1] == self._experts

    def top(self, score: Tensor, k: int, live: Callable[[], Tensor]) -> Tensor:
        """Returns [..., k] int64 for scores [..., E]: the experts given, or those that `live` chooses."""
        own = _local(score)
        given = self._give(own.shape[:-1].numel(), k)
        if given is None:
            index = live()
        else:
            index = given.expert_TK.to(own.device, torch.long).view(*own.shape[:-1], k)
            if given.some_live:
                index = torch.where((index < 0).any(-1, keepdim=True), _local(live()), index)
            if own is not score:  # a DTensor, of tokens that are split over ranks: each has its own
                shape = torch.Size((*score.shape[:-1], k))
                of_all: Any = score
                stride = torch.empty(shape, device="meta").stride()
                index = of_all.from_local(index, of_all.device_mesh, of_all.placements, shape=shape, stride=stride)
        self.chosen_TK = _local(index).flatten(0, -2)
        return index


def _local(tensor: Any) -> Tensor:
    # By its method, for DTensor's module takes long to import.
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def choosing() -> Choosing | None:
    """Returns the innermost `Choosing` that this thread is in. A compiled graph is in none."""
    return None if torch.compiler.is_compiling() else OF_THREAD.choosing


class RouterTap:
    """Records the choices of one router, or replays given ones.

    A forward takes the next rows of those given. They stay with the checkpoints around it, and a checkpoint that
    computes it again, after the replay has ended too, gets the same.

    Args:
        name: of the layer, in errors.   experts: E.
        free: called when neither this nor any checkpoint needs the tap any more.
    """

    def __init__(self, name: str, experts: int, free: Callable[[], None]) -> None:
        self.name, self.experts, self._free = name, experts, free
        self.recorded: list[Tensor] | None = None
        self.replayed: GivenExperts | None = None
        self._at, self._checked = 0, False
        self._device: torch.device | str | None = None
        self._kept: Remembered[GivenExperts] = Remembered()

    def __reduce__(self) -> Any:
        return type(None), ()  # copies of a model are in no record and in no replay

    def record(self, device: torch.device | str | None) -> None:
        self.recorded, self._device, self._checked = [], device, False

    def replay(self, expert_TK: Tensor, some_live: bool) -> None:
        self.replayed, self._at, self._checked = GivenExperts(expert_TK, some_live), 0, False

    def drop_recording(self) -> None:
        self.recorded = None
        self._release()

    def stop_recording(self) -> Tensor:
        """Returns [T, K], the choices of all forwards one after the other."""
        assert self.recorded is not None
        recorded, self.recorded = self.recorded, None
        self._release()
        if not recorded:
            raise ConfigError(f"routing.record: {self.name} has had no forward")
        if len({chosen.shape[1] for chosen in recorded}) > 1:
            raise ConfigError(f"routing.record: {self.name} has chosen other numbers of experts in other forwards")
        return torch.cat(recorded)

    def stop_replaying(self) -> int:
        """Returns how many rows are left."""
        left = 0 if self.replayed is None else len(self.replayed.expert_TK) - self._at
        self.replayed = None
        self._release()
        return left

    def _release(self) -> None:
        if self.recorded is None and self.replayed is None:
            # Checkpoints that are still to be computed again need it for so long.
            self._kept.when_gone(self._gone)

    def _gone(self) -> None:
        if self.recorded is None and self.replayed is None:
            self._free()

    def give(self, tokens: int, k: int) -> GivenExperts | None:
        """Returns the experts of this forward, or of the one that it computes again; None: they are chosen live.

        Raises:
            ConfigError: there are none for so many tokens, or not k each.
        """
        # Under a selective checkpoint nothing of this is an operation of the model.
        with disable_current_modes():
            around = checkpoints()
            if around.again is not None:
                given = self._kept.again(around)
            elif self.replayed is None and not self._kept:
                return None
            elif recomputing():
                raise ConfigError(
                    f"routing.replay: {self.name} is called in a backward pass by no checkpoint that replay "
                    "recognises, so the forward it repeats is unknown; use torch.utils.checkpoint"
                )
            elif self.replayed is None:
                return None
            else:
                given = self._take(tokens, k)
            if given is not None:
                self._kept.keep(given, around)
            return given

    def _take(self, tokens: int, k: int) -> GivenExperts:
        assert self.replayed is not None
        expert_TK, some_live = self.replayed
        left, width = len(expert_TK) - self._at, expert_TK.shape[1]
        if width != k:
            raise ConfigError(f"routing.replay: {self.name} chooses {k} experts for a token, and {width} were given")
        if tokens > left:
            raise ConfigError(
                f"routing.replay: {self.name} routes {tokens} tokens, and of {len(expert_TK)} rows that were given "
                f"{left} are left"
            )
        self._at += tokens
        return GivenExperts(expert_TK[self._at - tokens : self._at], some_live)

    def note(self, chosen_TK: Tensor | None, used_TK: Tensor | None = None) -> None:
        """Takes what was chosen in a forward, and which experts then were used, if anybody knows.

        Raises:
            ConfigError: the router does not choose by `top_experts` or `torch.topk`, or then takes others (this is
                looked at in the first forward).
        """
        if (self.replayed is None and self.recorded is None) or recomputing():
            return
        with disable_current_modes():
            same = chosen_TK is not None
            if chosen_TK is not None and used_TK is not None and not self._checked:
                self._checked, same = True, torch.equal(chosen_TK, used_TK.to(chosen_TK.dtype))
            # What a gate that is ours uses can be recorded however it was chosen.
            elsewhere = chosen_TK is None and used_TK is not None and self.replayed is None
            if not same and not elsewhere:
                raise ConfigError(
                    f"fusedmoe.routing: {self.name} takes other experts than a top-k of its scores gives, so that none "
                    "can be recorded or given; a fused top-k (Megatron's moe_router_fusion) has to be off, and a gate "
                    "of one's own to use fusedmoe.gates.top_experts"
                )
            if self.recorded is not None:
                chosen_TK = chosen_TK if used_TK is None else used_TK
                assert chosen_TK is not None
                number = torch.int16 if self.experts <= torch.iinfo(torch.int16).max else torch.int32
                self.recorded.append(chosen_TK.to(self._device or chosen_TK.device, number))
