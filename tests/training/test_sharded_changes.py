"""Parameters that a user changes, in any way and at any time: the replicas of experts are updated."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.experts.networks import Experts, FeedForward
from fusedmoe.gates import TopK
from fusedmoe.layers.moe import MoELayer
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import Transformer
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.training import ShardedExperts
from tests.cluster import Cluster
from tests.marks import slowly
from tests.training.placed import (
    AUTO,
    EXACT,
    HECATE,
    Model,
    Plain,
    Use,
    compare_results,
    optimizer_of,
    owners_of,
    results_of,
    square,
    tokens,
    train_step,
)


def change_all_parameters(model: torch.nn.Module) -> None:
    """Change every parameter without a trace visible to autograd."""
    for number, parameter in enumerate(model.parameters()):
        parameter.data.mul_(0.7 + 0.05 * (number % 5)).add_(0.01)


def evaluate(model: Model, topology: Topology, step: int) -> Tensor:
    with torch.no_grad():
        return model(tokens(topology.rank, step))


def forward_and_backward(model: Model, topology: Topology, step: int) -> Tensor:
    loss = square(model(tokens(topology.rank, step)))
    loss.backward()
    return loss.detach()


def change_after_evaluation(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    seen = evaluate(model, topology, 4)
    change_all_parameters(model)
    return seen, evaluate(model, topology, 4), train_step(model, optimizer, topology, 5)


def change_after_inference(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    with torch.inference_mode():
        model(tokens(topology.rank, 4))
    change_all_parameters(model)
    return train_step(model, optimizer, topology, 5)


def change_after_forward(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    """A forward with gradients but without a backward."""
    model(tokens(topology.rank, 4))
    change_all_parameters(model)
    return train_step(model, optimizer, topology, 5)


def change_between_micro_batches(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    """Gradients exist, and none is changed."""
    first = forward_and_backward(model, topology, 4)
    change_all_parameters(model)
    return first, forward_and_backward(model, topology, 5)


def evaluate_between_micro_batches(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    found = [
        forward_and_backward(model, topology, 4),
        evaluate(model, topology, 5),
        forward_and_backward(model, topology, 6),
    ]
    optimizer.step()
    return [*found, evaluate(model, topology, 7), train_step(model, optimizer, topology, 8)]


def evaluate_before_backward(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    """Two forwards wait for their backward while inference forwards run."""
    ys = []
    for step in (4, 5):
        ys.append(model(tokens(topology.rank, step)))
        ys.append(evaluate(model, topology, step + 5))
    (square(ys[0]) + square(ys[2])).backward()
    optimizer.step()
    return [*ys[1::2], forward_and_backward(model, topology, 6)]


def update_without_optimizer(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    """Steps without an optimizer; gradients are zeroed after the forward, in place."""
    losses = []
    for step in range(4, 7):
        loss = square(model(tokens(topology.rank, step)))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss.backward()
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.grad)
        losses.append(loss.detach())
    return losses


class ThroughData(torch.optim.Optimizer):
    """Changes through `.data`, as old optimizers do, and some of today."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data - 0.1 * parameter.grad.data


def update_through_data(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    other = ThroughData(model.parameters())
    losses = []
    for step in range(4, 7):
        losses.append(forward_and_backward(model, topology, step))
        other.step()
    return losses


def swap_averaged_weights(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    """Other weights for an evaluation, and back again: by new memory, and in place."""
    found = []
    for in_place in (False, True):
        kept = [parameter.data.clone() for parameter in model.parameters()]
        for back in (False, True):
            for parameter, saved in zip(model.parameters(), kept, strict=True):
                value = saved if back else 0.5 * saved
                if in_place:
                    parameter.data.copy_(value)
                else:
                    parameter.data = value.clone()
            found.append(evaluate(model, topology, 4))
        found.append(train_step(model, optimizer, topology, 5))
    return found


def change_in_place(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    """In-place changes visible to autograd."""
    model(tokens(topology.rank, 4))
    with torch.no_grad():
        for layer in model.layers:
            layer.experts.w1.mul_(0.5)
    return train_step(model, optimizer, topology, 5)


def load_state_dict(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    state = deepcopy(model.state_dict())
    change_all_parameters(model)
    seen = evaluate(model, topology, 4)
    model.load_state_dict(state)
    return seen, evaluate(model, topology, 4), train_step(model, optimizer, topology, 5)


def call_layers_directly(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    """The layers are called separately, never the whole model."""

    def whole(step: int) -> Tensor:
        y = tokens(topology.rank, step)
        for linear, layer in zip(model.between, model.layers, strict=True):
            y = y + layer(torch.tanh(linear(y)) + 0.5)
        return y

    with torch.no_grad():
        found = [whole(4)]
    for step in (5, 6):
        change_all_parameters(model)
        found.append(whole(step))
        square(found[-1]).backward()
    return found


def call_one_layer_twice(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    """Shared weights: a layer runs twice in a forward."""
    kept = model.layers[1]
    model.layers[1] = model.layers[0]
    found = [forward_and_backward(model, topology, 4)]
    change_all_parameters(model)
    found.append(forward_and_backward(model, topology, 5))
    model.layers[1] = kept
    return found


def checkpoint_whole_model(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    found = []
    for step in (4, 5):
        x_SM = tokens(topology.rank, step).requires_grad_()
        y_SM = checkpoint(model, x_SM, use_reentrant=False)
        square(y_SM).backward()
        found.append(x_SM.grad)
        change_all_parameters(model)
    return found


def checkpoint_each_layer(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    """Layers run without gradients first, and with gradients in backward."""
    found = []
    for step in (4, 5):
        y = tokens(topology.rank, step).requires_grad_()
        found.append(y)
        for linear, layer in zip(model.between, model.layers, strict=True):
            y = y + checkpoint(layer, torch.tanh(linear(y)) + 0.5, use_reentrant=True)
        square(y).backward()
        change_all_parameters(model)
    return [x.grad for x in found]


USES: tuple[Use, ...] = (
    change_after_evaluation,
    change_after_inference,
    change_after_forward,
    change_between_micro_batches,
    evaluate_between_micro_batches,
    evaluate_before_backward,
    update_without_optimizer,
    update_through_data,
    swap_averaged_weights,
    change_in_place,
    load_state_dict,
    call_layers_directly,
    call_one_layer_twice,
    checkpoint_whole_model,
    checkpoint_each_layer,
)

# Costs of a machine on which replicas pay.
CALIBRATED: dict[str, Any] = {"calibrates": True, "costs": PlacementCosts(1e-3, 8, 100, 200, 1e6, 1e7)}


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Plain:
    return Plain(cluster)


@pytest.mark.parametrize(
    ("uses", "options", "recomputes"),
    [
        (USES[::5], {}, False),
        (USES[1::5], EXACT, False),
        # Each use with all options, and with and without recomputation.
        *slowly(
            *(
                (USES[(number + recomputes) % 2 :: 2], options, recomputes)
                for number, options in enumerate(({}, {"rematerialises": True}, CALIBRATED, EXACT, AUTO))
                for recomputes in (False, True)
            )
        ),
    ],
    ids=lambda value: (
        f"{len(value)} uses" if isinstance(value, tuple) else "-".join(value) if isinstance(value, dict) else str(value)
    ),
)
def test_replicas_follow_parameter_changes(
    cluster: Cluster, plain: Plain, uses: tuple[Use, ...], options: dict[str, Any], recomputes: bool
) -> None:
    compare_results(results_of(cluster, "fssdp", uses, HECATE | options, recomputes), plain.results(uses))


def change_during_forward(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, reshard=False, **HECATE)
    for step in range(2):
        train_step(model, optimizer, topology, step)
    assert all("+" in str(one) for one in sharded.placements)

    def spoil(*_: Any) -> None:
        with torch.no_grad():
            model.layers[1].experts.w1.mul_(0.5)

    model.layers[0].register_forward_hook(spoil)
    with pytest.raises(RankError) as caught:
        model(tokens(rank, 0))
    sharded.close()
    return str(caught.value)


def test_parameter_change_during_forward_is_rejected(cluster: Cluster) -> None:
    for message in cluster.run(2, change_during_forward):
        assert "experts have changed since their replicas started" in message and "not within one" in message


def sent_and_expected_bytes(rank: int, world: int) -> tuple[list[int], list[int]]:
    """Bytes that a rank sends in each of two parts and in an inference forward, and the bytes of replicas and
    gradients.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp", recomputes=True)
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, reshard=False, **HECATE)
    for step in range(2):
        train_step(model, optimizer, topology, step)
    sent = [sharded.sent_bytes]
    for step in (4, 5):
        forward_and_backward(model, topology, step)
        sent.append(sharded.sent_bytes)
    evaluate(model, topology, 6)
    sent.append(sharded.sent_bytes)
    here = sharded.placements
    sharded.close()
    copies = [
        (one.owners[expert], layer.placed.table.expert_bytes, ranks)
        for one, layer in zip(here, model.layers, strict=True)
        for expert, ranks in enumerate(one.replicas)
    ]
    there = sum(bytes_ * len(ranks) for owner, bytes_, ranks in copies if owner == rank)
    back = sum(bytes_ * (rank in ranks) for _, bytes_, ranks in copies)
    found = [after - before for before, after in zip(sent, sent[1:], strict=False)]
    return found, [there + back, there + back, there]


def test_each_forward_fetches_replicas_once(cluster: Cluster) -> None:
    """Parameters are sent once for a forward, its backward and its recomputation; gradients return once."""
    for sent, wanted in cluster.run(2, sent_and_expected_bytes):
        assert sent == wanted and wanted[0] > 0


def check_state_of_other_layers(rank: int, world: int) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **HECATE)
    for step in range(2):
        train_step(model, optimizer, topology, step)
    before = deepcopy(sharded.state_dict())
    for wrong in ({"history": [[[1.0] * 4] * 2]}, {"placements": ["0: 0 0\n1:"] * 2}, {"history": [[[1.0] * 8] * 3]}):
        with pytest.raises(ConfigError):
            sharded.load_state_dict(before | {"iteration": 70, "overlap": 3} | wrong)
        assert sharded.state_dict() == before
    sharded.load_state_dict(before | {"iteration": 70})
    assert sharded.iteration == 70
    sharded.close()


def test_state_of_other_layers_is_rejected_without_changes(cluster: Cluster) -> None:
    cluster.run(2, check_state_of_other_layers)


def small_transformer() -> torch.nn.Module:
    return Transformer(ModelConfig(layers=2, model_dim=8, heads=2, seq_len=4, hidden=4, experts=4))


@pytest.mark.parametrize(
    "make", [lambda: MoELayer(4, TopK(4), FeedForward(4)), small_transformer], ids=["layer", "model"]
)
def test_state_of_other_experts_is_rejected_without_changes(make: Any) -> None:
    model, other = make(), make()
    change_all_parameters(other)
    state = other.state_dict()
    of = [f"{name}." if name else "" for name, one in model.named_modules() if isinstance(one, Experts)]
    state[of[-1] + "numbers"] = torch.tensor([1, 0, 2, 3])
    before = deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="owners have changed"):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    state[of[-1] + "numbers"] = torch.tensor([0, 1, 2, 3])
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def train_with_averages(
    rank: int, world: int, placement: str
) -> tuple[list[Tensor], dict[tuple[int, int, str, int], Tensor]]:
    """Outputs of averaged models after eight steps, and their experts by model, layer, name, number.

    One average is passed as `averaged`; the rest, of the model and of an average, are not. A copy that is garbage does
    not count.
    """
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=20.0)
    model = Model(topology, placement)
    optimizer, means = optimizer_of(model), [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))]
    named = [AveragedModel(model)]
    sharded = ShardedExperts(model, optimizer, topology, averaged=named, **HECATE) if placement == "fssdp" else None
    before = owners_of(model)
    for step in range(8):
        train_step(model, optimizer, topology, step)
        if step == 2:
            means += [AveragedModel(model), AveragedModel(means[0].module)]
            spare = deepcopy(model)
            spare.circle = [spare]
            del spare
        for mean in (*means[:2], *named):
            mean.update_parameters(model)
        for mean in means[2:]:
            mean.update_parameters(means[0].module)
    means += named
    with torch.no_grad():
        outputs = [mean(tokens(rank, 9)) for mean in means]
    found = {
        (number, at, name, expert): row.detach()
        for number, mean in enumerate(means)
        for at, layer in enumerate(mean.module.layers)
        for name, parameter in layer.experts.named_parameters()
        for expert, row in zip(layer.experts.own_numbers or layer.experts.place.numbers, parameter, strict=True)
    }
    if sharded is not None:
        assert all(owners_of(mean.module) == owners_of(model) != before for mean in means)
        sharded.close()
    return outputs, found


@pytest.mark.slow
def test_averaged_weights_follow_expert_owners(cluster: Cluster) -> None:
    ours, wanted = (cluster.run(2, train_with_averages, placement) for placement in ("fssdp", "ep"))
    for of in (ours, wanted):
        of[0][1].update(of[1][1])  # rank 1's experts to rank 0's: their owners may differ
    for (outputs, experts), (outputs_there, experts_there) in zip(ours, wanted, strict=True):
        torch.testing.assert_close(outputs, outputs_there, rtol=1e-10, atol=1e-12)
        for key in experts.keys() & experts_there.keys():
            torch.testing.assert_close(experts[key], experts_there[key], rtol=1e-10, atol=1e-12)
    assert ours[0][1].keys() == wanted[0][1].keys() and len(ours[0][1]) == 4 * 8 * 6


def error_of_independent_copy(rank: int, world: int, kind: str) -> str:
    """A copy that is trained, or that one rank alone has, is unaffected by its experts' moves."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=20.0)
    model = Model(topology, "fssdp")
    optimizer, sharded = (made := optimizer_of(model)), ShardedExperts(model, made, topology, **HECATE)
    kept = [deepcopy(model)] if kind == "trained" or rank == 1 else []
    if kind == "trained":
        kept[0](tokens(rank, 0)).sum().backward()
    before = owners_of(model)
    with pytest.raises(ConfigError) as caught:
        for step in range(8):
            train_step(model, optimizer, topology, step)
    assert owners_of(model) == before
    sharded.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("on one rank", "on all ranks"), *slowly(("trained", "trained by itself.*ShardedExperts of its own"))],
)
def test_independent_model_copies_are_rejected(cluster: Cluster, kind: str, text: str) -> None:
    for message in cluster.run(2, error_of_independent_copy, kind):
        assert re.search(text, message), message
