"""Measurement of a layer's passes and of all-to-all algorithms, on random tokens and on all ranks at once."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.autograd.order import order as order_rows
from fusedmoe.comm.all_to_all import AllToAll, TwoLevelAllToAll, make_all_to_all
from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of, max_over_ranks_s
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.comm.wire_format import WireFormat
from fusedmoe.compat.torch import autograd_recording, disable_current_modes, without_saved_tensor_hooks
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.engine.one_sided_dispatcher import KernelTransport, fused_experts, round_up_tokens
from fusedmoe.engine.run import AssignedPlans, Plans
from fusedmoe.gates import Hash
from fusedmoe.gates.base import Gate
from fusedmoe.layers.layer_plans import LayerPlans, PlannedExperts
from fusedmoe.names import ALGORITHMS
from fusedmoe.orders import Order
from fusedmoe.runtime.cache import cached_task_times, machine_facts, measured_costs
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.profiler import STEPS_BUDGET_S, observe_steps
from fusedmoe.runtime.recorder import Recorder, record_with, span
from fusedmoe.schedule.cost import CostModel, MeasuredPart, Observed
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ChunkedPass, extract_layer_pass, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, TaskKind
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import Workload

_TRIAL_DEGREES = (1, 4)
FUSED_DEGREES = (1, 2, 4)
_NUM_TIMED_ROUNDS, _FEW_TOKENS = 5, 64
_OPERATION = "measuring a layer"


def measure_layer(
    plans: LayerPlans, like: Tensor, all_to_all: AllToAll | None = None, *, budget_s: float | None = None
) -> CostModel:
    """Measure this machine and the parts of a layer, on random tokens like `like`, [S, M].

    Collective over all ranks. Cached for layers of the same description. With dynamically placed experts, only the
    machine is measured.

    Args:
        all_to_all: algorithm of the layer; None: direct.
        budget_s: ignore the cache and measure for about this many seconds; the same on every rank. If the layer's
            parameters are sharded now (FSDP2), only the machine is measured again. None: use the cache.
    Raises:
        ConfigError: the experts do not describe their workload.
    """
    topology, gate, order, experts = plans.parts
    half_budget_s = None if budget_s is None else budget_s / 2
    costs = measured_costs(topology, like.device, like.dtype, half_budget_s)
    if plans.is_placed:
        return costs
    tokens = max(all_gather_object(topology.world, len(like), _OPERATION))
    like = like.new_empty(max(1, round_rows(tokens)), like.shape[1])
    rows = max(1, round(len(like) * order.mean_rows_per_token(gate, len(like))))
    workload = plans.encoded(experts.workload(rows, like.dtype.itemsize, topology.ep.size, topology.esp.size))
    if all_to_all is None and plans.wire is not None:
        all_to_all = make_all_to_all("direct", topology, plans.wire)
    kind = f"{type(experts).__module__}.{experts.describe()}"
    sizes = [list(parameter.shape) for parameter in experts.parameters()]
    facts: dict[str, Any] = {"shapes": workload.shapes, "experts": kind, "sizes": sizes}
    facts |= {"gate": repr(gate), "order": repr(order)}
    if isinstance(all_to_all, TwoLevelAllToAll):
        facts["dispatch"] = all_to_all.name
    fused_kind = plans.fused_kind(like)
    degrees = [degree for degree in FUSED_DEGREES if degree <= plans.limit]
    facts |= {} if fused_kind is None else {"fused": f"{fused_kind} in {degrees}"}

    def observe() -> Observed:
        step = workload.step_costs(costs, [0], plans.kinds)
        budget_s = STEPS_BUDGET_S if half_budget_s is None else half_budget_s
        observed_parts = time_layer(topology, gate, order, experts, like, step, all_to_all, budget_s)
        if fused_kind is None:
            return observed_parts
        give_up_s = sum(s for sample, s in observed_parts.seconds.items() if sample.chunks == 1)
        max_tokens = max(len(like), round_up_tokens(tokens))

        def run_layer(routed: Routed, degree: int) -> Tensor:
            x_SM, layout, weight_SK, *_ = routed
            assert weight_SK is not None
            transport = KernelTransport(fused_kind, (degree, degree), max_tokens)
            return fused_experts(x_SM, weight_SK, layout, topology, experts.in_chunks(x_SM), transport, None)

        seconds = time_fused(topology, gate, order, experts, like, fused_kind, run_layer, degrees, give_up_s)
        return observed_parts | Observed(seconds)

    # Imports the compiler, which `import fusedmoe` avoids.
    from torch.distributed.tensor import DTensor

    facts["tokens"] = len(like)
    # FSDP gathers a layer's parameters only during its forward; otherwise earlier measurements of the parts are kept.
    is_unsharded = not any(isinstance(parameter, DTensor) for parameter in experts.parameters())
    ignore_cache = is_unsharded and budget_s is not None
    seen = measure_parts(topology, like.device, like.dtype, facts, observe, ignore_cache=ignore_cache)
    return replace(costs, observed={workload.shapes: seen})


class MeasurementState(Enum):
    """Progress of a `CostMeasurement`."""

    DUE = "the next forward measures"
    DONE = "measured, and not read yet"
    TAKEN = "read; measured again on request"


class CostMeasurement:
    """Measures the costs of a layer inside a forward, where FSDP has gathered its parameters.

    Attributes:
        budget_s: ignore the cache and measure for about this many seconds; None: use cached measurements if any.
        can_rechunk: the experts support another number of chunks backward than forward.
    """

    def __init__(self, plans: LayerPlans, measured: list[CostMeasurement] | None = None) -> None:
        self._plans, self._measured = plans, [] if measured is None else measured
        self.state = MeasurementState.DUE
        self.budget_s: float | None = None
        self.workload: Workload | None = None
        self.costs: CostModel | None = None
        self.can_rechunk = False

    def __call__(self, x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts]) -> None:
        """In state DUE, measure `costs` and `workload` with these tokens, and set `can_rechunk` and state DONE.

        Called in a layer's forward. In other states nothing is done. Collective over all ranks.
        """
        if self.state is not MeasurementState.DUE:
            return
        topology, experts = self._plans.topology, self._plans.parts.experts
        self.can_rechunk = in_chunks().can_rechunk
        if self._measured and self._measured[0] is not self:
            # The step uses the costs of the first layer that runs.
            self.state = MeasurementState.TAKEN
            return
        self._measured[:] = [self]
        with measurement_context():
            self.costs = measure_layer(self._plans, x_SM, exchange.algorithm, budget_s=self.budget_s)
            # Replicas of the experts may have other batches, and all ranks need the same workload.
            own = exchange.max_pairs, exchange.tokens_per_pair
            pairs, share = map(max, zip(*all_gather_object(topology.world, own, _OPERATION), strict=True))
        itemsize = x_SM.dtype.itemsize
        workload = experts.workload(round_rows(int(pairs)), itemsize, topology.ep.size, topology.esp.size)
        self.workload = self._plans.encoded(workload.sending(share))
        self.state = MeasurementState.DONE


@contextmanager
def measurement_context() -> Iterator[None]:
    """Context that hides measurements and the choice of plans inside a forward pass from the surrounding program.

    Activation checkpoints store and recompute nothing of the block. Gradients are enabled.
    """
    with (
        torch.inference_mode(False),
        disable_current_modes(),
        without_saved_tensor_hooks(),
        autograd_recording(),
        record_with(None),
    ):
        yield


def round_rows(rows: int) -> int:
    """Round up to three significant binary digits, so that plans are made for few sizes: four per doubling."""
    step = 1 << max(0, rows.bit_length() - 3)
    return max(1, -(-rows // step) * step)


_observed_parts: WeakKeyDictionary[Topology, dict[str, Observed]] = WeakKeyDictionary()


def measure_parts(
    topology: Topology,
    device: torch.device,
    dtype: torch.dtype,
    facts: dict[str, Any],
    measure: Callable[[], Observed],
    *,
    ignore_cache: bool = False,
) -> Observed:
    """Return the costs of a layer's parts, cached or measured. Collective over all ranks."""
    known, key = _observed_parts.setdefault(topology, {}), f"{device.type} {dtype} {sorted(facts.items())}"
    if key not in known or ignore_cache:
        machine = machine_facts(topology, device, dtype)
        known[key] = cached_task_times(topology, {**machine, "layer": facts}, measure, ignore_cache)
    return known[key]


def time_layer(
    topology: Topology,
    gate: Gate,
    order: Order,
    experts: PlannedExperts,
    like: Tensor,
    costs: StepCosts,
    all_to_all: AllToAll | None = None,
    budget_s: float = STEPS_BUDGET_S,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """Time the parts of a layer for tokens like `like`, [S, M]. Collective over all ranks, with the same result on all.

    No gradient is kept, and the global random generators are restored.
    """
    plans = [step_plan(costs, of, of) for of in ([ChunkedPass(three_queues, degree)] for degree in _TRIAL_DEGREES)]
    gate, parameters, x_SM, dy_SM = _make_trial_inputs(topology, gate, experts, like)
    recorder = Recorder(topology.rank, device=like.device, clock=clock)
    all_to_all, streams = all_to_all or make_all_to_all("direct", topology), Streams()
    sent: list[int] = []

    def run(plan: Plan, number: int) -> Timeline:
        def find(x_SM: Tensor, exchange: Exchange, in_chunks: object) -> AssignedPlans:
            sent.append(exchange.max_pairs)
            return AssignedPlans(Plans(extract_layer_pass(plan, 0, "forward"), extract_layer_pass(plan, 0, "backward")))

        through = Collectives(topology, all_to_all, find)
        through.runner.streams = streams
        recorder.clear()
        x = x_SM.detach().requires_grad_()
        ordered = order.order(x, gate(x), gate.experts)
        with record_with(recorder):
            y = through.through_experts(Routed(ordered.x_SM, ordered.layout, ordered.weight_SK), experts)
        y = order.restore(y, ordered)
        with span(recorder, "between the passes", kind=TaskKind.LOSS):
            pass
        torch.autograd.grad(y, [x, *parameters], dy_SM, allow_unused=True)
        with span(recorder, "after the passes", kind=TaskKind.OPTIMIZER):
            pass
        return recorder.timeline()

    with torch.enable_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        found = observe_steps(topology, plans, costs, run, budget_s, clock)
    of_layer = {
        sample: s for sample, s in found.seconds.items() if sample.kind not in (TaskKind.LOSS, TaskKind.OPTIMIZER)
    }
    rows = max(all_gather_object(topology.world, max(sent), _OPERATION))
    return Observed(of_layer, experts.workload(rows, like.dtype.itemsize, topology.ep.size, topology.esp.size).rows)


def _make_trial_inputs(
    topology: Topology, gate: Gate, experts: PlannedExperts, like: Tensor
) -> tuple[Gate, list[Tensor], Tensor, Tensor]:
    gate = copy.copy(gate)
    if isinstance(gate, Hash):
        gate.token_ids = None
    parameters = [p for p in chain(gate.parameters(), experts.parameters()) if p.requires_grad]
    # A separate generator: training continues with the same random numbers.
    generator = torch.Generator(like.device).manual_seed(topology.rank)
    x_SM, dy_SM = (torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype) for _ in range(2))
    return gate, parameters, x_SM, dy_SM


# (tokens, number of chunks) -> results of a layer with a fused operation.
RunLayer = Callable[[Routed, int], Tensor]


def time_fused(
    topology: Topology,
    gate: Gate,
    order: Order,
    experts: PlannedExperts,
    like: Tensor,
    kind: str,
    run_layer: RunLayer,
    degrees: Sequence[int],
    give_up_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[MeasuredPart, float]:
    """Time both passes of a layer with a fused operation, gate and order included, on the slowest rank.

    Collective over all ranks. No gradient is kept, and the global random generators are restored.

    Args:
        degrees: numbers of chunks to try, each for both passes.
        give_up_s: if at most 64 tokens in one chunk take this long, nothing more is tried, and their time is used for
            all tokens.
    Returns:
        Seconds by `kind`, pass and chunks; for at most 64 tokens only for one chunk. Empty if the order has no weights
        for rows, which the kernels need.
    """
    gate, parameters, x_SM, dy_SM = _make_trial_inputs(topology, gate, experts, like)

    def now_s() -> float:
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        # Ranks start together; otherwise all would measure the wait for the slowest.
        all_reduce(topology.world, torch.zeros(1, device=device_of(topology.world)), operation=_OPERATION)
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        return clock()

    def passes_s(tokens: int, degree: int) -> list[float] | None:
        x = x_SM[:tokens].detach().requires_grad_()
        began = now_s()
        ordered = order.order(x, gate(x), gate.experts)
        if ordered.weight_SK is None:
            return None
        y = order.restore(run_layer(Routed(ordered.x_SM, ordered.layout, ordered.weight_SK), degree), ordered)
        between = now_s()
        torch.autograd.grad(y, [x, *parameters], dy_SM[:tokens], allow_unused=True)
        return [between - began, now_s() - between]

    with torch.enable_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        few = min(len(like), _FEW_TOKENS)
        if passes_s(few, 1) is None:
            return {}
        seconds_by_degree = {1: max_over_ranks_s(topology.world, passes_s(few, 1) or [], _OPERATION)}
        if few < len(like) and sum(seconds_by_degree[1]) < give_up_s:
            for degree in degrees:
                # The first round allocates buffers and compiles for these sizes.
                own = (passes_s(len(like), degree) or [] for _ in range(1 + _NUM_TIMED_ROUNDS))
                rounds = [max_over_ranks_s(topology.world, seconds, _OPERATION) for seconds in own][1:]
                seconds_by_degree[degree] = [statistics.median(of) for of in zip(*rounds, strict=True)]
    return {
        MeasuredPart(kind, phase, degree): s
        for degree, seconds in seconds_by_degree.items()
        for phase, s in zip(PHASES, seconds, strict=True)
    }


# Per topology, and freed with it. Layers of a model share the choice.
_fastest_all_to_all: WeakKeyDictionary[Topology, dict[tuple[object, ...], AllToAll]] = WeakKeyDictionary()


def has_algorithm_choice(topology: Topology) -> bool:
    """Return whether all-to-all algorithms differ: ep spans several nodes, each with the same number (> 1) of ranks."""
    nodes = [rank // topology.ranks_per_node for rank in topology.ep.ranks]
    counts = {nodes.count(node) for node in nodes}
    return len(counts) == 1 and 1 < counts.pop() < len(nodes)


@measurement_context()
def choose_all_to_all(topology: Topology, gate: Gate, x_SM: Tensor, *, wire: WireFormat | None = None) -> AllToAll:
    """Return the fastest all-to-all algorithm for tokens of this size with uniformly chosen experts, measured once.

    Collective over all ranks, with the same result on all. `x_SM`: a batch of this rank; all ranks measure with the
    size of the largest.
    """
    tokens = round_rows(max(all_gather_object(topology.world, len(x_SM), "choosing a dispatch algorithm")))
    key = tokens, x_SM.shape[1], x_SM.dtype, x_SM.device, gate.experts, gate.k, wire
    chosen = _fastest_all_to_all.setdefault(topology, {})
    if key not in chosen:
        candidates = [make_all_to_all(name, topology, wire) for name in ALGORITHMS]
        generator = torch.Generator(x_SM.device).manual_seed(topology.rank)
        scores_SE = torch.rand(tokens, gate.experts, generator=generator, device=x_SM.device)
        layout = order_rows(scores_SE.topk(min(gate.k, gate.experts)).indices, gate.experts)
        routed = Routed(x_SM.new_zeros(tokens, x_SM.shape[1]), layout)
        tried = [_round_trips_s(Collectives(topology, candidate), routed) for candidate in candidates]
        every = all_gather_object(topology.world, tried, "choosing a dispatch algorithm")
        times = [statistics.median(map(max, zip(*of, strict=True))) for of in zip(*every, strict=True)]
        chosen[key] = candidates[times.index(min(times))]
    return chosen[key]


@torch.no_grad()
def _round_trips_s(through: Collectives, routed: Routed) -> list[float]:
    wait: Callable[[], None] = torch.cuda.synchronize if routed.x_SM.is_cuda else lambda: None
    seconds = []
    for _ in range(1 + _NUM_TIMED_ROUNDS):
        wait()
        start = time.perf_counter()
        through.combine(*through.dispatch(routed))
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
