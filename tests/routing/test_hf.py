"""Expert choices in models of transformers, for any implementation of the experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

import fusedmoe.hf  # noqa: F401, registers "fusedmoe" in transformers
from fusedmoe import ConfigError, routing
from tests.cluster import Cluster
from tests.integrations.models import CONFIGS, VOCABULARY, make
from tests.integrations.test_hf_parallel import load
from tests.marks import slowly

K = 2


def with_perturbed_routers(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "gate.weight" in name or "router.weight" in name:
                parameter.uniform_(-0.5, 0.5)
    return other


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if "_is_expert_parallel" in vars(module)]


def experts_and_weights(model: Any, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The experts and weights of a forward, by layer."""
    numbers, weights, hooks = [], [], []
    for experts in experts_of(model):
        hooks.append(experts.register_forward_pre_hook(lambda _, given: numbers.append(given[1])))
        hooks.append(experts.register_forward_pre_hook(lambda _, given: weights.append(given[2])))
    model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return numbers, weights


def tokens_of(seed: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("implementation", ["fusedmoe", "eager"])
@pytest.mark.parametrize("family", CONFIGS)
def test_record_and_replay_per_family(family: str, implementation: str) -> None:
    torch.manual_seed(1)
    model, tokens = make(family, implementation, torch.float64), tokens_of(2)
    with routing.record(model) as choices:
        wanted, weights = experts_and_weights(model, tokens)
    for chosen, number in zip(choices.values(), wanted, strict=True):
        assert torch.equal(chosen.long(), number)
    other = with_perturbed_routers(model)
    free, _ = experts_and_weights(other, tokens)
    with routing.replay(other, choices):
        found, others = experts_and_weights(other, tokens)
    assert all(map(torch.equal, found, wanted)) and not all(map(torch.equal, free, wanted))
    assert not all(map(torch.equal, others, weights))
    # Replaying its own choices does not change a model's output.
    plain, again = (model(input_ids=tokens).logits for _ in range(2))
    with routing.replay(model, choices):
        again = model(input_ids=tokens).logits
    torch.testing.assert_close(again, plain, rtol=1e-12, atol=1e-12)
    assert not any("forward" in vars(module) for module in other.modules())


def test_replay_computes_weights_and_gradients_from_live_logits() -> None:
    """Mixtral's router: a float32 softmax over all experts; the chosen weights are divided by their sum."""
    torch.manual_seed(3)
    model = make("mixtral", "fusedmoe", torch.float64).model.layers[0].mlp
    x = torch.randn(1, 9, 32, dtype=torch.float64, requires_grad=True)
    given = torch.rand(9, 4).topk(K).indices
    with routing.replay(model, [given]):
        y = model(x)
    experts = experts_of(model)[0]
    prob = (x[0] @ model.gate.weight.t()).softmax(1, dtype=torch.float32).gather(1, given)
    wanted = experts(x[0], given, prob / prob.sum(1, keepdim=True))[None]
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    leaves = [x, *model.parameters()]
    for one, other in zip(
        torch.autograd.grad(y.square().sum(), leaves), torch.autograd.grad(wanted.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_replay_under_gradient_checkpointing(reentrant: bool, inside: bool) -> None:
    torch.manual_seed(4)
    model = make("qwen3", "fusedmoe", torch.float64).train()
    batches = [tokens_of(seed) for seed in range(3)]
    choices = [torch.rand(3 * 14, 4).topk(K).indices for _ in range(2)]
    found = []
    for checked in (False, True):
        if checked:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.zero_grad(set_to_none=True)
        with routing.replay(model, choices):
            losses = [model(input_ids=tokens, labels=tokens).loss for tokens in batches]
            if inside:
                [loss.backward() for loss in losses[1:]]
                losses[0].backward()
        if not inside:
            [loss.backward() for loss in losses[1:]]
            losses[0].backward()
        del losses
        found.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_record_and_replay_in_peft_and_compiled_models() -> None:
    torch.manual_seed(5)
    model, tokens = make("mixtral", "fusedmoe"), tokens_of(1)
    with routing.record(model) as choices:
        model(input_ids=tokens)
    assert list(choices) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    wrapped = get_peft_model(with_perturbed_routers(model), lora)
    with routing.record(wrapped) as found, routing.replay(wrapped, list(choices.values())):
        wrapped(input_ids=tokens)
    assert all(map(torch.equal, found.values(), choices.values()))
    compiled = torch.compile(with_perturbed_routers(model), backend="eager")
    with routing.record(compiled) as found, routing.replay(compiled, choices):
        compiled(input_ids=tokens)
    assert all(map(torch.equal, found.values(), choices.values()))
    torch._dynamo.reset()


def test_deepcopy_during_replay_is_not_replayed() -> None:
    model, tokens = make("mixtral", "fusedmoe"), tokens_of(1)
    with routing.record(model) as choices:
        model(input_ids=tokens)
    other = with_perturbed_routers(model)
    wanted = other(input_ids=tokens).logits
    with routing.replay(other, choices):
        copied = copy.deepcopy(other)
        assert not torch.equal(other(input_ids=tokens).logits, wanted)
    assert torch.equal(copied(input_ids=tokens).logits, wanted)


def test_router_with_custom_selection_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt-oss", "fusedmoe")

    def forward(self: Any, hidden_states: Tensor) -> Any:
        logits, scores, index = original(self, hidden_states)
        return logits, scores, index.flip(1)

    original = GptOssTopKRouter.forward
    monkeypatch.setattr(GptOssTopKRouter, "forward", forward)
    with pytest.raises(ConfigError, match="model.layers.0.mlp uses experts other"), routing.record(model):
        model(input_ids=tokens_of(1))

    def by_sort(self: Any, hidden_states: Tensor) -> Any:
        logits = nn.functional.linear(hidden_states, self.weight, self.bias)
        scores, index = (each[:, :K] for each in logits.sort(1, descending=True))
        return logits, scores.softmax(1), index

    monkeypatch.setattr(GptOssTopKRouter, "forward", by_sort)
    # The choice can be recorded, but not replayed.
    with routing.record(model) as choices:
        model(input_ids=tokens_of(1))
    with pytest.raises(ConfigError, match="model.layers.0.mlp uses experts other"), routing.replay(model, choices):
        model(input_ids=tokens_of(1))


def test_module_with_two_routers_is_rejected() -> None:
    model = nn.ModuleDict()
    model["a"], model["b"] = (experts_of(make("mixtral", "eager"))[0] for _ in range(2))
    with pytest.raises(ConfigError, match="has two routers"):
        routing.find_routers(model)


def replay_on_ranks(rank: int, world: int, folder: str, sizes: dict[str, int]) -> tuple[list[Tensor], Tensor]:
    model = load(rank, world, folder, sizes)
    tokens = tokens_of(rank // sizes["tp_size"])
    generator = torch.Generator().manual_seed(rank // sizes["tp_size"])
    given = [torch.rand(14, 4, generator=generator).topk(K).indices for _ in range(2)]
    with routing.record(model) as choices, routing.replay(model, given):
        logits = model(input_ids=tokens).logits
    for chosen, one in zip(choices.values(), given, strict=True):
        assert torch.equal(chosen.long(), one)
    alone = load(rank, world, folder, None)
    with routing.replay(alone, given):
        wanted = alone(input_ids=tokens).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    logits.square().mean().backward()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, {"tp_size": 1, "ep_size": 2, "fsdp_size": 2}),
        *slowly((2, {"tp_size": 2, "ep_size": 2}), (4, {"tp_size": 2, "ep_size": 4, "fsdp_size": 2})),
    ],
    ids=["separate batches", "shared batch", "separate and shared batches"],
)
def test_replay_with_expert_parallelism(cluster: Cluster, tmp_path: Path, world: int, sizes: dict[str, int]) -> None:
    torch.manual_seed(6)
    make("mixtral", "eager").save_pretrained(tmp_path)
    cluster.run(world, replay_on_ranks, str(tmp_path), sizes, timeout_s=300)  # the first import of transformers is slow
