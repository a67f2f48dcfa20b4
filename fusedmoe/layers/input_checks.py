"""Checks of a layer: what it refuses when it is made and when it is called, on all ranks, before anything is sent.

Router logits that are not finite are seen on the device and told on the host, without making the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_choice, check_count, check_floats, check_tensor, refuse
from fusedmoe.comm.collectives import all_gather_rows, device_of
from fusedmoe.comm.metadata import CHECK, NonFinite
from fusedmoe.comm.topology import Topology
from fusedmoe.engine import dispatcher
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.gates import Gate
from fusedmoe.gates.base import Routing, SoftRouting
from fusedmoe.gates.packing import pack
from fusedmoe.kernels.backend import uses_triton
from fusedmoe.kernels.gate import count_bad
from fusedmoe.losses import Packing


class NonFiniteMonitor:
    """Counts numbers that should be finite and are not, over forwards of one layer.

    On CUDA the count stays on the device, also in a CUDA graph and in a compiled one; each `seen()` starts a copy to
    the host and gives what the last one that has arrived said. A copied layer starts with a watch of its own.
    """

    def __init__(self) -> None:
        self._bad: Tensor | None = None
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_bad": None, "_arriving": None}

    def note(self, bad: Tensor) -> None:
        """Adds a count, an int64 scalar; no host synchronisation."""
        if self._bad is None or self._bad.device != bad.device:
            self._bad = torch.zeros_like(bad)
        # In place: a CUDA graph that holds this forward adds to the same memory.
        self._bad.add_(bad)

    def seen(self) -> int:
        """Returns the bad numbers in forwards that the device has finished, as far as the host knows; never waits."""
        if self._bad is None or not self._bad.is_cuda or torch.cuda.is_current_stream_capturing():
            return 0
        count = 0
        if self._arriving is not None:
            copy, event = self._arriving
            if not event.query():
                return 0
            count = int(copy)
        copy = torch.empty((), dtype=torch.long, pin_memory=True, device="cpu").copy_(self._bad, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving = copy, event
        return count

    def wait(self) -> int:
        """Returns the bad numbers in all forwards so far, and starts again at none; waits for the device."""
        count = 0 if self._bad is None else int(self._bad)
        self._bad = self._arriving = None
        return count


def not_finite(*tensors: Tensor) -> Tensor:
    """Tells whether any number is NaN or infinite: an int64 scalar, 0 or more."""
    if torch.compiler.is_compiling():  # a compiler makes one kernel of these, and takes any size
        counts = [tensor.numel() - (tensor.detach().abs() < float("inf")).sum() for tensor in tensors]
        return sum(counts[1:], counts[0])
    # Reads each number once and writes none; both extremes are NaN where any number is.
    extremes = [torch.stack(tensor.detach().aminmax()) for tensor in tensors if tensor.numel()]
    if not extremes:
        return torch.zeros((), dtype=torch.long, device=tensors[0].device)
    return torch.stack([(~each.isfinite()).sum() for each in extremes]).sum()


_BAD_LOGITS = "tokens with router logits that are NaN or infinite"
_BAD_LOGITS_CURE = (
    "Look at the layer's input and at the gate's weights: most often the learning rate is too high or a loss scale has "
    "overflowed; a mask must leave each token an expert whose logit is not −inf"
)


_BAD_NUMBERS = "tokens or router weights that a layer was given are NaN or infinite"
_BAD_NUMBERS_CURE = (
    "Look at what computes them: most often the learning rate is too high, or activations have overflowed in half "
    "precision"
)


class InputChecks:
    """Looks at a layer's input and logits. What is wrong is a text: an exchange passes it on to the other ranks.

    Layers of other libraries, whose routers are not ours, have their tokens and router weights looked at instead.

    Args:
        name: of another library's layer, for errors; "" for a `MoELayer`, whose router logits are looked at.
        carried: an exchange tells the ranks of `bad_logits`.
    """

    def __init__(self, topology: Topology, name: str = "", carried: bool = False) -> None:
        self._topology, self._carried = topology, carried
        self._what = f"{name}: {_BAD_NUMBERS}" if name else _BAD_LOGITS
        self._cure = _BAD_NUMBERS_CURE if name else _BAD_LOGITS_CURE
        self._watch = NonFiniteMonitor()

    def tokens(self, x: Tensor, model_dim: int, experts: nn.Module) -> tuple[Tensor, str | None]:
        """Returns the tokens of x as [S, M], and what is wrong with x, if anything; then there are no tokens."""
        like: Tensor | None = next(experts.parameters(), None)  # experts without parameters compute in any dtype
        refusal = of_input("MoELayer got input", x, model_dim, like)
        if refusal is None:
            return x.reshape(-1, model_dim), None
        return no_tokens(x, model_dim, like), refusal

    def of_routing(self, routing: Routing | SoftRouting, gate: Gate, x_SM: Tensor) -> str | None:
        """Says what is wrong with a gate's result, if anything: its parts, experts that do not exist, logits."""
        try:
            check_routing(gate, routing, x_SM)
        except ConfigError as error:
            return str(error)
        return self.of_logits(routing)

    def of_logits(self, routing: Routing | SoftRouting) -> str | None:
        """Says what is wrong with router logits, if anything, where an exchange does not tell (`bad_logits`). Where
        nothing travels on CUDA a later call tells."""
        logits_SE = routing.logits_SE
        if logits_SE is None or self._is_carried(logits_SE):
            return None
        # A finite sum on the host is of finite numbers only; of what else it may be of, the count tells.
        if not (torch.compiler.is_compiling() or uses_triton(logits_SE)) and math.isfinite(logits_SE.sum()):
            return None
        bad = self._known(_bad_tokens(routing, logits_SE))
        return f"{bad} of {len(logits_SE)} {self._what}. {self._cure}" if bad else None

    def of_numbers(self, *tensors: Tensor) -> str | None:
        """Says what is wrong with tokens and router weights, if anything, told as by `of_logits`."""
        if tensors[0].is_meta:  # without numbers
            return None
        if torch.compiler.is_compiling() or uses_triton(tensors[0]):
            bad = self._known(not_finite(*tensors)) > 0
        elif all(math.isfinite(tensor.detach().sum()) for tensor in tensors):
            return None  # as cheap as can be: a few tokens of a decoder take little longer
        else:  # finite numbers may have a sum that is not
            extremes = (one.item() for tensor in tensors if tensor.numel() for one in tensor.detach().aminmax())
            bad = not all(map(math.isfinite, extremes))
        return f"{self._what}. {self._cure}" if bad else None

    def for_exchange(self, *tensors: Tensor) -> str | NonFinite | None:
        """Says what is wrong with tokens and router weights, as `Routed.refusal` wants it: on CUDA an exchange tells
        whether there is anything, and the host does not wait for it here."""
        if uses_triton(tensors[0]) and self._topology.ep.size * self._topology.esp.size > 1:
            return NonFinite(not_finite(*tensors), f"{self._what}. {self._cure}")
        return self.of_numbers(*tensors)

    def of_given(self, *tensors: Tensor) -> Tensor | None:
        """Tells whether tokens or router weights are not finite, for an exchange by operators to tell all ranks.

        Raises:
            ConfigError: they are not, and there are no other ranks (on CUDA of a call before).
        """
        if self._topology.ep.size * self._topology.esp.size > 1:
            return not_finite(*tensors)
        if not torch.compiler.is_compiling():
            self.tell_logits()
        self.refuse(self.of_numbers(*tensors))
        return None

    def _known(self, bad: Tensor) -> int:
        """Returns a count of bad numbers, as far as the host is to know it now."""
        if torch.compiler.is_compiling() and not uses_triton(bad):
            # In a graph on a CPU nothing else could end the run.
            torch.ops.aten._assert_async.msg(bad == 0, f"{self._what}. {self._cure}")
        elif uses_triton(bad) and self._topology.ep.size == self._topology.esp.size == 1:
            # Nothing travels, so no other rank is misled if the host hears of it with a later call.
            self._watch.note(bad)
        else:
            return int(bad)
        return 0

    def bad_logits(self, *routings: Routing | SoftRouting) -> NonFinite | None:
        """Counts tokens whose logits are not finite, for an exchange to tell all ranks; None: `of_logits` says what is
        wrong.

        In a graph and on CUDA, where the host would have to wait.
        """
        given = [(routing, routing.logits_SE) for routing in routings if routing.logits_SE is not None]
        if not given or not self._is_carried(given[0][1]):
            return None
        counts = [_bad_tokens(*each) for each in given]
        return NonFinite(counts[0] if len(counts) == 1 else torch.stack(counts).sum(), f"{self._what}. {self._cure}")

    def _is_carried(self, logits_SE: Tensor) -> bool:
        if self._topology.ep.size == self._topology.esp.size == 1:
            return False
        return torch.compiler.is_compiling() or (self._carried and uses_triton(logits_SE))

    def tell_logits(self, wait: bool = False) -> None:
        """Raises for bad numbers of forwards before, as far as the host knows; with `wait`, of all."""
        # Told once: a new watch begins, or every later forward would raise for the same logits.
        if bad := self._watch.wait() if wait else self._watch.seen():
            self._watch = NonFiniteMonitor()
            many = f"{bad} " if self._what is _BAD_LOGITS else ""
            self.refuse(f"{many}{self._what} in forwards before this one. {self._cure}")

    def agree_on_tokens(self, x_SM: Tensor, refusal: str | None, mp_input: str) -> tuple[Tensor, str | None]:
        """Checks that MP ranks pass in equally many tokens [S, M], or summands of them, in one dtype. Collective.

        Returns:
            the same tokens, which have gradients where any rank's have, or none where a rank refuses them, and what is
            wrong with them here. All ranks hear of that in the exchange that follows; where none does it is raised.
        """
        topology, mp = self._topology, self._topology.mp
        ends_here = topology.ep.size == topology.esp.size == 1
        if refusal is not None and ends_here:
            mp.board.refuse(CHECK, refusal, mp.size)
        own = [-1, 0] if refusal is not None else [len(x_SM), x_SM.dtype.itemsize]
        own_13 = torch.tensor([[*own, x_SM.requires_grad]], device=device_of(mp))
        # One exchange for sizes and dtypes: ranks with other tokens would wait in the next one.
        told = all_gather_rows(mp, own_13, [1] * mp.size, "exchange of counts").tolist()
        found = [sizes for *sizes, _ in told]
        if found == [own] * mp.size and refusal is None:
            # Gradients of tokens are put together by all ranks, or some would wait in the backward.
            if torch.is_grad_enabled() and not x_SM.requires_grad and any(learns for *_, learns in told):
                x_SM = x_SM.detach().requires_grad_()
            return x_SM, None
        culprits = [rank for rank, other in zip(mp.ranks, found, strict=True) if other == [-1, 0]]
        if not culprits:
            held = (f"{n} of {8 * size} bits on rank {rank}" for rank, (n, size) in zip(mp.ranks, found, strict=True))
            refusal = f"mp_input={mp_input!r} needs equal tokens on the {mp}, not {', '.join(held)}"
            if ends_here:
                mp.board.refuse(CHECK, refusal, mp.size)
        if ends_here:
            raise RankError(f"rank {topology.rank}: {refusal or f'ended because {mp.board.refusal(culprits[0])}'}")
        return x_SM[:0], refusal

    def refuse(self, refusal: str | None) -> None:
        """Raises it, if there is any, and tells the other ranks."""
        dispatcher.refuse(self._topology, refusal)


def _bad_tokens(routing: Routing | SoftRouting, logits_SE: Tensor) -> Tensor:
    # A gate's kernel has counted them on its way.
    counted = routing.bad if isinstance(routing, Routing) else None
    return count_bad(logits_SE) if counted is None else counted


def of_input(
    got: str, x: object, model_dim: int, like: Tensor | None, least: int = 1, also: Collection[torch.dtype] = ()
) -> str | None:
    """Says what is wrong with x, [..., M], if anything.

    Args:
        got: how the text begins: "MoELayer got input".
        like: a parameter of the experts; None: any dtype and device will do.
        least: of dimensions.   also: dtypes beside that of `like`.
    """
    if not isinstance(x, Tensor):
        return f"{got} that is {type(x).__name__}; it takes a tensor [..., {model_dim}]"
    if x.dim() < least or x.shape[-1] != model_dim:
        dims = f"; it takes at least {least} dimensions, and the last" if least > 1 else "; its last dimension"
        return f"{got} of shape {list(x.shape)}{dims} must be model_dim = {model_dim}"
    like = x if like is None else like
    if x.device != like.device:
        return f"{got} on {x.device} but its experts are on {like.device}; move one with .to()"
    if not x.is_floating_point():
        return f"{got} of {x.dtype}; it takes floating-point numbers"
    if x.dtype not in (like.dtype, *also) and not torch.is_autocast_enabled(x.device.type):
        return f"{got} of {x.dtype} but its experts are {like.dtype}; convert one with .to(), or use torch.autocast"
    return None


def real_tokens(mask: object, x: Tensor, refusal: str | None, gate: Gate) -> tuple[Tensor, str | None]:
    """Finds the tokens among padding: their places among the tokens of x, ascending, and what is wrong, if anything.

    Args:
        mask: true for a token.   x: [..., M].   refusal: of x; then there are none.
    """
    if refusal is None:
        refusal = of_mask("MoELayer", mask, x)
    if refusal is None:
        assert isinstance(mask, Tensor)
        real_N, cut = mask.reshape(-1), _cuts_sequences(mask, gate.loss_sequence)
        if cut is not None:
            # Whole sequences are a multiple of tokens; a cut leaves one place alone, which is none. So the host learns
            # of it with their number, and waits once.
            real_N = torch.cat([real_N & ~cut, cut[None]])
        # Where the mask is, so that one on the host makes nobody wait.
        real_S = real_N.nonzero().squeeze(1).to(x.device)
        if cut is None or len(real_S) % (gate.loss_sequence or 1) == 0:
            return real_S, None
        refusal = _cut_sequences("MoELayer", gate.loss_sequence)
    return torch.empty(0, dtype=torch.long, device=x.device if isinstance(x, Tensor) else None), refusal


def packing_of(
    cu_seqlens: object, x: Tensor, refusal: str | None, gate: Gate, joint: bool
) -> tuple[Packing | None, str | None]:
    """Returns the packed sequences of the tokens of x, [..., M], or what is wrong with them.

    Args:
        refusal: of x; then there are no sequences.   joint: the MP ranks route slices of the same tokens.
    """
    if refusal is None and joint:
        # A slice would cut sequences: its loss would need sums over the MP group.
        refusal = 'MoELayer got cu_seqlens, but its MP ranks route slices of the same tokens; use mp_input="split"'
    if refusal is not None:
        return None, refusal
    try:
        return pack(gate, cu_seqlens, x), None
    except ConfigError as error:
        return None, str(error)


def of_mask(who: str, mask: object, x: Tensor, *gates: Gate) -> str | None:
    """Says what is wrong with a mask of the tokens of x, [..., M], if anything. `gates`: that route the tokens, where
    the mask is on the host."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == x.shape[:-1]:
        for sequence in (gate.loss_sequence for gate in gates):
            if (cut := _cuts_sequences(mask, sequence)) is not None and cut:
                return _cut_sequences(who, sequence)
        return None
    got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    return f"{who} got a mask that is {got}; it takes booleans {list(x.shape[:-1])}, true for a token"


def _cuts_sequences(mask: Tensor, sequence: int | None) -> Tensor | None:
    """Tells whether a mask cuts a sequence in which a loss is taken: the loss would mix tokens of several.

    None: no loss is taken in sequences; or the loss itself tells, as in a graph and for tokens that do not divide.
    """
    if sequence is None or torch.compiler.is_compiling() or mask.numel() % sequence:
        return None
    mask_BL = mask.reshape(-1, sequence)
    return (mask_BL != mask_BL[:, :1]).any()


def _cut_sequences(who: str, sequence: int | None) -> str:
    return (
        f"{who} got a mask that cuts sequences of {sequence} tokens, in each of which the gate takes a loss; "
        "mask whole sequences, or make the gate without `sequence`"
    )


def no_tokens(x: object, model_dim: int, like: Tensor | None) -> Tensor:
    """Makes [0, M] tokens in place of a refused x, in the dtype and on the device of a parameter of the experts."""
    # Experts without parameters compute in any dtype.
    if like is None:
        like = x.float() if isinstance(x, Tensor) else torch.empty(0, device="cpu")
    return torch.zeros(0, model_dim, dtype=like.dtype, device=like.device)


def check_routing(by: Gate, routing: Routing | SoftRouting, x_SM: Tensor) -> None:
    """Checks what a gate, which may be the user's, made of tokens x_SM.

    Raises:
        ConfigError: parts of another kind, shape or device; numbers of experts that do not exist. On CUDA, where nobody
            waits to see them, the latter fail an assertion on the device.
    """
    gate, experts, tokens = f"{type(by).__name__} gate", by.experts, x_SM.shape[0]
    if isinstance(routing, SoftRouting):
        shape = (tokens, experts * routing.slots)
        for name, matrix_SN in (("dispatch_SN", routing.dispatch_SN), ("combine_SN", routing.combine_SN)):
            check_tensor(gate, name, matrix_SN, x_SM)
            if matrix_SN.shape != shape:
                refuse(gate, f"{name} must be {list(shape)}, got {list(matrix_SN.shape)}")
    elif isinstance(routing, Routing):
        check_tensor(gate, "expert_SK", routing.expert_SK, x_SM)
        check_choice(gate, routing.expert_SK, experts)
        check_tensor(gate, "weight_SK", routing.weight_SK, x_SM)
        check_floats(gate, "weight_SK", routing.weight_SK)
        shapes = routing.expert_SK.shape, routing.weight_SK.shape
        if shapes[0] != shapes[1] or shapes[0][0] != tokens:
            found = f"{list(shapes[0])} and {list(shapes[1])}"
            refuse(gate, f"expert_SK and weight_SK must both be [S, K] of {tokens} tokens, got {found}")
        if routing.capacity is not None:
            check_count(gate, "capacity", routing.capacity, 0)
        if routing.priority_S is not None:
            check_tensor(gate, "priority_S", routing.priority_S, x_SM)
            if routing.priority_S.shape != (tokens,):
                refuse(gate, f"priority_S must be [{tokens}], got {list(routing.priority_S.shape)}")
    else:
        refuse(gate, f"it must give a Routing or a SoftRouting, got {type(routing).__name__}")
    check_tensor(gate, "aux_loss", routing.aux_loss)
    if routing.aux_loss.dim() != 0:
        refuse(gate, f"aux_loss must be a scalar, got {list(routing.aux_loss.shape)}")


def no_routing(x_SM: Tensor) -> Routing:
    """Makes the routing of tokens without experts."""
    nothing = x_SM.new_zeros(x_SM.shape[0], 1)
    return Routing(torch.full_like(nothing, -1, dtype=torch.long), nothing, None, None, x_SM.new_zeros(()), None)


def no_load(gate: Gate) -> ConfigError:
    return ConfigError(f"{type(gate).__name__} gives all experts the same load: placement='ep' is for it")
