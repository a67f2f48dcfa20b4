"""Fine-tune a small Qwen3-MoE with LoRA on attention and experts: Trainer, resume, merge, on one process or several.

    python examples/fine_tuning.py
    torchrun --standalone --nproc-per-node 2 examples/fine_tuning.py     # experts split over the ranks

Needs `pip install '.[hf]' peft`. With a real model, replace `small_model` by its name or folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import fusedmoe.hf

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=ATTENTION, target_parameters=EXPERTS)
LENGTH, SAMPLES = 32, 64


def small_model(folder: str) -> None:
    """Save a model with random weights, in place of a downloaded one."""
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def samples() -> list[dict[str, torch.Tensor]]:
    """The bytes of the examples, in samples of equal length."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    rows = torch.tensor(list(text.encode()))[: SAMPLES * LENGTH].view(SAMPLES, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def with_adapters(name: str, world: int) -> PeftModel:
    """Load the model with fusedmoe's experts and new adapters. Call it on every rank."""
    split = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="fusedmoe")
    model = AutoModelForCausalLM.from_pretrained(
        name, experts_implementation="fusedmoe", distributed_config=split if world > 1 else None
    )
    torch.manual_seed(1)
    return fusedmoe.hf.apply(get_peft_model(model, LORA))  # last, and equal on all ranks


def train(model: PeftModel, folder: str, steps: int, resume: str | None = None) -> float:
    """Train to `steps` in all, with a checkpoint every half; return the mean loss of the steps of this call."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    options = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        save_steps=max(1, steps // 2),
        save_only_model=world > 1,  # Trainer saves no optimizer state of a split model
        learning_rate=3e-3,
        per_device_train_batch_size=8,
        logging_steps=max(1, steps // 4),
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, options, train_dataset=samples())
    return float(trainer.train(resume_from_checkpoint=resume).training_loss)


def main(steps: int = 24) -> tuple[float, float]:
    """Return the losses of the base model and of the merged model on the samples; on rank 0, else NaN."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group()
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    if world > 1:
        dist.broadcast_object_list(folders)
    base, run, adapter, merged = (f"{folders[0]}/{name}" for name in ("base", "run", "adapter", "merged"))
    if rank == 0:
        small_model(base)
    if world > 1:
        dist.barrier()
    try:
        train(with_adapters(base, world), run, steps)
        # A job that was stopped half-way: the same model and adapters, and the last checkpoint.
        model = with_adapters(base, world)
        train(model, run, steps, resume=f"{run}/checkpoint-{steps // 2}")
        model.save_pretrained(adapter, is_main_process=rank == 0)  # on every rank: it gathers the adapters
        if world > 1:
            dist.barrier()
        if rank:
            return float("nan"), float("nan")
        # Merge in one process: an ordinary model without adapters.
        plain = AutoModelForCausalLM.from_pretrained(base, experts_implementation="fusedmoe")
        before = loss(plain)
        whole = PeftModel.from_pretrained(plain, adapter).merge_and_unload()
        whole.save_pretrained(merged)
        after = loss(AutoModelForCausalLM.from_pretrained(merged))  # loads without fusedmoe, too
        print(f"loss of the base model {before:.3f}, of the merged model {after:.3f}", flush=True)
        return before, after
    finally:
        if world > 1:
            dist.barrier()
            dist.destroy_process_group()
        if rank == 0:
            shutil.rmtree(folders[0], ignore_errors=True)


@torch.no_grad()
def loss(model: torch.nn.Module) -> float:
    tokens = torch.stack([sample["input_ids"] for sample in samples()])
    return float(model.eval()(input_ids=tokens, labels=tokens).loss)


if __name__ == "__main__":
    fusedmoe.keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="?", default=24, help="optimizer steps (default: 24)")
    main(parser.parse_args().steps)
