"""Pipelined decoder blocks of transformers' models."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from transformers.distributed.expert_parallel import ExpertParallelLayer

from fusedmoe import PipelinedBlocks
from fusedmoe.blocks.external_blocks import ExpertsInput, ExternalBlock, pipeline_external
from fusedmoe.compat.torch import HOOK_KINDS, hooks_of
from fusedmoe.compat.transformers import captures_outputs, is_expert_parallel
from fusedmoe.errors import ConfigError
from fusedmoe.hf.callbacks import RouterMetrics, expert_inputs, find_experts
from fusedmoe.hf.module_experts import NAME
from fusedmoe.layers.scheduled_exchange import EXCHANGE

#: Block classes that only add their experts' output to their own.
FAMILIES = (
    "DeepseekV2DecoderLayer",
    "DeepseekV3DecoderLayer",
    "Dots1DecoderLayer",
    "Glm4MoeDecoderLayer",
    "GptOssDecoderLayer",
    "MiniMaxM2DecoderLayer",
    "MixtralDecoderLayer",
    "OlmoeDecoderLayer",
    "Qwen2MoeDecoderLayer",
    "Qwen3MoeDecoderLayer",
)


def pipeline(
    model: Any,
    degrees: tuple[int, int] | None = (2, 2),
    *,
    policy: str | None = None,
    recompute: bool = False,
    wire: str | None = None,
) -> list[PipelinedBlocks]:
    """Pipeline a model's decoder blocks: attention of one micro-batch overlaps with the experts of another.

    Collective. Losses and gradients equal those of sequential blocks, except that dropout draws new random numbers per
    micro-batch. Schedules of layers are inactive. FSDP keeps all blocks' parameters gathered throughout forward and
    throughout backward. Evaluation with a cache (`generate`) or with outputs of single blocks runs blocks sequentially.

    Args:
        model: a `PreTrainedModel` with `DistributedConfig(…, ep_implementation="fusedmoe")`, bare or wrapped, of one of
            these families: DeepSeek-V2 and -V3, dots.1, GLM-4 MoE, gpt-oss, MiniMax-M2, Mixtral, OLMoE, Qwen2 MoE,
            Qwen3 MoE.
        degrees: numbers of micro-batches in forward and backward, the same on all ranks; equal for gpt-oss. None
            restores sequential blocks.
        policy: "auto" (fastest by prediction) or a policy for whole layers ("flowmoe", "lancet"), which chooses the
            plan instead of `degrees`. The first forward then measures the machine and caches the result on disk.
        recompute: save only the blocks' inputs for backward, and recompute attention.
        wire: "fp8" or "fp8-both" sends tokens in fp8 (`fusedmoe.Schedule`), also in sequential blocks from now on; None
            keeps the format of the layers' schedules.
    Returns:
        One module per sequence of consecutive blocks with experts; its `set_plan` changes the plan. Empty without
        expert parallelism or if `degrees` is None.
    Raises:
        ConfigError: an unknown policy; an unsupported family, or tokens sent by transformers itself; peft adapters on
            experts; ranks that share a batch (tp_size). From a training forward: a cache, outputs of single blocks
            (`output_router_logits`, `output_attentions`, `output_hidden_states`), gradient checkpointing, compiled
            blocks, `mask_padding`.
        RankError: ranks with different blocks or degrees.
    """
    library = TransformersBlocks()
    for name, module in find_experts(model).items():
        if is_expert_parallel(module) and EXCHANGE not in vars(module):
            raise ConfigError(
                f"{library.who}: transformers itself sends the tokens of {name} ({type(module).__name__}); load the "
                f"model with DistributedConfig(…, ep_implementation={NAME!r})"
            )
        # Adapters on experts act inside peft's wrapper, which the pipeline bypasses.
        around = type(model.get_submodule(name.rpartition(".")[0]))
        if EXCHANGE in vars(module) and around.__module__.startswith("peft."):
            raise ConfigError(
                f"{library.who}: {name} is in peft's {around.__name__}; adapt attention alone, or use schedule=… in "
                "place of the pipeline"
            )
        if EXCHANGE in vars(module) and module.config.distributed_config.tp_size > 1:
            raise ConfigError(
                f"{library.who}: the ranks of tp_size={module.config.distributed_config.tp_size} share a batch, of "
                "which each routes a chunk; use fsdp_size and ep_size alone, or schedule=… in place of the pipeline"
            )
    return pipeline_external(model, library, degrees, policy, recompute, wire)


class _LocalTensors(ExpertParallelLayer):
    """Transformers parallel style that replaces a module's DTensors by this rank's local tensors."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True


class TransformersBlocks:
    """Transformers' blocks with the interface of `pipeline_external` (`DecoderLibrary`)."""

    who: str = "fusedmoe.hf.pipeline"
    families: tuple[str, ...] = FAMILIES

    def read(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsInput:
        # Metrics count the experts' inputs in hooks.
        for hook in hooks_of(experts)[HOOK_KINDS.index("forward_pre")].values():
            if isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), RouterMetrics):
                hook(experts, args, kwargs)
        x_TM, expert_TK, weight_TK = expert_inputs(*args, **kwargs).values()
        return x_TM, expert_TK, weight_TK

    def k(self, block: ExternalBlock) -> int:
        experts: Any = block.exchange.experts.module
        return int(experts.config.num_experts_per_tok)

    def plain_tensors(self, block: ExternalBlock) -> AbstractContextManager[None]:
        return _LocalTensors().context_around_forward(block.exchange.experts.module, None)

    def why_not_split(self, block: ExternalBlock, kwargs: dict[str, Any]) -> str | None:
        module: Any = block.module
        # Until transformers 5.23, and since 5.24.
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
            return "it has a cache; call the model with use_cache=False"
        if captures_outputs():
            return "outputs of single blocks are requested; leave output_router_logits and similar out"
        if module.gradient_checkpointing and module.training:
            return "gradient checkpointing is on; call gradient_checkpointing_disable() and pass recompute=True"
        if "_fusedmoe_padding" in vars(block.exchange.experts.module):
            return "mask_padding masks the tokens of whole batches; leave it out"
        return None
