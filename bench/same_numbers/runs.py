"""The fixed set of runs. This module imports neither the library nor its integrations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch


class Skipped(Exception):
    """Raised if a run is impossible on this machine, with the reason."""


@dataclass(frozen=True)
class Run:
    """A program and its arguments.

    Attributes:
        program_name: "module.function", in this package.
        world: number of ranks.
        interpreted: the ranks execute Triton kernels in Triton's interpreter.
        needs: packages without which the run is skipped.
        precision: least precise dtype of the computation, if no recorded tensor has it.
    """

    name: str
    program_name: str
    arguments: tuple[Any, ...] = ()
    world: int = 1
    interpreted: bool = False
    needs: tuple[str, ...] = ()
    precision: torch.dtype = torch.float64

    @property
    def file(self) -> str:
        return re.sub(r"\W+", "-", self.name).strip("-")

    def program(self) -> Callable[..., None]:
        module, function = self.program_name.split(".")
        found: Callable[..., None] = getattr(import_module(f".programs_{module}", __package__), function)
        return found


GATES = (
    "topk", "switch", "gshard", "sigmoid", "xmoe", "softmoe", "expert_choice", "batch_prioritised", "hash", "random",
    "deepseek_v3",
)  # fmt: skip
F64, F32, BF16 = "float64", "float32", "bfloat16"

RUNS: list[Run] = []


def _add(name: str, program: str, *arguments: Any, **traits: Any) -> None:
    RUNS.append(Run(name, program, arguments, **traits))


for _gate in GATES:
    _add(f"gate {_gate}: every order, every kind of experts", "layers.gate", _gate)
for _dtype in (F64, F32, BF16):
    _add(f"layer in {_dtype}", "layers.precision", _dtype)
_add("layer under autocast", "layers.autocast", precision=torch.bfloat16)
_add("shared expert, mask, packed sequences", "layers.shared_and_masked")
_add("capacity: drops from many to none", "layers.capacities")
_add("frozen parameters", "layers.frozen")
_add("made on the meta device", "layers.made_on_meta")
_add("activation checkpoints", "layers.checkpoints")
_add("compiled layer", "layers.compiled")
_add("adapters on experts", "layers.adapters")
_add("routing replay", "layers.replayed")
_add("optimizer steps", "training.steps", {}, "sgd")
_add("tutel, one rank", "integrations.tutel")
for _family in ("mixtral", "qwen3", "olmoe", "deepseek", "gpt_oss"):
    _add(f"hf {_family}", "integrations.hf_family", _family, needs=("transformers",))
_add("hf with adapters of peft", "integrations.hf_adapters", needs=("transformers", "peft"))
_add("hf with int8 experts", "integrations.hf_quantised", "int8", needs=("transformers", "torchao"))
_add("hf with 4-bit experts", "integrations.hf_quantised", "4 bits", needs=("transformers", "bitsandbytes"))
_add("titan, one rank", "integrations.titan", None, needs=("torchtitan",))

for _dtype in (F64, F32, BF16):
    _add(f"ep 2 in {_dtype}", "layers.over_ranks", {"ep": 2}, "direct", _dtype, world=2)
_add("esp 2", "layers.over_ranks", {"esp": 2}, "direct", F64, world=2)
for _mp_input in ("replicated", "partial", "split"):
    _add(f"mp 2, {_mp_input}", "layers.model_parallel", {"mp": 2}, _mp_input, world=2)
for _degrees in ((1, 4), (2, 2), (3, 2)):
    _add(f"ep 2, fsmoe in {_degrees} chunks", "layers.scheduled", {"ep": 2}, "direct", _degrees, world=2)
_add("esp 2, fsmoe in (2, 3) chunks", "layers.scheduled", {"esp": 2}, "direct", (2, 3), world=2)
_add("policies of layers by given costs", "layers.policies", world=2)
_add("hooks on the wire", "layers.wire", world=2, precision=torch.bfloat16)
_add("frozen parameters with a schedule", "layers.frozen", {"ep": 2}, world=2)
_add("activation checkpoints over ranks, with a schedule", "layers.checkpoints", {"ep": 2}, world=2)
_add("compiled layer over ranks", "layers.compiled", {"ep": 2}, world=2)
_add("adapters on experts over ranks", "layers.adapters", {"ep": 2}, world=2)
_add("routing replay over ranks", "layers.replayed", {"ep": 2}, world=2)
for _along in ("samples", "positions"):
    _add(f"blocks along {_along}", "systems.blocks", {"ep": 2}, _along, world=2)
_add("blocks with recomputation", "systems.blocks", {"ep": 2}, "samples", True, world=2)
for _policy in ("flowmoe", "lancet", "joint", "fsmoe"):
    _add(f"blocks by the plan of {_policy}, steps with buckets", "systems.planned_blocks", _policy, world=2)
for _balance in ("predicted", "exact", "auto"):
    _add(f"fssdp, {_balance} balance, steps", "systems.placed", {"ep": 2}, {"balance": _balance}, world=2)
_add("fssdp, rematerialised replicas", "systems.placed", {"ep": 2}, {"rematerialises": True}, world=2)
_add("fssdp in chunks", "systems.placed", {"ep": 2}, {"balance": "exact"}, "chunks", world=2)
_add("fssdp in blocks", "systems.placed", {"ep": 2}, {"balance": "exact"}, "blocks", world=2)
_add("fssdp with adapters", "systems.placed", {"ep": 2}, {"balance": "exact"}, "adapters", world=2)
_add("captured graph", "systems.captured", False, world=2)
_add("captured graph, own places", "systems.captured", True, world=2)
_add("optimizer steps over ranks", "training.steps", {"ep": 2}, "adamw", world=2)
_add("optimizer steps of PyTorch's DDP", "training.wrapped", "ddp", world=2)
_add("optimizer steps of FSDP2", "training.wrapped", "fsdp", world=2)
_add("checkpoint saved by ep, loaded by esp", "training.saved", world=2)
_add("tutel, two ranks", "integrations.tutel", world=2)
_add("hf expert parallelism", "integrations.hf_parallel", "off", world=2, needs=("transformers", "accelerate"))
_add("hf expert parallelism with a schedule", "integrations.hf_parallel", "fsmoe", world=2,
     needs=("transformers", "accelerate"))  # fmt: skip
_add("hf blocks in micro-batches", "integrations.hf_parallel", "blocks", world=2, needs=("transformers", "accelerate"))
_add("titan, two ranks with a schedule", "integrations.titan", (2, 3), world=2, needs=("torchtitan",))
_add("megatron, two ranks", "integrations.megatron", None, world=2, needs=("megatron",))
_add("megatron, two ranks with a schedule", "integrations.megatron", (2, 3), world=2, needs=("megatron",))

for _dispatch in ("direct", "1dh", "2dh"):
    _add(f"ep 4 by {_dispatch}", "layers.over_ranks", {"ep": 4}, _dispatch, F64, world=4)
_add("ep 4 by 2dh, fsmoe in (3, 2) chunks", "layers.scheduled", {"ep": 4}, "2dh", (3, 2), world=4)
_add("ep 2 and esp 2, fsmoe in (2, 1) chunks", "layers.scheduled", {"ep": 2, "esp": 2}, "direct", (2, 1), world=4)
_add("ep 2 and mp 2, split", "layers.model_parallel", {"ep": 2, "mp": 2}, "split", world=4)
_add("ep 2 and dp 2, optimizer steps", "training.steps", {"ep": 2}, "sgd", world=4)
_add("fssdp on two nodes, exact balance", "systems.placed", {"ep": 4}, {"balance": "exact"}, world=4)
_add("blocks over ep 2 and esp 2", "systems.blocks", {"ep": 2, "esp": 2}, "samples", world=4)

_add("one-sided puts in (2, 3) chunks", "one_sided.fused", (2, 3), None, world=2, interpreted=True)
_add("one-sided puts with a bound on rows", "one_sided.fused", (1, 1), 2.0, world=2, interpreted=True)
_add("fssdp by one-sided puts", "one_sided.placed", world=2, interpreted=True)

if len({run.file for run in RUNS}) < len(RUNS):
    raise ValueError("two runs have the same name")
