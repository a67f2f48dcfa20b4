"""LoRA of expert parameters, as made by peft, compared with peft over transformers' own experts in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import layer as peft_layer
from torch import Tensor

import fusedmoe.hf
from fusedmoe.hf import module_experts, peft_adapters
from tests.integrations.models import VOCABULARY, make

NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TOKENS = torch.randint(0, VOCABULARY, (2, 9))


@contextmanager
def never_folded() -> Iterator[None]:
    """Reject folding an adapter into its parameter."""
    proxies = (peft_layer._LoraFactorsProxy, peft_layer._LoraParameterProxy)
    refusals = [patch.object(proxy, "forward", side_effect=AssertionError("folded")) for proxy in proxies]
    with refusals[0], refusals[1], patch.object(module_experts, "add_adapter", side_effect=AssertionError("folded")):
        yield


def pair(family: str, names: list[str] = NAMES, **options: Any) -> tuple[PeftModel, PeftModel]:
    """Build a model over transformers' own experts and one over ours, with the same random adapters."""
    plain = make(family, "eager", torch.float64)
    config = LoraConfig(r=3, lora_alpha=5, target_parameters=names, init_lora_weights=False, **options)
    theirs, ours = (get_peft_model(model, config) for model in (plain, copy.deepcopy(plain)))
    ours.load_state_dict(theirs.state_dict())
    return theirs, fusedmoe.hf.apply(ours)


def add_adapter(models: tuple[PeftModel, PeftModel], name: str, **options: Any) -> None:
    config = LoraConfig(target_parameters=NAMES, init_lora_weights=False, **options)
    for model in models:
        model.add_adapter(name, copy.deepcopy(config))
    models[1].load_state_dict(models[0].state_dict())


def outputs_and_gradients(model: PeftModel) -> dict[str, Tensor]:
    """Return the logits, the loss and all gradients of a pass."""
    model.zero_grad()
    out = model(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    named = getattr(model, "_orig_mod", model).named_parameters()
    grads = {name: p.grad for name, p in named if p.grad is not None}
    assert all("lora_" in name for name in grads)
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


def compare(theirs: PeftModel, ours: PeftModel, folds: bool = False) -> None:
    wanted = outputs_and_gradients(theirs)
    with nullcontext() if folds else never_folded():
        got = outputs_and_gradients(ours)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10 * value.abs().max().item(), msg=name)


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "deepseek", "gpt-oss"])
def test_lora_of_model_families_equals_peft(family: str) -> None:
    """Compare logits and gradients, also for few tokens without gradients; no adapter is ever folded."""
    theirs, ours = pair(family)
    compare(theirs, ours)
    with torch.no_grad(), never_folded():
        logits = ours(input_ids=TOKENS[:1, :2]).logits
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(input_ids=TOKENS[:1, :2]).logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[1:]])
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_lora_of_one_expert_parameter(family: str, names: list[str]) -> None:
    compare(*pair(family, names))


def test_rslora_with_attention_adapters() -> None:
    compare(*pair("mixtral", use_rslora=True, target_modules=["q_proj", "v_proj"]))


def test_multiple_active_adapters_equal_peft() -> None:
    """Each adapter separately, both together, and none."""
    models = pair("mixtral")
    add_adapter(models, "second", r=2, lora_alpha=7)
    for active in ("second", "default", ["default", "second"]):
        for model in models:
            model.base_model.set_adapter(active)
        compare(*models)
    with models[0].disable_adapter(), models[1].disable_adapter(), torch.no_grad(), never_folded():
        logits = [model(input_ids=TOKENS).logits for model in models]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert not torch.allclose(models[1](input_ids=TOKENS).logits, logits[1])


@torch.no_grad()
def test_merge_and_unmerge_preserve_logits() -> None:
    """Merging and unmerging restores the results; merging permanently gives a plain model."""
    _, ours = pair("gpt-oss")
    logits = ours(input_ids=TOKENS).logits
    ours.merge_adapter()
    torch.testing.assert_close(ours(input_ids=TOKENS).logits, logits, rtol=1e-10, atol=1e-10)
    ours.unmerge_adapter()
    torch.testing.assert_close(ours(input_ids=TOKENS).logits, logits, rtol=1e-10, atol=1e-10)
    plain = ours.merge_and_unload()
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, logits, rtol=1e-10, atol=1e-10)
    assert not any("lora" in name for name, _ in plain.named_parameters())


def test_gradient_checkpointing_with_adapters() -> None:
    theirs, ours = pair("mixtral")
    for model in (theirs, ours):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    compare(theirs, ours)


def test_trainable_base_parameters_fall_back_to_peft() -> None:
    """These use peft's own implementation, with one warning that names the parameter."""
    models = pair("mixtral")
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith(("experts.base_layer.base_layer.gate_up_proj", "experts.base_layer.base_layer.down_proj")):
                parameter.requires_grad_("layers.1" in name)
    with warnings.catch_warnings(record=True) as seen, patch.object(peft_adapters, "_warned", set()):
        warnings.simplefilter("always")
        wanted, got = ({n: p.grad for n, p in parameters_with_gradient(model)} for model in models)
        parameters_with_gradient(models[1])
    assert len(wanted) == len(got) == 10
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-10, atol=1e-10 * grad.abs().max().item(), msg=name)
    told = [str(warning.message) for warning in seen if "fusedmoe.hf" in str(warning.message)]
    assert len(told) == 2 and "down_proj" in "".join(told) and all("is trained, too" in text for text in told)


def parameters_with_gradient(model: PeftModel) -> list[tuple[str, torch.nn.Parameter]]:
    """List the parameters that receive a gradient in a pass."""
    model.zero_grad()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    return [(name, p) for name, p in model.named_parameters() if p.grad is not None]


def test_unpatched_peft_never_folds_parameters() -> None:
    """Without the replaced method, factors are read from peft's parametrisation, and no read of a parameter folds."""
    models = pair("mixtral")
    wrapper, proxy = peft_layer.ParamWrapper, peft_layer._LoraFactorsProxy
    replaced = wrapper._activate_lora
    assert hasattr(replaced, "original")
    folds, fold = [], proxy.forward
    with (
        patch.object(wrapper, "_activate_lora", replaced.original),
        patch.object(proxy, "forward", lambda self, w: folds.append(w) or fold(self, w)),
    ):
        wanted = outputs_and_gradients(models[0])
        folds.clear()
        got = outputs_and_gradients(models[1])
    assert len(folds) == 4  # by peft itself, one per parameter of each layer
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10 * value.abs().max().item(), msg=name)


def test_eager_experts_keep_peft_implementation() -> None:
    """The replaced method has no effect on experts that this library does not compute."""
    theirs, ours = pair("mixtral")
    wanted = outputs_and_gradients(theirs)
    with patch.object(peft_layer.ParamWrapper, "_activate_lora", peft_layer.ParamWrapper._activate_lora.original):
        torch.testing.assert_close(outputs_and_gradients(theirs), wanted, rtol=0, atol=0)
    ours.base_model.model.set_experts_implementation("eager")
    torch.testing.assert_close(outputs_and_gradients(ours), wanted, rtol=0, atol=0)


def test_compiled_graph_selects_fused_experts() -> None:
    experts = pair("mixtral")[1].base_model.model.model.layers[0].mlp.experts.get_base_layer()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x + 1 if module_experts.is_fused(experts) else x, backend="eager", fullgraph=True
    )
    assert compiled(torch.ones(1)) == 2


@pytest.mark.slow
def test_compiled_lora_model_equals_peft() -> None:
    theirs, ours = pair("mixtral")
    compare(theirs, torch.compile(ours, backend="aot_eager", fullgraph=True))
