"""A transformer in micro-batches: same loss, gradients and dropped rows; the workload of a block."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe.blocks.pipeline import Along
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Place
from fusedmoe.kernels.activation import ACTIVATIONS
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer, block_workload, make_experts
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import LINES, Contention, CostModel, Line
from fusedmoe.training import plan_step, sync_gradients
from tests.cluster import Cluster
from tests.models.test_parallel import AUX, BERT, GPT, LENGTH

COSTS = CostModel(
    {name: Line(1e-6, 1e-12 if name == "gemm" else 4e-9) for name in LINES}, contention=Contention.between_links(0.8)
)
POLICIES = ("flowmoe", "lancet", "joint", "fsmoe")


def run(model: Transformer, config: ModelConfig, batch: int, seed: int, buckets: Any) -> list[Tensor | None]:
    torch.manual_seed(seed)
    tokens_BL, targets_BL = torch.randint(config.vocabulary, (2, batch, LENGTH))
    loss = model(tokens_BL, targets_BL)
    if buckets is not None:
        buckets.open()
    (loss.nats + AUX * loss.aux).backward()
    sync_gradients(model, model.topology, buckets=buckets)
    dropped = torch.tensor([layer.dropped for layer in model.moe_layers()])
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return [loss.nats.detach(), loss.aux.detach(), dropped, *grads]


def compare(
    rank: int,
    world: int,
    settings: dict[str, Any],
    layout: dict[str, int],
    recompute: bool,
    along: Along = "samples",
    policies: Sequence[str] = POLICIES,
) -> None:
    topology = Topology.from_sizes(**layout, timeout_s=30) if world > 1 else Topology()
    config = ModelConfig(**settings)
    torch.manual_seed(0)
    model = Transformer(config, topology, recompute=recompute, dtype=torch.double)
    workload = block_workload(config, topology.ep.size, topology.esp.size, topology.mp.size, 8)
    for policy in policies:
        other = copy.deepcopy(model)
        blocks = other.pipeline_blocks(along)
        plan, buckets = plan_step(other, topology, policy, COSTS, workload, limit=4, blocks=blocks)
        recorder = Recorder(rank)
        other.record(recorder)
        for step in range(2):
            seed = 10 * step + topology.dp.index
            want, got = run(model, config, 3, seed, None), run(other, config, 3, seed, buckets)
            for one, right in zip(got, want, strict=True):
                assert (one is None) == (right is None)
                if one is not None and right is not None:
                    torch.testing.assert_close(one, right, rtol=1e-10, atol=1e-10)
        done = [(span.kind, span.chunk, span.layer, span.phase) for span in recorder.timeline().spans]
        assert all(done.count(task[:4]) == 2 for task in plan)


@pytest.mark.parametrize(
    ("settings", "recompute"),
    [
        (GPT, True),
        (BERT, False),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in ((GPT, False), (BERT, True), *(({**GPT, "gate": "hash", "k": 1}, how) for how in (False, True)))
        ),
    ],
    ids=["gpt-again", "bert", "gpt", "bert-again", "hash", "hash-again"],
)
def test_micro_batches_equal_whole_batch(settings: dict[str, Any], recompute: bool) -> None:
    compare(0, 1, settings, {}, recompute)


@pytest.mark.slow
def test_micro_batches_equal_whole_batch_on_four_ranks(cluster: Cluster) -> None:
    cluster.run(4, compare, GPT, dict(ep=2, esp=2, mp=2), False, "samples", ("joint",))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [dict(ep=2, esp=2, mp=2), dict(ep=4), dict(ep=2, mp=4)], ids=str)
@pytest.mark.parametrize("settings", [GPT, BERT], ids=["gpt", "bert"])
def test_every_policy_equals_whole_batch_on_four_ranks(
    cluster: Cluster, settings: dict[str, Any], layout: dict[str, int]
) -> None:
    cluster.run(4, compare, settings, layout, False)


def test_micro_batches_with_dense_last_block() -> None:
    compare(0, 1, {**GPT, "layers": 3, "moe_every": 2}, {}, False)


@pytest.mark.parametrize(
    ("positions", "moe_every"),
    [("rope", 1), ("learned", 2), *(pytest.param(*of, marks=pytest.mark.slow) for of in (("rope", 2), ("learned", 1)))],
)
def test_position_chunks_equal_whole_batch(positions: str, moe_every: int) -> None:
    compare(0, 1, {**GPT, "positions": positions, "layers": 4, "moe_every": moe_every}, {}, False, "positions")


@pytest.mark.slow
def test_position_chunks_equal_whole_batch_on_ranks(cluster: Cluster) -> None:
    cluster.run(2, compare, {**GPT, "k": 1, "bias": True}, dict(ep=2), True, "positions")


def test_unsplittable_models_raise() -> None:
    with pytest.raises(ConfigError, match="no experts"):
        Transformer(ModelConfig(**{**GPT, "moe_every": 3})).pipeline_blocks()
    with pytest.raises(ConfigError, match="along positions"):
        Transformer(ModelConfig(**BERT)).pipeline_blocks("positions")
    with pytest.raises(ConfigError, match="looks at whole batches"):
        Transformer(ModelConfig(**{**GPT, "gate": "expert_choice"})).pipeline_blocks()


TOKENS = 2 * 16


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"k": 2, "capacity_factor": 1.5}, 3 * TOKENS),
        ({"k": 2, "capacity_factor": None}, 2 * TOKENS),
        ({"k": 2, "capacity_factor": 1.5, "order": "dropless"}, 2 * TOKENS),
        ({"gate": "switch", "k": 2, "capacity_factor": 1.0}, TOKENS),
        ({"gate": "expert_choice", "k": 2, "capacity_factor": 0.5}, TOKENS),
        ({"gate": "expert_choice", "k": 2, "capacity_factor": 0.5, "order": "dropless"}, TOKENS),
        ({"gate": "softmoe", "gate_options": {"slots": 3}}, 8 * 3),
    ],
    ids=str,
)
def test_block_workload_row_count(settings: dict[str, Any], rows: int) -> None:
    config = ModelConfig(batch=2, seq_len=16, experts=8, **settings)
    assert block_workload(config, 4, 1, 1, 4).rows == pytest.approx(rows)
    # Doubling an expert's shards doubles the tokens it receives.
    assert block_workload(config, 4, 2, 1, 4).rows == pytest.approx(2 * rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_expert_flop_equals_parameters_times_rows(activation: str) -> None:
    """A gated activation adds a third product, whichever --expert it is combined with."""
    config = ModelConfig(expert="ffn", activation=activation, layers=1)
    expert = make_experts(config)
    expert.setup(config.model_dim, Place(), device="meta")
    work = block_workload(config, 1, 1, 1, 4)
    elements = sum(p.numel() for p in expert.parameters())
    assert work.volumes()["expert"] == pytest.approx(2 * work.rows * elements)
