"""Experts in 4 and 8 bits, with and without adapters, compared with the same matrices unpacked."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils import parametrize

import fusedmoe.hf
from fusedmoe.errors import ConfigError
from fusedmoe.hf import module_experts
from fusedmoe.hf import quantised as hf_quantised
from tests.integrations.models import VOCABULARY, make
from tests.integrations.test_hf_lora import NAMES

TOKENS = torch.randint(0, VOCABULARY, (2, 9))


def four_bits(experts: Any, name: str, nested: bool = False, blocksize: int = 64) -> None:
    replace = pytest.importorskip("bitsandbytes.nn.parametrize")
    replace.replace_parameter_4bit(experts, name, compress_statistics=nested, blocksize=blocksize)


def eight_bits(experts: Any, name: str, kind: str = "Int8WeightOnlyConfig") -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.FqnToConfig({name: getattr(quantization, kind)()})
    quantization.quantize_(experts, config, filter_fn=None)
    getattr(experts, name).requires_grad_(False)


STORES = {
    "4 bits": four_bits,
    "4 bits, nested": lambda experts, name: four_bits(experts, name, nested=True),
    "int8": eight_bits,
    "float8": lambda experts, name: eight_bits(experts, name, "Float8WeightOnlyConfig"),
}


def pair(store: Any, family: str = "mixtral") -> tuple[Any, Any]:
    """Build a model with quantised experts, and one with their unpacked values."""
    packed = make(family, "eager")
    whole = copy.deepcopy(packed)
    for layer, other in zip(packed.model.layers, whole.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            store(layer.mlp.experts, name)
            full = unpacked(layer.mlp.experts, name)
            setattr(other.mlp.experts, name, torch.nn.Parameter(full.clone(), requires_grad=False))
    return packed, whole


def unpacked(experts: Any, name: str) -> torch.Tensor:
    """Unpack all matrices of a quantised parameter."""
    if not parametrize.is_parametrized(experts, name):
        return getattr(experts, name).detach().dequantize()
    parametrisations = experts.parametrizations[name]
    state = copy.copy(parametrisations[0].quant_state)
    shape, state.shape = state.shape, torch.Size([state.shape.numel()])  # correct on CPUs for any column count
    functional = pytest.importorskip("bitsandbytes.functional")
    return functional.dequantize_4bit(parametrisations.original, state).view(shape)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("adapted", [True, False])
def test_quantised_experts_are_unpacked_one_at_a_time(store: str, adapted: bool) -> None:
    """Results and gradients equal those of the unpacked matrices; at most one matrix is unpacked at a time."""
    models = pair(STORES[store])
    if adapted:
        # For a module with parametrisations, peft needs the full parameter names.
        names = [f"model.layers.{layer}.{name}" for layer in range(2) for name in NAMES]
        config = LoraConfig(r=3, target_parameters=names, target_modules=["q_proj"], init_lora_weights=False)
        models = tuple(get_peft_model(model, config) for model in models)
        with torch.no_grad():
            for theirs, own in zip(*map(adapters, models), strict=True):
                theirs.copy_(own)
    packed, whole = map(fusedmoe.hf.apply, models)
    if not adapted:
        for model in models:
            model.requires_grad_(False)
            model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    with forbid_full_unpacking():
        got, wanted = (logits_and_gradients(model) for model in (packed, whole))
        with torch.no_grad():
            few = packed(input_ids=TOKENS[:1, :2]).logits
    for value, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())
    with torch.no_grad():
        torch.testing.assert_close(few, whole(input_ids=TOKENS[:1, :2]).logits, rtol=1e-5, atol=1e-5)


def adapters(model: Any) -> list[torch.nn.Parameter]:
    """Return all adapter factors in one order; peft nests those of parametrised modules in another."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            layer = name.partition("layers.")[2][0]
            key = (layer, getattr(module, "parameter_name", name))
            found[key] = [module.lora_A["default"].weight, module.lora_B["default"].weight]
    return [factor for key in sorted(found) for factor in found[key]]


def logits_and_gradients(model: Any) -> list[torch.Tensor]:
    """Return logits, and gradients of the trained parameters."""
    model.zero_grad()
    out = model(input_ids=TOKENS, labels=TOKENS)
    out.loss.backward()
    trained = adapters(model) or [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    return [out.logits.detach(), *(p.grad for p in trained)]


def forbid_full_unpacking() -> Any:
    """Context in which bitsandbytes cannot unpack a whole parameter."""
    try:
        from bitsandbytes.nn.parametrize import Bnb4bitParametrization
    except ImportError:
        return patch.object(hf_quantised, "_BITSANDBYTES", hf_quantised._BITSANDBYTES)
    return patch.object(Bnb4bitParametrization, "forward", side_effect=AssertionError("all experts at once"))


def test_unsupported_quantisation_raises() -> None:
    packed, _ = pair(lambda experts, name: four_bits(experts, name, blocksize=512))
    with pytest.raises(ConfigError, match="blocks of 512, which do not end where experts"):
        fusedmoe.hf.apply(packed)
    packed, _ = pair(STORES["4 bits"], "gpt-oss")
    with pytest.raises(ConfigError, match="gate_up_proj is quantised, which only experts whose gate is SwiGLU"):
        fusedmoe.hf.apply(packed)


def test_quantised_experts_split_over_ranks_raise() -> None:
    experts = make("mixtral", "fusedmoe").model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    whole = hf_quantised.QuantisedMatrices((8, 32, 24), torch.float32, torch.device("cpu"))
    with (
        patch.object(module_experts, "base_parameter", lambda *_: whole),
        pytest.raises(ConfigError, match="MixtralExperts is quantised and split over ranks"),
    ):
        module_experts.check_experts(experts)
