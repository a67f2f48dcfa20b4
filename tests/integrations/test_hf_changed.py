"""Experts changed by a user after `experts_implementation="fusedmoe"` was selected, compared with transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

import fusedmoe.hf  # noqa: F401, registers "fusedmoe" in transformers
from tests.integrations.models import VOCABULARY, make
from tests.marks import slowly

NAMES = ("gate_up_proj", "down_proj")
REPLACED_AT_IMPORT = hasattr(peft_layer.ParamWrapper._activate_lora, "original")
FAMILIES = ("mixtral", "gpt-oss", "qwen3", "olmoe", "deepseek")


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if "_is_expert_parallel" in vars(module)]


class SumOfTwo(nn.Module):
    """Store a parameter as two summands, neither of which is the parameter."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return 0.25 * w, 0.75 * w


class Flattened(nn.Module):
    """Store a parameter as a vector."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, w: Tensor) -> Tensor:
        return w.view(self.shape)

    def right_inverse(self, w: Tensor) -> Tensor:
        return w.reshape(-1)


class CountsEvaluations(nn.Module):
    """Add a number to a parameter that grows with each evaluation."""

    evaluations = 0

    def forward(self, w: Tensor) -> Tensor:
        self.evaluations += 1
        return w + 0.01 * self.evaluations


def halved_gate(experts: Any, rows: Tensor) -> Tensor:
    return type(experts)._apply_gate(experts, rows) / 2


def parametrised(make_one: Callable[[Tensor], nn.Module]) -> Callable[[Any], None]:
    def change(experts: Any) -> None:
        for name in NAMES:
            register_parametrization(experts, name, make_one(getattr(experts, name)), unsafe=True)

    return change


def prune_experts(experts: Any) -> None:
    for name in NAMES:
        prune.l1_unstructured(experts, name, 0.4)


def replace_parameters(experts: Any) -> None:
    for name in NAMES:
        setattr(experts, name, nn.Parameter(1.1 * getattr(experts, name).detach().mT.contiguous().mT))


def change_limit(experts: Any) -> None:
    if hasattr(experts, "limit"):
        experts.alpha, experts.limit = 1.2, 0.3


def hook_activation(experts: Any) -> None:
    if hasattr(experts, "act_fn"):
        experts.act_fn = copy.deepcopy(experts.act_fn)
        experts.act_fn.register_forward_hook(lambda *given: given[-1] * 1.5)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parametrized_as_sum": parametrised(lambda _: SumOfTwo()),
    "parametrized_flat": parametrised(lambda w: Flattened(w.shape)),
    "weight_norm": lambda experts: parametrizations.weight_norm(experts, "gate_up_proj"),
    "pruned": prune_experts,
    "replaced_parameters": replace_parameters,
    "frozen": lambda experts: experts.requires_grad_(False),
    "one_parameter_frozen": lambda experts: experts.down_proj.requires_grad_(False),
    "limit": change_limit,
    "activation_hook": hook_activation,
}


def logits_and_gradients(model: Any) -> dict[str, Tensor]:
    """Return logits, the logits of a few tokens, and all gradients of two passes."""
    tokens, found = torch.arange(140).view(2, 70) % VOCABULARY, {}
    for number in range(2):
        model.zero_grad()
        out = model(input_ids=tokens, labels=tokens, use_cache=False)
        out.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            few = model(input_ids=tokens[:1, :5], use_cache=False).logits
        found |= {f"{number} {name}": value for name, value in {"logits": out.logits, "few": few, **grads}.items()}
    return found


def compare(family: str, change: Callable[[Any], Any], reentrant: bool | None, steps_before: bool) -> None:
    """Change both models, after a step or without, and compare their next steps."""
    torch.manual_seed(0)
    theirs = make(family, "eager", torch.float64)
    results = []
    for model in (theirs, copy.deepcopy(theirs)):
        if results:
            model.set_experts_implementation("fusedmoe")
        if steps_before:
            logits_and_gradients(model)
        changed = change(model).train()
        if reentrant is not None:
            changed.gradient_checkpointing_enable({"use_reentrant": reentrant})
            changed.enable_input_require_grads()
        results.append(logits_and_gradients(changed))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        # Routers' weights and norms are float32 in both.
        scale = value.abs().max().item()
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6 * scale + 1e-12, msg=name)


DEFAULT = [("mixtral", name) for name in CHANGES if name != "limit"] + [("gpt-oss", "limit")]
OTHERS = [pair for pair in product(FAMILIES, CHANGES) if pair not in DEFAULT]


@pytest.mark.parametrize("reentrant", [*slowly(None, True), False])
@pytest.mark.parametrize(("family", "name"), [*DEFAULT, *slowly(*OTHERS)])
def test_modified_experts_equal_transformers(family: str, name: str, reentrant: bool | None) -> None:
    def change(model: Any) -> Any:
        for experts in experts_of(model):
            CHANGES[name](experts)
        return model

    compare(family, change, reentrant, steps_before=True)


def add_lora(model: Any) -> Any:
    torch.manual_seed(5)
    names = [f"mlp.experts.{name}" for name in NAMES]
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_parameters=names, init_lora_weights=False))


def add_second_adapter(model: Any, active: list[str]) -> Any:
    model = add_lora(model)
    names = [f"mlp.experts.{name}" for name in NAMES]
    model.add_adapter("second", LoraConfig(r=2, target_parameters=names, init_lora_weights=False))
    model.base_model.set_adapter(active)
    if "default" not in active:
        model.delete_adapter("default")
    return model


def merge_and_unmerge(model: Any) -> Any:
    model = add_lora(model)
    model.merge_adapter()
    model.unmerge_adapter()
    return model


def disable_adapters(model: Any) -> Any:
    model = add_lora(model)
    model.base_model.disable_adapter_layers()
    model.get_input_embeddings().weight.requires_grad_(True)
    return model


def unfreeze_experts(model: Any) -> Any:
    model = add_lora(model)
    for experts in experts_of(model):
        experts.requires_grad_(True)
    return model


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "one_adapter": add_lora,
    "two_active_adapters": lambda model: add_second_adapter(model, ["default", "second"]),
    "deleted": lambda model: add_second_adapter(model, ["second"]),
    "unmerged": merge_and_unmerge,
    "merged_and_unloaded": lambda model: add_lora(model).merge_and_unload().requires_grad_(True),
    "disabled": disable_adapters,
    "unfrozen_experts": unfreeze_experts,
}


@pytest.mark.parametrize("reentrant", [*slowly(None, True), False])
@pytest.mark.parametrize("family", ["mixtral", *slowly(*FAMILIES[1:])])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_added_before_first_forward(name: str, family: str, reentrant: bool | None) -> None:
    """The adapters are added without a call of `apply`."""
    assert REPLACED_AT_IMPORT
    compare(family, ADAPTERS[name], reentrant, steps_before=False)


@pytest.mark.parametrize("reentrant", [*slowly(None, True), False])
@pytest.mark.parametrize("family", ["mixtral", *slowly(*FAMILIES[1:])])
@pytest.mark.parametrize("name", ["one_adapter", *slowly("two_active_adapters", "unfrozen_experts")])
def test_recompute_uses_peft_method_of_forward(name: str, family: str, reentrant: bool | None) -> None:
    """A recomputation uses the forward's method, even if other code has restored peft's method."""
    wrapper = peft_layer.ParamWrapper
    method = getattr(wrapper._activate_lora, "original", wrapper._activate_lora)
    with patch.object(wrapper, "_activate_lora", method):
        compare(family, ADAPTERS[name], reentrant, steps_before=False)
        assert wrapper._activate_lora is method


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_parametrizations_are_evaluated_once(family: str, few: bool) -> None:
    experts = experts_of(make(family, "fusedmoe"))[0]
    names = [*NAMES, *(f"{name}_bias" for name in NAMES if experts.has_bias)]
    for name in names:
        register_parametrization(experts, name, CountsEvaluations(), unsafe=True)
    x_TM = torch.randn(2 if few else 80, 32)
    number_TK = torch.arange(2 * len(x_TM)).view(-1, 2) % 4
    with torch.set_grad_enabled(not few):
        experts(x_TM, number_TK, torch.rand(number_TK.shape))
    assert {name: experts.parametrizations[name][0].evaluations for name in names} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_replaced_gate_of_one_module_takes_effect(family: str) -> None:
    """A replaced gate takes effect for many and for few tokens, as in transformers' grouped implementations."""
    experts = experts_of(make(family, "fusedmoe", torch.float64))[0]
    x_TM, number_TK = torch.randn(80, 32, dtype=torch.float64), torch.arange(160).view(-1, 2) % 4
    weight_TK = torch.rand(number_TK.shape, dtype=torch.float64)
    bias = experts.down_proj_bias.detach() if experts.has_bias else x_TM.new_zeros(4, 32)
    wanted = experts(x_TM, number_TK, weight_TK).detach() / 2
    wanted += (bias[number_TK] * weight_TK[:, :, None] / 2).sum(1)
    experts._apply_gate = MethodType(halved_gate, experts)
    torch.testing.assert_close(experts(x_TM, number_TK, weight_TK), wanted, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        few = experts(x_TM[:9], number_TK[:9], weight_TK[:9])
    torch.testing.assert_close(few, wanted[:9], rtol=1e-6, atol=1e-6)


class OtherModule(nn.Module):
    """Module unrelated to transformers' experts, with a parameter of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,edh->neh", x, self.down_proj)


def test_adapters_of_unrelated_modules_are_unchanged() -> None:
    """peft's method behaves as before for these modules."""
    model = nn.Sequential(OtherModule())
    config = LoraConfig(r=2, target_parameters=["0.down_proj"], init_lora_weights=False)
    model, x = get_peft_model(model, config), torch.randn(6, 4)
    found = model(x)
    model.merge_adapter()
    torch.testing.assert_close(model(x), found)
