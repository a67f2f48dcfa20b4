"""Fully sharded sparse data parallelism: who owns and who copies the experts of a model in training (Hecate)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_count
from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of, on_all_ranks, slowest_s
from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.comm.sparse import SparseCollectives
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import require_own_experts
from fusedmoe.layers.dynamic_experts import DynamicExperts
from fusedmoe.layers.expert_tables import require_stacked
from fusedmoe.layers.measure import measured_costs
from fusedmoe.layers.moe import MoELayer
from fusedmoe.placement.balance import Balance, auto_balance, cheapest_balance, outlasts_rows
from fusedmoe.placement.hecate import (
    WINDOW,
    LayerLoads,
    LayerPolicy,
    calibrate,
    hecate,
    is_due,
    overlap_degree,
    predict,
    reshard,
    uneven,
)
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.training.expert_moves import followers, move, require_movable
from fusedmoe.training.gradient_buckets import moe_layers
from fusedmoe.training.optimizers import JoinedOptimizers, Optimizers, require_parts

#: Policies by name: Hecate, Hecate without the search behind Algorithm 1, and expert parallelism, which moves nothing.
PLACEMENT_POLICIES = ("hecate", "algorithm1", "ep")

_HECATE = ("hecate", "algorithm1")

#: From what copies and their rows follow: from earlier steps; also from what the gates have just chosen; or from that
#: where it saves more than it takes.
PLACEMENT_BALANCES = ("predicted", "exact", "auto")

#: Corrects a layer's placement after its gate: (placement, tokens_WE, nodes, m, costs) -> placement, as `calibrate`.
Correction = Callable[[Placement, NDArray[np.int64], Nodes, int, PlacementCosts], Placement]

#: Costs where nothing is decided by them.
_UNKNOWN = PlacementCosts(0.0, 0, 0, 0, 1.0, 1.0)


class ExpertMemory(NamedTuple):
    """Bytes that dynamic experts take on this rank, now.

    Attributes:
        parameters: of the experts that it owns.
        replicas: of the experts of other ranks that it holds, with room that is kept for them.
    """

    parameters: int
    replicas: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of all four together."""
        return sum(self)


class ShardedExperts:
    """Shards the experts of a model, parameters and optimizer state, over all ranks, and copies them to where they are
    asked for (Hecate, section 3: FSSDP). Collective over all ranks, as are all its methods.

        model = Transformer(config, topology, placement="fssdp")
        optimizer = torch.optim.AdamW(model.parameters())
        experts = ShardedExperts(model, optimizer, topology, overlap=8, memory=2)

    That is all; the loop stays as it was. After each `optimizer.step()` the loads of the last five steps say where
    copies are in the next one (Algorithm 1). They are fetched for each forward pass, so that it sees parameters as they
    are, whoever changed them and how. They are on their way while the model computes what comes before its first
    experts; their gradients come back while the backward pass computes what is left, and `.grad` of an expert that a
    rank owns is whole when `backward()` returns. Every 100 steps, and after the first five, experts change owners where
    that evens out the work of ranks (Algorithm 2). Losses, gradients and updates are those of expert parallelism.

    A parameter of experts is [owned, ...] on each rank, and changes its shape and its memory when owners change: look
    it up, do not keep `.data`. Checkpoints (`save_checkpoint`) have experts by their numbers and load under any
    placement, on any number of ranks; `state_dict()` beside them has what the next placements follow from. The model's
    own `state_dict()` loads where ranks own the same experts, and is refused elsewhere, before anything of it is
    loaded.

    A `deepcopy` of the model has no replicas. Its experts change owners with the model's, so that weights can be
    averaged into it (`torch.optim.swa_utils.AveragedModel`). All ranks must have it, and nobody may train it, unless it
    has a ShardedExperts of its own.

    Args:
        model: with one or more `MoELayer(placement="fssdp")`, of equal numbers of experts. It is hooked: run it whole.
        optimizer: one of single elements (AdamW, SGD), or of single experts, whose state is shaped like the parameters,
            or `PerMatrix`; or several in a list, in the order in which they step. They have all experts' parameters;
            the `step()` of the last one is hooked.
        policy: "hecate"; "algorithm1", the same without the search behind Algorithm 1; "ep", which moves nothing; or a
            function of your own that places a layer's experts for the next step, from what is known of its loads
            (`LayerLoads` -> `Placement`). It is asked after each step, on one rank for each layer.
        memory: m, how many copies a rank has room for in each layer.
        overlap: t, how many experts may travel for a layer. None: as many as are hidden by the time that the model
            takes between two layers of experts, which the first five steps measure, at the bandwidth that this machine
            was measured to have (`fusedmoe.runtime.cache`). Where costs are known, a search behind Algorithm 1
            makes more of what it gives (`fusedmoe.placement.hecate`).
        reshard: owners may change, by Algorithm 2 or by a function of your own.
        calibrates: True looks again once the gate has chosen, and fetches more copies where that pays. Or a function
            that does so: (placement, tokens_WE, nodes, memory, costs) -> a placement that has all of `placement`.
        balance: "exact": once the gate has chosen, rows are shared over the copies so that the busiest rank computes as
            few as is worth it, in evaluation too; and in a step's first training forward copies are added where that
            saves more time than nothing hides of their way (`fusedmoe.placement.balance`). It is worked out on the host
            in each forward. "auto": the same where what uneven ranks and links cost is more than working it out takes,
            as measured when this is made, and more than 2% of the layer's time; copies that were predicted and compute
            next to nothing may give their places to others. Elsewhere rows go to the nearest copies; and owners stay
            where their ranks are within 5% of the mean. "predicted": the copies are those of the policy, and rows
            spread evenly over them.
        rematerialises: copies are given back after each forward pass and fetched again for its backward pass. Less
            memory, that of two layers' copies (one layer's are used while the next one's arrive), twice the traffic.
        costs: what a token and an expert take. None: measured where a policy asks for them; what `tune_step` measures
            again, as steps have drifted, counts from the next step on, and `overlap` is then found anew.
        heap: symmetric memory of the expert-parallel group (`comm.one_sided.heaps.open_heap`), which must outlive
            this. One-sided puts then send the experts, in place of collectives.
        averaged: models whose experts change owners with this one's, though they were not made by `copy.deepcopy` of
            it: read from a file, say. They have no optimizer of their own.
    Attributes:
        averaged: append one that is made later, on all ranks, before the next step.
        overlap: t; 0 while it is not known yet.
        iteration: steps so far.
        moved_bytes: parameters and state that this rank has sent to new owners.
    Raises:
        ConfigError: no layers with dynamic experts, layers of different numbers of experts or with a ShardedExperts
            already, numbers that cannot be, a `balance` other than "predicted" with `calibrates`, or an optimizer that
            looks at several experts at once, or whose state cannot move with single ones; in the first step, where it
            cannot be tried on a small parameter before. In a step in which owners change: a copy of the model that is
            trained by itself, or that not all ranks have. A function that places experts on other ranks than the layer
            has, or changes owners with `reshard=False`.
        RankError: the ranks pass different arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        topology: Topology,
        *,
        policy: str | LayerPolicy = "hecate",
        memory: int = 2,
        overlap: int | None = None,
        reshard: bool = True,
        calibrates: bool | Correction = False,
        balance: str = "predicted",
        rematerialises: bool = False,
        costs: PlacementCosts | None = None,
        heap: Heap | None = None,
        averaged: Sequence[nn.Module] = (),
    ) -> None:
        if not callable(policy) and policy not in PLACEMENT_POLICIES:
            raise ConfigError(
                f"placement policy {policy!r}; choose one of {', '.join(PLACEMENT_POLICIES)}, or give a function"
            )
        check_count("ShardedExperts", "memory", memory, 0)
        if overlap is not None:
            check_count("ShardedExperts", "overlap", overlap, 0)
        if balance not in PLACEMENT_BALANCES or (balance != "predicted" and calibrates):
            raise ConfigError(
                f"ShardedExperts: balance = {balance!r} and calibrates = {calibrates!r}; choose one of "
                f"{', '.join(PLACEMENT_BALANCES)}, and the last two without calibrates: they add copies by themselves"
            )
        layers = [layer for layer in moe_layers(model) if layer.placed is not None]
        self._recorded = layers
        self._layers = _dynamic(model)
        # A model without other ranks has no dynamic experts: everything below is for those that move.
        if topology.ep.size > 1 and not layers:
            raise ConfigError("ShardedExperts: no layer of this model was made with placement='fssdp'")
        if any(placed.hooked for placed in self._layers):
            raise ConfigError("ShardedExperts: this model has one already; close() it before another is made")
        for layer in layers:
            assert layer.placed is not None
            if layer.experts is not layer.placed.experts:
                raise ConfigError(
                    f"ShardedExperts: the experts of a layer were put into a {type(layer.experts).__name__}, which "
                    "computes without copies (peft's target_parameters, say). Give them LoRA by "
                    "torch.nn.utils.parametrize instead, with one part for each expert, or use placement='ep'."
                )
            require_stacked(layer.placed.experts, layer.placed.owned)
        self._names = [placed.names for placed in self._layers]
        if len({placed.placement.experts for placed in self._layers}) > 1:
            raise ConfigError("the layers have different numbers of experts; ShardedExperts needs equal ones")
        self.iteration, self.moved_bytes = 0, 0
        self._optimizer, self._topology, self.averaged = JoinedOptimizers(optimizer), topology, list(averaged)
        self._history: deque[NDArray[np.int64]] = deque(maxlen=WINDOW)
        self._policy, self._memory = policy, memory
        self._correction = calibrate if calibrates is True else calibrates or None
        self._moves = reshard and policy != "ep"
        self.overlap = overlap or 0
        self._measures = overlap is None and policy in _HECATE and bool(self._layers)
        self._idle_s: list[float] = []
        if not self._layers:
            self._hooks: list[Any] = []
            return
        asks = self._measures or calibrates or callable(policy) or balance != "predicted"
        self._renews, self._finds_overlap = costs is None and bool(asks), self._measures
        self._costs = costs or (_measured(layers[0], topology) if asks else _UNKNOWN)
        facts: dict[str, Any] = {"policy": "a function" if callable(policy) else policy, "memory": memory}
        facts |= {"overlap": overlap, "reshard": reshard, "calibrates": bool(calibrates), "balance": balance}
        facts |= {"averaged": len(self.averaged), "rematerialises": rematerialises}
        # Ranks with other settings would decide for other placements, and wait for experts that no rank sends.
        topology.agree(facts | {"costs": self._costs, "heap": heap is not None}, "ShardedExperts")
        # Now, and not in the step in which owners change for the first time, a hundred steps from here.
        on_all_ranks(
            topology.world, "looking at the optimizer", partial(require_parts, self._optimizer, model, topology)
        )
        if self._moves:
            try_on = partial(require_movable, self._layers, self._optimizer, tries=True)
            on_all_ranks(topology.world, "looking at the optimizer", try_on)
        # None: it is looked for in any case.
        self._look_s = _look_s(self._layers[0], memory, self._costs, topology) if balance == "auto" else None
        self._sparse = _sparse(topology, heap)
        neighbours = zip([None, *self._layers[:-1]], [*self._layers[1:], None], strict=True)
        for placed, (before, after) in zip(self._layers, neighbours, strict=True):
            placed.hooked, placed.rematerialises, placed.neighbours = True, rematerialises, (before, after)
            placed.sparse, placed.clocked = self._sparse, self._measures
            if self._correction is not None:
                placed.correct = partial(self._corrected, placed.nodes)
            if balance != "predicted":
                placed.balances = partial(self._balanced, placed.nodes)
                # Nothing is late where nothing goes on beside copies.
                placed.outlasts = None if self._sparse.at_once else partial(outlasts_rows, self._costs)
        # Experts are fetched before a forward pass, not after the step: whoever changes parameters in between is seen.
        self._hooks = [
            model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._begin())),
            self._optimizer.each[-1].register_step_post_hook(lambda *_: self._stepped()),
            model.register_load_state_dict_pre_hook(require_own_experts),
        ]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of the experts in the next step, one for each layer; none on one rank, where nothing travels."""
        return tuple(one.placement for one in self._layers)

    @property
    def sent_bytes(self) -> int:
        """Bytes of parameters and gradients of replicas that this rank has sent."""
        return sum(one.sent_bytes for one in self._layers)

    def memory(self) -> ExpertMemory:
        """Returns the bytes that experts take on this rank; 0 on one rank, where none move."""
        owned = held = gradients = state = 0
        for parameter in (parameter for placed in self._layers for parameter in placed.parameters):
            owned += parameter.nbytes
            held += parameter.data.untyped_storage().nbytes()
            gradients += 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()
            kept = self._optimizer.of(parameter).state.get(parameter, {}).values()
            state += sum(value.nbytes for value in kept if isinstance(value, Tensor))
        return ExpertMemory(owned, held - owned, gradients, state)

    def hide_in(self, seconds: float) -> None:
        """Sets t to the experts that travel in so many seconds: those in which a plan's link between nodes has nothing
        else to do (`schedule.sparse_collectives`), in place of what the first steps would measure. Only where `overlap`
        was left open, and before it was found."""
        if self._measures:
            expert_bytes = max(1, self._layers[0].expert_bytes)
            self._set_overlap(overlap_degree(seconds, expert_bytes, self._costs.inter_bytes_s))

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next placements follow from, the same on every rank; for `save_checkpoint(…, extra=…)`."""
        return {
            "iteration": self.iteration,
            "history": [load_LE.tolist() for load_LE in self._history],
            "overlap": None if self._measures else self.overlap,
            "placements": [str(one) for one in self.placements],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another one was, after `load_checkpoint`. On another number of ranks, owners start evenly.

        Raises:
            ConfigError: the state is of a model with other layers or numbers of experts; nothing was loaded.
        """
        iteration, overlap = int(state["iteration"]), state["overlap"]
        history = [np.array(load_LE, dtype=np.int64) for load_LE in state["history"]]
        saved = [Placement.parse(text) for text in state["placements"]]
        shape = (len(self._layers), self._layers[0].placement.experts) if self._layers else None
        other = next((load_LE.shape for load_LE in history if shape and load_LE.shape != shape), None)
        if other is not None:
            raise ConfigError(
                f"ShardedExperts: this state has loads of {list(other)} layers and experts, and the model has "
                f"{list(shape or ())}. Load what was saved beside this model."
            )
        self.iteration = iteration
        if not self._layers:
            return
        self._history.clear()
        self._history.extend(history)
        if overlap is not None and self._measures:
            self._set_overlap(int(overlap))
        here, there = ([(one.ranks, one.experts) for one in placements] for placements in (self.placements, saved))
        if there == here:
            self._install(saved)
        elif self._history:
            self._decide()  # saved placements are of other ranks; the loads are of the same experts

    def close(self) -> None:
        """Takes its hooks away and ends its threads. The layers stay where they are, without replicas."""
        for hook in self._hooks:
            hook.remove()
        if self._layers:
            self._sparse.close()
        for one in self._layers:
            one.rest()

    def _begin(self) -> None:
        """Starts the fetch of copies, before a forward pass of the model."""
        # `.data` of what came later would not move with its expert.
        if self._names != [placed.names for placed in self._layers]:
            raise ConfigError(
                "ShardedExperts: parameters of experts have come or gone since this was made. Parametrise experts "
                "(LoRA) first; to do it now, close() this and make another, with the optimizer that has them."
            )
        with self._topology.guard("ShardedExperts"):
            for layer, one in zip(self._recorded, self._layers, strict=True):
                one.recorder = layer.recorder
                one.begin()

    def _stepped(self) -> None:
        """Decides where experts are next, after a step of the optimizer."""
        if not self._history and self._moves:
            # Without a guard: where all ranks refuse, the job may go on with another policy.
            movable = partial(require_movable, self._layers, self._optimizer)
            on_all_ranks(self._topology.world, "looking at the optimizer", movable)
        with self._topology.guard("ShardedExperts"):
            self.iteration += 1
            load_LE = torch.from_numpy(np.stack([one.take_load() for one in self._layers]))
            load_LE = load_LE.to(device_of(self._topology.world))
            self._history.append(all_reduce(self._topology.world, load_LE, operation="sum of loads").cpu().numpy())
            if self._renews and (costs := _measured(self._recorded[0], self._topology)) != self._costs:
                self._set_costs(costs)
            if self._measures:
                self._measure()
            self._decide()

    def _decide(self) -> None:
        history_ILE = np.stack(self._history)
        nodes, before, world = self._layers[0].nodes, self.placements, self._topology.world
        if self._policy in _HECATE and self._moves and is_due(self.iteration):
            shardings, load_LE = tuple(placement.sharding for placement in before), predict(history_ILE)
            if self._look_s is None or uneven(shardings, load_LE):
                before = reshard(shardings, load_LE, nodes, self.overlap)
        # The rest is one layer's alone, and takes its time: ranks decide for some layers each.
        decided = []
        for layer in range(world.index, len(before), world.size):
            now = LayerLoads(self.iteration, before[layer], history_ILE[:, layer], nodes, self._costs)
            placement = self._place(now, layer)
            decided.append((placement.owners, placement.replicas))
        owners = [placement.owners for placement in before]
        of_ranks = all_gather_object(world, (owners, decided), "placements")
        if any(theirs != owners for theirs, _ in of_ranks):
            raise RankError(
                f"rank {self._topology.rank}: the ranks give experts to different owners. These follow from the loads: "
                "run the same versions of this library and of NumPy on every rank"
            )
        chosen = [of_ranks[layer % world.size][1][layer // world.size] for layer in range(len(before))]
        self._install([Placement(nodes.ranks, *owners_and_replicas) for owners_and_replicas in chosen])

    def _place(self, now: LayerLoads, layer: int) -> Placement:
        """Places the experts of one layer by the policy."""
        if self._policy == "ep":
            return now.placement
        if not callable(self._policy):
            return hecate(now, t=self.overlap, m=self._memory, searches=self._policy == "hecate")
        placement = self._policy(now)
        same = (placement.ranks, placement.experts) == (now.placement.ranks, now.placement.experts)
        if not same or not (self._moves or placement.owners == now.placement.owners):
            raise ConfigError(
                f"ShardedExperts: the policy has placed layer {layer} as {_in_line(placement)} after "
                f"{_in_line(now.placement)}. Keep the ranks and experts of the layer, and with reshard=False their "
                "owners."
            )
        return placement

    def _corrected(self, nodes: Nodes, placement: Placement, tokens_WE: NDArray[np.int64]) -> Placement:
        assert self._correction is not None
        wanted = self._correction(placement, tokens_WE, nodes, self._memory, self._costs)
        if not placement.is_within(wanted):
            raise ConfigError(
                f"ShardedExperts: calibrates made a placement that lacks something of the one before: "
                f"{_in_line(placement)} is not within {_in_line(wanted)}"
            )
        return wanted

    def _balanced(self, nodes: Nodes, placement: Placement, tokens_WE: NDArray[np.int64], adds: bool) -> Balance:
        m = self._memory if adds else 0
        # As long as t experts travel, twice: what lies between two layers takes twice as long backward.
        hidden_s = 2 * self.overlap * self._costs.expert_bytes / self._costs.inter_bytes_s
        if self._look_s is None:
            return cheapest_balance(placement, tokens_WE, nodes, m, self._costs, hidden_s)
        return auto_balance(placement, tokens_WE, nodes, m, self._costs, self._look_s, hidden_s)

    def _install(self, placements: Sequence[Placement]) -> None:
        shardings = [one.sharding for one in placements]
        if shardings != [one.placement.sharding for one in self._layers]:
            given = [_dynamic(model) for model in self.averaged]
            # Looked for before anything moves: a refusal leaves all experts where they are.
            copies = followers(self._layers, given, self._topology.world)
            self.moved_bytes += move(self._layers, shardings, self._optimizer, copies)
        for one, placement in zip(self._layers, placements, strict=True):
            one.place(placement)

    def _measure(self) -> None:
        """Finds t from the time between two layers of experts."""
        # The least of all ranks: where one has less time, experts would keep all of them waiting.
        idle_s = torch.tensor([one.idle_s() for one in self._layers], dtype=torch.float64, device="cpu").mean()
        idle_s = all_reduce(self._topology.world, idle_s.to(device_of(self._topology.world)), "min", "time to hide in")
        self._idle_s.append(float(idle_s))
        if len(self._idle_s) == WINDOW:
            self.hide_in(float(np.median(self._idle_s)))

    def _set_costs(self, costs: PlacementCosts) -> None:
        """Has placements follow from other costs. Collective over all ranks."""
        self._costs = costs
        if self._look_s is not None:
            self._look_s = _look_s(self._layers[0], self._memory, costs, self._topology)
        for one in self._layers:
            if one.outlasts is not None:
                one.outlasts = partial(outlasts_rows, costs)
        if self._finds_overlap:
            self._idle_s.clear()
            self._measures = True
            for one in self._layers:
                one.clocked = True

    def _set_overlap(self, overlap: int) -> None:
        self.overlap, self._measures = overlap, False
        for one in self._layers:
            one.clocked = False


def _dynamic(model: nn.Module) -> list[DynamicExperts]:
    return [layer.placed for layer in moe_layers(model) if layer.placed is not None]


def _sparse(topology: Topology, heap: Heap | None) -> SparseCollectives:
    if heap is None:
        # A process group of their own: experts travel beside the layers' collectives, and neither waits for the other.
        return SparseCollectives(topology.beside(topology.ep, "experts that move"))
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll  # which needs Triton

    return SparseCollectives(topology.ep, OneSidedAllToAll(heap))


def _measured(layer: MoELayer, topology: Topology) -> PlacementCosts:
    """Measures what this machine takes for a token and an expert of a layer. Collective over all ranks."""
    assert layer.placed is not None
    parameters, expert_bytes = layer.placed.parameters, layer.placed.expert_bytes
    first = parameters[0]
    lines = measured_costs(topology, first.device, first.dtype).lines
    inter = lines["all-to-all/ep"]
    # A multiplication and an addition for each parameter, forward, and twice as many backward.
    flop = 3 * 2 * sum(parameter.shape[1:].numel() for parameter in parameters)
    return PlacementCosts(
        token_s=flop * lines["gemm"].beta_s,
        token_bytes=layer.model_dim * first.element_size(),
        expert_bytes=expert_bytes,
        state_bytes=2 * expert_bytes,  # Adam's two moments; the optimizer has not stepped yet, so it cannot be asked
        inter_bytes_s=inter.per_s,
        intra_bytes_s=lines.get("all-gather/esp", inter).per_s,
    )


def _look_s(placed: DynamicExperts, m: int, costs: PlacementCosts, topology: Topology) -> float:
    """Measures the seconds that the slowest rank looks for a balance in a forward. Collective over all ranks."""
    ranks, experts = placed.placement.ranks, placed.placement.experts
    tokens_WE = np.tile(4096 // np.arange(1, experts + 1), (ranks, 1))  # skewed by Zipf's law
    seconds = []
    for _ in range(3):  # the first also loads what the others use
        start = perf_counter()
        found = auto_balance(placed.placement.sharding, tokens_WE, placed.nodes, m, costs)
        auto_balance(found.placement, tokens_WE, placed.nodes, 0, costs)  # as `DynamicExperts.split` asks
        seconds.append(perf_counter() - start)
    return slowest_s(topology.world, [min(seconds)], "time to balance in")[0]


def _in_line(placement: Placement) -> str:
    return str(placement).replace("\n", "; ")
