"""Metrics compared with values computed by hand, on one rank and on two; their host cost; their destinations."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import ConfigError, MoELayer, RankError, Topology, experts, gates
from fusedmoe.layers.load import RoutingCounters, expert_load
from fusedmoe.metrics import Metrics
from fusedmoe.schedule.timeline import Span
from tests.cluster import Cluster
from tests.training.host_reads import HostReads, fake_gpu

E = 4
# Expert choices of each rank's tokens. With a capacity of a quarter of the rows, rank 0 accepts two per expert, rank 1
# one.
ROUTED = ([0, 0, 0, 1, 2, 0, 0, 1], [3, 3, 0, 0])


def make(topology: Topology | None = None, **more: Any) -> MoELayer:
    """Build a layer in which a token of e · log 3 chooses expert e with probability 1/2; each other expert has 1/6."""
    gate = gates.TopK(E, 1, 1.0, aux={"balance": 0.5})
    layer = MoELayer(E, gate, experts.FeedForward(3), topology=topology, dtype=torch.float64, **more)
    with torch.no_grad():
        gate.weight_EM.copy_(torch.eye(E))
    return layer


def tokens(routed: list[int]) -> Tensor:
    return (torch.eye(E, dtype=torch.float64) * math.log(3))[routed]


def train_step(layer: nn.Module, x: Tensor) -> None:
    (
        layer(x.requires_grad_()).sum() + sum(one.aux_loss for one in layer.modules() if isinstance(one, MoELayer))
    ).backward()


def balance(routed: list[int]) -> float:
    """Compute E · Σ mean probability · share by hand."""
    counts, S = [routed.count(e) for e in range(E)], len(routed)
    return E * sum((count / 2 + (S - count) / 6) / S * count / S for count in counts)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_expert_load_of_any_integer_dtype(dtype: torch.dtype) -> None:
    """A gate may return a narrow integer dtype whose last value has no successor."""
    expert_SK = torch.tensor([[127, 0], [127, 3]]).to(dtype)
    load_E = expert_load(expert_SK, 128)
    assert load_E.dtype == torch.int64 and load_E[[0, 3, 127]].tolist() == [1, 1, 2] and load_E.sum() == 4


OF_ANY = {"moe/router_entropy": math.log(2) / 2 + math.log(6) / 2, "moe/z_loss": math.log(6) ** 2}
# Choices 5, 2, 1, 0; within capacity 2, 2, 1, 0.
ALONE = OF_ANY | {
    "moe/max_vio": 1.5,
    "moe/max_vio_worst": 1.5,
    "moe/load_cv": math.sqrt((9 + 0 + 1 + 4) / 4) / 2,
    "moe/dead_experts": 0.25,
    "moe/diversity": math.exp(-(5 * math.log(5 / 8) + 2 * math.log(2 / 8) + math.log(1 / 8)) / 8) / 4,
    "moe/dropped": 3 / 8,
    "moe/rank_rows": 1.0,
    "moe/balance_loss": balance(ROUTED[0]),
    "moe/aux_loss": balance(ROUTED[0]) / 2,
}
# Choices 7, 2, 1, 2; within capacity 3, 2, 1, 1; two experts per rank.
ON_TWO = OF_ANY | {
    "moe/max_vio": 4 / 3,
    "moe/max_vio_worst": 4 / 3,
    "moe/load_cv": math.sqrt((16 + 1 + 4 + 1) / 4) / 3,
    "moe/dead_experts": 0.0,
    "moe/diversity": math.exp(-(7 * math.log(7 / 12) + 4 * math.log(2 / 12) + math.log(1 / 12)) / 12) / 4,
    "moe/dropped": 5 / 12,
    "moe/rank_rows": 5 / 3.5,
    "moe/balance_loss": (8 * balance(ROUTED[0]) + 4 * balance(ROUTED[1])) / 12,
    "moe/aux_loss": (8 * balance(ROUTED[0]) + 4 * balance(ROUTED[1])) / 24,
}
# With one expert per token, a token is sent to one rank.
EAGER = {"moe/pairs_per_token": 1.0}


def assert_metrics(found: dict[str, float], right: dict[str, float]) -> None:
    timed = {"moe/tokens_per_s", "moe/exposed_s", "moe/exposed_share", "moe/mfu"}
    assert {key: value for key, value in found.items() if key not in timed} == pytest.approx(right, rel=1e-12)
    assert found["moe/tokens_per_s"] > 0


def test_metrics_on_one_rank_equal_hand_computed_values() -> None:
    layer = make()
    metrics = Metrics(layer, flops_per_token=3e6, peak_flops=6e9)
    for _ in range(3):
        train_step(layer, tokens(ROUTED[0]))
    layer.eval()
    layer(tokens([3] * 7))  # not a training forward
    layer.train()
    found = metrics.collect(per_layer=True)
    assert found["moe/mfu"] == pytest.approx(found["moe/tokens_per_s"] * 3e6 / 6e9)
    assert found["moe/exposed_s"] == found["moe/exposed_share"] == 0.0 and "moe/pairs_per_token" not in found
    each = {key.replace("moe/layer/", "moe/"): found.pop(key) for key in list(found) if key.startswith("moe/layer/")}
    assert_metrics(found, ALONE)
    assert each == pytest.approx({key: value for key, value in ALONE.items() if key != "moe/max_vio_worst"})
    assert metrics.collect().keys() == {"moe/tokens_per_s", "moe/mfu"}  # nothing since the last collect
    metrics.close()
    train_step(layer, tokens(ROUTED[0]))
    assert metrics.collect().keys() == {"moe/tokens_per_s", "moe/mfu"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_are_counted_once(reentrant: bool) -> None:
    layer = make()
    metrics = Metrics(layer)
    checkpoint(layer, tokens(ROUTED[0]).requires_grad_(), use_reentrant=reentrant).sum().backward()
    train_step(layer, tokens(ROUTED[1]))
    assert_metrics(metrics.collect(), ON_TWO | {"moe/rank_rows": 1.0})


@pytest.mark.slow
def test_compiled_layer_counts_in_one_graph() -> None:
    torch._dynamo.reset()
    layer = make()
    metrics = Metrics(layer)
    train_step(torch.compile(layer, fullgraph=True, backend="eager"), tokens(ROUTED[0]))
    assert_metrics(metrics.collect(), ALONE)


def test_metrics_are_averaged_and_named_by_layer() -> None:
    """Gates without logits report no entropy; soft gates report no loads."""
    layers = [make(), MoELayer(E, gates.Random(E), experts.FeedForward(3)).double()]
    model = nn.Sequential(*layers, MoELayer(E, gates.SoftMoE(E, 1), experts.FeedForward(3)).double())
    metrics = Metrics(model)
    assert [layer.number for layer in model] == [0, 1, 2]
    train_step(model, tokens(ROUTED[0]))
    loads = [layer.load_E.double() for layer in layers]
    vio = [float(load.max() / load.mean() - 1) for load in loads]
    found = metrics.collect(per_layer=True)
    assert found["moe/max_vio"] == pytest.approx(sum(vio) / 2) and found["moe/max_vio_worst"] == pytest.approx(max(vio))
    assert found["moe/0/max_vio"] == pytest.approx(1.5)
    assert found["moe/router_entropy"] == pytest.approx(OF_ANY["moe/router_entropy"])
    assert not any(key.startswith("moe/2/") and "aux" not in key for key in found)
    assert sum("/" not in key.removeprefix("moe/") for key in found) <= 32


def collect_on_rank(rank: int, world: int) -> list[dict[str, float]]:
    topology = Topology.from_sizes(world)
    layer = make(topology)
    metrics = Metrics(layer)
    for _ in range(2):
        train_step(layer, tokens(ROUTED[rank]))
    found = [metrics.collect()]
    assert layer.recorder is None
    sampler = pickle.loads(pickle.dumps(copy.deepcopy(metrics._exposed_sampler)))  # hooks are copied with a layer
    sampler._begin(layer, None), sampler._end(layer)
    assert sampler.exposed() is None and copy.deepcopy(layer.load).counters is None
    assert metrics.collect().keys() == {"moe/tokens_per_s"}
    metrics.close()
    metrics = Metrics(layer)
    for _ in range(2):
        train_step(layer, tokens(ROUTED[rank]))
    loads = metrics.collect(per_expert=True)  # both ranks, both forwards, including drops
    assert [loads[f"moe/layer/load/{e}"] for e in range(E)] == [2 * sum(of.count(e) for of in ROUTED) for e in range(E)]
    assert not any("load/" in key for key in metrics.collect(per_layer=True))
    metrics.close()

    layers = [make(topology) for _ in range(2)]
    blocks = fusedmoe.pipeline([(Twice(), layer) for layer in layers], (2, 2))
    metrics = Metrics(blocks)
    train_step(blocks, tokens(ROUTED[rank])[:, None])
    found.append(metrics.collect())
    assert blocks.recorder is None
    metrics.close()

    torch._dynamo.reset()
    compiled = make(topology)
    metrics = Metrics(compiled)
    for _ in range(2):
        train_step(torch.compile(compiled, fullgraph=True, backend="eager"), tokens(ROUTED[rank]))
    found.append(metrics.collect())
    assert compiled.recorder is None
    metrics.close()

    other = nn.Sequential(*layers[: rank + 1])
    with pytest.raises(RankError, match=r"Metrics: layers is .* on ranks \[0\]"):
        Metrics(other)
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in other.modules())
    Metrics(layers[0]).close()  # a refusal leaves no state behind
    return found


class Twice(nn.Module):
    """Dense part; all blocks receive the same tokens."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = x.detach().argmax(-1)
        return x * 1.0, tokens(found.flatten().tolist()).view(x.shape) + 0.0 * x


def test_metrics_on_two_ranks_equal_hand_computed_values(cluster: Cluster) -> None:
    of_ranks = cluster.run(2, collect_on_rank)
    for alone, blocks, compiled in of_ranks:
        assert_metrics(alone, ON_TWO | EAGER)
        assert_metrics(compiled, ON_TWO)
        assert "moe/exposed_s" not in compiled  # a graph contains no clock
        for sampled in (alone, blocks):
            assert sampled["moe/exposed_s"] > 0 and 0 < sampled["moe/exposed_share"] < 1
        # Drops change the tokens' norms, but not their experts.
        assert_metrics(blocks, ON_TWO | EAGER)
    assert of_ranks[0] == of_ranks[1]


def exposed_of_layers(rank: int, world: int) -> tuple[float, float]:
    """Exposed seconds and share of three layers: a link is in use for 5 s, computation starts after 2 s plus rank."""
    layers = [make(Topology.from_sizes(world)) for _ in range(3)]
    metrics = Metrics(nn.ModuleList(layers))
    sampler: Any = metrics._exposed_sampler
    recorder = sampler._recorder
    for number, layer in enumerate(layers):
        for kind, resource, start_s in (("dispatch", "inter", 0.0), ("expert", "compute", 2.0 + rank)):
            began_s = recorder._zero_s + 10.0 * number + start_s
            span = Span(kind, kind, resource, 0.0, 0.0, 0, number)
            recorder._records.append((span, began_s, began_s + 5.0))
        sampler._recorded_modules.add(layer)
        layer.load.counters.sums[2 * E] = 1.0  # a token
    found = metrics.collect()
    metrics.close()
    return found["moe/exposed_s"], found["moe/exposed_share"]


def test_exposed_time_is_summed_over_layers_and_averaged_over_ranks(cluster: Cluster) -> None:
    for exposed_s, share in cluster.run(2, exposed_of_layers):
        assert exposed_s == pytest.approx((3 * 2 + 3 * 3) / 2)
        assert share == pytest.approx((3 * 2 + 3 * 3) / (27 + 28))


def test_counting_never_waits_for_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu() as reads:
        counters = RoutingCounters(E, "cuda")
        logits = torch.empty(8, E, device="cuda")
        for _ in range(2):
            chosen, number = torch.ones(E, dtype=torch.long, device="cuda"), logits.topk(2).indices
            counters.count_choices(number, chosen, logits, logits.sum())
            counters.count_rows(chosen)
        assert counters.sums.is_cuda and reads.count == 0
        counters.sums.cpu()
        assert reads.count == 1  # the counter does count

    layer, x, found = make(), tokens(ROUTED[0]), []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: (found.append(0), tolist(self))[1])
    costs = []
    for make_metrics in (lambda one: None, Metrics):
        make_metrics(layer)
        found.clear()
        with HostReads() as reads:
            train_step(layer, x.detach())
        costs.append(reads.count + len(found))
    assert costs[0] == costs[1] and layer.load.counters is not None
    with HostReads() as reads:
        train_step(layer, x.detach())
        assert layer.dropped == 3
    assert reads.count > 0


def test_metrics_rejects_invalid_arguments_and_second_use() -> None:
    with pytest.raises(ConfigError, match="no MoE layers"):
        Metrics(nn.Linear(2, 2))
    layer = make()
    for wrong in ({"peak_flops": 1e9}, {"flops_per_token": 0.0, "peak_flops": 1e9}):
        with pytest.raises(ConfigError, match="flops_per_token"):
            Metrics(layer, **wrong)
    Metrics(layer)
    with pytest.raises(ConfigError, match=r"close\(\)"):
        Metrics(layer)
