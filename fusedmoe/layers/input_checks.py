"""Checks of a layer's arguments and input, on all ranks, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_choice, check_count, check_floats, check_tensor, refuse
from fusedmoe.comm.collectives import all_gather_rows, device_of
from fusedmoe.comm.metadata import INPUT_CHECK, NonFiniteCount
from fusedmoe.comm.topology import Topology
from fusedmoe.engine import dispatcher
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.gates import Gate
from fusedmoe.gates.base import Routing, SoftRouting
from fusedmoe.gates.sigmoid import read_cu_seqlens
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.gate import count_invalid
from fusedmoe.losses import Packing


class NonFiniteMonitor:
    """Counts non-finite values over the forwards of one layer, on the device. Copies start at zero."""

    def __init__(self) -> None:
        self._count: Tensor | None = None
        self._pending_copy: tuple[Tensor, torch.cuda.Event] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_count": None, "_pending_copy": None}

    def add(self, bad: Tensor) -> None:
        """Add a count, an int64 scalar, without host synchronization."""
        if self._count is None or self._count.device != bad.device:
            self._count = torch.zeros_like(bad)
        # In place: a CUDA graph that captured this forward adds to the same memory.
        self._count.add_(bad)

    def poll(self) -> int:
        """Return the count if the copy that an earlier poll started has completed, else 0. Never waits.

        Starts the next copy unless one is pending. Returns 0 on CPU and during graph capture.
        """
        if self._count is None or not self._count.is_cuda or torch.cuda.is_current_stream_capturing():
            return 0
        count = 0
        if self._pending_copy is not None:
            copy, event = self._pending_copy
            if not event.query():
                return 0
            count = int(copy)
        copy = torch.empty((), dtype=torch.long, pin_memory=True, device="cpu").copy_(self._count, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._pending_copy = copy, event
        return count

    def wait_for_count(self) -> int:
        """Return and reset the number of non-finite values in all forwards so far; synchronizes with the device."""
        count = 0 if self._count is None else int(self._count)
        self._count = self._pending_copy = None
        return count


def count_nonfinite(*tensors: Tensor) -> Tensor:
    """Return an int64 scalar that is positive if any value is NaN or infinite."""
    if torch.compiler.is_compiling():
        counts = [tensor.numel() - (tensor.detach().abs() < float("inf")).sum() for tensor in tensors]
        return sum(counts[1:], counts[0])
    # Reads each value once and writes none; both extremes are NaN if any value is.
    extremes = [torch.stack(tensor.detach().aminmax()) for tensor in tensors if tensor.numel()]
    if not extremes:
        return torch.zeros((), dtype=torch.long, device=tensors[0].device)
    return torch.stack([(~each.isfinite()).sum() for each in extremes]).sum()


_NONFINITE_LOGITS = "tokens with router logits that are NaN or infinite"
_NONFINITE_LOGITS_FIX = (
    "Look at the layer's input and at the gate's weights: most often the learning rate is too high or a loss scale has "
    "overflowed; a mask must leave each token an expert whose logit is not −inf"
)


_NONFINITE_VALUES = "tokens or router weights that a layer was given are NaN or infinite"
_NONFINITE_VALUES_FIX = (
    "Look at what computes them: most often the learning rate is too high, or activations have overflowed in half "
    "precision"
)


class InputChecks:
    """Checks a layer's input and router logits. Checks return an error message, which the exchange sends to all ranks.

    Args:
        name: of another library's layer, whose tokens and router weights are checked; "" for a `MoELayer`, whose router
            logits are checked.
        exchange_reports_logits: the exchange sends the result of `nonfinite_logits` to all ranks.
    """

    def __init__(self, topology: Topology, name: str = "", exchange_reports_logits: bool = False) -> None:
        self._topology, self._exchange_reports_logits = topology, exchange_reports_logits
        self._has_exchange = topology.ep.size * topology.esp.size > 1
        self._problem = f"{name}: {_NONFINITE_VALUES}" if name else _NONFINITE_LOGITS
        self._fix = _NONFINITE_VALUES_FIX if name else _NONFINITE_LOGITS_FIX
        self._monitor = NonFiniteMonitor()

    def flatten_tokens(self, x: Tensor, model_dim: int, experts: nn.Module) -> tuple[Tensor, str | None]:
        """Return the tokens of x as [S, M] and None; for invalid x, [0, M] and an error message."""
        like: Tensor | None = next(experts.parameters(), None)  # experts without parameters compute in any dtype
        refusal = find_tokens_error("MoELayer got input", x, model_dim, like)
        if refusal is None:
            return x.reshape(-1, model_dim), None
        return empty_tokens(x, model_dim, like), refusal

    def find_routing_error(self, routing: Routing | SoftRouting, gate: Gate, x_SM: Tensor) -> str | None:
        try:
            check_routing(gate, routing, x_SM)
        except ConfigError as error:
            return str(error)
        return self.find_logits_error(routing)

    def find_logits_error(self, routing: Routing | SoftRouting) -> str | None:
        """Return an error message for non-finite router logits; None if all are finite or the exchange reports them.

        On CUDA with one rank, a later call of `raise_deferred` reports them; a CPU graph asserts that there are none.
        """
        logits_SE = routing.logits_SE
        if logits_SE is None or self._is_reported_by_exchange(logits_SE):
            return None
        # On the host: a finite sum has finite summands; otherwise count them.
        if not (torch.compiler.is_compiling() or uses_triton(logits_SE)) and math.isfinite(logits_SE.sum()):
            return None
        bad = self._count_now(_count_nonfinite_tokens(routing, logits_SE))
        return f"{bad} of {len(logits_SE)} {self._problem}. {self._fix}" if bad else None

    def find_values_error(self, *tensors: Tensor) -> str | None:
        """Return an error message for non-finite tokens or weights, else None. Deferred as in `find_logits_error`."""
        if tensors[0].is_meta:  # no values
            return None
        if torch.compiler.is_compiling() or uses_triton(tensors[0]):
            bad = self._count_now(count_nonfinite(*tensors)) > 0
        elif all(math.isfinite(tensor.detach().sum()) for tensor in tensors):
            return None  # cheapest test: a decoding step with a few tokens takes little longer
        else:  # the sum of finite values may overflow
            extremes = (one.item() for tensor in tensors if tensor.numel() for one in tensor.detach().aminmax())
            bad = not all(map(math.isfinite, extremes))
        return f"{self._problem}. {self._fix}" if bad else None

    def values_refusal(self, *tensors: Tensor) -> str | NonFiniteCount | None:
        """Check tokens and router weights for `Routed.refusal`; on CUDA return a count, without synchronizing."""
        if uses_triton(tensors[0]) and self._has_exchange:
            return NonFiniteCount(count_nonfinite(*tensors), f"{self._problem}. {self._fix}")
        return self.find_values_error(*tensors)

    def nonfinite_flag(self, *tensors: Tensor) -> Tensor | None:
        """Return a scalar that is positive if values are not finite, for operators that report it to all ranks.

        With one rank, return None, or raise `ConfigError` if values are not finite (on CUDA: in an earlier call).
        """
        if self._has_exchange:
            return count_nonfinite(*tensors)
        if not torch.compiler.is_compiling():
            self.raise_deferred()
        self.refuse(self.find_values_error(*tensors))
        return None

    def _count_now(self, bad: Tensor) -> int:
        if torch.compiler.is_compiling() and not uses_triton(bad):
            # In a CPU graph only an assertion can stop the run.
            torch.ops.aten._assert_async.msg(bad == 0, f"{self._problem}. {self._fix}")
        elif uses_triton(bad) and not self._has_exchange:
            self._monitor.add(bad)
        else:
            return int(bad)
        return 0

    def nonfinite_logits(self, *routings: Routing | SoftRouting) -> NonFiniteCount | None:
        """Return the count of tokens with non-finite logits, and the error that the exchange then reports to all ranks.

        None if there are no logits, or if `find_logits_error` reports them.
        """
        given = [(routing, routing.logits_SE) for routing in routings if routing.logits_SE is not None]
        if not given or not self._is_reported_by_exchange(given[0][1]):
            return None
        counts = [_count_nonfinite_tokens(*each) for each in given]
        return NonFiniteCount(
            counts[0] if len(counts) == 1 else torch.stack(counts).sum(), f"{self._problem}. {self._fix}"
        )

    def _is_reported_by_exchange(self, logits_SE: Tensor) -> bool:
        reports = torch.compiler.is_compiling() or (self._exchange_reports_logits and uses_triton(logits_SE))
        return self._has_exchange and reports

    def raise_deferred(self, wait: bool = False) -> None:
        """Raise for non-finite values in earlier forwards, once.

        Without `wait`, considers only counts whose asynchronous copy from the device has completed; on a CPU, none.
        With `wait`, synchronizes with the device and considers all earlier forwards.
        """
        # Reported once: otherwise every later forward would raise for the same logits.
        if bad := self._monitor.wait_for_count() if wait else self._monitor.poll():
            self._monitor = NonFiniteMonitor()
            many = f"{bad} " if self._problem is _NONFINITE_LOGITS else ""
            self.refuse(f"{many}{self._problem} in forwards before this one. {self._fix}")

    def agree_on_tokens(self, x_SM: Tensor, refusal: str | None, mp_input: str) -> tuple[Tensor, str | None]:
        """Check that MP ranks pass in the same number of tokens [S, M], in one dtype. Collective over mp.

        Args:
            refusal: error message of this rank's tokens, or None.
        Returns:
            The tokens, which require grad if any rank's do, and None. If ranks differ or any has a refusal: no tokens,
            and the error message, or None if only other ranks refuse; the exchange that follows reports it to all
            ranks.
        Raises:
            RankError: ranks differ or any has a refusal, and the layer has no exchange.
        """
        topology, mp, raises_here = self._topology, self._topology.mp, not self._has_exchange
        if refusal is not None and raises_here:
            mp.board.refuse(INPUT_CHECK, refusal, mp.size)
        own = [-1, 0] if refusal is not None else [len(x_SM), x_SM.dtype.itemsize]
        own_13 = torch.tensor([[*own, x_SM.requires_grad]], device=device_of(mp))
        # Sizes and dtypes are compared first: ranks that differ would deadlock in the next collective.
        gathered = all_gather_rows(mp, own_13, [1] * mp.size, "exchange of counts").tolist()
        size_by_rank = [sizes for *sizes, _ in gathered]
        if size_by_rank == [own] * mp.size and refusal is None:
            # Backward gathers gradients of tokens over all ranks: some would wait forever otherwise.
            if torch.is_grad_enabled() and not x_SM.requires_grad and any(grad for *_, grad in gathered):
                x_SM = x_SM.detach().requires_grad_()
            return x_SM, None
        culprits = [rank for rank, other in zip(mp.ranks, size_by_rank, strict=True) if other == [-1, 0]]
        if not culprits:
            sizes = zip(mp.ranks, size_by_rank, strict=True)
            held = (f"{n} tokens of {8 * size}-bit numbers on rank {rank}" for rank, (n, size) in sizes)
            refusal = f"mp_input={mp_input!r} needs equal tokens on the {mp}, not {', '.join(held)}"
            if raises_here:
                mp.board.refuse(INPUT_CHECK, refusal, mp.size)
        if raises_here:
            raise RankError(f"rank {topology.rank}: {refusal or f'ended because {mp.board.refusal(culprits[0])}'}")
        return x_SM[:0], refusal

    def refusal_to_report(self, refusal: str | None, *routings: Routing) -> str | NonFiniteCount | None:
        """Return `refusal`, or else non-finite logits, for the exchange to report; without an exchange, raise it."""
        for routing in routings:
            refusal = refusal or self.find_logits_error(routing)
        if not self._has_exchange:
            self.refuse(refusal)
        return refusal or self.nonfinite_logits(*routings)

    def refuse(self, refusal: str | None) -> None:
        dispatcher.refuse(self._topology, refusal)

    def refuse_without_exchange(self, refusal: str | None) -> None:
        """Raise `refusal`, if given, in a layer without an exchange. Otherwise the exchange reports it to all ranks."""
        if not self._has_exchange:
            self.refuse(refusal)


def _count_nonfinite_tokens(routing: Routing | SoftRouting, logits_SE: Tensor) -> Tensor:
    counted = routing.bad if isinstance(routing, Routing) else None
    return count_invalid(logits_SE) if counted is None else counted


def find_tokens_error(
    prefix: str, x: object, model_dim: int, like: Tensor | None, min_dims: int = 1, dtypes: Collection[torch.dtype] = ()
) -> str | None:
    """Return an error message for invalid x, [..., M], else None.

    Args:
        prefix: subject and verb of the message, such as "MoELayer got input".
        like: a parameter of the experts; None: any dtype and device.
        dtypes: allowed in addition to `like`'s.
    """
    if not isinstance(x, Tensor):
        return f"{prefix} that is {type(x).__name__}; it takes a tensor [..., {model_dim}]"
    if x.dim() < min_dims or x.shape[-1] != model_dim:
        dims = f"; it takes at least {min_dims} dimensions, and the last" if min_dims > 1 else "; its last dimension"
        return f"{prefix} of shape {list(x.shape)}{dims} must be model_dim = {model_dim}"
    like = x if like is None else like
    if x.device != like.device:
        return f"{prefix} on {x.device} but its experts are on {like.device}; move one with .to()"
    if not x.is_floating_point():
        return f"{prefix} of {x.dtype}; it takes floating-point numbers"
    if x.dtype not in (like.dtype, *dtypes) and not torch.is_autocast_enabled(x.device.type):
        return f"{prefix} of {x.dtype} but its experts are {like.dtype}; convert one with .to(), or use torch.autocast"
    return None


def find_tokens(mask: object, x: Tensor, refusal: str | None, gate: Gate) -> tuple[Tensor, str | None]:
    """Return the ascending indices of the tokens among padding, on x's device, and None.

    For an invalid mask, or if there is a `refusal`, an error message about x: no indices, and the error message.
    """
    if refusal is None:
        refusal = find_mask_error("MoELayer", mask, x)
    if refusal is None:
        assert isinstance(mask, Tensor)
        real_N, cut = mask.reshape(-1), _mask_cuts_sequences(mask, gate.loss_sequence)
        if cut is not None:
            # Whole sequences give a multiple of `sequence` indices; a cut leaves exactly one index, which is not. One
            # synchronization returns the number of tokens and whether there is a cut.
            real_N = torch.cat([real_N & ~cut, cut[None]])
        # On the mask's device: a mask on the host needs no synchronization.
        real_S = real_N.nonzero().squeeze(1).to(x.device)
        if cut is None or len(real_S) % (gate.loss_sequence or 1) == 0:
            return real_S, None
        refusal = _cut_sequences_error("MoELayer", gate.loss_sequence)
    return torch.empty(0, dtype=torch.long, device=x.device if isinstance(x, Tensor) else None), refusal


def read_packing(
    cu_seqlens: object, x: Tensor, refusal: str | None, gate: Gate, joint: bool
) -> tuple[Packing | None, str | None]:
    """Return the packed sequences of x, [..., M], and None; if invalid, None and an error message.

    Args:
        refusal: error message about x, which is then returned.
        joint: MP ranks route slices of the same tokens, which would cut sequences: an error.
    """
    if refusal is None and joint:
        refusal = 'MoELayer got cu_seqlens, but its MP ranks route slices of the same tokens; use mp_input="split"'
    if refusal is not None:
        return None, refusal
    try:
        return read_cu_seqlens(gate, cu_seqlens, x), None
    except ConfigError as error:
        return None, str(error)


def find_mask_error(who: str, mask: object, x: Tensor, *gates: Gate) -> str | None:
    """Return an error message for an invalid padding mask, or None for a valid one.

    A mask must be boolean, of shape x.shape[:-1]. If one of the gates has a per-sequence loss, the mask must keep or
    mask whole sequences; it is then read, and should be on the host.
    """
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:-1]:
        for sequence in (gate.loss_sequence for gate in gates):
            if (cut := _mask_cuts_sequences(mask, sequence)) is not None and cut:
                return _cut_sequences_error(who, sequence)
        return None
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    return f"{who} got a mask that is {got}; it takes booleans {list(x.shape[:-1])}, true for a token"


def _mask_cuts_sequences(mask: Tensor, sequence: int | None) -> Tensor | None:
    """Return whether a mask covers a sequence partly, so that a per-sequence loss would mix tokens of two sequences.

    None: no per-sequence loss, or the gate itself raises (in a graph, or if `sequence` does not divide the tokens).
    """
    if sequence is None or torch.compiler.is_compiling() or mask.numel() % sequence:
        return None
    mask_BL = mask.reshape(-1, sequence)
    return (mask_BL != mask_BL[:, :1]).any()


def _cut_sequences_error(who: str, sequence: int | None) -> str:
    return (
        f"{who} got a mask that cuts sequences of {sequence} tokens, in each of which the gate takes a loss; "
        "mask whole sequences, or make the gate without `sequence`"
    )


def empty_tokens(x: object, model_dim: int, like: Tensor | None) -> Tensor:
    """Return [0, M] tokens in place of an invalid x, with dtype and device of `like`, a parameter of the experts."""
    if like is None:
        like = x.float() if isinstance(x, Tensor) else torch.empty(0, device="cpu")
    return torch.zeros(0, model_dim, dtype=like.dtype, device=like.device)


def check_routing(gate: Gate, routing: Routing | SoftRouting, x_SM: Tensor) -> None:
    """Check the result of a gate, possibly a user's own, for tokens x_SM.

    Raises:
        ConfigError: wrong types, shapes or devices; invalid expert ids (on CUDA a device assertion).
    """
    owner, experts, tokens = f"{type(gate).__name__} gate", gate.experts, x_SM.shape[0]
    if isinstance(routing, SoftRouting):
        shape = (tokens, experts * routing.slots)
        for name, matrix_SN in (("dispatch_SN", routing.dispatch_SN), ("combine_SN", routing.combine_SN)):
            check_tensor(owner, name, matrix_SN, x_SM)
            if matrix_SN.shape != shape:
                refuse(owner, f"{name} must be {list(shape)}, got {list(matrix_SN.shape)}")
    elif isinstance(routing, Routing):
        check_tensor(owner, "expert_SK", routing.expert_SK, x_SM)
        check_choice(owner, routing.expert_SK, experts)
        check_tensor(owner, "weight_SK", routing.weight_SK, x_SM)
        check_floats(owner, "weight_SK", routing.weight_SK)
        shapes = routing.expert_SK.shape, routing.weight_SK.shape
        if shapes[0] != shapes[1] or shapes[0][0] != tokens:
            found = f"{list(shapes[0])} and {list(shapes[1])}"
            refuse(owner, f"expert_SK and weight_SK must both be [S, K] of {tokens} tokens, got {found}")
        if routing.capacity is not None:
            check_count(owner, "capacity", routing.capacity, 0)
        if routing.priority_S is not None:
            check_tensor(owner, "priority_S", routing.priority_S, x_SM)
            if routing.priority_S.shape != (tokens,):
                refuse(owner, f"priority_S must be [{tokens}], got {list(routing.priority_S.shape)}")
    else:
        refuse(owner, f"it must give a Routing or a SoftRouting, got {type(routing).__name__}")
    check_tensor(owner, "aux_loss", routing.aux_loss)
    if routing.aux_loss.dim() != 0:
        refuse(owner, f"aux_loss must be a scalar, got {list(routing.aux_loss.shape)}")


def empty_routing(x_SM: Tensor) -> Routing:
    nothing = x_SM.new_zeros(x_SM.shape[0], 1)
    return Routing(torch.full_like(nothing, -1, dtype=torch.long), nothing, None, None, x_SM.new_zeros(()), None)


def uniform_load_error(gate: Gate) -> ConfigError:
    return ConfigError(f"{type(gate).__name__} gives all experts the same load: placement='ep' is for it")
