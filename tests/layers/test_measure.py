"""A layer measures its own parts, on a clock that only those parts advance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.experts.networks import Custom
from fusedmoe.gates.base import Gate, Routing
from fusedmoe.layers.measure import time_fused, time_layer
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule.cost import CostModel, Line, MeasuredPart, Observed
from fusedmoe.schedule.task import PHASES
from fusedmoe.schedule.workload import Workload
from fusedmoe.training import plan_step
from fusedmoe.training import step_plan as step_plan_module
from tests.cluster import Cluster

E, K, M, TOKENS = 4, 2, 8, 32
MODEL = CostModel({name: Line(1e-4, 1e-9) for name in ("all-to-all/ep", "all-reduce/dp", "gemm")}, task_s=1e-5)
# Seconds of the gate, of one expert launch and of each row, forward; backward takes twice the time.
GATE_S, START_S, ROW_S = 2**-6, 2**-7, 2**-10


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Tick(torch.autograd.Function):
    """Identity that advances the clock by the given seconds, and by twice that in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now_s += seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.now_s += 2 * ctx.seconds
        return dy, None, None


class EvenGate(Gate):
    """Route the same number of tokens to each expert."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(E, K)
        self.clock = clock

    def route(self, x_SM: Tensor) -> Routing:
        expert_SK = (torch.arange(len(x_SM))[:, None] * K + torch.arange(K)) % E
        weight_SK = Tick.apply(x_SM, self.clock, GATE_S)[:, :1].expand(-1, K).sigmoid()
        return Routing(expert_SK, weight_SK, None, None, x_SM.new_zeros(()), None)


class SlowExperts(Custom):
    rank_specific = ("times",)

    def __init__(self, clock: Clock, times: float) -> None:
        super().__init__(lambda model_dim: torch.nn.Linear(model_dim, model_dim))
        self.clock, self.times = clock, times

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        return super().compute(Tick.apply(rows_NM, self.clock, self.times * (START_S + ROW_S * len(rows_NM))), counts)

    def workload(self, rows: int, itemsize: int, ep: int, esp: int) -> Workload:
        return Workload(1, rows, M, M, E, k=1, ep=ep, esp=esp, itemsize=itemsize)


def layer_of(topology: Topology, clock: Clock) -> fusedmoe.MoELayer:
    return fusedmoe.MoELayer(M, EvenGate(clock), SlowExperts(clock, 1.0 + topology.rank), topology=topology)


def observe_layer(rank: int, world: int) -> Observed:
    clock, topology = Clock(), Topology.from_sizes(2)
    layer = layer_of(topology, clock)
    costs = layer.experts.workload(TOKENS * K, 4, 2, 1).step_costs(MODEL, [0], layer.parts)
    before = torch.get_rng_state()
    found = time_layer(topology, layer.gate, layer.order, layer.experts, torch.empty(TOKENS, M), costs, clock=clock)
    assert torch.equal(before, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in layer.parameters())
    assert int(layer.load_E.sum()) == 0
    return found


def test_measured_parts_equal_known_times(cluster: Cluster) -> None:
    """Both ranks find the slower rank's times, which predict the time of any number of chunks."""
    one, other = cluster.run(2, observe_layer)
    assert one == other and one.rows == TOKENS * K
    rows, slower = TOKENS * K, 2.0
    for phase, times in (("forward", 1.0), ("backward", 2.0)):
        assert one.seconds[MeasuredPart("other", phase)] == pytest.approx(times * GATE_S)
        for chunks in (1, 4):
            expected_s = slower * times * (START_S + ROW_S * rows / chunks)
            assert one.seconds[MeasuredPart("expert", phase, chunks)] == pytest.approx(expected_s)
    assert {sample.kind for sample in one.seconds} == {"other", "count-exchange", "dispatch", "expert", "combine"}
    workload = Workload(1, rows, M, M, E, k=1, ep=2)
    model = CostModel(MODEL.lines, observed={workload.shapes: one})
    layer = workload.step_costs(model, [0], ("dispatch", "expert", "combine")).layers[0]
    expert = layer.chunks["backward"]["expert"]
    assert expert.alpha_s == pytest.approx(2 * slower * START_S)
    assert expert.whole_s == pytest.approx(2 * slower * ROW_S * rows)
    assert layer.dense_s["backward"]["other"] == pytest.approx(2 * GATE_S)


@pytest.mark.parametrize(("give_up_s", "tokens"), [(1e9, 100), (1e-9, 100), (1e9, 64)])
def test_fused_operations_are_measured_per_chunk_count(give_up_s: float, tokens: int) -> None:
    """Time passes separately, and use a single chunk if a few tokens already take too long or are all tokens."""
    clock, topology, tried = Clock(), Topology(), []
    layer = fusedmoe.MoELayer(M, EvenGate(clock), SlowExperts(clock, 1.0), topology=topology)

    def through(routed: Routed, degree: int) -> Tensor:
        tried.append((len(routed.x_SM), degree))
        y = Tick.apply(routed.x_SM, clock, degree * START_S + ROW_S * len(routed.x_SM))
        assert routed.weight_SK is not None
        return y * routed.weight_SK.sum(1, keepdim=True)

    like = torch.empty(tokens, M)
    of = layer.gate, layer.order, layer.experts, like, "dispatch-expert-combine", through
    found = time_fused(topology, *of, (1, 2, 4), give_up_s, clock=clock)
    more = give_up_s > 1 and tokens > 64
    of_all = tokens if more else 64
    assert found.keys() == {
        MeasuredPart(of[4], phase, chunks) for phase in PHASES for chunks in ((1, 2, 4) if more else (1,))
    }
    for (_, phase, chunks, _), seconds in found.items():
        forward_s = GATE_S + chunks * START_S + ROW_S * of_all
        assert seconds == pytest.approx(forward_s * (1 if phase == "forward" else 2))
    assert {degree for rows, degree in tried if rows == 100} == ({1, 2, 4} if more else set())


def measure_repeatedly(rank: int, world: int, folder: str) -> list[float]:
    """Return the cost model and the experts' measured costs: first, again, and with FSDP-sharded parameters."""
    topology, found = Topology.from_sizes(2), []
    layer = layer_of(topology, Clock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        for number, again_s in enumerate((None, 1.0, 1.0), 1):
            costs = CostModel({name: Line(1e-4, number * 1e-9) for name in MODEL.lines})
            seen = Observed({MeasuredPart("expert", "forward", 1): float(number)})
            patch.setattr(
                "fusedmoe.runtime.cache.cached_profile", lambda *_, of=costs, **__: (SimpleNamespace(costs=of),)
            )
            patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_, of=seen: of)
            if number == 3:
                mesh = init_device_mesh("cpu", (world,))
                for module in layer.experts.modules():
                    for name, parameter in module.named_parameters(recurse=False):
                        setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
            measured = layer.measured_costs(TOKENS, again_s=again_s)
            found += [measured.line("gemm").beta_s, *next(iter(measured.observed.values())).seconds.values()]
    return found


def test_costs_of_unsharded_parameters_are_measured_again(cluster: Cluster, tmp_path: Path) -> None:
    for found in cluster.run(2, measure_repeatedly, str(tmp_path)):
        assert found == pytest.approx([1e-9, 1.0, 2e-9, 2.0, 3e-9, 2.0], rel=1e-12)


def chunks_after_slowdown(rank: int, world: int, folder: str) -> list[tuple[int, int]]:
    """Return a layer's chunk counts while its links slow down; only `measured_costs(again_s=...)` updates them."""
    layer = fusedmoe.MoELayer(
        M, fusedmoe.gates.TopK(E, K), fusedmoe.experts.SwiGLU(8), topology=Topology.from_sizes(2), schedule="fsmoe"
    )
    x_SM, chunks = torch.randn(TOKENS, M), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed())
        for beta_s, again_s in ((0.0, None), (1e-3, None), (1e-3, 1.0)):
            line = Line(1e-9, beta_s)
            costs = CostModel({name: line if "all-to-all" in name else Line(1e-9, 1e-6) for name in MODEL.lines})
            patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_, of=costs: of)
            if again_s is not None:
                layer.measured_costs(TOKENS, again_s=again_s)
            layer(x_SM).sum().backward()
            ((_, plans),) = layer.plans.plans_by_workload.items()
            chunks.append(plans.degrees)
    return chunks


def test_layer_replans_only_after_new_measurement(cluster: Cluster, tmp_path: Path) -> None:
    for first, kept, again in cluster.run(2, chunks_after_slowdown, str(tmp_path)):
        assert first == kept == (1, 1) and min(again) > 1


def plan_and_cache(rank: int, world: int, folder: str) -> list[Any]:
    topology = Topology.from_sizes(2)
    layers = [layer_of(topology, Clock()) for _ in range(2)]
    given: list[CostModel] = []
    model_costs = step_plan_module.model_costs
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *where: MODEL)
        patch.setattr(step_plan_module, "model_costs", lambda *of: (given.append(of[2]), model_costs(*of))[1])
        work = Workload(1, TOKENS, M, M, E, k=K, ep=2)
        plans = [plan_step(torch.nn.ModuleList(layers), topology, "sequential", None, work)[0] for _ in range(2)]
        # The second time the costs are cached, also for an equal layer.
        patch.setattr("fusedmoe.layers.measure.time_layer", None)
        layer_of(topology, Clock()).measured_costs(TOKENS)
    assert given[0] == given[1] and given[0].observed.keys() == {work.shapes}
    return [plan.fingerprint for plan in plans]


def test_layers_of_equal_shape_share_one_measurement(cluster: Cluster, tmp_path: Path) -> None:
    one, other = cluster.run(2, plan_and_cache, str(tmp_path))
    assert one == other and one[0] == one[1]
    assert [path.name[:6] for path in tmp_path.iterdir()] == ["steps-"]
