"""All ranks issue their collectives in one order, over all communicators at once (`fusedmoe/runtime/nccl.md`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.schedule import Schedule
from fusedmoe.models.transformer import Transformer
from fusedmoe.schedule.policies import POLICIES, layer_policies
from fusedmoe.schedule.task import Task
from fusedmoe.training import clip_grad_norm, plan_step, sync_gradients
from fusedmoe.training.gradient_buckets import GradientBuckets
from tests.cluster import Cluster
from tests.layers.test_pipeline import L, M, make_blocks
from tests.layers.test_pipeline_plans import COSTS as BLOCK_COSTS
from tests.layers.test_pipeline_plans import workload
from tests.marks import slowly
from tests.runtime.issue_order import Issue, check, fake_streams, random_delays, recorded
from tests.training.test_step_plan import CONFIG, COSTS, WORK

TOKENS = [11, 0, 23, 1]


def layers_in_a_step(topology: Topology, policy: str) -> None:
    """A model whose layers follow a step plan, with gradient buckets during and alongside the passes."""
    torch.manual_seed(3)
    model = Transformer(CONFIG, topology, dtype=torch.float64)
    _, buckets = plan_step(model, topology, policy, COSTS, WORK, limit=4)
    for seed in (1, 2):
        tokens = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(seed + topology.dp.index))
        buckets.open()
        loss = model(tokens, tokens)
        (loss.nats + 0.1 * loss.aux).backward()
        sync_gradients(model, topology, buckets=buckets)
        clip_grad_norm(model, topology, 1.0)


def blocks_in_micro_batches(topology: Topology, policy: str) -> None:
    """Ranks with different numbers of samples, one without any."""
    blocks = fusedmoe.pipeline(make_blocks("topk", 2, 1.0, topology))
    _, buckets = plan_step(blocks, topology, policy, BLOCK_COSTS, workload(topology, 2), limit=4)
    for _ in range(2):
        buckets.open()
        z = blocks(torch.randn(3 - topology.rank % 4, L, M, dtype=torch.float64).requires_grad_())
        (z.sum() + sum(layer.aux_loss for layer in blocks.experts)).backward()
        sync_gradients(blocks, topology, buckets=buckets)


def layers_with_schedules(topology: Topology, policy: str) -> None:
    torch.manual_seed(7)
    layers = [
        fusedmoe.MoELayer(
            M,
            fusedmoe.gates.TopK(8, 2, 1.25),
            fusedmoe.experts.SwiGLU(8),
            topology=topology,
            dtype=torch.float64,
            schedule=Schedule(policy, degrees),
            dispatch="2dh" if number else "direct",
        )
        for number, degrees in enumerate([(3, 2), (1, 4)])
    ]
    x = torch.randn(TOKENS[topology.rank], M, dtype=torch.float64).requires_grad_()
    (layers[1](layers[0](x)).sum() + layers[0].aux_loss).backward()
    sync_gradients(nn.ModuleList(layers), topology)


class Communicating(fusedmoe.hooks.Hooks):
    """Hooks that call a collective over the job's default group, on the thread of the link."""

    def before_dispatch(self, rows: Tensor, context: fusedmoe.hooks.HookContext) -> None:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, group=dist.group.WORLD)

    def after_combine(self, rows: Tensor, context: fusedmoe.hooks.HookContext) -> None:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.SUM, group=dist.group.WORLD)


def layers_with_replicas_and_hooks(topology: Topology, policy: str) -> None:
    """Experts that are replicated on other ranks while tokens are sent; and a layer whose hooks communicate."""
    torch.manual_seed(7)
    layers = [
        fusedmoe.MoELayer(
            M,
            fusedmoe.gates.TopK(8, 2),
            fusedmoe.experts.SwiGLU(8),
            topology=topology,
            dtype=torch.float64,
            schedule=Schedule(policy, (3, 3)),
            **options,
        )
        for options in ({"placement": "fssdp"}, {"hooks": [Communicating()]})
    ]
    for _ in range(2):
        x = torch.randn(TOKENS[topology.rank], M, dtype=torch.float64).requires_grad_()
        (layers[1](layers[0](x)).sum() + layers[0].aux_loss).backward()
        sync_gradients(nn.ModuleList(layers), topology)


Step = Callable[[Topology, str], None]
STEPS: dict[str, tuple[Step, list[str]]] = {
    "layers": (layers_in_a_step, [*layer_policies()]),
    "blocks": (blocks_in_micro_batches, [*POLICIES]),
    "schedules": (layers_with_schedules, [*layer_policies()]),
    "replicas": (layers_with_replicas_and_hooks, [*layer_policies()]),
}


def issues_by_policy(
    rank: int, world: int, what: str, ep: int, esp: int, streams: bool, only: Sequence[str] = ()
) -> dict[str, list[Issue]]:
    """Issues by policy, for all policies of the step, or for `only` these."""
    step, policies = STEPS[what]
    mp = 2 if what == "layers" and world == 4 else 1
    topology = Topology.from_sizes(ep, esp, mp, ranks_per_node=2, timeout_s=30)
    found = {}
    for policy in only or policies:
        with recorded() as issues, fake_streams() if streams else nullcontext(), random_delays(rank):
            step(topology, policy)
        found[policy] = issues
    return found


def assert_same_issue_order(found_W: list[dict[str, list[Issue]]], streams: bool) -> None:
    for policy, issues in found_W[0].items():
        assert len({issue.group for issue in issues}) > 1 and len(issues) > 20, policy
        check([found[policy] for found in found_W], streams)


@pytest.mark.parametrize(
    ("what", "streams"),
    [
        pytest.param(what, streams, marks=() if place == 2 and streams else pytest.mark.slow)
        for place, what in enumerate(STEPS)
        for streams in (True, False)
    ],
)
def test_two_ranks_agree_on_issue_order(cluster: Cluster, what: str, streams: bool) -> None:
    assert_same_issue_order(cluster.run(2, issues_by_policy, what, 2, 1, streams), streams)


# Each pair of a step, a layout and a way to run.
@pytest.mark.parametrize(
    ("what", "ep", "esp", "streams"),
    slowly(
        *(
            (what, *sizes, (row + column) % 2 == 0)
            for row, what in enumerate(STEPS)
            for column, sizes in enumerate([(2, 2), (4, 1), (2, 1), (1, 4)])
        )
    ),
)
def test_four_ranks_agree_on_issue_order(cluster: Cluster, what: str, ep: int, esp: int, streams: bool) -> None:
    assert_same_issue_order(cluster.run(4, issues_by_policy, what, ep, esp, streams), streams)


def test_check_detects_different_order_on_one_rank(cluster: Cluster) -> None:
    """Any two neighbours of different communicators, swapped on one rank only."""
    found_W = [found["fsmoe"] for found in cluster.run(2, issues_by_policy, "blocks", 2, 1, True, ("fsmoe",))]
    check(found_W, one_thread=True)
    ours, theirs = found_W
    pairs = [i for i in range(len(theirs) - 1) if theirs[i].group != theirs[i + 1].group]
    assert len(pairs) > 4
    for i in pairs:
        swapped = [*theirs[:i], theirs[i + 1], theirs[i], *theirs[i + 2 :]]
        with pytest.raises(AssertionError, match="in different orders"):
            check([ours, swapped], one_thread=True)
    with pytest.raises(AssertionError, match="number"):
        check([ours, [theirs[0]._replace(operation="broadcast"), *theirs[1:]]], one_thread=True)
    with pytest.raises(AssertionError, match="ranks issued"):
        check([ours, theirs[:-1]], one_thread=True)
    with pytest.raises(AssertionError, match="rank 1 issues collectives from"):
        check([ours, [theirs[0]._replace(thread="another"), *theirs[1:]]], one_thread=True)


def issues_with_overlapped_buckets(rank: int, world: int) -> list[Issue]:
    """Gradient buckets started alongside other work, with a collective of the caller in between."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    model = nn.ModuleList(block.experts for block in make_blocks("topk", 2, None, topology))
    buckets = GradientBuckets(model, topology)
    with recorded() as issues, fake_streams():
        buckets.open()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        buckets.begin([Task("gradient-all-reduce", 0, 0, "backward", 10**6)])
        topology.require_equal_facts({}, "test")
        buckets.wait()
        buckets.close()
    return issues


def test_overlapped_buckets_are_issued_before_later_collectives(cluster: Cluster) -> None:
    issues_W = cluster.run(2, issues_with_overlapped_buckets)
    check(issues_W, one_thread=True)
    operations = [issue.operation for issue in issues_W[0]]
    # Each follows its envelope; objects are inside theirs.
    assert operations[1].startswith("all-reduce") and not operations[-1].startswith("all-reduce")
