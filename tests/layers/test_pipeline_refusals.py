"""Invalid input of blocks on one rank, and invalid results or exceptions of dense parts.

All ranks end, and may continue.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import experts, gates
from fusedmoe.blocks.forward import BlocksForward
from fusedmoe.blocks.pipeline import PipelinedBlocks
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.dispatcher import is_recomputing
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import save_communication
from tests.cluster import Cluster
from tests.layers.test_pipeline import Attention, L, M, make_blocks
from tests.marks import slowly

Give = Callable[[Tensor, Tensor], Any]


class Meddled(Attention):
    """Dense part that changes its result from a given call on, if requested."""

    def __init__(self) -> None:
        super().__init__()
        self.give: Give | None = None
        self.calls = 0

    def forward(self, x_BLM: Tensor) -> Any:
        y_BLM, u_BLM = super().forward(x_BLM)
        self.calls += 1
        return (y_BLM, u_BLM) if self.give is None or self.calls < 2 else self.give(y_BLM, u_BLM)


def make(topology: Topology, degrees: tuple[int, int]) -> PipelinedBlocks:
    blocks = make_blocks("topk", 2, 1.0, topology)
    return fusedmoe.pipeline([(Meddled().double(), block.experts) for block in blocks], degrees)


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "wider": (lambda x: torch.cat([x, x[..., :1]], -1), rf"input of shape \[4, {L}, {M + 1}\].* model_dim = {M}"),
    "a number": (lambda x: x.sum(), r"input of shape \[\]"),
    "a row": (lambda x: x[0, 0], rf"input of shape \[{M}\]; it takes at least 2 dimensions"),
    "float32": (lambda x: x.float(), "input of torch.float32 but its experts are torch.float64; convert"),
    "integers": (lambda x: x.long(), "input of torch.int64; it takes floating-point numbers"),
    "complex": (lambda x: x.to(torch.complex128), "input of torch.complex128; it takes floating-point numbers"),
    "elsewhere": (lambda x: x.to("meta"), r"input on meta but its experts are on cpu; move one with .to\(\)"),
    "a list": (lambda x: list(x), "input that is list; it takes a tensor"),
    "nan": (lambda x: x.index_fill(0, torch.tensor(3), torch.nan), "router logits that are NaN or infinite"),
}

GIVEN: dict[str, tuple[Give, str]] = {
    "a tensor": (lambda y, u: y, "the dense part Meddled gave a Tensor"),
    "fewer positions": (lambda y, u: (y, u[:, 1:]), "u of the dense part Meddled is"),
    "float32": (lambda y, u: (y, u.float()), "Meddled gave u of torch.float32 but its experts are torch.float64"),
    "integers": (lambda y, u: (y.long(), u), "Meddled gave y of torch.int64"),
    "elsewhere": (lambda y, u: (y.to("meta"), u), "y of the dense part Meddled is on meta, x on cpu"),
    "no tensor": (lambda y, u: (y, None), "Meddled gave u that is NoneType"),
    "nan": (lambda y, u: (y, u * torch.nan), "router logits that are NaN"),
}


def step(run: PipelinedBlocks, x_BLM: Tensor) -> list[Tensor]:
    """Return a batch's result and gradients."""
    run.zero_grad()
    x_BLM = x_BLM.clone().requires_grad_()
    z_BLM = run(x_BLM)
    (z_BLM.square().sum() + sum(layer.aux_loss for layer in run.experts)).backward()
    return [z_BLM.detach(), *(one.grad.clone() for one in (x_BLM, *run.parameters()) if one.grad is not None)]


def check_error_and_continue(
    rank: int,
    world: int,
    culprit: int,
    sizes: tuple[int, int],
    degrees: tuple[int, int],
    hooked: bool = False,
    compiled: bool = False,
) -> None:
    topology = Topology.from_sizes(*sizes, timeout_s=60.0)
    run = make(topology, degrees)
    if hooked:  # the blocks run without overlap
        run.experts[0].gate.register_forward_hook(lambda gate, given, routing: None)
    if compiled:
        run.set_plan(None)
        run.forward = torch.compile(run.forward, backend="eager")  # type: ignore[method-assign]
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    wanted, others = step(run, x_BLM), ""
    if rank != culprit:
        others = f"ended because rank {culprit} failed in the check of the layer's input: "

    def refused(batch: Any, text: str) -> None:
        with pytest.raises(RankError, match=f"^rank {rank}: {others}.*{text}"):
            run(batch)
        for dense in run.dense:
            dense.give = None
        found = step(run, x_BLM)
        assert len(found) == len(wanted) and all(map(torch.equal, found, wanted)), text

    for change, text in WRONG.values():
        refused(change(x_BLM) if rank == culprit else x_BLM, text)
    for number, (give, text) in enumerate(GIVEN.values()):
        if rank == culprit:
            dense = run.dense[number % 2]
            dense.give, dense.calls = give, 2 - degrees[0]  # in the middle of a batch
        refused(x_BLM, text)
    assert topology.world.board.read() is None


@pytest.mark.parametrize(("world", "sizes"), [(2, (2, 1)), *slowly((2, (1, 2)), (4, (2, 2)))])
@pytest.mark.parametrize("degrees", [(2, 2), pytest.param((1, 1), marks=pytest.mark.slow)])
def test_error_on_one_rank_leaves_next_batch_correct(
    cluster: Cluster, world: int, sizes: tuple[int, int], degrees: tuple[int, int]
) -> None:
    cluster.run(world, check_error_and_continue, random.randrange(world), sizes, degrees)


@pytest.mark.parametrize(("world", "sizes"), [(2, (2, 1)), *slowly((2, (1, 2)), (4, (2, 2)))])
def test_error_on_one_rank_with_hooks(cluster: Cluster, world: int, sizes: tuple[int, int]) -> None:
    cluster.run(world, check_error_and_continue, random.randrange(world), sizes, (1, 1), True)


@pytest.mark.slow
def test_error_on_one_rank_in_compiled_blocks(cluster: Cluster) -> None:
    cluster.run(2, check_error_and_continue, random.randrange(2), (2, 1), (1, 1), False, True)


def test_invalid_input_in_world_of_one_raises() -> None:
    run = make(Topology(), (2, 2))
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    wanted = step(run, x_BLM)
    for change, text in WRONG.values():
        with pytest.raises(ConfigError, match=text):
            run(change(x_BLM))
    for give, text in GIVEN.values():
        run.dense[1].give = give
        with pytest.raises(ConfigError, match=text):
            run(x_BLM)
        run.dense[1].give = None
    assert all(map(torch.equal, step(run, x_BLM), wanted))


def test_pipeline_in_activation_checkpoints() -> None:
    """A recomputation uses the plans of its forward pass; a selective checkpoint is rejected."""
    few, many = (make(Topology(), (degree, degree)) for degree in (1, 3))
    x_BLM = torch.randn(4, L, M, dtype=torch.float64, requires_grad=True)

    def gradients(plans: Any, later: Any, **how: Any) -> list[Tensor]:
        many.set_plan(plans)
        y_BLM = checkpoint(many, x_BLM, **how) if how else many(x_BLM)
        many.set_plan(later)
        x_BLM.grad = None
        many.zero_grad()
        y_BLM.square().sum().backward()
        assert x_BLM.grad is not None
        return [y_BLM.detach(), x_BLM.grad, *(one.grad for one in many.parameters() if one.grad is not None)]

    plans_of_many = many.plans
    right = gradients(few.plans, None)
    for reentrant in (False, True):
        for plans, later in (
            (few.plans, plans_of_many),
            (plans_of_many, few.plans),
            (few.plans, None),
            (None, few.plans),
        ):
            for found, wanted in zip(gradients(plans, later, use_reentrant=reentrant), right, strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="pipeline: a selective activation checkpoint"):
        many.set_plan(few.plans)
        checkpoint(many, x_BLM, use_reentrant=False, context_fn=save_communication)


def test_checkpoint_recomputes_blocks_before_their_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint recomputes blocks before their backward, rather than inside it.

    Recomputing inside would run once per micro-batch, at a different point on each rank. The computation after the
    blocks in the checkpoint causes the one recomputation.
    """
    ran, run = [], BlocksForward.run

    def counted(self: BlocksForward) -> Any:
        ran.append(is_recomputing())
        return run(self)

    monkeypatch.setattr(BlocksForward, "run", counted)
    pipe, last = make(Topology(), (2, 3)), nn.Linear(M, M, dtype=torch.float64)
    x_BLM = torch.randn(4, L, M, dtype=torch.float64, requires_grad=True)
    found = []
    for model in (pipe, nn.Sequential(pipe, last)):
        for around in (False, True):
            model.zero_grad()
            x_BLM.grad = None
            y_BLM = checkpoint(model, x_BLM, use_reentrant=False) if around else model(x_BLM)
            y_BLM.square().sum().backward()
            assert x_BLM.grad is not None
            found.append([y_BLM.detach(), x_BLM.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert ran == [False] * 4 + [True]
    for first, second in (found[:2], found[2:]):
        assert all(map(torch.equal, first, second))


def fail_on_mp_rank(rank: int, world: int, culprit: int, mp_input: str) -> None:
    """An MP rank fails: its peers may be waiting in dense parts instead of an exchange, so there is no next batch."""
    topology = Topology.from_sizes(2, 1, 2, timeout_s=60.0)
    parts: dict[str, Any] = {"topology": topology, "mp_input": mp_input, "dtype": torch.double}
    run = fusedmoe.pipeline([(Attention().double(), fusedmoe.MoELayer(M, gates.TopK(8), experts.SwiGLU(4), **parts))])
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    run(x_BLM)
    run(x_BLM[..., 1:] if rank == culprit else x_BLM)


@pytest.mark.parametrize("mp_input", ["split", "replicated"])
def test_invalid_input_of_mp_rank_ends_job(cluster: Cluster, mp_input: str) -> None:
    culprit = random.randrange(2)
    text = rf"pipeline got input of shape \[4, {L}, {M - 1}\]"
    for rank, outcome in enumerate(cluster.outcomes(2, fail_on_mp_rank, culprit, mp_input)):
        said = "" if rank == culprit else f".* ended because rank {culprit} failed in the check of the layer's input: "
        assert outcome.error is not None and outcome.error[0] == "RankError"
        assert re.search(f"^rank {rank}: {said}{text}", outcome.error[1]), outcome.error[1]


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no way back")


def no_way_there(y: Tensor, u: Tensor) -> Any:
    raise ValueError("no way there")


def no_way_back(y: Tensor, u: Tensor) -> Any:
    return y, NoWayBack.apply(u)


def fail_in_dense_part(
    rank: int, world: int, culprit: int, degrees: tuple[int, int], give: Give
) -> list[tuple[str, str]]:
    """A dense part raises on one rank; the ranks that caught the exception then try to continue."""
    run = make(Topology.from_sizes(world, timeout_s=60.0), degrees)
    x_BLM = torch.randn(4, L, M, dtype=torch.double)
    step(run, x_BLM)
    if rank == culprit:
        run.dense[1].give = give
    endings = []
    for _ in range(2):
        run.dense[1].calls = 2
        with pytest.raises((ValueError, RankError)) as caught:
            step(run, x_BLM)
        endings.append((caught.type.__name__, str(caught.value)))
        run.dense[1].give = None
    return endings


ENDINGS = [((2, 2), no_way_there), ((1, 1), no_way_back)]
MORE = [
    pytest.param((1, 1), no_way_there, marks=pytest.mark.slow),
    pytest.param((2, 2), no_way_back, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("degrees", "give"), [ENDINGS[0], *slowly(*ENDINGS[1:]), *MORE])
def test_exception_in_dense_part_ends_job(cluster: Cluster, degrees: tuple[int, int], give: Give) -> None:
    """An exception in a dense part ends the job immediately, so no exchange of the next batch pairs with this one's."""
    culprit, said = random.randrange(2), give.__name__.replace("_", " ")
    for rank, (first, second) in enumerate(cluster.run(2, fail_in_dense_part, culprit, degrees, give)):
        told = f"^rank {rank}: .* group .* ended because rank {culprit} failed in pipeline: ValueError: {said}"
        if rank == culprit:
            assert first == ("ValueError", said)
        else:
            assert first[0] == "RankError" and re.search(told, first[1])
        assert second[0] == "RankError" and re.search(told, second[1])


def check_sharded_dense_part(rank: int, world: int) -> list[bool]:
    topology = Topology.from_sizes(world, timeout_s=60.0)
    plain, sharded = (make(topology, (1, 1)) for _ in range(2))
    fully_shard(sharded.dense[0])
    return [run._blocks[0].dense.has_collectives for run in (plain, sharded)]


def test_rejection_does_not_wait_for_fsdp_gather(cluster: Cluster) -> None:
    """The gathering ranks would not reach the exchange that carries the refusal."""
    assert cluster.run(2, check_sharded_dense_part) == [[False, True]] * 2
