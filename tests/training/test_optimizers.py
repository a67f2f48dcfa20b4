"""Optimizers of whole matrices and tensors over split experts: right, or refused before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import FeedForward
from fusedmoe.experts.split_optimizers import _is_elementwise
from fusedmoe.gates import TopK
from fusedmoe.layers.moe import MoELayer
from fusedmoe.placement.hecate import LayerLoads
from fusedmoe.placement.placement import Placement
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.training import (
    PerMatrix,
    ShardedExperts,
    Survival,
    clip_grad_norm,
    distributed_data_parallel,
    load_checkpoint,
    optimizers,
    save_checkpoint,
    sync_gradients,
)
from fusedmoe.training.survival.node_memory import NodeMemory
from tests.cluster import Cluster
from tests.training.placed import DIM, EXPERTS, HECATE, Model, tokens

COSTS = PlacementCosts(1e-3, 8, 100, 200, 1e6, 1e7)
Muon = partial(PerMatrix, kind=torch.optim.Muon, lr=0.02)
slow = partial(pytest.param, marks=pytest.mark.slow)


class Eight(torch.optim.Optimizer):
    """Momentum in 8 bits with a scale for each block and a table, as in bitsandbytes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.update({parameters[n]: dict(values) for n, values in state_dict["state"].items()})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "table": torch.linspace(-1, 1, 256), "bits": torch.full_like(p, 127).byte()}
                    state["scale"] = torch.zeros(-(-p.numel() // 8))
                scale = state["scale"].repeat_interleave(8)[: p.numel()].view_as(p)
                mean = 0.9 * state["table"][state["bits"].long()] * scale + p.grad
                blocks = nn.functional.pad(mean.flatten(), (0, -p.numel() % 8)).view(-1, 8)
                state["scale"].copy_(blocks.abs().amax(1))
                bits = (blocks / state["scale"].clamp(min=1e-30)[:, None] * 127.5 + 127.5).round().clamp(0, 255)
                state["bits"] = bits.flatten()[: p.numel()].view_as(p).byte()
                state["count"] += 1
                p.sub_(group["lr"] * mean)


def hugging_face_adafactor(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(params, **settings)


KINDS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.01}),
    "fused": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "eight": (Eight, {"lr": 0.02}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "hugging face": (hugging_face_adafactor, {"beta1": 0.9}),
}


def alternate_single_owner(now: LayerLoads) -> Placement:
    """Every second step one rank owns all experts, and the other ranks hold no expert state."""
    placement = Placement.even(now.placement.num_ranks, EXPERTS)
    if now.step % 2 == 0:
        return placement
    return Placement(placement.num_ranks, (placement.num_ranks - 1,) * EXPERTS)


class SingleMatrices:
    """The definition of `PerMatrix`: each matrix is a separate parameter, with a permanent optimizer of its own."""

    def __init__(self, parameters: list[nn.Parameter], kind: str) -> None:
        self._stacks = {
            p: [nn.Parameter(matrix.clone()) for matrix in p.detach().reshape(-1, *p.shape[-2:])] for p in parameters
        }
        of, settings = KINDS[kind]
        self.optimizer = of([matrix for stack in self._stacks.values() for matrix in stack], **settings)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, stack in self._stacks.items():
            for matrix, gradient in zip(stack, parameter.grad.reshape(-1, *parameter.shape[-2:]), strict=True):
                matrix.grad = gradient.clone()
        self.optimizer.step()
        for parameter, stack in self._stacks.items():
            parameter.copy_(torch.stack(list(stack)).reshape(parameter.shape))


@pytest.mark.parametrize("kind", ["muon", "adafactor", "eight", "adamw", "fused", slow("hugging face")])
def test_per_matrix_equals_separate_matrices(kind: str) -> None:
    """Three and four dimensions, not contiguous, with a changing learning rate and a reloaded state."""
    of, settings = KINDS[kind]
    shapes = [(5, 3, 4), (2, 2, 6, 3), (1, 1, 7), (4, 5, 3)]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    values[3] = values[3].transpose(1, 2)
    ours, plain = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    assert not ours[3].is_contiguous()
    wanted, found = SingleMatrices(plain, kind), PerMatrix(ours, of, **settings)
    for step in range(8):
        for ours_p, plain_p in zip(ours, plain, strict=True):
            ours_p.grad = torch.randn_like(ours_p)
            plain_p.grad = ours_p.grad.clone()
        if kind != "hugging face" and step == 2:
            wanted.optimizer.param_groups[0]["lr"] = found.param_groups[0]["lr"] = 0.003
        if step == 4:
            state, found = found.state_dict(), PerMatrix(ours, of, **settings)
            found.load_state_dict(state)
        wanted.step()
        assert found.step(lambda: 3) == 3
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    assert all(not torch.equal(p, value) for p, value in zip(ours, values, strict=True))


def test_per_matrix_rejects_unsupported_parameters_and_state() -> None:
    matrices = nn.Parameter(torch.randn(3, 4, 5))
    with pytest.raises(ConfigError, match=r"rows, columns\] and was given one of shape \[3, 4\].*biases"):
        PerMatrix([matrices, nn.Parameter(torch.randn(3, 4))], torch.optim.AdamW)
    with pytest.raises(ConfigError, match="Blocks keeps q as Quantised"):
        PerMatrix([matrices], Blocks)
    saved = PerMatrix([matrices], torch.optim.SGD, lr=0.1, momentum=0.9)
    matrices.grad = torch.ones_like(matrices)
    saved.step()
    other = PerMatrix([nn.Parameter(torch.randn(2, 4, 5))], torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ConfigError, match=r"momentum_buffer of shape \[3, 4, 5\] is of other experts"):
        other.load_state_dict(saved.state_dict())


class Quantised(Tensor):
    """A tensor subclass, like torchao's states."""


class Blocks(torch.optim.SGD):
    """Stores state of that class, with the parameters' shape."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["q"] = parameter.detach().clone().as_subclass(Quantised)
        return super().step(closure)


class BatchedMuon(torch.optim.Optimizer):
    """Orthogonalises matrices in batches, like other Muon implementations."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                u, _, v = torch.linalg.svd(mean, full_matrices=False)
                p.sub_(group["lr"] * u @ v)


class ByNorm(torch.optim.AdamW):
    """Scales steps by the norm of the whole parameter, as LAMB does; its state is shaped like the parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        super().step(closure)
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old + (p - old) * old.norm())


@pytest.mark.parametrize(
    ("optimizer", "dim", "parts"),
    [
        (torch.optim.AdamW, 0, True),
        (partial(torch.optim.AdamW, lr=0.0), 1, True),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 2, True),
        (torch.optim.Adafactor, 0, False),
        (torch.optim.Adafactor, 1, False),
        (torch.optim.LBFGS, 0, False),
        (BatchedMuon, 0, True),
        (BatchedMuon, 1, False),
        (ByNorm, 0, False),
        (partial(ByNorm, lr=0.0), 0, False),
        (Eight, 0, True),
        # Row and column state belongs to a matrix; only scaling and clipping use the stack.
        slow(
            partial(hugging_face_adafactor, lr=0.1, relative_step=False, scale_parameter=False, clip_threshold=1e9),
            0,
            True,
        ),
        slow(partial(hugging_face_adafactor, lr=0.1, relative_step=False, scale_parameter=False), 0, False),
        slow(partial(hugging_face_adafactor, lr=0.1, relative_step=False, clip_threshold=1e9), 0, False),
        slow(
            partial(hugging_face_adafactor, lr=0.1, relative_step=False, scale_parameter=False, clip_threshold=1e9),
            1,
            False,
        ),
    ],
)
def test_elementwise_optimizers_are_detected(
    optimizer: Callable[..., torch.optim.Optimizer], dim: int, parts: bool
) -> None:
    parameter = nn.Parameter(torch.randn(2, 2, 2))
    assert _is_elementwise(optimizer([parameter]), parameter, dim) == parts


def train(model: Model, step_all: Callable[[], None], topology: Topology, steps: range) -> None:
    """Train the tokens of two ranks on any number of ranks."""
    for step in steps:
        model.zero_grad()
        own = [r for r in range(2) if r % topology.size == topology.rank]
        x_SM = torch.cat([torch.zeros(0, DIM, dtype=torch.float64), *(tokens(r, step + 1) for r in own)])
        (model(x_SM).square().sum() / 50).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if ".experts." not in name and topology.size > 1:
                torch.distributed.all_reduce(parameter.grad)
        step_all()


def parameters_of(model: Model) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of the experts, and the remaining parameters, with biases."""
    matrices = [p for layer in model.layers for p in (layer.experts.w1, layer.experts.w2)]
    return matrices, [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]


def values_of(model: Model) -> dict[Any, Tensor]:
    """The parameters of each expert that this rank owns."""
    return {
        (layer, name, number): parameter.detach()[row].clone()
        for layer, experts in enumerate(layer.experts for layer in model.layers)
        for row, number in enumerate(experts.place.numbers if experts.own_numbers is None else experts.own_numbers)
        for name, parameter in experts.named_parameters()
    }


def train_reference(kind: str, steps: int) -> dict[Any, Tensor]:
    """Train on one rank, by the definition."""
    model = Model(Topology(), "ep")
    matrices, rest = parameters_of(model)
    plain, others = SingleMatrices(matrices, kind), torch.optim.AdamW(rest, lr=0.01)

    def step_all() -> None:
        plain.step()
        others.step()

    train(model, step_all, Topology(), range(steps))
    return values_of(model)


def resume_and_train(rank: int, world: int, kind: str, placement: str, steps: range, path: str, options: Any) -> Any:
    """Resume from the checkpoint at `path`, and save the end there."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0) if world > 1 else Topology()
    model = Model(topology, placement)
    matrices, rest = parameters_of(model)
    of, settings = KINDS[kind]
    both = [PerMatrix(matrices, of, **settings), torch.optim.AdamW(rest, lr=0.01)]
    sharded = ShardedExperts(model, both, topology, **options) if placement == "fssdp" else None
    if steps.start:
        extra = load_checkpoint(path, model, both, topology)
        if sharded is not None and extra:
            sharded.load_state_dict(extra)
    train(model, lambda: [one.step() for one in both] and None, topology, steps)
    save_checkpoint(path, model, both, topology, extra={} if sharded is None else sharded.state_dict())
    moved = 0 if sharded is None else sharded.moved_bytes
    if sharded is not None:
        assert sharded.memory().optimizer >= sharded.memory().parameters / 10
        sharded.close()
    return values_of(model), moved


@pytest.mark.parametrize(
    ("kind", "placement", "options", "worlds"),
    [
        ("muon", "fssdp", HECATE, (2, 1)),
        slow("muon", "fssdp", HECATE, (2, 4, 2)),
        slow("muon", "fssdp", HECATE | {"reshard": False}, (4, 2)),
        slow("muon", "ep", {}, (4, 2, 1)),
        slow("adafactor", "fssdp", {"policy": alternate_single_owner, "costs": COSTS}, (2, 4, 2)),
        slow("eight", "fssdp", {"policy": alternate_single_owner, "costs": COSTS}, (4, 1, 2)),
        slow("hugging face", "fssdp", {"policy": alternate_single_owner, "costs": COSTS}, (2,)),
        slow("adafactor", "fssdp", HECATE, (4, 2, 1)),
        slow("adafactor", "fssdp", HECATE | {"rematerialises": True}, (1, 4, 2)),
        slow("adafactor", "ep", {}, (1, 2, 4)),
        slow("eight", "fssdp", HECATE, (2, 4, 1)),
        slow("eight", "ep", {}, (4, 1, 2)),
        slow("hugging face", "fssdp", HECATE, (4, 2)),
    ],
)
def test_per_matrix_over_ranks_equals_one_rank(
    cluster: Cluster, tmp_path: Path, kind: str, placement: str, options: Any, worlds: tuple[int, ...]
) -> None:
    """Experts change owners, and checkpoints resume on other numbers of ranks: equal to one rank by the definition."""
    path, steps, moved = str(tmp_path / "checkpoint"), 7, 0
    for turn, world in enumerate(worlds):
        turns = range(steps * turn, steps * (turn + 1))
        ranks = cluster.run(world, resume_and_train, kind, placement, turns, path, options)
        found = [item for values, _ in ranks for item in values.items()]
        assert len(found) == EXPERTS * 6, "each once: w1 and w2 of both layers, b1 and b2 of one"
        torch.testing.assert_close(dict(found), train_reference(kind, turns.stop), rtol=1e-10, atol=1e-12)
        moved += sum(bytes_ for _, bytes_ in ranks)
    assert (moved > 0) == (placement == "fssdp" and options.get("reshard", True)), "experts took their state with them"


def train_with_clipping(rank: int, world: int, ep: int, placement: str, wraps: bool) -> dict[Any, Tensor]:
    """Steps of clipped gradients with tokens on each rank; experts on one group of ranks or two."""
    topology = Topology.from_sizes(ep=ep, ranks_per_node=1, timeout_s=30.0)
    model = Model(topology, placement)
    matrices, rest = parameters_of(model)
    both = [PerMatrix(matrices, torch.optim.Muon, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
    sharded = ShardedExperts(model, both, topology, **HECATE) if placement == "fssdp" else None
    whole = distributed_data_parallel(model, topology) if wraps else model
    for step in range(7):
        model.zero_grad()
        (whole(tokens(rank, step)).square().sum() / 50).backward()
        sync_gradients(whole, topology)
        clip_grad_norm(model, topology, 1.0)
        for optimizer in both:
            optimizer.step()
    if sharded is not None:
        assert sharded.moved_bytes > 0
        sharded.close()
    return values_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [False, True])
def test_replicated_experts_stay_equal(cluster: Cluster, wraps: bool) -> None:
    ranks = cluster.run(4, train_with_clipping, 4, "ep", False)
    of_four = {key: value for values in ranks for key, value in values.items()}
    for placement in ("ep", "fssdp"):
        first, second, *copies = cluster.run(4, train_with_clipping, 2, placement, wraps)
        torch.testing.assert_close([first, second], copies, rtol=0, atol=0)
        torch.testing.assert_close({**first, **second}, of_four, rtol=1e-10, atol=1e-12)


def resume_from_node_memory(rank: int, world: int, folder: str, node: int | None, last: int) -> dict[Any, Tensor]:
    """Store each step in the memory of two nodes, and resume from it; then all ranks are on one node."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=30.0)
    model = Model(topology, "fssdp")
    matrices, rest = parameters_of(model)
    of, settings = KINDS["adafactor"]
    both = [PerMatrix(matrices, of, **settings), torch.optim.AdamW(rest, lr=0.01)]
    sharded = ShardedExperts(model, both, topology, **HECATE)
    path = Path(folder, str(rank // 2 if node is None else node))
    path.mkdir(exist_ok=True)
    survival = Survival(topology, NodeMemory(os.getppid(), path))
    extra = survival.restore(model, both)
    if extra is not None:
        sharded.load_state_dict(extra)
    assert sharded.iteration == (0 if node is None else 6)
    for step in range(sharded.iteration, last):
        train(model, lambda: [one.step() for one in both] and None, topology, range(step, step + 1))
        survival.refresh(step + 1, model, both, sharded.state_dict())
    sharded.close()
    return values_of(model)


@pytest.mark.slow
def test_training_resumes_after_node_loss(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run(4, resume_from_node_memory, str(tmp_path), None, 6)
    found = cluster.run(2, resume_from_node_memory, str(tmp_path), 1, 8)
    torch.testing.assert_close({**found[0], **found[1]}, train_reference("adafactor", 8), rtol=1e-10, atol=1e-12)


def errors_before_first_step(rank: int, world: int) -> list[str]:
    said = []
    topology = Topology.from_sizes(ep=world, timeout_s=20.0)

    def step(optimizer_of: Callable[..., Any], over: Topology = topology, wraps: bool = False) -> None:
        layer = MoELayer(4, TopK(4), FeedForward(4), topology=over, mp_input="split")
        optimizer = optimizer_of(layer)
        model = distributed_data_parallel(layer, over) if wraps else layer
        model(torch.ones(3, 4) + rank).sum().backward()
        sync_gradients(model, over)
        before = [p.detach().clone() for p in layer.parameters()]
        try:
            optimizer.step()
        except ConfigError as error:
            said.append(str(error))
            assert all(torch.equal(p, old) for p, old in zip(layer.parameters(), before, strict=True))
            with pytest.raises(ConfigError):  # the second attempt, too
                optimizer.step()
            return
        said.append("")

    shards = Topology.from_sizes(esp=world, timeout_s=20.0)
    step(lambda layer: torch.optim.Adafactor(layer.parameters()))
    step(lambda layer: torch.optim.Adafactor(layer.parameters()), wraps=True)
    step(lambda layer: ByNorm([layer.experts.b1]))
    step(lambda layer: Muon([layer.experts.w1, layer.experts.w2]), over=shards)
    for optimizer_of in (
        lambda layer: torch.optim.AdamW(layer.parameters()),
        lambda layer: torch.optim.Adafactor([p for n, p in layer.named_parameters() if "experts" not in n]),
        lambda layer: BatchedMuon([layer.experts.w1, layer.experts.w2]),
        lambda layer: Muon([layer.experts.w1, layer.experts.w2]),
    ):
        step(optimizer_of)
    return said


def test_whole_tensor_optimizers_are_rejected_before_first_step(cluster: Cluster) -> None:
    for said in cluster.run(2, errors_before_first_step):
        assert all("Adafactor looks at more of experts." in text and "PerMatrix" in text for text in said[:2])
        assert "ByNorm looks at more of experts.b1 than one rank has: ep splits" in said[2] and "AdamW" in said[2]
        assert "PerMatrix looks at more of experts.w1 than one rank has: esp splits" in said[3]
        assert said[4:] == [""] * 4


def unchecked_before_and_after_step(rank: int, world: int) -> list[bool]:
    optimizers._unchecked_parameters.clear()  # of models of earlier tests
    topology = Topology.from_sizes(ep=world, timeout_s=20.0)
    layer = MoELayer(4, TopK(4), FeedForward(4), topology=topology)
    optimizer, hooked = torch.optim.SGD(layer.parameters(), 0.1), []
    for _ in range(2):
        layer(torch.ones(3, 4) + rank).sum().backward()
        sync_gradients(layer, topology)
        hooked.append(bool(_global_optimizer_pre_hooks))
        optimizer.step()
    return hooked


def test_optimizers_are_checked_at_first_step_only(cluster: Cluster) -> None:
    assert cluster.run(2, unchecked_before_and_after_step) == [[True, False]] * 2


def check_rejections_outside_step(rank: int, world: int, path: str) -> None:
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=20.0)
    model = Model(topology, "fssdp")
    for reshard in (True, False):
        with pytest.raises(ConfigError, match=r"Adafactor looks at more of layers\.0\.experts"):
            ShardedExperts(model, torch.optim.Adafactor(model.parameters()), topology, reshard=reshard, **HECATE)
    matrices, rest = parameters_of(model)
    with pytest.raises(ConfigError, match="Blocks keeps q as Quantised.*reshard=False"):
        ShardedExperts(model, Blocks(model.parameters(), lr=0.1), topology, **HECATE)
    with pytest.raises(ConfigError, match=r"PerMatrix does not have the experts' b1.*in a list"):
        ShardedExperts(model, Muon(matrices), topology, **HECATE)
    with pytest.raises(ConfigError, match=r"PerMatrix\+AdamW: two optimizers have the same parameter"):
        ShardedExperts(model, [Muon(matrices), torch.optim.AdamW(model.parameters())], topology, **HECATE)
    ShardedExperts(model, [Muon(matrices), torch.optim.AdamW(rest)], topology, **HECATE).close()
    blocks = Blocks(matrices, lr=0.1)
    for matrix in matrices:
        matrix.grad = torch.ones_like(matrix)
    blocks.step()
    with pytest.raises(ConfigError, match="Blocks keeps q as Quantised.*bitsandbytes"):
        save_checkpoint(path + "-not", model, blocks, topology)
    with pytest.raises(ConfigError, match=r"b1\.row_var has shape \[8, 1\].*cannot be split over ranks"):
        load_checkpoint(path, model, torch.optim.Adafactor(model.parameters()), topology)
    load_checkpoint(path, model, None, topology)
    with pytest.raises(ConfigError, match="no optimizer in the list"):
        save_checkpoint(path + "-not", model, [], topology)
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(ConfigError, match=r"\[2, 3, 4\] that FSDP shards"):
        PerMatrix([nn.Parameter(distribute_tensor(torch.ones(2, 3, 4), mesh, [Shard(0)]))], torch.optim.Muon)
    shards = Model(over := Topology.from_sizes(esp=world, timeout_s=20.0), "ep")
    with pytest.raises(ConfigError, match=r"\[8, 6, 6\] is split along dimension 1 \(2 ranks\).*PerMatrix"):
        load_checkpoint(path + "-muon", shards, Muon(parameters_of(shards)[0]), over)


def test_resharding_and_loading_reject_whole_tensor_optimizers(cluster: Cluster, tmp_path: Path) -> None:
    model = Model(Topology(), "ep")
    optimizer = torch.optim.Adafactor(model.parameters())
    model(tokens(0, 0)).sum().backward()
    optimizer.step()
    save_checkpoint(tmp_path / "one", model, optimizer, Topology())
    muon = Muon(parameters_of(model)[0])
    muon.step()
    save_checkpoint(tmp_path / "one-muon", model, muon, Topology())
    cluster.run(2, check_rejections_outside_step, str(tmp_path / "one"))
