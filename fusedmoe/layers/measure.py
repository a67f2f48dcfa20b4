"""What the parts of a layer take: its passes on random tokens, gate and order with them, on all ranks at once."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_gather_object, all_reduce, device_of
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import LocalExperts, Routed
from fusedmoe.engine.run import Assigned, Plans
from fusedmoe.layers.expert_networks import Experts
from fusedmoe.layers.gates import Hash
from fusedmoe.layers.gates.base import Gate
from fusedmoe.layers.orders import Order
from fusedmoe.runtime.execute import Streams
from fusedmoe.runtime.profiler import observe_steps
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import Observed, Sample
from fusedmoe.schedule.passes import three_queues
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.step import ChunkedPass, pass_of, step_plan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.timeline import Timeline

# Chunks of the passes that are measured.
_DEGREES = (1, 4)
#: Chunks of the passes by fused operations that are measured.
FUSED_DEGREES = (1, 2, 4)
# How often these are measured, and the tokens of a first try.
_ROUNDS, _FEW = 5, 64


def observe_layer(
    topology: Topology,
    gate: Gate,
    order: Order,
    experts: Experts,
    like: Tensor,
    costs: StepCosts,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Observed:
    """What the parts of a layer take for as many tokens as in `like`, of its dtype, on its device. Collective over all
    ranks; the same on all of them.

    Nothing of the layer changes: no gradient is kept, and the global generators are as before.

    Args:
        like: [S, M]; its values do not matter.
        costs: of one such layer, before.
        clock: what is measured with on a CPU.
    """
    plans = [step_plan(costs, of, of) for of in ([ChunkedPass(three_queues, degree)] for degree in _DEGREES)]
    gate = copy.copy(gate)
    if isinstance(gate, Hash):
        gate.token_ids = None  # of other tokens
    recorder = Recorder(topology.rank, device=like.device, clock=clock)
    all_to_all, streams = make_all_to_all("direct", topology), Streams()
    chance = torch.Generator(like.device).manual_seed(topology.rank)
    parameters = [p for p in chain(gate.parameters(), experts.parameters()) if p.requires_grad]
    x_SM, dy_SM = (torch.randn(like.shape, generator=chance, device=like.device).to(like.dtype) for _ in range(2))

    sent: list[int] = []

    def run(plan: Plan, number: int) -> Timeline:
        def find(x_SM: Tensor, rows: int, experts: LocalExperts) -> Assigned:
            sent.append(rows)
            return Assigned(Plans(pass_of(plan, 0, "forward"), pass_of(plan, 0, "backward")))

        through = Collectives(topology, all_to_all, find, recorder=recorder, streams=streams)
        recorder.clear()
        x = x_SM.detach().requires_grad_()
        ordered = order.order(x, gate(x), gate.experts)
        y = through.through_experts(Routed(ordered.x_SM, ordered.layout, ordered.weight_SK), experts)
        y = order.restore(y, ordered)
        with recorder.span("between the passes", kind="loss"):
            pass
        torch.autograd.grad(y, [x, *parameters], dy_SM, allow_unused=True)
        with recorder.span("after the passes", kind="optimizer"):
            pass
        return recorder.timeline()

    devices = [like.device] if like.device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices=devices):
        found = observe_steps(topology, plans, costs, run, clock=clock)
    of_layer = {sample: s for sample, s in found.seconds.items() if sample.kind not in ("loss", "optimizer")}
    rows = max(all_gather_object(topology.world, max(sent), "measuring a layer"))
    return Observed(of_layer, experts.workload(rows, like.dtype.itemsize, topology.ep.size, topology.esp.size).rows)


# A layer's results of its tokens, by a fused operation in so many chunks.
Through = Callable[[Routed, int], Tensor]


def observe_fused(
    topology: Topology,
    gate: Gate,
    order: Order,
    experts: Experts,
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
    gate = copy.copy(gate)
    if isinstance(gate, Hash):
        gate.token_ids = None  # of other tokens
    chance = torch.Generator(like.device).manual_seed(topology.rank)
    parameters = [p for p in chain(gate.parameters(), experts.parameters()) if p.requires_grad]
    x_SM, dy_SM = (torch.randn(like.shape, generator=chance, device=like.device).to(like.dtype) for _ in range(2))

    def now() -> float:
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        all_reduce(topology.world, torch.zeros(1, device=device_of(topology.world)), operation="measuring a layer")
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

    def slowest(seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device=device_of(topology.world))
        slow: list[float] = all_reduce(topology.world, found, "max", "measuring a layer").tolist()
        return slow

    devices = [like.device] if like.device.type == "cuda" else []
    with torch.enable_grad(), torch.random.fork_rng(devices=devices):
        few = min(len(like), _FEW)
        if passes_s(few, 1) is None:  # the first time, kernels are compiled
            return {}
        found = {1: slowest(passes_s(few, 1) or [])}
        if few < len(like) and sum(found[1]) < enough_s:
            for degree in degrees:
                rounds = [slowest(passes_s(len(like), degree) or []) for _ in range(1 + _ROUNDS)][1:]
                found[degree] = [statistics.median(of) for of in zip(*rounds, strict=True)]
    return {
        Sample(kind, phase, degree): s
        for degree, seconds in found.items()
        for phase, s in zip(PHASES, seconds, strict=True)
    }
