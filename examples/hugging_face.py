"""Train a small Hugging Face Mixtral on the source of these examples, with fusedmoe's experts.

    python examples/hugging_face.py
    torchrun --nproc-per-node 2 examples/hugging_face.py      # experts split over the ranks, the rest by FSDP

Two lines select fusedmoe: `import fusedmoe.hf` and `experts_implementation="fusedmoe"`. With several ranks,
`ep_implementation="fusedmoe"` also sends the tokens. Needs `pip install '.[hf]'`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed import DistributedConfig

import fusedmoe.hf

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 8, "vocab_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "bos_token_id": None, "eos_token_id": None}
LENGTH, BATCH = 64, 8


def main(steps: int = 60) -> float:
    """Return the last loss; on rank 0, its mean over the ranks."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group()
    try:
        return train(world, rank, steps)
    finally:
        if world > 1:
            dist.destroy_process_group()


def train(world: int, rank: int, steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        if rank == 0:  # stands for a downloaded model
            torch.manual_seed(0)
            MixtralForCausalLM(MixtralConfig(**SMALL, **HEADS)).save_pretrained(folder)
        if world > 1:
            dist.broadcast_object_list(shared)
        config = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="fusedmoe")
        model = AutoModelForCausalLM.from_pretrained(
            shared[0], experts_implementation="fusedmoe", distributed_config=config if world > 1 else None
        )
        if world > 1:
            dist.barrier()  # before the folder is removed
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    bytes_N = torch.tensor(list(text.encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chance = torch.Generator().manual_seed(rank)  # different batches on every rank
    mean = torch.zeros(())
    for step in range(steps):
        starts = torch.randint(0, len(bytes_N) - LENGTH, (BATCH,), generator=chance)
        tokens_BL = torch.stack([bytes_N[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=tokens_BL, labels=tokens_BL).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        if rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:3}: loss {float(mean) / world:.3f}", flush=True)
    return float(mean) / world


if __name__ == "__main__":
    fusedmoe.keep_memory()
    main()
