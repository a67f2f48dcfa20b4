"""Fully sharded sparse data parallelism: sharding and replication of a model's experts (Hecate, section 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_count
from fusedmoe.comm.collectives import all_reduce, device_of, on_all_ranks
from fusedmoe.comm.one_sided.heap import Heap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, callable_name, require_parameters
from fusedmoe.experts.networks import Experts, require_own_experts
from fusedmoe.experts.split_optimizers import JoinedOptimizers, Optimizers, require_elementwise
from fusedmoe.names import PLACEMENT_BALANCES, PLACEMENT_POLICIES
from fusedmoe.placement.expert_table import require_stacked
from fusedmoe.placement.expert_transport import SparseCollectives
from fusedmoe.placement.hecate import WINDOW, LayerPolicy, calibrate, overlap_degree
from fusedmoe.placement.placed_experts import PlacedExperts, PlacementSettings
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.planner import (
    HECATE_POLICIES,
    UNKNOWN_COSTS,
    Correction,
    PlacementPlanner,
    measured_placement_costs,
)
from fusedmoe.placement.resharding import find_copies_to_move, move_experts, require_movable
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.runtime.recorder import Recorder


class PlacedLayer(Protocol):
    """A layer with dynamically placed experts (`MoELayer`)."""

    placed: PlacedExperts
    experts: Experts
    model_dim: int
    recorder: Recorder | None


class ExpertMemory(NamedTuple):
    """Memory of experts on this rank, in bytes. `replicas`: allocated for replicas of other ranks' experts."""

    parameters: int
    replicas: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return sum(self)


class ShardedExperts:
    """Shards a model's experts over all ranks and replicates experts with high load (FSSDP: Hecate, section 3).

    The constructor and all methods are collective over all ranks.

        model = Transformer(config, topology, placement="fssdp")
        optimizer = torch.optim.AdamW(model.parameters())
        experts = ShardedExperts(model, optimizer, topology, overlap=8, memory=2)

    The training loop does not change. After each `optimizer.step()` the loads of the last five steps determine the
    replicas of the next step (Algorithm 1), which its forward fetches while the model computes. Gradients of replicas
    are sent while the rest of the backward computes; `.grad` of an owned expert is complete when `backward()` returns.
    After five steps, and every 100 steps, experts change owners if this balances the load (Algorithm 2). Losses,
    gradients and updates equal expert parallelism, up to rounding.

    An expert parameter is [owned, ...] on each rank. Its shape and memory change with the owners: do not keep its
    `.data`. Checkpoints (`save_checkpoint`) load under any placement, on any number of ranks. Save `state_dict()` with
    them: it determines the next placements. The model's own `state_dict()` loads only on ranks that own the same
    experts.

    A `deepcopy` of the model, on all ranks, has no replicas. Its experts change owners with the model's, which permits
    weight averaging (`torch.optim.swa_utils.AveragedModel`). To train it, construct another ShardedExperts for it.

    Args:
        model: has at least one `MoELayer(placement="fssdp")`; all have the same number of experts. Call the whole
            model: its forward is hooked.
        optimizer: elementwise (AdamW, SGD) or `PerMatrix`; or a list in step order, which together has all expert
            parameters. The last optimizer's `step()` is hooked.
        policy: "hecate"; "algorithm1", without the search after Algorithm 1; "ep", static expert parallelism; or a
            function from a layer's loads (`LayerLoads`) to its `Placement` for the next step, called after each step on
            one rank per layer.
        memory: m, the maximum number of replicas on a rank in each layer.
        overlap: t, the maximum number of experts sent for a layer. None: the number that can be sent between two MoE
            layers, measured in the first five steps with the machine's bandwidth (`fusedmoe.runtime.cache`).
        reshard: allow owners to change, by Algorithm 2 or the function.
        calibrates: True adds replicas after the gate if this saves time. A function replaces this step: (placement,
            tokens_WE, node_layout, memory, costs) -> a placement with at least the replicas of `placement`.
        balance: "predicted": only the policy chooses replicas, and rows are split evenly over them. "exact": each
            forward plans on the host after the gate: it assigns rows to replicas to minimize the layer's time, and the
            first training forward of a step adds on-demand replicas. "auto": as "exact" if planning can pay off, else
            rows are sent to the nearest replicas; owners stay while the busiest ranks are within 5% of the mean.
        rematerialises: release replicas after each forward and fetch them again for its backward: memory for the
            replicas of two layers instead of all layers, and twice the traffic.
        costs: of a token and an expert. None: measured if a policy needs them; `tune_step` may measure them again, and
            then `overlap` is also measured again.
        heap: symmetric memory of the expert-parallel group (`comm.one_sided.heaps.open_heap`), which must outlive this
            object. Experts are then sent by one-sided puts instead of collectives.
        averaged: further models without an optimizer whose experts change owners with this model's, such as models
            loaded from a file.
    Attributes:
        averaged: append models made later, on all ranks, before the next step.
        iteration: number of steps.
        moved_bytes: bytes of parameters and state that this rank has sent to new owners.
    Raises:
        ConfigError: no layer with placement="fssdp"; layers with different numbers of experts, or already in a
            ShardedExperts; arguments out of range; a `balance` other than "predicted" with `calibrates`; an optimizer
            that needs several experts at once, or whose state cannot move with single experts. In a step that changes
            owners: a copy of the model that is trained, or that does not exist on all ranks; a policy that changes
            ranks, or owners with `reshard=False`.
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
        if callable(policy):
            require_parameters(policy, f"placement policy {callable_name(policy)}", "loads")
        elif policy not in PLACEMENT_POLICIES:
            raise ConfigError(
                f"placement policy {policy!r}; choose one of {', '.join(PLACEMENT_POLICIES)}, or give a function"
            )
        check_count("ShardedExperts", "memory", memory, 0)
        if overlap is not None:
            check_count("ShardedExperts", "overlap", overlap, 0)
        if balance not in PLACEMENT_BALANCES or (balance != "predicted" and calibrates):
            raise ConfigError(
                f"ShardedExperts: balance = {balance!r} and calibrates = {calibrates!r}; choose one of "
                f"{', '.join(PLACEMENT_BALANCES)}, and the last two without calibrates: they add replicas by themselves"
            )
        layers = placed_layers(model)
        self._layers, self._placed = layers, [layer.placed for layer in layers]
        # On one rank no experts move.
        if topology.ep.size > 1 and not layers:
            raise ConfigError("ShardedExperts: no layer of this model was made with placement='fssdp'")
        for layer in layers:
            _require_placed(layer)
        self._parameter_names = [placed.table.names for placed in self._placed]
        if len({placed.table.placement.experts for placed in self._placed}) > 1:
            raise ConfigError("the layers have different numbers of experts; ShardedExperts needs equal ones")
        self.iteration, self.moved_bytes = 0, 0
        self._optimizer, self._topology, self.averaged = JoinedOptimizers(optimizer), topology, list(averaged)
        self._history: deque[NDArray[np.int64]] = deque(maxlen=WINDOW)
        # Idle seconds of the first steps, which determine t; None: t is known.
        self._idle_s: list[float] | None = None
        self._measures_overlap = overlap is None and policy in HECATE_POLICIES and bool(layers)
        # Costs given by the caller are not measured again.
        by_costs = self._measures_overlap or calibrates or callable(policy) or balance != "predicted"
        self._remeasures_costs = costs is None and bool(by_costs)
        self._hooks: list[Any] = []
        node_layout = self._placed[0].table.node_layout if layers else NodeLayout(1, 1)
        correction = calibrate if calibrates is True else calibrates or None
        self._planner = PlacementPlanner(
            policy, memory, overlap or 0, reshard and policy != "ep", correction, node_layout
        )
        if not layers:
            return
        facts: dict[str, Any] = {"policy": "a function" if callable(policy) else policy, "memory": memory}
        facts |= {"overlap": overlap, "reshard": reshard, "calibrates": bool(calibrates), "balance": balance}
        facts |= {"averaged": len(self.averaged), "rematerialises": rematerialises, "heap": heap is not None}
        self._require_agreement(model, costs, facts)
        self._transport = _make_transport(topology, heap)
        self._attach(rematerialises, balance != "predicted")
        # Fetched before the forward, as parameters may change after the step.
        self._hooks += [
            model.register_forward_pre_hook(torch.compiler.disable(lambda *_: self._begin())),
            self._optimizer.optimizers[-1].register_step_post_hook(lambda *_: self._after_step()),
            model.register_load_state_dict_pre_hook(require_own_experts),
        ]

    def _require_agreement(self, model: nn.Module, costs: PlacementCosts | None, facts: dict[str, Any]) -> None:
        """Require equal arguments and movable optimizer state; measure costs. Collective."""
        topology, planner = self._topology, self._planner
        planner.costs = self._measured_costs() if self._remeasures_costs else costs or UNKNOWN_COSTS
        # Ranks with different settings would wait for experts that no rank sends.
        topology.require_equal_facts(facts | {"costs": planner.costs}, "ShardedExperts")
        checks = [partial(require_elementwise, self._optimizer, model, topology)]
        # At construction, not in the first step that changes owners.
        if planner.may_reshard:
            checks.append(partial(require_movable, self._placed, self._optimizer, steps=True))
        for check in checks:
            on_all_ranks(topology.world, "looking at the optimizer", check)
        if facts["balance"] == "auto":
            planner.measure_planning(self._placed[0], topology)

    def _attach(self, releases_replicas: bool, has_row_sharing: bool) -> None:
        planner, transport = self._planner, self._transport
        neighbors = zip([None, *self._placed[:-1]], [*self._placed[1:], None], strict=True)
        for placed, (before, after) in zip(self._placed, neighbors, strict=True):
            settings = PlacementSettings(
                transport,
                before,
                after,
                releases_replicas,
                None if planner.correction is None else planner.calibrate,
                planner.share_rows if has_row_sharing else None,
            )
            placed.attach(settings)
        if self._measures_overlap:
            self._set_idle_measurement(True)

    @property
    def overlap(self) -> int:
        """t, the maximum number of experts sent for a layer; 0 until measured."""
        return self._planner.overlap

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placement of each layer's experts in the next step; empty on one rank."""
        return tuple(placed.table.placement for placed in self._placed)

    @property
    def sent_bytes(self) -> int:
        """Bytes of parameters and gradients of replicas that this rank has sent."""
        return sum(placed.replicas.sent_bytes for placed in self._placed)

    def memory(self) -> ExpertMemory:
        """Return the memory of this rank's experts in bytes; all 0 on a single rank, where no experts are sharded."""
        owned = held = gradients = state = 0
        for parameter in (parameter for placed in self._placed for parameter in placed.table.parameters):
            owned += parameter.nbytes
            held += parameter.data.untyped_storage().nbytes()
            gradients += 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()
            kept = self._optimizer.optimizer_of(parameter).state.get(parameter, {}).values()
            state += sum(value.nbytes for value in kept if isinstance(value, Tensor))
        return ExpertMemory(owned, held - owned, gradients, state)

    def hide_in(self, seconds: float) -> None:
        """Set t to the number of experts that the inter-node link can send in `seconds` of idle time.

        No effect if `overlap` was given or has been measured. `seconds`: see `sparse_collectives.hidden_s`.
        """
        if self._idle_s is not None:
            expert_bytes = max(1, self._placed[0].table.expert_bytes)
            self._set_overlap(overlap_degree(seconds, expert_bytes, self._planner.costs.inter_bytes_s))

    def state_dict(self) -> dict[str, Any]:
        """Return the loads and placements for `save_checkpoint(…, extra=…)`, equal on all ranks."""
        return {
            "iteration": self.iteration,
            "history": [load_LE.tolist() for load_LE in self._history],
            "overlap": None if self._idle_s is not None else self.overlap,
            "placements": [str(one) for one in self.placements],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict()`. Call after `load_checkpoint`.

        On the saved number of ranks, each layer gets its saved placement. On another number, experts first stay with
        their current owners (in a new model, spread evenly), and the policy chooses placements from the saved loads.

        Raises:
            ConfigError: the saved loads are of another number of layers or experts; nothing was loaded.
        """
        iteration, overlap = int(state["iteration"]), state["overlap"]
        history = [np.array(load_LE, dtype=np.int64) for load_LE in state["history"]]
        saved = [Placement.parse(text) for text in state["placements"]]
        shape = (len(self._placed), self._placed[0].table.placement.experts) if self._placed else None
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
        if overlap is not None and self._idle_s is not None:
            self._set_overlap(int(overlap))
        here, there = ([(one.num_ranks, one.experts) for one in placements] for placements in (self.placements, saved))
        if there == here:
            self._apply_placements(saved)
        elif self._history:
            self._choose_placements()  # the saved placements are for other ranks

    def close(self) -> None:
        """Remove the hooks and stop the threads. Experts stay with their owners, without replicas."""
        for hook in self._hooks:
            hook.remove()
        if self._layers:
            self._transport.close()
        for placed in self._placed:
            placed.detach()

    def _begin(self) -> None:
        # `.data` of a parameter added later would not move with its expert.
        if self._parameter_names != [placed.table.names for placed in self._placed]:
            raise ConfigError(
                "ShardedExperts: parameters of experts have come or gone since this was made. Parametrise experts "
                "(LoRA) first; to do it now, close() this and make another, with the optimizer that has them."
            )
        with self._topology.guard("ShardedExperts"):
            for layer in self._layers:
                layer.placed.begin(layer.recorder)

    def _after_step(self) -> None:
        if not self._history and self._planner.may_reshard:
            # Outside the guard, whose errors are final: the job may catch this one.
            movable = partial(require_movable, self._placed, self._optimizer)
            on_all_ranks(self._topology.world, "looking at the optimizer", movable)
        with self._topology.guard("ShardedExperts"):
            self.iteration += 1
            load_LE = torch.from_numpy(np.stack([placed.pop_load() for placed in self._placed]))
            load_LE = load_LE.to(device_of(self._topology.world))
            self._history.append(all_reduce(self._topology.world, load_LE, operation="sum of loads").cpu().numpy())
            if self._remeasures_costs and (costs := self._measured_costs()) != self._planner.costs:
                self._set_costs(costs)
            if self._idle_s is not None:
                self._record_idle(self._idle_s)
            self._choose_placements()

    def _choose_placements(self) -> None:
        history_ILE = np.stack(self._history)
        chosen = self._planner.choose_placements(self.iteration, self.placements, history_ILE, self._topology)
        self._apply_placements(chosen)

    def _apply_placements(self, placements: Sequence[Placement]) -> None:
        shardings = [placement.sharding for placement in placements]
        if shardings != [placement.sharding for placement in self.placements]:
            given = [[layer.placed for layer in placed_layers(model)] for model in self.averaged]
            # Before anything moves.
            duplicates = find_copies_to_move(self._placed, given, self._topology.world)
            self.moved_bytes += move_experts(self._placed, shardings, self._optimizer, duplicates)
        for placed, placement in zip(self._placed, placements, strict=True):
            placed.set_placement(placement)

    def _record_idle(self, all_s: list[float]) -> None:
        """Append this step's mean seconds between MoE layers to `all_s`. After `WINDOW` steps, set t by the median."""
        clocks = [placed.clock for placed in self._placed]
        own_s = [clock.idle_s(before) for before, clock in zip([None, *clocks[:-1]], clocks, strict=True)]
        # Minimum: all ranks wait for the rank with the least time.
        idle_s = torch.tensor(own_s, dtype=torch.float64, device="cpu").mean().to(device_of(self._topology.world))
        all_s.append(float(all_reduce(self._topology.world, idle_s, "min", "time to hide in")))
        if len(all_s) == WINDOW:
            self.hide_in(float(np.median(all_s)))

    def _measured_costs(self) -> PlacementCosts:
        return measured_placement_costs(self._placed[0], self._layers[0].model_dim, self._topology)

    def _set_costs(self, costs: PlacementCosts) -> None:
        self._planner.costs = costs
        if self._planner.planning_s is not None:
            self._planner.measure_planning(self._placed[0], self._topology)
        if self._measures_overlap:
            self._set_idle_measurement(True)

    def _set_overlap(self, overlap: int) -> None:
        self._planner.overlap = overlap
        self._set_idle_measurement(False)

    def _set_idle_measurement(self, is_on: bool) -> None:
        self._idle_s = [] if is_on else None
        for placed in self._placed:
            placed.clock.is_on = is_on


def placed_layers(model: nn.Module) -> list[PlacedLayer]:
    """Return a model's layers with dynamically placed experts, in module order."""
    modules: list[Any] = list(model.modules())
    return [module for module in modules if isinstance(getattr(module, "placed", None), PlacedExperts)]


def _require_placed(layer: PlacedLayer) -> None:
    placed = layer.placed
    if placed.is_attached:
        raise ConfigError("ShardedExperts: this model has one already; close() it before another is made")
    if layer.experts is not placed.table.experts:
        raise ConfigError(
            f"ShardedExperts: the experts of a layer were put into a {type(layer.experts).__name__}, which "
            "computes without copies (peft's target_parameters, say). Give them LoRA by "
            "torch.nn.utils.parametrize instead, with one part for each expert, or use placement='ep'."
        )
    require_stacked(placed.table.experts, placed.table.num_owned)


def _make_transport(topology: Topology, heap: Heap | None) -> SparseCollectives:
    if heap is None:
        # A separate process group: transfers and the layers' collectives do not wait for each other.
        return SparseCollectives(topology.duplicate_group(topology.ep, "experts that move"))
    from fusedmoe.comm.one_sided.receive_buffers import OneSidedAllToAll  # needs Triton

    return SparseCollectives(topology.ep, OneSidedAllToAll(heap))
