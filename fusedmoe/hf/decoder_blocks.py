"""Decoder blocks of Hugging Face transformers in micro-batches: attention of some samples beside experts of others."""

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
from fusedmoe.hf.callbacks import RouterMetrics, named_input, registered_experts
from fusedmoe.hf.module_experts import NAME
from fusedmoe.layers.scheduled_exchange import EXCHANGE

#: Classes of blocks that add what their experts give to what they return, and do nothing else with it.
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
) -> list[PipelinedBlocks]:
    """Has a model's decoder blocks go in micro-batches: attention of one beside the experts, and the travelling tokens,
    of another, over all blocks (`fusedmoe.pipeline`).

    Losses and gradients are those of the blocks one after the other, but for random numbers (dropout), which each
    micro-batch draws anew. Schedules of the layers rest meanwhile. FSDP keeps all blocks' parameters gathered from the
    first block's forward pass to the last one's, and so in the backward pass. With a cache, as `generate` has it, and
    where outputs of single blocks are asked for, blocks of a model in evaluation go one after the other.

    Args:
        model: a `PreTrainedModel` with `DistributedConfig(…, ep_implementation="fusedmoe")`, bare or in a wrapper, of
            one of these families: DeepSeek-V2 and -V3, dots.1, GLM-4 MoE, gpt-oss, MiniMax-M2, Mixtral, OLMoE, Qwen2
            MoE, Qwen3 MoE.
        degrees: micro-batches of a rank's samples, forward and backward, the same on all ranks; gpt-oss's have one
            number. None: blocks go one after the other again.
        policy: "auto", the best by prediction, or the name of a policy for whole layers ("flowmoe", "lancet"), chooses
            the plan in place of the degrees; the first forward then measures the machine, and keeps that on disk.
        recompute: keep only what blocks begin with for the backward pass, and compute attention again there.
    Returns:
        The blocks that follow each other with experts, a module for each such row of them: `set_plan` gives it another
        plan. None where experts are not over ranks, and nothing travels.
    Raises:
        ConfigError: an unknown policy; a model of another family, or whose tokens transformers itself sends; adapters
            of peft on experts; ranks that share a batch (tp_size); from a forward in training, a cache, outputs of
            single blocks (`output_router_logits`, `output_attentions`, `output_hidden_states`), gradient
            checkpointing, compiled blocks, `mask_padding`. Each names the cure.
        RankError: ranks with different blocks or degrees. Collective.
    """
    door = TransformersBlocks()
    for name, module in registered_experts(model).items():
        if is_expert_parallel(module) and EXCHANGE not in vars(module):
            raise ConfigError(
                f"{door.who}: transformers itself sends the tokens of {name} ({type(module).__name__}); load the model "
                f"with DistributedConfig(…, ep_implementation={NAME!r})"
            )
        # Adapters on experts are at work within the wrapper's own forward.
        around = type(model.get_submodule(name.rpartition(".")[0]))
        if EXCHANGE in vars(module) and around.__module__.startswith("peft."):
            raise ConfigError(
                f"{door.who}: {name} is in peft's {around.__name__}; adapt attention alone, or use schedule=… in place "
                "of the pipeline"
            )
        if EXCHANGE in vars(module) and module.config.distributed_config.tp_size > 1:
            raise ConfigError(
                f"{door.who}: the ranks of tp_size={module.config.distributed_config.tp_size} share a batch, of which "
                "each routes a chunk; use fsdp_size and ep_size alone, or schedule=… in place of the pipeline"
            )
    return pipeline_external(model, door, degrees, policy, recompute)


class _LocalTensors(ExpertParallelLayer):
    """Style of transformers whose context makes a module's DTensors the local tensors of this rank."""

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        return True


class TransformersBlocks:
    """Blocks of transformers as `pipeline_external` sees them (`DecoderDoor`)."""

    who: str = "fusedmoe.hf.pipeline"
    families: tuple[str, ...] = FAMILIES

    def read(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExpertsInput:
        # Metrics count what experts are called with, by hooks.
        for hook in hooks_of(experts)[HOOK_KINDS.index("forward_pre")].values():
            if isinstance(hook, partial) and isinstance(getattr(hook.func, "__self__", None), RouterMetrics):
                hook(experts, args, kwargs)
        x_TH, number_TK, weight_TK = named_input(*args, **kwargs).values()
        return x_TH, number_TK, weight_TK

    def k(self, block: ExternalBlock) -> int:
        experts: Any = block.exchange.experts.module
        return int(experts.config.num_experts_per_tok)

    def plain_tensors(self, block: ExternalBlock) -> AbstractContextManager[None]:
        return _LocalTensors().context_around_forward(block.exchange.experts.module, None)

    def refuses(self, block: ExternalBlock, kwargs: dict[str, Any]) -> str | None:
        module: Any = block.module
        # By the names of transformers until 5.23, and since 5.24.
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):
            return "it has a cache; call the model with use_cache=False"
        if captures_outputs():
            return "outputs of single blocks are asked for; leave output_router_logits and the like out"
        if module.gradient_checkpointing and module.training:
            return "gradient checkpointing is on; call gradient_checkpointing_disable() and give recompute=True"
        if "_fusedmoe_padding" in vars(block.exchange.experts.module):
            return "mask_padding masks the tokens of whole batches; leave it out"
        return None
