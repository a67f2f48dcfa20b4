"""Loads of experts: counts of what a layer's forwards routed where, and sums of them for metrics.

Nothing here waits for the device but `tell` and `dropped`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from fusedmoe.autograd.aux_loss import without_a_graph
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import Group
from fusedmoe.engine.dispatcher import recomputing
from fusedmoe.engine.recomputation import trains_tokens
from fusedmoe.gates.base import Gate, Routing, SoftRouting
from fusedmoe.losses import balance_loss_of_sums, logsumexp_of_rows

# Training forwards without `tell`, after which a gate that waits for it says so: more than a step accumulates.
_UNTOLD = 100

#: What is added up beside the numbers of experts: tokens, and over them the gate's losses; tokens with logits, and
#: over them entropy, squared logsumexp and balance loss; (token, k) pairs of forwards in which tokens travelled, and
#: those tokens, once for each rank that one went to. Losses are those of the tokens' forwards.
TERMS = ("tokens", "aux_loss", "scored", "entropy", "z_loss", "balance_loss", "pairs", "sent")


class Load:
    """Load of one layer's experts, on this rank.

    Attributes:
        chosen_E: slots that chose each expert in the last forward, drops included.
        kept_E: rows that each expert got of them: the rest were dropped.
        counters: adds up what the training forwards were like, for `fusedmoe.metrics`; None: nothing is counted.
    """

    def __init__(self, experts: int) -> None:
        self.counters: RoutingCounters | None = None  # of the object itself, as in copies: graphs look where it is
        self.chosen_E = torch.zeros(experts, dtype=torch.long, device="cpu")
        self.kept_E = torch.zeros(experts, dtype=torch.long, device="cpu")
        self._sum_E = torch.zeros(experts, dtype=torch.long, device="cpu")
        self._counts = self._in_reentrant_checkpoint = False
        self._untold = 0  # training forwards since `tell`, where a gate waits for it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"counters": None}  # nothing is collected of copies and pickles

    def count(self, routing: Routing | SoftRouting, kept_E: Tensor, gate: Gate, training: bool, all_kept: bool) -> None:
        """Count a forward. A training forward with gradients adds its load to the sum that `tell` hands to the gate.

        Args:
            kept_E: rows that each expert got.   all_kept: no slot with an expert was dropped, so that these are all.
        """
        self.kept_E = kept_E
        experts = len(self.chosen_E)
        self._counts = False
        if isinstance(routing, SoftRouting):
            # Each expert has its slots of mixtures of all tokens: nothing is chosen, and nothing to count.
            self.chosen_E = torch.full((experts,), routing.slots, device=routing.combine_SN.device)
            return
        self.chosen_E = kept_E if all_kept else expert_load(routing.expert_SK, experts)
        wanted = training and (self.counters is not None or gate.balances) and trains_tokens()
        self._counts = self.counters is not None and wanted
        if self._counts:
            assert self.counters is not None
            self.counters.choices(routing.expert_SK, self.chosen_E, routing.logits_SE, routing.aux_loss)
            self.counters.rows(kept_E)
        if wanted and gate.balances:
            # Always a tensor, or compiled layers would need a graph for the first step and one for all others.
            self._sum_E = self._sum_E.to(self.chosen_E.device) + self.chosen_E
            if not torch.compiler.is_compiling():  # a graph would be compiled anew for each number
                self._untold += 1
                if self._untold == _UNTOLD:
                    warnings.warn(
                        f"the {type(gate).__name__} gate balances its experts in MoELayer.update_gate(), which was not "
                        f"called in {_UNTOLD} training forwards, so loads stay as they are: call it on every rank "
                        "after each optimizer step",
                        stacklevel=2,
                    )

    def sent(self, travelled: tuple[int, int] | None) -> None:
        """Counts the pairs and tokens that travelled in the forward that `count` counted; None: not known."""
        if self._counts and travelled is not None:
            assert self.counters is not None
            self.counters.sent(*travelled)

    def keep_aux(self, aux: Tensor, gate: Gate, training: bool) -> Tensor:
        """Returns a forward's auxiliary loss as the layer's attribute, which may be read long after the forward."""
        if not torch.is_grad_enabled():
            like = next(gate.parameters(), None) if training and gate.aux else None
            aux = without_a_graph(aux, "MoELayer.aux_loss", like, if_any=not gate.aux)
            if not torch.compiler.is_compiling():
                self._in_reentrant_checkpoint |= aux.requires_grad
        elif aux.requires_grad and not self._in_reentrant_checkpoint and recomputing():
            # Non-reentrant checkpointing: gradients go through the first forward's graph. The graph made here, held by
            # this attribute, would keep every activation that led to it until the next forward.
            aux = aux.detach().requires_grad_()
        return aux

    def tell(self, gate: Gate, world: Group) -> None:
        """Tells a gate that balances the load of all ranks in training since it was last told. Collective."""
        if gate.balances:
            sum_E, self._sum_E, self._untold = self._sum_E, torch.zeros_like(self._sum_E), 0
            sum_E = sum_E if world.size == 1 else sum_E.to(device_of(world))
            gate.update(all_reduce(world, sum_E, operation="sum of expert loads"))

    def dropped(self) -> int:
        """Slots that got no row. Waits for the device."""
        # Counted from what is there anyway; nothing is added up in forwards for it.
        return int(self.chosen_E.sum() - self.kept_E.sum())


def expert_load(expert_SK: Tensor, experts: int) -> Tensor:
    """[E] int64: slots that chose each expert; no host synchronisation."""
    # Empty slots, -1, go to a column of their own, which is cut off: no selection, whose size a host would wait for.
    column = expert_SK.reshape(-1).long() + 1
    return column.new_zeros(experts + 1).scatter_add_(0, column, torch.ones_like(column))[1:]


class RoutingCounters:
    """Sums over the training forwards of one layer on this rank. Nothing here waits for the device.

    A forward costs a softmax over its logits, [S, E] in float32 for a moment, and some additions.

    Attributes:
        sums: [2·E + 8] float64: choices of each expert, how many of them got a row, and `TERMS`.
    """

    def __init__(self, experts: int, device: torch.device | str = "cpu") -> None:
        self.experts = experts
        self.sums = torch.zeros(2 * experts + len(TERMS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def choices(
        self, expert_SK: Tensor, chosen_E: Tensor, logits_SE: Tensor | None = None, aux_loss: Tensor | None = None
    ) -> None:
        """Adds the choices of another forward.

        Args:
            expert_SK: [S, K] of which the shape counts.   chosen_E: choices of each expert, drops included.
            logits_SE: of the router, if it has any.   aux_loss: the gate's weighted losses, a scalar.
        """
        if self.sums.device != chosen_E.device:  # the layer was moved
            self.sums = self.sums.to(chosen_E.device)
        S, K = expert_SK.shape
        chosen, _, tokens, aux, of_scores, _ = self._parts()
        chosen.add_(chosen_E)
        tokens.add_(S)
        if aux_loss is not None:
            aux.add_(S * aux_loss)
        if logits_SE is None:
            return
        # All of these are sums over tokens, so that ranks and forwards of any size add up to means.
        logits_SE = logits_SE.to(torch.promote_types(logits_SE.dtype, torch.float32))
        prob_SE = logits_SE.softmax(1)
        balance = balance_loss_of_sums(prob_SE.sum(0).unsqueeze(0), chosen_E.unsqueeze(0), S, K)
        z = logsumexp_of_rows(logits_SE).square().sum()
        of_scores.add_(torch.stack([torch.full_like(z, S), torch.special.entr(prob_SE).sum(), z, S * balance]))

    @torch.no_grad()
    def rows(self, kept_E: Tensor) -> None:
        """Adds the choices of a forward that got a row, of each expert."""
        self._parts()[1].add_(kept_E)

    @torch.no_grad()
    def sent(self, pairs: int, tokens: int) -> None:
        """Adds what travelled in a forward."""
        self._parts()[-1].add_(self.sums.new_tensor([pairs, tokens]))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.sums.split([self.experts, self.experts, 1, 1, 4, 2])
