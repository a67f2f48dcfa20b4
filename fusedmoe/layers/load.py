"""Expert loads of a layer's forwards, and their sums for metrics.

Only `update_gate` and `num_dropped` synchronize with the device.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.aux_loss import guard_aux_loss
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.engine.dispatcher import is_recomputing
from fusedmoe.engine.recomputation import is_counting_tokens
from fusedmoe.gates.base import Gate, Routing, SoftRouting
from fusedmoe.losses import balance_loss_of_sums, logsumexp_of_rows

_WARN_AFTER_FORWARDS = 100

#: Sums in addition to the expert counts: tokens, and the gate's losses over them; tokens with logits, and entropy,
#: squared logsumexp and balance loss over them; (token, k) pairs of forwards that sent tokens, and these tokens,
#: counted once per destination rank. Losses are weighted by their forward's number of tokens.
COUNTER_NAMES = ("tokens", "aux_loss", "scored", "entropy", "z_loss", "balance_loss", "pairs", "sent")


class Load:
    """Load of one layer: the counts of this rank's (token, k) pairs over all E experts.

    Attributes:
        chosen_E: pairs that chose each expert in the last forward, including dropped pairs.
        kept_E: pairs of each expert in the last forward that were not dropped.
        counters: sums over training forwards for `fusedmoe.metrics`; None: nothing is summed.
    """

    def __init__(self, experts: int) -> None:
        self.counters: RoutingCounters | None = None  # also defined in copies: graphs guard on it
        self.chosen_E = torch.zeros(experts, dtype=torch.long, device="cpu")
        self.kept_E = torch.zeros(experts, dtype=torch.long, device="cpu")
        self._load_since_update_E = torch.zeros(experts, dtype=torch.long, device="cpu")
        self._is_last_counted = self._in_reentrant_checkpoint = False
        self._forwards_since_update = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"counters": None}  # copies and pickles collect nothing

    def count(self, routing: Routing | SoftRouting, kept_E: Tensor, gate: Gate, training: bool, all_kept: bool) -> None:
        """Count a forward. Training forwards with gradients also add to `counters` and to the sum for `update_gate`.

        Warns after 100 training forwards without `update_gate`, if the gate needs it. `kept_E`: kept pairs per expert.
        `all_kept`: no pair was dropped.
        """
        self.kept_E = kept_E
        experts = len(self.chosen_E)
        self._is_last_counted = False
        if isinstance(routing, SoftRouting):
            # Each expert computes slots that mix all tokens: there is no choice to count.
            self.chosen_E = torch.full((experts,), routing.slots, device=routing.combine_SN.device)
            return
        self.chosen_E = kept_E if all_kept else expert_load(routing.expert_SK, experts)
        is_counted = training and (self.counters is not None or gate.needs_load) and is_counting_tokens()
        self._is_last_counted = self.counters is not None and is_counted
        if self._is_last_counted:
            assert self.counters is not None
            self.counters.count_choices(routing.expert_SK, self.chosen_E, routing.logits_SE, routing.aux_loss)
            self.counters.count_rows(kept_E)
        if is_counted and gate.needs_load:
            # Always a tensor: otherwise compiled layers would need another graph for the first step.
            self._load_since_update_E = self._load_since_update_E.to(self.chosen_E.device) + self.chosen_E
            if not torch.compiler.is_compiling():  # a graph would be specialized on each value
                self._forwards_since_update += 1
                if self._forwards_since_update == _WARN_AFTER_FORWARDS:
                    warnings.warn(
                        f"the {type(gate).__name__} gate balances its experts in MoELayer.update_gate(), which was not "
                        f"called in {_WARN_AFTER_FORWARDS} training forwards, so loads stay as they are: call it on "
                        "every rank after each optimizer step",
                        stacklevel=2,
                    )

    def count_sent(self, sent_counts: tuple[int, int] | None) -> None:
        """Add the (pairs, tokens) sent in the forward that `count` counted; None: unknown."""
        if self._is_last_counted and sent_counts is not None:
            assert self.counters is not None
            self.counters.count_sent(*sent_counts)

    def storable_aux_loss(self, aux: Tensor, gate: Gate, training: bool) -> Tensor:
        """Return the auxiliary loss to store in the layer, which may be read after an activation checkpoint."""
        if not torch.is_grad_enabled():
            like = next(gate.parameters(), None) if training and gate.aux else None
            aux = guard_aux_loss(aux, "MoELayer.aux_loss", like, if_any=not gate.aux)
            if not torch.compiler.is_compiling():
                self._in_reentrant_checkpoint |= aux.requires_grad
        elif aux.requires_grad and not self._in_reentrant_checkpoint and is_recomputing():
            # Non-reentrant checkpoint: gradients use the first forward's graph. Through this attribute, the graph of
            # the recomputation would keep all activations alive until the next forward.
            aux = aux.detach().requires_grad_()
        return aux

    def update_gate(self, gate: Gate, world: Group) -> None:
        """All-reduce the training load since the last call and pass it to a gate that balances. Collective."""
        if gate.needs_load:
            sum_E, self._forwards_since_update = self._load_since_update_E, 0
            self._load_since_update_E = torch.zeros_like(sum_E)
            sum_E = sum_E if world.size == 1 else sum_E.to(device_of(world))
            gate.update(all_reduce(world, sum_E, operation="sum of expert loads"))

    def num_dropped(self) -> int:
        """Return the number of pairs that chose an expert without room. Synchronizes with the device."""
        return int(self.chosen_E.sum() - self.kept_E.sum())


def expert_load(expert_SK: Tensor, experts: int) -> Tensor:
    """Return [E] int64, the number of pairs that chose each expert, without host synchronization."""
    # Empty pairs, -1, are counted in an extra column: filtering would synchronize.
    column = expert_SK.reshape(-1).long() + 1
    return column.new_zeros(experts + 1).scatter_add_(0, column, torch.ones_like(column))[1:]


class RoutingCounters:
    """Sums over the training forwards of one layer on this rank. Never synchronizes with the device.

    Cost per forward: a softmax over its logits, with a temporary [S, E] float32.

    Attributes:
        sums: [2·E + 8] float64: chosen pairs per expert, kept pairs per expert, and `COUNTER_NAMES`.
    """

    def __init__(self, experts: int, device: torch.device | str = "cpu") -> None:
        self.experts = experts
        self.sums = torch.zeros(2 * experts + len(COUNTER_NAMES), dtype=torch.float64, device=device)

    @torch.no_grad()
    def count_choices(
        self, expert_SK: Tensor, chosen_E: Tensor, logits_SE: Tensor | None = None, aux_loss: Tensor | None = None
    ) -> None:
        """Add the choices of another forward.

        Args:
            expert_SK: [S, K]; only its shape is used.
            chosen_E: pairs that chose each expert, including dropped pairs.
            aux_loss: the gate's weighted losses, a scalar.
        """
        if self.sums.device != chosen_E.device:  # the layer changed its device
            self.sums = self.sums.to(chosen_E.device)
        S, K = expert_SK.shape
        chosen, _, tokens, aux, of_scores, _ = self._parts()
        chosen.add_(chosen_E)
        tokens.add_(S)
        if aux_loss is not None:
            aux.add_(S * aux_loss)
        if logits_SE is None:
            return
        # Sums over tokens permit means over ranks and forwards of different sizes.
        logits_SE = logits_SE.to(torch.promote_types(logits_SE.dtype, torch.float32))
        prob_SE = logits_SE.softmax(1)
        balance = balance_loss_of_sums(prob_SE.sum(0).unsqueeze(0), chosen_E.unsqueeze(0), S, K)
        z = logsumexp_of_rows(logits_SE).square().sum()
        of_scores.add_(torch.stack([torch.full_like(z, S), torch.special.entr(prob_SE).sum(), z, S * balance]))

    @torch.no_grad()
    def count_rows(self, kept_E: Tensor) -> None:
        self._parts()[1].add_(kept_E)

    @torch.no_grad()
    def count_sent(self, pairs: int, tokens: int) -> None:
        self._parts()[-1].add_(self.sums.new_tensor([pairs, tokens]))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.sums.split([self.experts, self.experts, 1, 1, 4, 2])
