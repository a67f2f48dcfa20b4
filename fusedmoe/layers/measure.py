"""Measuring a layer: its passes on random tokens, gate and order with them, on all ranks at once.

For `dispatch="auto"` each all-to-all algorithm is tried with as many tokens as the layer has.
"""

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
from fusedmoe.comm.all_to_all import ALGORITHMS, AllToAll, TwoLevel, make_all_to_all
from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of, slowest_s
from fusedmoe.comm.exchange import Exchange
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import disable_current_modes, recording, saved_tensor_hooks_removed
from fusedmoe.engine.chunk_experts import ChunkExperts
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.engine.one_sided_dispatcher import KernelTransport, fused_experts, rounded_up
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.gates import Hash
from fusedmoe.gates.base import Gate
from fusedmoe.layers.layer_plans import LayerPlans, PlannedExperts
from fusedmoe.orders import Order
from fusedmoe.runtime.cache import cached_observed, cached_profile, machine_facts
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.profiler import BUDGET_S, STEPS_BUDGET_S, observe_steps
from fusedmoe.runtime.recorder import Recorder, record_with
from fusedmoe.schedule.cost import CostModel, Observed, Sample
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ChunkedPass, pass_of, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES, TaskKind
from fusedmoe.schedule.timeline import Timeline
from fusedmoe.schedule.workload import Workload

# Chunks of the passes that are measured.
_DEGREES = (1, 4)
#: Chunks of the passes by fused operations that are measured.
FUSED_DEGREES = (1, 2, 4)
# How often these and all-to-alls are measured, and the tokens of a first try.
_ROUNDS, _FEW = 5, 64
# As failures name it.
_OPERATION = "measuring a layer"


def measure_layer(
    plans: LayerPlans, like: Tensor, all_to_all: AllToAll | None = None, *, again_s: float | None = None
) -> CostModel:
    """Measures this machine, and the parts of a layer for as many tokens as in `like`, [S, M]. Collective over all
    ranks; kept for layers like this one.

    Where the experts move, the lines of the machine alone are measured.

    Args:
        all_to_all: how the layer's tokens travel; None: directly.
        again_s: measure in any case, for about so many seconds; the same on every rank. Of a layer whose parameters
            are sharded now (FSDP2) the machine alone.
    Raises:
        ConfigError: experts that do not say how much they compute.
    """
    topology, gate, order, experts = plans.parts
    half_s = None if again_s is None else again_s / 2
    costs = measured_costs(topology, like.device, like.dtype, half_s)
    if plans.moves:
        return costs
    # Ranks may have different numbers of tokens; all measure by those of the largest.
    tokens = max(all_gather_object(topology.world, len(like), _OPERATION))
    like = like.new_empty(max(1, rounded(tokens)), like.shape[1])
    rows = max(1, round(len(like) * order.rows_per_token(gate, len(like))))
    workload = experts.workload(rows, like.dtype.itemsize, topology.ep.size, topology.esp.size)
    kind = f"{type(experts).__module__}.{experts.describe()}"
    sizes = [list(parameter.shape) for parameter in experts.parameters()]
    facts: dict[str, Any] = {
        "shapes": workload.shapes,
        "experts": kind,
        "sizes": sizes,
        "gate": repr(gate),
        "order": repr(order),
    }
    if isinstance(all_to_all, TwoLevel):
        facts["dispatch"] = all_to_all.name
    fused_kind = plans.fused_kind(like)
    degrees = [degree for degree in FUSED_DEGREES if degree <= plans.limit]
    facts |= {} if fused_kind is None else {"fused": f"{fused_kind} in {degrees}"}

    def observed() -> Observed:
        step = workload.step_costs(costs, [0], plans.kinds)
        budget_s = STEPS_BUDGET_S if half_s is None else half_s
        of_parts = observe_layer(topology, gate, order, experts, like, step, all_to_all, budget_s)
        if fused_kind is None:
            return of_parts
        # By collectives all of it takes no longer than this.
        enough_s = sum(s for sample, s in of_parts.seconds.items() if sample.chunks == 1)
        most = max(len(like), rounded_up(tokens))

        def through(routed: Routed, degree: int) -> Tensor:
            x_SM, layout, weight_SK, _ = routed
            assert weight_SK is not None
            transport = KernelTransport(fused_kind, (degree, degree), most)
            return fused_experts(x_SM, weight_SK, layout, topology, experts.in_chunks(x_SM), transport, None)

        seconds = observe_fused(topology, gate, order, experts, like, fused_kind, through, degrees, enough_s)
        return of_parts | Observed(seconds)

    # With it comes the compiler, which `import fusedmoe` waits for no more than it must.
    from torch.distributed.tensor import DTensor

    facts["tokens"] = len(like)
    # FSDP has a layer's parameters whole in a forward alone: elsewhere what its parts took stays.
    whole = not any(isinstance(parameter, DTensor) for parameter in experts.parameters())
    seen = measured_parts(topology, like.device, like.dtype, facts, observed, again=whole and again_s is not None)
    return replace(costs, observed={workload.shapes: seen})


class Measurement(Enum):
    """Progress of a `CostTrial`."""

    DUE = "the next forward measures"
    DONE = "measured, and not read yet"
    TAKEN = "read; measured again on request"


class CostTrial:
    """Costs of a layer, measured in a forward: elsewhere FSDP may have its parameters sharded (`LayerPlans.trial`).

    Attributes:
        again_s: measure in any case, for about this many seconds; None: use earlier measurements if there are any.
        workload, costs: as measured.
        any_degree: the experts support another number of chunks backward than forward.
    """

    def __init__(self, plans: LayerPlans) -> None:
        self._plans = plans
        self.state = Measurement.DUE
        self.again_s: float | None = None
        self.workload: Workload | None = None
        self.costs: CostModel | None = None
        self.any_degree = False

    def __call__(self, x_SM: Tensor, exchange: Exchange, in_chunks: Callable[[], ChunkExperts]) -> None:
        """Measure the layer for tokens like these if that is due. Collective over all ranks."""
        if self.state is not Measurement.DUE:
            return
        topology, experts = self._plans.topology, self._plans.parts.experts
        self.any_degree = in_chunks().any_degree
        with undisturbed():
            self.costs = measure_layer(self._plans, x_SM, again_s=self.again_s)
        itemsize, pairs = x_SM.dtype.itemsize, rounded(exchange.most_pairs)
        self.workload = experts.workload(pairs, itemsize, topology.ep.size, topology.esp.size).sending(exchange.share)
        self.state = Measurement.DONE


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context for measuring, and for what ranks say to each other about plans, in the midst of a forward pass.

    That happens once, in the first forward, and not where an activation checkpoint computes it again: so whoever counts
    the tensors that are saved for backward, or watches operators, sees nothing of it; and gradients can be taken.
    """
    # Measuring takes gradients, which inference mode forbids, and modes of the caller would see its operators.
    with (
        torch.inference_mode(False),
        disable_current_modes(),
        saved_tensor_hooks_removed(),
        recording(),
        record_with(None),
    ):
        yield


def rounded(rows: int) -> int:
    """Rounds to three binary digits, up: plans are made for few sizes."""
    # At most a fourth too many, and four sizes for each doubling.
    step = 1 << max(0, rows.bit_length() - 3)
    return max(1, -(-rows // step) * step)


# By topology, as long as it is in use; the layers of a model share one.
_measured: WeakKeyDictionary[Topology, dict[tuple[str, torch.dtype], CostModel]] = WeakKeyDictionary()


def measured_costs(
    topology: Topology, device: torch.device, dtype: torch.dtype, again_s: float | None = None
) -> CostModel:
    """Returns what this machine takes, from this process, from disk, or measured now. Collective over all ranks.

    `again_s`: measure in any case, for about so many seconds; the same on every rank.
    """
    known = _measured.setdefault(topology, {})
    key = (device.type, dtype)
    if key not in known or again_s is not None:
        budget_s = BUDGET_S if again_s is None else again_s
        again = again_s is not None
        known[key] = cached_profile(topology, device, dtype=dtype, budget_s=budget_s, again=again)[0].costs
        # Links take as long whatever the products are of.
        links = {name: line for name, line in known[key].lines.items() if again and name not in ("gemm", "copy")}
        for other, costs in known.items():
            known[other] = replace(costs, lines={**costs.lines, **links})
    return known[key]


# What the parts of layers take, by all that it depends on.
_parts: WeakKeyDictionary[Topology, dict[str, Observed]] = WeakKeyDictionary()


def measured_parts(
    topology: Topology,
    device: torch.device,
    dtype: torch.dtype,
    facts: dict[str, Any],
    measure: Callable[[], Observed],
    *,
    again: bool = False,
) -> Observed:
    """Returns what the parts of a layer take, from this process, from disk, or measured now. Collective over all ranks.

    Args:
        facts: all that tells the layer from others, in plain types.
        again: measure in any case.
    """
    known, key = _parts.setdefault(topology, {}), f"{device.type} {dtype} {sorted(facts.items())}"
    if key not in known or again:
        machine = machine_facts(topology, device, dtype)
        known[key] = cached_observed(topology, {**machine, "layer": facts}, measure, again)
    return known[key]


def observe_layer(
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
    """Measures what the parts of a layer take for as many tokens as in `like`, of its dtype, on its device. Collective
    over all ranks; the same on all of them.

    Nothing of the layer changes: no gradient is kept, and the global generators are as before.

    Args:
        like: [S, M]; its values do not matter.
        costs: of one such layer, before.
        all_to_all: how its tokens travel; None: directly.
        budget_s: see `observe_steps`.
        clock: what is measured with on a CPU.
    """
    plans = [step_plan(costs, of, of) for of in ([ChunkedPass(three_queues, degree)] for degree in _DEGREES)]
    gate, parameters, x_SM, dy_SM = _trial(topology, gate, experts, like)
    recorder = Recorder(topology.rank, device=like.device, clock=clock)
    all_to_all, streams = all_to_all or make_all_to_all("direct", topology), Streams()
    sent: list[int] = []

    def run(plan: Plan, number: int) -> Timeline:
        def find(x_SM: Tensor, exchange: Exchange, in_chunks: object) -> Assigned:
            sent.append(exchange.most_pairs)
            return Assigned(Plans(pass_of(plan, 0, "forward"), pass_of(plan, 0, "backward")))

        through = Collectives(topology, all_to_all, find, streams=streams)
        recorder.clear()
        x = x_SM.detach().requires_grad_()
        ordered = order.order(x, gate(x), gate.experts)
        with record_with(recorder):
            y = through.through_experts(Routed(ordered.x_SM, ordered.layout, ordered.weight_SK), experts)
        y = order.restore(y, ordered)
        with recorder.span("between the passes", kind=TaskKind.LOSS):
            pass
        torch.autograd.grad(y, [x, *parameters], dy_SM, allow_unused=True)
        with recorder.span("after the passes", kind=TaskKind.OPTIMIZER):
            pass
        return recorder.timeline()

    # Gates draw from the global generators, which must stand as before.
    with torch.enable_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        found = observe_steps(topology, plans, costs, run, budget_s, clock)
    of_layer = {
        sample: s for sample, s in found.seconds.items() if sample.kind not in (TaskKind.LOSS, TaskKind.OPTIMIZER)
    }
    rows = max(all_gather_object(topology.world, max(sent), _OPERATION))
    return Observed(of_layer, experts.workload(rows, like.dtype.itemsize, topology.ep.size, topology.esp.size).rows)


def _trial(
    topology: Topology, gate: Gate, experts: PlannedExperts, like: Tensor
) -> tuple[Gate, list[Tensor], Tensor, Tensor]:
    """Returns a gate for other tokens, what learns, tokens like these, and gradients of their results."""
    gate = copy.copy(gate)
    if isinstance(gate, Hash):
        gate.token_ids = None
    parameters = [p for p in chain(gate.parameters(), experts.parameters()) if p.requires_grad]
    # A generator of its own: training goes on with the numbers that it would have had.
    chance = torch.Generator(like.device).manual_seed(topology.rank)
    x_SM, dy_SM = (torch.randn(like.shape, generator=chance, device=like.device).to(like.dtype) for _ in range(2))
    return gate, parameters, x_SM, dy_SM


# A layer's results of its tokens, by a fused operation in so many chunks.
Through = Callable[[Routed, int], Tensor]


def observe_fused(
    topology: Topology,
    gate: Gate,
    order: Order,
    experts: PlannedExperts,
    like: Tensor,
    kind: str,
    through: Through,
    degrees: Sequence[int],
    enough_s: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Sample, float]:
    """Seconds of both passes of a layer by a fused operation: all of it, gate and order with it, on the slowest rank.
    Collective over all ranks; nothing of the layer changes.

    Args:
        degrees: numbers of chunks, tried in both passes at once.
        enough_s: where a few tokens in one chunk take longer than that, nothing more is tried: their time is taken for
            that of all.
    Returns:
        By `kind`, pass and chunks, in one chunk alone where there are but a few tokens; nothing where the order has no
        weights for rows, which kernels need.
    """
    gate, parameters, x_SM, dy_SM = _trial(topology, gate, experts, like)

    def now() -> float:
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        # Ranks begin together, or the slowest one's wait would be measured in all others.
        all_reduce(topology.world, torch.zeros(1, device=device_of(topology.world)), operation=_OPERATION)
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        return clock()

    def passes_s(tokens: int, degree: int) -> list[float] | None:
        x = x_SM[:tokens].detach().requires_grad_()
        began = now()
        ordered = order.order(x, gate(x), gate.experts)
        if ordered.weight_SK is None:
            return None
        y = order.restore(through(Routed(ordered.x_SM, ordered.layout, ordered.weight_SK), degree), ordered)
        between = now()  # once all ranks are there: the slowest one's time
        torch.autograd.grad(y, [x, *parameters], dy_SM[:tokens], allow_unused=True)
        return [between - began, now() - between]

    with torch.enable_grad(), torch.random.fork_rng(devices=[like.device] if like.is_cuda else []):
        few = min(len(like), _FEW)
        if passes_s(few, 1) is None:  # the first time, kernels are compiled
            return {}
        seconds_by_degree = {1: slowest_s(topology.world, passes_s(few, 1) or [], _OPERATION)}
        if few < len(like) and sum(seconds_by_degree[1]) < enough_s:
            for degree in degrees:
                # The first round is left out: it makes buffers and compiles for these sizes.
                own = (passes_s(len(like), degree) or [] for _ in range(1 + _ROUNDS))
                rounds = [slowest_s(topology.world, seconds, _OPERATION) for seconds in own][1:]
                seconds_by_degree[degree] = [statistics.median(of) for of in zip(*rounds, strict=True)]
    return {
        Sample(kind, phase, degree): s
        for degree, seconds in seconds_by_degree.items()
        for phase, s in zip(PHASES, seconds, strict=True)
    }


# By topology, as long as it is in use, and by all that the choice depends on: layers of a model share it.
_chosen: WeakKeyDictionary[Topology, dict[tuple[object, ...], AllToAll]] = WeakKeyDictionary()


def has_choice(topology: Topology) -> bool:
    """Tells whether algorithms differ: ranks of the ep group on several nodes, several on each, and all alike."""
    nodes = [rank // topology.ranks_per_node for rank in topology.ep.ranks]
    counts = {nodes.count(node) for node in nodes}
    return len(counts) == 1 and 1 < counts.pop() < len(nodes)


@undisturbed()
def choose_all_to_all(topology: Topology, gate: Gate, x_SM: Tensor) -> AllToAll:
    """Returns the algorithm that takes tokens like these to uniformly chosen experts and back in the least time.
    Collective over all ranks, where it was not chosen before for such tokens; the same on all of them.

    Args:
        x_SM: a batch of this rank; all ranks measure by the largest.
    """
    tokens = rounded(max(all_gather_object(topology.world, len(x_SM), "choosing a dispatch algorithm")))
    key = tokens, x_SM.shape[1], x_SM.dtype, x_SM.device, gate.experts, gate.k
    chosen = _chosen.setdefault(topology, {})
    if key not in chosen:
        candidates = [make_all_to_all(name, topology) for name in ALGORITHMS]
        chance = torch.Generator(x_SM.device).manual_seed(topology.rank)
        scores_SE = torch.rand(tokens, gate.experts, generator=chance, device=x_SM.device)
        layout = order_rows(scores_SE.topk(min(gate.k, gate.experts)).indices, gate.experts)
        routed = Routed(x_SM.new_zeros(tokens, x_SM.shape[1]), layout)
        tried = [_round_trips_s(topology, Collectives(topology, candidate), routed) for candidate in candidates]
        # A round is over once its last rank is through.
        every = all_gather_object(topology.world, tried, "choosing a dispatch algorithm")
        times = [statistics.median(map(max, zip(*of, strict=True))) for of in zip(*every, strict=True)]
        chosen[key] = candidates[times.index(min(times))]
    return chosen[key]


@torch.no_grad()
def _round_trips_s(topology: Topology, through: Collectives, routed: Routed) -> list[float]:
    """Times dispatch and combine, round by round."""
    wait: Callable[[], None] = torch.cuda.synchronize if routed.x_SM.is_cuda else lambda: None
    seconds = []
    for _ in range(1 + _ROUNDS):
        wait()
        start = time.perf_counter()
        through.combine(*through.dispatch(routed))
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
