"""The mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from fusedmoe.autograd.checks import check_results
from fusedmoe.autograd.hooks import HookContext, Hooks, run_hooks
from fusedmoe.autograd.linear import linear
from fusedmoe.autograd.parallel import join_rows, mean_over, reduce_scatter_rows, split_counts, split_rows, sum_gradient
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.dispatcher import Dispatcher, recomputing
from fusedmoe.engine.run import Followed, GradientReducer, Plans
from fusedmoe.errors import ConfigError
from fusedmoe.kernels.layout import contiguous_layout
from fusedmoe.layers.dynamic_experts import DynamicExperts, first_place
from fusedmoe.layers.expert_networks import NAMED, Experts, Place, require_own_experts
from fusedmoe.layers.gates import Gate, SoftMoE
from fusedmoe.layers.gates.base import Routing, SoftRouting
from fusedmoe.layers.input_checks import InputChecks, no_routing, require_kind
from fusedmoe.layers.load import Load
from fusedmoe.layers.orders import Dropless, Einsum, Order, Sparse
from fusedmoe.layers.planner import Planner
from fusedmoe.layers.schedule import Schedule
from fusedmoe.runtime.execute import require_runnable
from fusedmoe.runtime.recorder import Recorder, span
from fusedmoe.schedule.task import Task

MpInput = Literal["replicated", "split", "partial"]
Placements = Literal["ep", "fssdp"]


class MoELayer(nn.Module):
    """A mixture-of-experts layer over DP, MP, EP and ESP (FSMoE §2.2, Fig. 2).

        y[s] = Σ over the chosen experts i of s that did not drop it of weight_i(s) · expert_i(x[s])  (+ shared(x[s]))

    Every rank routes its own tokens, as many as it has, none included; capacity and auxiliary losses are decided on
    them alone. Given each rank's tokens, results depend neither on where the experts are nor on the dispatch algorithm,
    nor (to rounding) on whether the order is sparse or by products.

    Args:
        model_dim: M.
        gate: decides which experts see a token; `gate.experts` experts in all, split evenly over EP.
        experts: the experts' network; each rank makes the parameters of its own.
        order: how rows are laid out; by default `Dropless` for a gate without capacity, else `Sparse`.
        topology: where ranks stand; by default a world of one (data parallelism around it needs nothing else).
        dispatch: all-to-all algorithm, "direct", "1dh" or "2dh"; or a `Dispatcher` of your own, which then has the say
            over how rows travel, and whose hooks and plans are its own.
        hooks: user code at six seams, `Hooks`.
        shared: an experts' network that sees every token (DeepSeek's shared expert), replicated on all ranks.
        mp_input: what the model-parallel ranks pass in. "replicated": all the same x; each routes its slice of the
            tokens and all return the same y. "partial": summands of x, summed on the way in (MP-ReduceScatter); y as
            before. "split": slices already; y is the slice's. With the first two, the loss is the same on all MP ranks,
            and gradients of x and of replicated parameters are whole on each, `sync_gradients(…,
            mp_loss="replicated")`; with "split" they are summands.
        schedule: chunks that overlap what travels with what is computed; results do not depend on it. "off"; "auto",
            the best that is known; the name of a policy; or a `Schedule`. What a choice of degrees needs to know of the
            machine is measured in the first forward, and kept on disk (`fusedmoe.runtime.cache`): with "auto"
            and names the first forward, in each dtype, is collective over all ranks, replicas included.
        placement: "ep": each rank has the same number of experts, in order, for good. "fssdp": experts are owned by any
            rank, any number of them, and copied to others as their load asks for, as `fusedmoe.training.ShardedExperts`
            has them; results are those of "ep".
        device, dtype: of the parameters.

    Attributes:
        dispatcher: takes rows to their experts and back.
        placed: where the experts are, with "fssdp"; None where they do not move, as with one rank.
        aux_loss: the gate's weighted auxiliary losses in the last forward, a scalar to add to the loss. Like the task's
            loss, it is the same on every rank of an MP group, except with mp_input="split", where it is this rank's
            summand of the group's mean.
        load_E: how many slots chose each expert in the last forward, on this rank, drops included.
        dropped: how many of them were dropped.
        recorder: measures each part while set (see `fusedmoe.runtime.recorder`).

    Saves for backward, parameters aside, for S tokens of this rank, N of whose S·K rows are kept, and R rows that the
    experts here compute (R = N where nothing travels), with a `TopK` gate, a `Sparse` or `Dropless` order, feed-forward
    experts (H is their `hidden`, g = 2 for a gated activation, else 1), in elements:
    - in x's dtype: S·M for x, R·g·H/ESP for the pre-activation, and with EP·ESP > 1 or hooks R·M for the rows received;
    - in float32 (float64 for float64): S·K + R router weights, and E·(S + 1) for the balance loss, if it is on;
    - integers, of 8 bytes at most: 2·S·K + 4·N + 2·S + 4·E or less, and 5·R + 4·E more with EP·ESP > 1 or hooks.
    The activation, the experts' outputs and any padding are never saved. Other gates save as much, or say so; `Einsum`
    saves its matrices, S·E·C twice; under autocast x and the experts' parameters are also saved in the lower precision.

    Raises:
        ConfigError: parts of another kind or sizes that cannot work, found when the layer is made or called in a world
            of one.
        RankError: in a larger world, on every rank alike, naming the rank at fault: layers that differ (found when
            they are made, which is collective), input of a wrong shape, dtype or device, logits that are not finite.
            Nothing has been sent by then.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        _keep_out_of_graphs()
        return super().__new__(cls)

    def __init__(
        self,
        model_dim: int,
        gate: Gate,
        experts: Experts,
        *,
        order: Order | None = None,
        topology: Topology | None = None,
        dispatch: str | Dispatcher = "direct",
        hooks: Iterable[Hooks] = (),
        shared: Experts | None = None,
        mp_input: MpInput = "replicated",
        schedule: str | Schedule = "off",
        placement: Placements = "ep",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if placement not in ("ep", "fssdp"):
            raise ConfigError(f"placement = {placement!r}; choose ep or fssdp")
        if mp_input not in ("replicated", "split", "partial"):
            raise ConfigError(f"mp_input = {mp_input!r}; choose replicated, split or partial")
        hooks = tuple(hooks)
        require_kind("gate", gate, Gate, "fusedmoe.gates.TopK(experts=8, k=2)")
        network = "fusedmoe.experts.SwiGLU(hidden=2048), or modules of your own by fusedmoe.experts.Custom"
        require_kind("experts", experts, Experts, network)
        if shared is not None:
            require_kind("shared", shared, Experts, network)
        if order is not None:
            require_kind("order", order, Order, "fusedmoe.orders.Sparse()")
        if topology is not None:
            require_kind("topology", topology, Topology, "fusedmoe.Topology.from_sizes(ep=4)")
        for hook in hooks:
            require_kind("a hook", hook, Hooks, "fusedmoe.hooks.WireCast(), or a fusedmoe.Hooks of your own")
        self.topology = Topology() if topology is None else topology
        ep, esp = self.topology.ep, self.topology.esp
        self.model_dim, self.mp_input = model_dim, mp_input
        self.hooks = hooks
        self.order = order or (Dropless() if gate.capacity_factor is None else Sparse())
        self.dispatch = str(dispatch)
        self.topology.agree(
            {
                "model_dim": model_dim,
                "gate": f"{type(gate).__name__}({gate.extra_repr()})",
                "experts": experts.describe(),
                "shared": None if shared is None else shared.describe(),
                "order": str(self.order),
                "dispatch": self.dispatch,
                "hooks": [type(hook).__name__ for hook in self.hooks],
                "mp_input": mp_input,
                "schedule": repr(schedule),
                "placement": placement,
                "dtype": str(dtype or torch.get_default_dtype()),
            },
            "MoELayer",
        )
        if placement == "fssdp" and ep.size > 1:
            place = first_place(gate.experts, self.topology)
        elif gate.experts % ep.size:
            raise ConfigError(
                f"{gate.experts} experts cannot be split over ep = {ep.size} ranks; choose a multiple of {ep.size} "
                "experts, or another topology"
            )
        else:
            local = gate.experts // ep.size
            place = Place(ep.index * local, local, esp.index, esp.size)
        self.gate, self.experts, self.shared = gate, experts, shared
        gate.setup(model_dim, device=device, dtype=dtype)
        experts.setup(model_dim, place, device=device, dtype=dtype)
        if shared is not None:
            shared.setup(model_dim, Place(), device=device, dtype=dtype)
            shared.shardings = {}
        if self.topology.ep.size * self.topology.esp.size > 1:
            _require_shardings(experts)
        for name, _ in experts.named_parameters():
            experts.shardings.setdefault(name, {"ep": NAMED})  # an expert's all the same, even where nothing is split
        self.placed: DynamicExperts | None = None
        if placement == "fssdp" and self.topology.ep.size > 1:
            if isinstance(self.order, Einsum):
                raise ConfigError("placement='fssdp' sends rows to copies, which an order by products cannot: Sparse()")
            if isinstance(gate, SoftMoE):
                raise _no_load(gate)
            self.placed = DynamicExperts(experts, gate.experts, self.topology)
        self.recorder: Recorder | None = None
        named = Schedule.named(schedule) if isinstance(schedule, str) else schedule
        self._planner = Planner(self.topology, experts, named, gate.k)
        if isinstance(dispatch, Dispatcher):
            self.dispatcher = dispatch
        else:
            self.dispatcher = self._planner.dispatcher(dispatch, hooks, self.placed)
        self._checks = InputChecks(self.topology)
        self._load = Load(gate.experts)
        self.aux_loss = torch.zeros(())
        self._ran_without_graph = False
        self.register_load_state_dict_pre_hook(require_own_experts)

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., M], any number of tokens. Under autocast the experts compute in the autocast dtype.

        Where no rows travel between ranks and there are no hooks, `torch.compile(fullgraph=True)` takes the layer in,
        and nothing waits for the device, so that a CUDA graph can hold it; else a compiled model calls it as it is.
        On CUDA logits that are not finite are then told by a later call, or by `check`.
        """
        if torch.compiler.is_compiling() and not self._travels and self.topology.mp.size == 1:
            return self._forward(x)
        return self._guarded(x)

    def _guarded(self, x: Tensor) -> Tensor:
        with self.topology.guard("MoELayer.forward"):
            self._checks.tell_logits()
            return self._forward(x)

    @property
    def _travels(self) -> bool:
        """Whether rows go through an exchange, between ranks or past the hooks."""
        return self.topology.ep.size * self.topology.esp.size > 1 or bool(self.hooks)

    def _forward(self, x: Tensor) -> Tensor:
        if self.hooks and isinstance(x, Tensor):
            x = run_hooks(self.hooks, "before_moe_start", self._tap(x, "before_moe_end"), HookContext("forward"))
        mp, recorder = self.topology.mp, self.recorder
        refusal = self._checks.of_input(x, self.model_dim, self._like(x))
        if refusal is None:
            x_SM = x.reshape(-1, self.model_dim)
        else:
            like = self._like(x.float() if isinstance(x, Tensor) else torch.empty(0))
            x_SM = torch.zeros(0, self.model_dim, dtype=like.dtype, device=like.device)
        if mp.size > 1 and self.mp_input != "split":
            self._checks.agree_on_tokens(x_SM, refusal, self.mp_input)
        counts = split_counts(len(x_SM), mp)
        if self.mp_input == "partial":
            x_SM = reduce_scatter_rows(x_SM, mp, counts, recorder)
        elif self.mp_input == "replicated":
            x_SM = split_rows(x_SM, mp, counts, recorder)
        y_SM = self._route(x_SM, refusal)
        if self.mp_input != "split":
            y_SM = join_rows(y_SM, mp, counts, recorder)
        y = y_SM.view(x.shape)
        if self.hooks:
            y = run_hooks(self.hooks, "before_moe_end", y, HookContext("forward"))
            y = self._tap(y, "before_moe_start")
        return y

    def _route(self, x_SM: Tensor, refusal: str | None) -> Tensor:
        recorder = self.recorder
        self.experts.recorder = recorder
        with span(recorder, "gate", kind="gate", phase="forward"):
            routing = self._replicated(self.gate, x_SM)
            refusal = refusal or self._checks.of_routing(routing, self.gate, x_SM)
            if refusal is not None:
                routing = no_routing(x_SM)  # this rank sends nothing but why
            self._count(routing)
        if self.topology.ep.size == self.topology.esp.size == 1:
            self._checks.refuse(refusal)
        if self.placed is not None and isinstance(routing, SoftRouting):
            raise _no_load(self.gate)
        x_SM = x_SM.to(self.experts.row_dtype(x_SM))
        with span(recorder, "order", kind="order", phase="forward"):
            ordered = self.order.order(x_SM, routing, self.gate.experts)
        self._load.kept_E = ordered.kept_E
        self.dispatcher.recorder = recorder
        y_SM = self.dispatcher.through_experts(ordered.x_SM, ordered.layout, ordered.weight_SK, self.experts, refusal)
        with span(recorder, "unorder", kind="unorder", phase="forward"):
            y_SM = self.order.restore(y_SM, ordered)
        check_results(type(self.experts).__name__, y_SM, x_SM)
        if self.shared is not None:
            self.shared.recorder = recorder
            every = contiguous_layout(torch.full((1,), len(x_SM), device=x_SM.device), len(x_SM))
            shared_SM = self._replicated(self.shared, x_SM, every, None)
            check_results(type(self.shared).__name__, shared_SM, x_SM)
            y_SM = y_SM + shared_SM
        self._keep_aux(routing.aux_loss)
        return y_SM

    @property
    def parts(self) -> tuple[str, ...]:
        """The kinds of tasks that plans of this layer have, by collectives."""
        return self._planner.kinds

    def _replicated(self, module: nn.Module, *inputs: Any) -> Any:
        """Calls a module whose parameters are replicated.

        Where MP ranks join their slices again, each must get the whole gradient, as for all that is replicated there.
        """
        mp = self.topology.mp
        if mp.size == 1 or self.mp_input == "split":
            return module(*inputs)
        parameters = {name: sum_gradient(parameter, mp) for name, parameter in module.named_parameters()}
        return torch.func.functional_call(module, parameters, inputs)

    def follow(self, plans: Plans, gradients: GradientReducer | None = None, beside: Sequence[Task] = ()) -> None:
        """From now on the layer works by these plans, the same on every rank, whatever its schedule.

        Args:
            gradients: reduces the gradient pieces that the backward plan has, and those `beside` what follows it.
        Raises:
            ConfigError: plans with other tasks than this layer can run, or without some of its parts.
        """
        for phase, plan in (("forward", plans.forward), ("backward", plans.backward)):
            own = f"MoELayer.follow: the {phase} plan"
            require_runnable(plan, (*self.parts, *(["gradient-all-reduce"] if gradients is not None else [])), own)
            lacks = [kind for kind in self.parts if kind not in {task.kind for task in plan}]
            if lacks:
                raise ConfigError(f"{own} has no {lacks[0]}, which every chunk of this layer goes through; add it")
        self._planner.told = Followed(plans, gradients, beside)

    def update_gate(self) -> None:
        """Tells the gate the load of all ranks since the last call; call it after each optimizer step. Collective.

        Only gates that balance without a loss (DeepSeek-V3) do anything with it.
        """
        if not self._balances:
            return
        load_E = self._load.taken()
        if self.topology.size > 1:
            load_E = load_E.to(device_of(self.topology.world))
        self.gate.update(all_reduce(self.topology.world, load_E, operation="sum of expert loads"))

    @property
    def _balances(self) -> bool:
        """Whether the gate does anything with the load."""
        return type(self.gate).update is not Gate.update

    def count(self, routing: Routing, kept_E: Tensor) -> None:
        """What a forward outside this layer (`fusedmoe.pipeline`) routed, and the rows of each expert that it kept."""
        self._count(routing)
        self._load.kept_E = kept_E

    def _count(self, routing: Routing | SoftRouting) -> None:
        self._load.count(routing, summed=self.training and self._balances and not recomputing())

    def _keep_aux(self, aux: Tensor) -> None:
        mp = self.topology.mp
        aux = aux / mp.size if self.mp_input == "split" else mean_over(aux, mp)
        if not recomputing():
            self._ran_without_graph |= self.training and not torch.is_grad_enabled()
        elif aux.requires_grad and not self._ran_without_graph:
            # Non-reentrant checkpointing: gradients go through the first forward's graph. The graph made here, held by
            # this attribute, would keep every activation that led to it until the next forward.
            aux = aux.detach().requires_grad_()
        self.aux_loss = aux

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles are not part of a graph.
        return self.__dict__ | {"aux_loss": self.aux_loss.detach()}

    @property
    def load_E(self) -> Tensor:
        """[E] int64: slots that chose each expert in the last forward, on this rank, drops included."""
        return self._load.chosen_E

    @property
    def dropped(self) -> int:
        """How many slots of the last forward were dropped (on CUDA this waits for the device)."""
        return self._load.dropped()

    def check(self) -> None:
        """Raises what a forward would that knew of bad router logits in forwards before, and of waits for other ranks
        that ended early. Waits for the device.

        Only what runs on CUDA without waiting needs it, graphs above all: see `forward`.
        """
        with self.topology.guard("MoELayer.check"):
            self.topology.check()
            self._checks.tell_logits(wait=True)

    def refuse_logits(self, routing: Routing | SoftRouting) -> str | None:
        """What is wrong with the router's logits, if anything."""
        return self._checks.of_logits(routing)

    def _tap(self, tensor: Tensor, seam: str) -> Tensor:
        """The identity, whose backward passes the gradient through the hooks at `seam`."""
        hooks = self.hooks  # the graph does not hold the layer
        return linear(tensor, lambda t: t, lambda grad: run_hooks(hooks, seam, grad, HookContext("backward")))

    def _like(self, x: Tensor) -> Tensor:
        """A tensor of the dtype and device that x should have: a parameter of the experts; x itself without any."""
        return next(self.experts.parameters(), x)

    def extra_repr(self) -> str:
        schedule = "off" if self._planner.schedule is None else str(self._planner.schedule)
        return (
            f"model_dim={self.model_dim}, order={self.order}, dispatch={self.dispatch!r}, schedule={schedule!r}, "
            f"{self.topology}"
        )


def _require_shardings(experts: Experts) -> None:
    """Experts that live on some ranks only must say so, or their gradients would be summed with other experts'."""
    unknown = [name for name, _ in experts.named_parameters() if name not in experts.shardings]
    if unknown:
        raise ConfigError(
            f"{type(experts).__name__} does not say how {', '.join(unknown)} is split over ep and esp. Set, say, "
            f"self.shardings[{unknown[0]!r}] = {{'ep': 0}} where it is made, if its first dimension counts the local "
            "experts, or {} if all ranks hold the same."
        )


def _no_load(gate: Gate) -> ConfigError:
    return ConfigError(f"{type(gate).__name__} gives all experts the same load: placement='ep' is for it")


@cache
def _keep_out_of_graphs() -> None:
    """Compiled models call `_guarded` as it is. Said with the first layer, not with the module: to say so imports the
    compiler, which takes longer than all of this library."""
    MoELayer._guarded = torch.compiler.disable(MoELayer._guarded)  # type: ignore[method-assign]
