"""Properties of every gate: shapes, dtypes, edge cases, errors, seeds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedmoe import orders
from fusedmoe.errors import ConfigError
from fusedmoe.gates import (
    GATES,
    BatchPrioritised,
    DeepSeekV3,
    ExpertChoice,
    Gate,
    GShard,
    Hash,
    Routing,
    SoftMoE,
    Switch,
    TopK,
    XMoE,
)
from fusedmoe.gates.base import SoftRouting
from fusedmoe.gates.topk import top_experts
from tests.layers.gate_cases import LEARNED, ROUTED, TOP_K, ids, make, parts
from tests.marks import slowly


@pytest.fixture(autouse=True)
def seed() -> None:
    print("seed", torch.seed())  # shown on failure


def check_routing(routing: Routing | SoftRouting, gate: Gate, S: int, dtype: torch.dtype) -> None:
    assert routing.aux_loss.shape == () and routing.aux_loss.dtype == dtype and routing.aux_loss.isfinite()
    if isinstance(routing, SoftRouting):
        N = gate.experts * routing.slots
        assert routing.dispatch_SN.shape == routing.combine_SN.shape == (S, N)
        assert routing.dispatch_SN.dtype == routing.combine_SN.dtype == dtype
        assert routing.logits_SE is not None and routing.logits_SE.shape == (S, N)
        return
    K = gate.experts if isinstance(gate, ExpertChoice) else gate.k
    assert routing.expert_SK.shape == routing.weight_SK.shape == (S, K)
    assert routing.expert_SK.dtype == torch.int64 and routing.weight_SK.dtype == dtype
    assert not routing.expert_SK.is_floating_point() and routing.weight_SK.isfinite().all()
    assert ((routing.expert_SK >= -1) & (routing.expert_SK < gate.experts)).all()
    for row in routing.expert_SK.tolist():
        chosen = [e for e in row if e >= 0]
        assert len(set(chosen)) == len(chosen)
        assert isinstance(gate, ExpertChoice) or len(chosen) == K
    assert routing.capacity == gate.row_capacity(S)
    if routing.logits_SE is not None:
        assert routing.logits_SE.shape == (S, gate.experts) and not routing.logits_SE.requires_grad
    assert (routing.priority_S is not None) == isinstance(gate, BatchPrioritised)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("S, E, k", [(0, 4, 2), (1, 4, 2), (5, 1, 1), (7, 4, 4), (33, 6, 3), (3, 40, 36)])
@pytest.mark.parametrize("name", GATES)
def test_routing_shapes_and_ranges(name: str, S: int, E: int, k: int, training: bool) -> None:
    gate = make(name, E, k, dim=5).train(training)
    x = torch.randn(S, 5, requires_grad=True)
    routing = gate(x)
    check_routing(routing, gate, S, torch.float32)
    total = sum(part.sum() for part in parts(routing))
    if name in LEARNED:
        total.backward()
        assert x.grad is not None and x.grad.isfinite().all()
        for parameter in gate.parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(
    "given, inside",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_router_computes_in_at_least_float32(name: str, given: torch.dtype, inside: torch.dtype) -> None:
    gate = make(name, 4, 2, dim=8).eval()
    exact = copy.deepcopy(gate).double()
    x = torch.randn(20, 8, dtype=given, requires_grad=True)
    torch.manual_seed(3)
    routing = gate(x)
    torch.manual_seed(3)
    expected = exact(x.detach().double())
    check_routing(routing, gate, 20, inside)
    for part, want in zip(parts(routing), parts(expected), strict=True):
        torch.testing.assert_close(part.double(), want, rtol=1e-4, atol=1e-5)
    if name in LEARNED:
        parts(routing)[0].square().sum().backward()
        assert x.grad is not None and x.grad.dtype == given


@pytest.mark.parametrize("name", GATES)
def test_gates_with_bfloat16_parameters(name: str) -> None:
    gate = make(name, 4, 2, dim=8, dtype=torch.bfloat16)
    routing = gate(torch.randn(6, 8, dtype=torch.bfloat16))
    check_routing(routing, gate, 6, torch.float32)
    if name in LEARNED:
        sum(part.square().sum() for part in parts(routing)).backward()
        assert all(p.grad is None or p.grad.dtype == torch.bfloat16 for p in gate.parameters())


@pytest.mark.parametrize("name", LEARNED)
def test_autocast_does_not_change_routing(name: str) -> None:
    gate = make(name, 4, 2, dim=64)
    x = torch.randn(50, 64, requires_grad=True)

    def run(enabled: bool) -> list[torch.Tensor]:
        torch.manual_seed(5)
        gate.zero_grad()
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            routing = gate(x)
            # Backward also runs inside autocast, as in activation checkpointing.
            sum(part.square().sum() for part in parts(routing)).backward()
        gradients = [p.grad.clone() for p in gate.parameters() if p.grad is not None]
        return [*(part.detach() for part in parts(routing)), x.grad.clone(), *gradients]

    for with_autocast, without in zip(run(True), run(False), strict=True):
        assert with_autocast.dtype == torch.float32
        torch.testing.assert_close(with_autocast, without, rtol=0, atol=0)


@pytest.mark.parametrize("name", GATES)
def test_strided_input_equals_contiguous_input(name: str) -> None:
    gate = make(name, 4, 2, dim=6)
    wide = torch.randn(6, 24, dtype=torch.float64).t()[::2]
    assert not wide.is_contiguous()
    torch.manual_seed(1)
    strided = gate(wide)
    torch.manual_seed(1)
    contiguous = gate(wide.contiguous())
    for a, b in zip(parts(strided), parts(contiguous), strict=True):
        torch.testing.assert_close(a, b)
    if name in ROUTED:
        assert torch.equal(ids(strided), ids(contiguous))


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_input_keeps_ids_in_range(name: str, bad: float) -> None:
    gate = make(name, 6, 3, dim=4)
    x = torch.randn(9, 4)
    x[2] = bad
    x[5, 1] = bad
    routing = gate(x)
    if isinstance(routing, Routing):
        assert ((routing.expert_SK >= -1) & (routing.expert_SK < 6)).all()
    if name in LEARNED:
        assert routing.logits_SE is not None and not routing.logits_SE[2].isfinite().any()


@pytest.mark.parametrize("name", [name for name in TOP_K if name not in ("hash", "random")])
def test_equal_logits_choose_lowest_experts(name: str) -> None:
    gate = make(name, 8, 3, dim=4).eval()
    with torch.no_grad():
        for parameter in gate.parameters():
            if parameter.dim() == 2 and parameter.shape[0] == 8:
                parameter.copy_(parameter[:1].expand_as(parameter).clone())
    assert torch.equal(ids(gate(torch.randn(50, 4))), torch.arange(3).expand(50, 3))


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("training", [True, False])
def test_equal_seeds_give_equal_routing(name: str, training: bool) -> None:
    gate = make(name, 4, 2, dim=6).train(training)
    x = torch.randn(64, 6)
    torch.manual_seed(11)
    first = gate(x)
    torch.manual_seed(11)
    second = gate(x)
    for a, b in zip(parts(first), parts(second), strict=True):
        assert torch.equal(a, b)
    if name in ROUTED:
        assert torch.equal(ids(first), ids(second))


@pytest.mark.parametrize("name", GATES)
def test_only_the_stated_gates_draw_random_numbers(name: str) -> None:
    gate = make(name, 8, 2, dim=6)
    x = torch.randn(4, 6)
    for training in (True, False):
        gate.train(training)
        before = torch.get_rng_state()
        gate(x)
        drew = not torch.equal(before, torch.get_rng_state())
        assert drew == (name == "random" or (training and name in ("switch", "gshard")))


@pytest.mark.parametrize("name", GATES)
def test_initial_weights_depend_on_seed_only(name: str) -> None:
    def initial(**make_options: Any) -> list[torch.Tensor]:
        torch.manual_seed(21)
        gate = make(name, 4, 2)
        gate.setup(16, **make_options)
        return [p.detach() for p in gate.parameters()]

    reference = initial()
    for other in (initial(dtype=torch.float64), initial(device="cpu")):
        for a, b in zip(reference, other, strict=True):
            assert torch.equal(a, b.float())
    for a, b in zip(reference, initial(dtype=torch.bfloat16), strict=True):
        assert torch.equal(a.bfloat16(), b)
    with torch.device("meta"):
        assert all(p.is_meta for p in initial())
    names = [parameter_name for parameter_name, _ in make(name, 4, 2, dim=16).named_parameters()]
    for parameter_name, value in zip(names, reference, strict=True):
        assert (value.abs().max() > 0) != parameter_name.startswith("noise")


@pytest.mark.parametrize("name", GATES)
def test_setup_is_required_and_idempotent(name: str) -> None:
    gate = make(name, 4, 2)
    with pytest.raises(ConfigError, match=r"call setup\(model_dim\)"):
        gate(torch.randn(3, 5))
    gate.setup(5)
    parameters = dict(gate.named_parameters())
    gate.setup(5)
    assert all(parameters[n] is p for n, p in gate.named_parameters())
    with pytest.raises(ConfigError, match="already set up for model_dim = 5, got 6"):
        gate.setup(6)
    for bad in (torch.randn(3, 6), torch.randn(2, 3, 5), torch.zeros(3, 5, dtype=torch.int64)):
        with pytest.raises(ConfigError, match=r"input must be floats \[tokens, 5\]"):
            gate(bad)
    with pytest.raises(ConfigError, match="model_dim must be an integer of at least 1"):
        make(name, 4, 2).setup(0)


def test_state_dict_round_trip() -> None:
    for name in GATES:
        gate, other = make(name, 4, 2, dim=6), make(name, 4, 2, dim=6)
        other.load_state_dict(gate.state_dict())
        x = torch.randn(10, 6)
        torch.manual_seed(1)
        first = gate(x)
        torch.manual_seed(1)
        for a, b in zip(parts(first), parts(other(x)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    "make_bad, text",
    [
        (lambda: TopK(experts=0), "TopK gate: experts must be an integer of at least 1, got 0"),
        (lambda: TopK(experts=2.0), "experts must be an integer"),
        (lambda: TopK(experts=4, k=0), "k must be an integer of at least 1, got 0"),
        (lambda: TopK(experts=4, k=True), "k must be an integer of at least 1, got True"),
        (lambda: TopK(experts=4, k=5), "k = 5 is more than its 4 experts"),
        (lambda: TopK(experts=4, capacity_factor=0), "capacity_factor must be positive"),
        (lambda: TopK(experts=4, capacity_factor=math.nan), "capacity_factor must be positive"),
        (lambda: TopK(experts=4, noise=-1), "noise must be at least 0"),
        (lambda: TopK(experts=4, aux={"balanced": 1.0}), "'balanced' is not defined by this gate; defined: balance,"),
        (lambda: TopK(experts=4, aux={"z": math.inf}), "coefficient of 'z' must be finite"),
        (lambda: TopK(experts=4, aux={"importance_load": 1.0}), "pass noise > 0"),
        (lambda: Switch(experts=4, aux={"importance_load": 1.0}), "Switch gate: auxiliary loss 'importance_load'"),
        (lambda: Switch(experts=4, jitter=1), "jitter must be at least 0 and below 1"),
        (lambda: Hash(experts=4, k=5), "Hash gate: k = 5 is more than its 4 experts"),
        (lambda: XMoE(experts=4, proj_dim=0), "proj_dim must be an integer"),
        (lambda: XMoE(experts=4, temperature=0), "temperature must be at least 0.01"),
        (lambda: SoftMoE(experts=4, slots=0), "slots must be an integer"),
        (lambda: SoftMoE(experts=4, aux={"balance": 1.0}), "'balance' is not defined by this gate; defined: z"),
        (lambda: ExpertChoice(experts=4, capacity_factor=None), "capacity_factor determines how many tokens"),
        (lambda: DeepSeekV3(experts=4, k=2, groups=3), "4 experts do not divide into 3 groups"),
        (lambda: DeepSeekV3(experts=4, k=1, groups=2, groups_kept=3), "groups_kept = 3 is more than its 2 groups"),
        (lambda: DeepSeekV3(experts=8, k=3, groups=4, groups_kept=1), "k = 3 is more than the 2 experts of 1 groups"),
        (lambda: DeepSeekV3(experts=8, k=2, bias_rate=-0.1), "bias_rate must be at least 0"),
        (lambda: DeepSeekV3(experts=8, k=2, route_scale=0), "route_scale must be positive"),
    ],
)
def test_argument_error_names_argument(make_bad: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_bad()
    assert text in str(error.value)


def test_row_capacity_is_rounded_up() -> None:
    gate = TopK(experts=8, k=2, capacity_factor=1.25)
    assert [gate.row_capacity(S) for S in (0, 1, 8, 8192)] == [0, 1, 3, 2560]
    assert TopK(experts=2, k=1, capacity_factor=1.1).row_capacity(100) == 55  # just above 55 in floating point
    assert TopK(experts=8).row_capacity(100) is None
    assert SoftMoE(experts=8, slots=3).row_capacity(100) == 3


def test_only_whole_batch_gates_reject_splits() -> None:
    assert {name for name, gate in GATES.items() if not gate.splits} == {
        "softmoe",
        "expert_choice",
        "batch_prioritised",
    }


@pytest.mark.parametrize("name", [name for name in ROUTED if GATES[name].splits and name != "random"])
def test_split_batch_routes_like_whole_batch(name: str) -> None:
    gate = make(name, 6, 2, dim=8).eval()
    x = torch.randn(31, 8, dtype=torch.float64)
    whole = gate(x)
    halves = [gate(half) for half in x.split(16)]
    assert torch.equal(ids(whole), torch.cat([ids(half) for half in halves]))
    torch.testing.assert_close(whole.weight_SK, torch.cat([half.weight_SK for half in halves]))


@pytest.mark.parametrize("name", GATES)
def test_auxiliary_losses_are_weighted_sums(name: str) -> None:
    options: dict[str, Any] = {"noise": 1.0} if name in ("topk", "batch_prioritised") else {}
    gates = {term: make(name, 5, 2, aux={term: 1.0}, **options) for term in GATES[name].losses}
    if not gates:
        return
    both = make(name, 5, 2, aux={term: 0.5 + i for i, term in enumerate(gates)}, **options)
    both.setup(4)
    x = torch.randn(40, 4)

    def loss(gate: Gate) -> torch.Tensor:
        gate.setup(4)
        gate.load_state_dict(both.state_dict())
        torch.manual_seed(2)
        return gate(x).aux_loss

    expected = sum((0.5 + i) * loss(gate) for i, gate in enumerate(gates.values()))
    torch.testing.assert_close(loss(both), expected)
    assert loss(make(name, 5, 2, aux={}, **options)) == 0


def test_default_auxiliary_losses() -> None:
    softmax = {"topk", "switch", "gshard", "xmoe", "batch_prioritised"}
    for name in GATES:
        assert make(name, 4, 2).aux == ({"balance": 1.0} if name in softmax else {})


def test_only_wide_tensor_saved_for_backward_is_input() -> None:
    for name in ("topk", "gshard", "sigmoid", "xmoe", "expert_choice", "batch_prioritised", "deepseek_v3"):
        gate = make(name, 4, 2, dim=256)
        x = torch.randn(100, 256, dtype=torch.bfloat16, requires_grad=True)
        kept: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            gate(x)
        wide = [tensor for tensor in kept if tensor.numel() >= x.numel()]
        assert wide and all(tensor.data_ptr() == x.data_ptr() for tensor in wide), name


@pytest.mark.parametrize("name", ["topk", "deepseek_v3", *slowly("gshard", "hash")])
def test_compiled_gate_has_no_graph_break(name: str) -> None:
    gate = make(name, 6, 2, dim=8).eval()
    x = torch.randn(12, 8)
    expected = gate(x)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = gate(x)
        return routing.expert_SK, *parts(routing)

    torch._dynamo.reset()
    got = torch.compile(run, backend="eager", fullgraph=True)(x)
    for a, b in zip(got, (expected.expert_SK, *parts(expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_gshard_has_zero_initialized_noise_weights() -> None:
    assert set(dict(make("gshard", 4, 2, dim=3).named_parameters())) == {"weight_EM", "noise_weight_EM"}
    fresh = GShard(experts=4)
    fresh.setup(3)
    assert torch.equal(fresh.noise_weight_EM, torch.zeros(4, 3))


class Nearest(Gate):
    splits = True

    def parameter_shapes(self, model_dim: int) -> dict[str, tuple[int, ...]]:
        return {"center_EM": (self.experts, model_dim)}

    def score(self, x_SM: Tensor, *drawn: Tensor) -> tuple[Tensor, ...]:
        return (-torch.cdist(x_SM, self.center_EM, compute_mode="donot_use_mm_for_euclid_dist"),)

    def choose(self, *scores: Tensor) -> Routing:
        expert_SK = top_experts(scores[0], self.k)
        return self.routing(expert_SK, scores[0].gather(1, expert_SK).softmax(1), scores[0])


def test_custom_gate_routes_and_trains() -> None:
    """A gate of `score` and `choose` trains, and returns equal results for micro-batches and the whole batch."""
    gate: Any = Nearest(experts=5, k=2)
    gate.setup(4)
    assert gate.splits
    x = torch.randn(9, 4)
    whole = gate(x)
    whole.weight_SK[:, 0].sum().backward()
    assert gate.center_EM.grad.norm() > 0
    assert torch.equal(ids(whole), torch.cat([ids(gate(part)) for part in x.split(4)]))


def test_overridden_methods_reset_gate_traits() -> None:
    """A mixin's override of a method replaces the traits of the classes after it."""

    class Routes:
        def route(self, x_SM: Tensor) -> Any:
            return super().route(x_SM)  # type: ignore[misc]

    class Updates:
        def update(self, load_E: Tensor) -> None: ...

    class Restores:
        def restore(self, y_SM: Tensor, ordered: Any) -> Tensor:
            return super().restore(y_SM, ordered)  # type: ignore[misc]

    assert TopK.splits and not type("Mine", (Routes, TopK), {}).splits
    assert type("Mine", (Routes, TopK), {"splits": True}).splits
    balancing = type("Balancing", (Gate,), {"update": Updates.update})
    for bases in ((Updates, TopK), (TopK, balancing), (balancing,)):
        assert type("Mine", bases, {}).needs_load
    assert not TopK.needs_load
    mine = type("Mine", (Restores, orders.Sparse), {})
    assert orders.Sparse.copies and orders.Sparse.splits and not mine.copies and not mine.splits
