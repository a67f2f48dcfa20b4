"""Run transformers' `Trainer` on a small Mixtral from a folder, alone or, under torchrun, with experts over the ranks.

Rank 0 prints each step's loss and gradient norm as JSON. With the second argument "blocks", decoder blocks run in
micro-batches.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import fusedmoe.hf
from tests.integrations.models import VOCABULARY


def main(folder: str, *words: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    split = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="fusedmoe")
    model = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="fusedmoe", distributed_config=split if world > 1 else None
    )
    if "blocks" in words:
        assert len(fusedmoe.hf.pipeline(model)) == 1
    tokens = torch.randint(0, VOCABULARY, (16, 9), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        f"{folder}/run", max_steps=4, per_device_train_batch_size=4 // world, use_cpu=True, report_to="none", seed=1,
        logging_steps=1, save_strategy="no", disable_tqdm=True, max_grad_norm=0.1, learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[fusedmoe.hf.MetricsCallback()],
    )
    trainer.train()
    if trainer.state.is_world_process_zero:
        kept = ("loss", "grad_norm", "moe/max_vio")
        steps = [{key: step[key] for key in kept} for step in trainer.state.log_history if "loss" in step]
        print("steps:", json.dumps(steps), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
