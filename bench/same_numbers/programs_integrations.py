"""Programs of the integrations: Tutel's interface, Hugging Face transformers, torchtitan, Megatron-core."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from .programs_layers import M, batch
from .record import Record

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
MATRICES = ("gate_up_proj", "down_proj")


def tutel(record: Record, rank: int, world: int, scratch: Path) -> None:
    """Record layers of Tutel's interface, on two ranks with sharded experts."""
    from fusedmoe.tutel import moe

    cases: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ({"k": 2}, {}, {}),
        ({"k": 1, "capacity_factor": 0.5}, {"type": "llama_ffn"}, {"batch_prioritized_routing": True}),
        ({"k": 2, "capacity_factor": 0.0}, {}, {"a2a_ffn_overlap_degree": 2}),
        ({"k": 2}, {}, {"is_postscore": False}),
        ({"type": "cosine_top", "k": 2, "proj_dim": 8}, {"activation_fn": lambda x: x.tanh()}, {}),
    ]
    if world > 1:
        cases += [({"k": 2}, {"num_experts_per_device": -world}, {}), ({"k": 2}, {}, {"use_2dh": True})]
    for number, (gate, network, options) in enumerate(cases):
        torch.manual_seed(3)
        experts = {"type": "ffn", "num_experts_per_device": 4 // world, "hidden_size_per_expert": 12} | network
        layer = moe.moe_layer({"type": "top"} | gate, M, experts, seeds=(1, rank + 1, 1), **options)
        x = batch(rank, 24).requires_grad_()
        y = layer(x)
        (y.square().sum() + 0.3 * layer.l_aux).backward()
        record.note(f"{number}: y", y)
        record.note(f"{number}: aux", layer.l_aux)
        record.note(f"{number}: dx", x.grad)
        record.gradients(layer, f"{number}: ")


def hf_config(family: str) -> Any:
    import transformers

    latent = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    makers: dict[str, Callable[[], Any]] = {
        "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4),
        "qwen3": lambda: transformers.Qwen3MoeConfig(
            **SHAPE, num_experts=4, moe_intermediate_size=16, head_dim=8, decoder_sparse_step=1
        ),
        "olmoe": lambda: transformers.OlmoeConfig(**SHAPE, num_experts=4),
        "deepseek": lambda: transformers.DeepseekV3Config(**SHAPE, **latent, **groups, moe_intermediate_size=16),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **SHAPE | {"intermediate_size": 32}, num_local_experts=4, head_dim=8, rope_parameters=rope
        ),
    }
    return makers[family]()


def hf_model(family: str, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(hf_config(family), experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    return model.to(dtype)


def hf_step(record: Record, name: str, model: Any, rank: int = 0, samples: int = 2) -> None:
    torch.manual_seed(50 + rank)
    tokens = torch.randint(0, 64, (samples, 9 + rank))
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    record.note(f"{name}: logits", out.logits)
    record.note(f"{name}: loss", out.loss)
    record.gradients(model, f"{name}: ")
    model.zero_grad()


def hf_family(record: Record, rank: int, world: int, scratch: Path, family: str) -> None:
    import fusedmoe.hf

    for dtype in (torch.float32, torch.float64):
        model = fusedmoe.hf.apply(hf_model(family, dtype))
        hf_step(record, str(dtype), model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hf_step(record, "checkpoints", model.train())


def hf_adapters(record: Record, rank: int, world: int, scratch: Path) -> None:
    from peft import LoraConfig, get_peft_model

    import fusedmoe.hf

    for family in ("mixtral", "gpt_oss"):
        names = [f"mlp.experts.{name}" for name in MATRICES]
        config = LoraConfig(
            r=3, lora_alpha=5, target_parameters=names, target_modules=["q_proj"], init_lora_weights=False
        )
        model = fusedmoe.hf.apply(get_peft_model(hf_model(family), config))
        hf_step(record, family, model)
        model.merge_adapter()
        with torch.no_grad():
            record.note(f"{family} merged: logits", model(input_ids=torch.arange(9)[None]).logits)


def hf_quantised(record: Record, rank: int, world: int, scratch: Path, store: str) -> None:
    from peft import LoraConfig, get_peft_model

    import fusedmoe.hf

    model = hf_model("mixtral", torch.float32)
    for layer in model.model.layers:
        for name in MATRICES:
            if store == "int8":
                from torchao import quantization

                config = quantization.FqnToConfig({name: quantization.Int8WeightOnlyConfig()})
                quantization.quantize_(layer.mlp.experts, config, filter_fn=None)
                getattr(layer.mlp.experts, name).requires_grad_(False)
            else:
                from bitsandbytes.nn.parametrize import replace_parameter_4bit

                replace_parameter_4bit(layer.mlp.experts, name, blocksize=64)
    names = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in MATRICES]
    adapters = LoraConfig(r=3, target_parameters=names, target_modules=["q_proj"], init_lora_weights=False)
    adapted = fusedmoe.hf.apply(get_peft_model(model, adapters))
    torch.manual_seed(50)
    tokens = torch.randint(0, 64, (2, 9))
    out = adapted(input_ids=tokens, labels=tokens)
    out.loss.backward()
    record.note("logits", out.logits)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            record.note(f"gradient of {name}", parameter.grad)


def hf_parallel(record: Record, rank: int, world: int, scratch: Path, form: str) -> None:
    """Record steps of a model that transformers has split over the ranks, with gradient accumulation."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import fusedmoe.hf

    folder = scratch / "model"
    if rank == 0:
        hf_model("mixtral", torch.float32).save_pretrained(folder)
    dist.barrier()
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with patch.dict(os.environ, {name: str(value) for name, value in given.items()}):
        config = DistributedConfig(fsdp_size=2, ep_size=2, tp_size=1, ep_implementation="fusedmoe")
        model = AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="fusedmoe", distributed_config=config
        ).train()
    if form == "fsmoe":
        fusedmoe.hf.apply(model, schedule=fusedmoe.Schedule("fsmoe", (2, 3)))
    elif form == "blocks":
        fusedmoe.hf.pipeline(model, (2, 3))
    for number, samples in enumerate((3, 1)):
        hf_step(record, f"{form} {number}", model, rank, samples)


@contextmanager
def _titan_on_cpus() -> Iterator[None]:
    from torchtitan.config import TORCH_DTYPE_MAP

    with (
        patch("torchtitan.distributed.parallel_dims.device_type", "cpu"),
        patch.dict(TORCH_DTYPE_MAP, {"float32": torch.float64}),
    ):
        yield


def _titan_config() -> Any:
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import (
        make_ffn_config,
        make_gqa_config,
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )
    from torchtitan.models.common.nn_modules import RMSNorm
    from torchtitan.models.qwen3 import Qwen3Model
    from torchtitan.models.qwen3.model import Qwen3TransformerBlock

    dim, hidden, heads, normal = 16, 24, 2, {"weight": partial(nn.init.normal_, std=0.3)}
    ones = {"weight": nn.init.ones_}
    norm = RMSNorm.Config(normalized_shape=dim, eps=1e-6, param_init=ones)

    def block(shared: bool) -> Any:
        ffn = make_ffn_config(dim=dim, hidden_dim=hidden, w1_param_init=normal, w2w3_param_init=normal)
        return Qwen3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=dim, n_heads=heads, n_kv_heads=heads, head_dim=8, wqkv_param_init=normal, wo_param_init=normal,
                fuse_qkv=True, inner_attention=ScaledDotProductAttention.Config(),
                rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4),
                qk_norm=RMSNorm.Config(normalized_shape=8, eps=1e-6, param_init=ones),
            ),
            moe=make_moe_config(
                num_experts=4,
                router=make_router_config(
                    dim=dim, num_experts=4, gate_param_init=normal, top_k=2,
                    score_func="sigmoid" if shared else "softmax", route_norm=not shared, route_scale=1.5,
                ),
                routed_experts=make_routed_experts_config(
                    dim=dim, hidden_dim=hidden, num_experts=4, top_k=2, comm_backend="standard",
                    param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), normal["weight"]),
                ),
                shared_experts=ffn if shared else None,
            ),
        )  # fmt: skip

    return Qwen3Model.Config(
        vocab_size=32, dim=dim, norm=norm, tok_embeddings=Embedding.Config(
            num_embeddings=32, embedding_dim=dim, param_init=normal),
        lm_head=Linear.Config(in_features=dim, out_features=32, param_init=normal),
        layers=[block(shared=False), block(shared=True)],
    )  # fmt: skip


def titan(record: Record, rank: int, world: int, scratch: Path, degrees: tuple[int, int] | None) -> None:
    """Record steps of a torchtitan Qwen 3 with this library's routed experts, split as by its trainer."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
    from torchtitan.models.qwen3 import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    import fusedmoe.titan

    made = _titan_config()
    schedule: Any = "off" if degrees is None else fusedmoe.Schedule("fsmoe", degrees)
    if world > 1:
        set_qwen3_sharding_config(made, enable_sp=True, enable_ep=True)
    name = "fusedmoe.titan.routed_experts"
    apply_overrides(OverrideConfig(imports=[(name, {"timeout_s": 200.0, "schedule": schedule})]), made)
    torch.manual_seed(0)
    model = made.build()
    model.init_states()
    model = model.double()
    context: Any = None
    if world > 1:
        backend = "partial_dtensor"
        set_spmd_backend(backend)
        sizes = {"dp_replicate": 1, "dp_shard": world, "cp": 1, "tp": 1, "pp": 1, "ep": world}
        dims = ParallelDims(**sizes, world_size=world, spmd_backend=backend)
        with _titan_on_cpus():
            context = get_spmd_context(parallel_dims=dims)
            with context():
                model = parallelize_qwen3(
                    model, parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
                    parallelism=ParallelismConfig(spmd_backend=backend), compile_config=CompileConfig(),
                    ac_config=None, dump_folder="", skip_dp=False,
                )  # fmt: skip
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo supports no other reduction
    tokens = torch.randint(0, 32, (2 + rank, 9), generator=torch.Generator().manual_seed(rank))
    position = torch.arange(8).expand(len(tokens), -1)
    for form in ("layers", "blocks") if world > 1 else ("layers",):
        if form == "blocks":
            fusedmoe.titan.pipeline(model, degrees)
        for number in range(2):
            if context is None:
                loss = nn.functional.cross_entropy(
                    model(tokens[:, :-1], position).flatten(0, 1), tokens[:, 1:].flatten()
                )
                loss.backward()
            else:
                with context():
                    logits = model(tokens[:, :-1], position)
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                    loss.backward()
            record.note(f"{form} {number}: loss", loss)
        record.gradients(model, f"{form}: ")
        model.zero_grad()


@contextmanager
def _megatron_on_cpus(**sizes: int) -> Iterator[None]:
    """Initialise Megatron's process groups without the GPU and Transformer Engine that it expects."""
    from megatron.core import parallel_state

    with (
        patch("torch.cuda.current_device", lambda: "cpu"),
        patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True),
    ):
        parallel_state.initialize_model_parallel(**sizes)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def megatron(record: Record, rank: int, world: int, scratch: Path, degrees: tuple[int, int] | None) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import fusedmoe.megatron

    config = TransformerConfig(
        num_layers=2, num_attention_heads=2, hidden_size=M, ffn_hidden_size=48, moe_ffn_hidden_size=24,
        num_moe_experts=4, moe_router_topk=2, moe_router_dtype="fp64", moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", add_bias_linear=False, bias_activation_fusion=False,
        use_cpu_initialization=True, params_dtype=torch.float64, gated_linear_unit=True,
        activation_func=nn.functional.silu, expert_model_parallel_size=world,
    )  # fmt: skip
    schedule: Any = "off" if degrees is None else fusedmoe.Schedule("fsmoe", degrees)
    even: Any = "off" if degrees is None else fusedmoe.Schedule("fsmoe", (2, 2))
    with _megatron_on_cpus(expert_model_parallel_size=world):
        spec = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
        for override, given in (
            (fusedmoe.megatron.routed_experts, schedule),
            (fusedmoe.megatron.token_dispatcher, even),
        ):
            layer = override(copy.deepcopy(spec), timeout_s=200.0, schedule=given)(config=config)
            layer.set_layer_number(1)
            with torch.no_grad():
                for number, (name, parameter) in enumerate(layer.named_parameters()):
                    # Replicated parameters are equal on all ranks; expert parameters are not.
                    seed = number + (1000 * rank if "local_experts" in name else 0)
                    generator = torch.Generator().manual_seed(seed)
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
            for count in (11 + 3 * rank, 4):
                name = f"{override.__name__} {count - 3 * rank if count > 4 else count}"
                x = batch(rank, (count, 1), torch.float64).requires_grad_()
                y, _ = layer(x)
                y.square().sum().backward()
                record.note(f"{name}: y", y)
                record.note(f"{name}: dx", x.grad)
                record.gradients(layer, f"{name}: ")
                layer.zero_grad()
