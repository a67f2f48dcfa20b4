"""LoRA of expert parameters, as peft makes it: a parametrisation of theirs."""

from __future__ import annotations

import copy

import torch
from peft import LoraConfig, get_peft_model

import fusedmoe.hf
from tests.integrations.models import VOCABULARY, make


def test_lora_of_experts() -> None:
    """Two steps with the experts' own parameters frozen: transformers' own experts give the same."""
    plain = make("mixtral", "eager", torch.float64)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    models = [
        get_peft_model(model, LoraConfig(r=2, target_parameters=names, init_lora_weights=False))
        for model in (copy.deepcopy(plain), fusedmoe.hf.apply(copy.deepcopy(plain)))
    ]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    trained = []
    for model in models:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        trained.append({name: p.detach() for name, p in model.named_parameters() if p.requires_grad})
    assert len(trained[0]) == 8
    for name, wanted in trained[0].items():
        torch.testing.assert_close(trained[1][name], wanted, rtol=1e-9, atol=1e-11)
