"""Features of training loops besides forward, backward and step: equal with experts under a placement and without."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from bench.placement.baselines import shadow, swap
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import Experts
from fusedmoe.layers.schedule import Schedule
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.schedule.machines import TESTBEDS
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
    experts_of,
    optimizer_of,
    owners_of,
    results_of,
    square,
    tokens,
    train_step,
)

CHEAP = PlacementCosts(1e-3, 8, 100, 200, 1e6, 1e7)

REMATERIALISES: dict[str, Any] = {"rematerialises": True}


def two_forwards_one_backward(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    ys = [model(tokens(topology.rank, step)) for step in (4, 5)]
    (square(ys[0]) + square(ys[1])).backward()


def evaluate_before_backward(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    y = model(tokens(topology.rank, 4))
    with torch.no_grad():
        found = model(tokens(topology.rank, 5))
    square(y).backward()
    return found


def backward_twice(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    loss = square(model(tokens(topology.rank, 4)))
    loss.backward(retain_graph=True)
    loss.backward()


def call_layers_after_evaluation(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    """The model runs without gradients; then its layers are called directly, with gradients."""
    with torch.no_grad():
        model(tokens(topology.rank, 4))
    y = tokens(topology.rank, 5)
    for linear, layer in zip(model.between, model.layers, strict=True):
        y = y + layer(torch.tanh(linear(y)) + 0.5)
    square(y).backward()


def modify_outputs_in_place(model: Model, _: torch.optim.Optimizer, topology: Topology) -> Any:
    handles = [layer.register_forward_hook(lambda _, __, y: y.mul_(2)) for layer in model.layers]
    square(model(tokens(topology.rank, 4))).backward()
    for handle in handles:
        handle.remove()


def run_inference(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    with torch.inference_mode():
        found = model(tokens(topology.rank, 4)).clone()
    train_step(model, optimizer, topology, 5)
    return found


def copy_model(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    square(model(tokens(topology.rank, 3))).backward()
    other = deepcopy(model)
    mean = optimizer_of(other)
    for step in (4, 5):
        other.zero_grad()
        square(other(tokens(topology.rank, step))).backward()
        mean.step()
    with torch.no_grad():
        found = other(tokens(topology.rank, 6))
    train_step(model, optimizer, topology, 7)
    return found


def freeze_experts(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    first, second = model.layers
    first.experts.requires_grad_(False)
    second.experts.w1.requires_grad_(False)
    for step in (4, 5):
        train_step(model, optimizer, topology, step)
    for layer in (first, second):
        layer.experts.requires_grad_(True)
    train_step(model, optimizer, topology, 6)


def zero_gradients_in_place(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    for step in (4, 5):
        optimizer.zero_grad(set_to_none=False)
        square(model(tokens(topology.rank, step))).backward()
        optimizer.step()


def scale_loss(model: Model, optimizer: torch.optim.Optimizer, topology: Topology) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for step in (4, 5):
        optimizer.zero_grad()
        scaler.scale(square(model(tokens(topology.rank, step)))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 32.0, "no step was left out"


USES: tuple[Use, ...] = (
    two_forwards_one_backward,
    evaluate_before_backward,
    backward_twice,
    call_layers_after_evaluation,
    modify_outputs_in_place,
    run_inference,
    copy_model,
    freeze_experts,
    zero_gradients_in_place,
    scale_loss,
)


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Plain:
    return Plain(cluster)


@pytest.mark.parametrize(
    ("uses", "options"),
    [
        (USES[1::4], REMATERIALISES),
        *(pytest.param(USES, options, marks=pytest.mark.slow) for options in ({}, REMATERIALISES, EXACT, AUTO)),
    ],
    ids=lambda value: f"{len(value)} uses" if isinstance(value, tuple) else "-".join(value),
)
def test_training_loop_features_equal_no_placement(
    cluster: Cluster, plain: Plain, uses: tuple[Use, ...], options: dict[str, Any]
):
    compare_results(results_of(cluster, "fssdp", uses, HECATE | options), plain.results(uses))


def train_steps(topology: Topology, steps: int, **shape: Any) -> tuple[Model, torch.optim.Optimizer, ShardedExperts]:
    """A model under Hecate's placements after the given number of steps."""
    model = Model(topology, "fssdp", **shape)
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **HECATE)
    for step in range(steps):
        train_step(model, optimizer, topology, step)
    return model, optimizer, sharded


def error_of_late_backward(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model, optimizer, sharded = train_steps(topology, 3)
    optimizer.zero_grad()
    square(model(tokens(rank, 3))).backward()
    loss = square(model(tokens(rank, 3)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="between a forward") as caught:
        loss.backward()
    sharded.close()
    return str(caught.value)


def test_backward_after_optimizer_step_raises(cluster: Cluster):
    for message in cluster.run(2, error_of_late_backward):
        assert "optimizer.step()" in message


def train_uneven_experts(rank: int, world: int, experts: int, schedule: Schedule | str) -> dict[str, Any]:
    """After placements and owners have changed."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=2, timeout_s=20.0)
    model, optimizer, sharded = train_steps(topology, 7, experts=experts, schedule=schedule)
    optimizer.zero_grad()
    square(model(tokens(rank, 7))).backward()
    sharded.close()
    dense = {name: value for name, value in model.state_dict().items() if ".experts." not in name}
    return {"dense": dense, "experts": experts_of(model), "moved": sharded.moved_bytes}


BY_COST = Schedule("fsmoe", costs=TESTBEDS["B"].costs)


@pytest.mark.parametrize(
    ("world", "experts", "schedule"),
    [(3, 8, "off"), *slowly((4, 2, "off"), (4, 2, BY_COST))],
    ids=["3-8", "4-2", "4-2-by-cost"],
)
def test_experts_not_divisible_by_ranks_equal_one_rank(
    cluster: Cluster, world: int, experts: int, schedule: Schedule | str
):
    """Gradients of experts equal those of one rank with all experts and tokens; some ranks may own none."""
    found = cluster.run(world, train_uneven_experts, experts, schedule)
    assert sum(one["moved"] for one in found) > 0 or experts < world
    whole = Model(Topology(), "ep", experts=experts)
    whole.load_state_dict(found[0]["dense"], strict=False)
    parameters = [dict(layer.experts.named_parameters()) for layer in whole.layers]
    owned = [
        ((number, name, expert), pair)
        for rank in found
        for number, layer in enumerate(rank["experts"])
        for name, by_number in layer.items()
        for expert, pair in by_number.items()
    ]
    assert len(dict(owned)) == len(owned) == sum(experts * len(of) for of in parameters)
    with torch.no_grad():
        for (number, name, expert), (value, _) in owned:
            parameters[number][name][expert] = value
    sum(square(whole(tokens(rank, 7))) for rank in range(world)).backward()
    for (number, name, expert), (_, grad) in owned:
        torch.testing.assert_close(grad, parameters[number][name].grad[expert], rtol=1e-10, atol=1e-12)


def load_first_state(rank: int, world: int) -> tuple[bool, str]:
    """Whether this rank owns other experts than at first, and the error of loading the first state then."""
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=20.0)
    model, optimizer, sharded = train_steps(topology, 0)
    first, owners = deepcopy(model.state_dict()), owners_of(model)
    assert [tuple(first[f"layers.{layer}.experts.numbers"].tolist()) for layer in range(2)] == owners
    for step in range(7):
        train_step(model, optimizer, topology, step)
    now = deepcopy(model.state_dict())
    unmoved = Model(topology, "ep")
    unmoved.load_state_dict(first)
    for name, value in unmoved.state_dict().items():
        assert torch.equal(value, first[name])
    said = ""
    for other, state in ((model, first), (unmoved, now)):
        before = deepcopy(other.state_dict())
        try:
            other.load_state_dict(state)
        except ConfigError as error:
            said += str(error)
            for name, value in other.state_dict().items() if other is model else ():
                assert torch.equal(value, before[name]), name
    model.load_state_dict(now)
    for name, value in model.state_dict().items():
        assert torch.equal(value, now[name])
    changed = owners_of(model) != owners
    sharded.close()
    return changed, said


def test_state_dict_of_other_owners_is_rejected(cluster: Cluster):
    found = cluster.run(2, load_first_state)
    assert any(changed for changed, _ in found)
    for changed, said in found:
        assert said.count("owners have changed") == said.count("load_checkpoint identify") == 2 * changed


class Rows(torch.optim.SGD):
    """Stores a number for each row of a matrix, as Adafactor does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.detach().square().mean(-1)
        return super().step(closure)


class Late(Rows):
    """An optimizer that a trial step cannot classify: it stores nothing before its second step."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure) if self.steps > 1 else None


def errors_of_unmovable_states(rank: int, world: int) -> list[str]:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    optimizer = Rows(model.parameters(), lr=0.01)
    said = []
    smart: dict[str, Any] = {"policy": swap, "costs": CHEAP}
    for options in (HECATE, smart):
        with pytest.raises(ConfigError) as caught:
            ShardedExperts(model, optimizer, topology, **options)
        said.append(str(caught.value))
        for of in (torch.optim.Adafactor, torch.optim.LBFGS):
            with pytest.raises(ConfigError, match=f"{of.__name__} looks at more of"):
                ShardedExperts(model, of(model.parameters(), lr=0.01), topology, **options)
    shadowing: dict[str, Any] = {"policy": "ep", "calibrates": shadow, "costs": CHEAP}
    for options in ({"reshard": False, **HECATE}, shadowing):
        sharded = ShardedExperts(model, optimizer, topology, **options)
        with pytest.raises(ConfigError) as caught:
            ShardedExperts(model, optimizer, topology, **HECATE)
        assert "close() it" in str(caught.value)
        for step in range(7):
            train_step(model, optimizer, topology, step)
        sharded.close()
    without = torch.optim.SGD([one for name, one in model.named_parameters() if "experts" not in name], lr=0.1)
    with pytest.raises(ConfigError, match="the SGD does not have the experts' "):
        ShardedExperts(model, without, topology, **HECATE)
    late = Late(model.parameters(), lr=0.01)
    late.steps = 1
    sharded = ShardedExperts(model, late, topology, **HECATE)
    with pytest.raises(ConfigError) as caught:
        train_step(model, late, topology, 0)
    sharded.close()
    said.append(str(caught.value))
    parametrize.register_parametrization(model.layers[1].experts, "w2", torch.nn.Identity())
    with pytest.raises(
        ConfigError, match=r"has parametrizations\.w2\.original besides, .*say so before .*original'\] ="
    ):
        ShardedExperts(model, optimizer, topology, reshard=False)
    return said


class Put(torch.nn.Module):
    """A module of its own around the experts, as peft creates for `target_parameters`."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.base_layer = experts


def check_unsupported_parametrizations(rank: int, world: int) -> None:
    """After ShardedExperts was made, by a module without a part for each expert, and around the experts."""
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    optimizer, experts = optimizer_of(model), model.layers[0].experts
    sharded = ShardedExperts(model, optimizer, topology, **HECATE)
    parametrize.register_parametrization(experts, "w2", torch.nn.Identity())
    experts.shardings["parametrizations.w2.original"] = experts.shardings.pop("w2")
    with pytest.raises(ConfigError, match="have come or gone since .* close"):
        model(tokens(rank, 0))
    sharded.close()
    ShardedExperts(model, optimizer, topology, **HECATE).close()
    experts.scale = torch.nn.Parameter(torch.ones(3))
    experts.shardings["scale"] = {"ep": 0}
    with pytest.raises(ConfigError, match="FeedForward has scale besides"):
        ShardedExperts(model, optimizer, topology, **HECATE)
    del experts.scale, experts.shardings["scale"]
    model.layers[1].experts = Put(model.layers[1].experts)
    with pytest.raises(ConfigError, match="were put into a Put, .*target_parameters.*parametrize instead"):
        ShardedExperts(model, optimizer, topology, **HECATE)


def test_unsupported_parametrizations_are_rejected(cluster: Cluster) -> None:
    cluster.run(2, check_unsupported_parametrizations)


@pytest.mark.slow
def test_row_wise_optimizer_state_is_rejected(cluster: Cluster):
    for states in cluster.run(2, errors_of_unmovable_states):
        assert len(states) == 3 and all("keeps rows of" in state for state in states)
        assert all(" of shape " in state and "reshard=False" in state for state in states)


def losses_without_sharded_experts(rank: int, world: int) -> list[Tensor]:
    """Before `ShardedExperts` is made, and after it is closed."""
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    losses = []
    for placement in ("ep", "fssdp"):
        model = Model(topology, placement)
        optimizer = optimizer_of(model)
        for step in range(6):
            if step == 2 and placement == "fssdp":
                sharded = ShardedExperts(model, optimizer, topology, **HECATE)
            if step == 4 and placement == "fssdp":
                sharded.close()
            losses.append(train_step(model, optimizer, topology, step))
    return losses


@pytest.mark.slow
def test_layers_run_before_and_after_sharded_experts(cluster: Cluster):
    for losses in cluster.run(2, losses_without_sharded_experts):
        torch.testing.assert_close(losses[6:], losses[:6], rtol=1e-10, atol=1e-12)


def train_with_reentrant_checkpoint(rank: int, world: int) -> int:
    topology = Topology.from_sizes(ep=world, timeout_s=60.0)
    model = Model(topology, "fssdp")
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **HECATE)
    for layer in model.layers:

        def with_loss(x: Tensor, layer: Any = layer, inner: Any = layer.forward) -> tuple[Tensor, Tensor]:
            return inner(x), layer.aux_loss

        layer.forward = lambda x, inner=with_loss: checkpoint(inner, x, use_reentrant=True)[0]
    for step in range(2):
        train_step(model, optimizer, topology, step)
    copies = sum(int(one.extra_W().sum()) for one in sharded.placements)
    sharded.close()
    return copies


def test_loads_are_counted_under_reentrant_checkpointing(cluster: Cluster):
    assert min(cluster.run(2, train_with_reentrant_checkpoint)) > 0
