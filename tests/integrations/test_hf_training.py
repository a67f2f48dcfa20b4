"""Typical uses of models of Hugging Face: `Trainer`, activation recomputation, generation, saving."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import fusedmoe.hf
from tests.integrations.models import VOCABULARY, make


def model_pair(family: str) -> list[Any]:
    """Build a model with transformers' own experts, and the same model with ours, in float64."""
    plain = make(family, "eager", torch.float64)
    return [plain, fusedmoe.hf.apply(copy.deepcopy(plain))]


@pytest.mark.slow
def test_trainer_losses_and_saved_model_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (12, 9))]
    given = {"max_steps": 3, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "seed": 1}
    trained = []
    for model in model_pair("mixtral"):
        arguments = TrainingArguments(str(tmp_path / "run"), save_strategy="no", disable_tqdm=True, **given)
        Trainer(model, arguments, train_dataset=rows).train()
        trained.append(model.state_dict())
    for name, wanted in trained[0].items():
        torch.testing.assert_close(trained[1][name], wanted, rtol=1e-8, atol=1e-10)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", experts_implementation="fusedmoe")
    assert all(torch.equal(again.state_dict()[name], saved) for name, saved in model.state_dict().items())


def trained(folder: Path, ranks: int, *words: str) -> list[dict[str, float]]:
    """Return the steps of `trainer_on_ranks`."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *launcher, "tests.integrations.trainer_on_ranks", str(folder), *words]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr
    steps: list[dict[str, float]] = json.loads(done.stdout.split("steps:")[1])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("blocks",)], ids=["whole_batches", "micro_batches"])
def test_trainer_on_two_ranks_equals_one_process(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Experts split over the ranks, gradients clipped: the losses, norms and metrics equal those of one process."""
    make("mixtral", "eager").save_pretrained(tmp_path)
    found = trained(tmp_path, 1), trained(tmp_path, 2, *words)
    assert len(found[0]) == 4
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_activation_checkpointing_equals_transformers(family: str) -> None:
    tokens, found = torch.randint(0, VOCABULARY, (2, 9)), []
    for model in model_pair(family):
        if model.config._experts_implementation == "fusedmoe":
            model.train()
            model.activation_checkpointing_enable()
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_generated_tokens_equal_transformers(family: str) -> None:
    tokens = torch.randint(0, VOCABULARY, (3, 5))
    texts = [model.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=True) for model in model_pair(family)]
    assert torch.equal(*texts) and texts[0].shape == (3, 8)
