"""Small Hugging Face, torchtitan and Megatron models with this library's integrations: step times under "auto" and
"off".

Also measured: the integrations with all-to-alls restricted to one direction of the link at a time (their earlier form),
blocks in micro-batches if the model has attention (Hugging Face), and the cost of steps that try plans.

A step is forward and backward of all layers, including the framework's own communication: FSDP's parameters and
gradients for Hugging Face, nothing for the others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.cluster.model import explored
from bench.cluster.setting import Setting
from bench.cluster.turns import beside, in_turns, row, setting_json, tell
from fusedmoe.comm.topology import Topology
from fusedmoe.layers import scheduled_exchange
from fusedmoe.layers.schedule import ScheduledPlans
from fusedmoe.layers.scheduled_exchange import exchanges_in
from fusedmoe.schedule.workload import uniform_share
from fusedmoe.training import tune_model

#: Micro-batches of whole blocks, forward and backward.
_DEGREES = (2, 2)
# Vocabulary size with negligible cost.
_VOCABULARY = 64


class Door(NamedTuple):
    """A model, and a function that runs its forward and backward."""

    model: nn.Module
    step: Callable[[], object]


def balanced(setting: Setting, topology: Topology, off: Door, set_rate: Callable[[Setting], object]) -> Setting:
    """Return the setting with the link rate at which the model's bytes take as long as its computation. Collective."""
    assert setting.inter_mbit is not None and setting.computation_s is not None
    for _ in range(2):  # the first measurement includes rate-dependent parts
        sent_s = min(in_turns(topology, {"off": off.step}, 2)["off"]) - setting.computation_s
        setting = replace(setting, inter_mbit=max(1, round(setting.inter_mbit * sent_s / setting.computation_s)))
        set_rate(setting)
    return setting


def measure(setting: Setting, topology: Topology, off: Door, rounds: int) -> dict[str, Any]:
    """Time interleaved steps; report which fraction of the hideable communication "auto" hides. Collective."""
    with _one_direction():
        doors = {"before": make(setting)}
    doors |= {"off": off, "auto": make(setting)}
    for exchange in exchanges_in(doors["auto"].model):
        exchange.set_schedule("auto")
    if setting.door == "hf":
        import fusedmoe.hf

        doors["blocks"] = make(setting)
        fusedmoe.hf.pipeline(doors["blocks"].model, _DEGREES)
    found = in_turns(topology, {name: door.step for name, door in doors.items()}, rounds)
    rows = beside({name: row(seconds) for name, seconds in found.items()})
    first = exchanges_in(doors["auto"].model)[0].plans
    assert isinstance(first, ScheduledPlans)
    for plans in first.plans_by_workload.values():
        rows["auto"]["degrees"] = list(plans.degrees)
    if "blocks" in rows:
        rows["blocks"]["degrees"] = list(_DEGREES)
    off_s, auto_s, computed_s = rows["off"]["median_s"], rows["auto"]["median_s"], setting.computation_s
    assert computed_s is not None
    # At most the computation time can be hidden.
    hideable_s = min(off_s - computed_s, computed_s)
    result = {"setting": setting_json(setting), "rows": rows, "over_before": rows["before"]["median_s"] / auto_s}
    result |= {"computation_s": computed_s, "hideable_s": hideable_s, "hidden": (off_s - auto_s) / hideable_s}
    if "blocks" in rows:
        result["hidden_by_blocks"] = (off_s - rows["blocks"]["median_s"]) / hideable_s
    return result


def measure_tuning(setting: Setting, topology: Topology, off: Door) -> dict[str, Any]:
    """Measure the cost of steps that try plans, until one is chosen. Collective."""
    tuning = tune_model(off.model, tell=lambda _: None)
    while not tuning.is_settled:
        tell(topology, "auto tries plans")
        with tuning:
            off.step()
    rows = {one.candidate.name: row(list(one.step_times_s)) for one in tuning.trials.entries if one.step_times_s}
    return {"setting": setting_json(setting), "rows": beside(rows), "auto": explored(tuning)}


def sent_bytes(setting: Setting) -> int:
    share = uniform_share(setting.E, setting.k, setting.ranks)
    return round(setting.layers * 4 * share * setting.row_bytes / 2)


def make(setting: Setting, alone: bool = False) -> Door:
    """Create the setting's model over the ranks, or with all experts local (`alone`), without communication."""
    torch.manual_seed(0)
    return {"hf": _hf, "titan": _titan, "megatron": _megatron}[str(setting.door)](setting, alone)


def _hf(setting: Setting, alone: bool) -> Door:
    from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig
    from transformers.distributed import DistributedConfig

    import fusedmoe.hf

    sizes = dict(hidden_size=setting.M, intermediate_size=setting.H, num_hidden_layers=setting.layers)
    shared = dict(vocab_size=_VOCABULARY, max_position_embeddings=setting.sequence, num_experts_per_tok=setting.k)
    config: Any
    if setting.heads is None:
        heads = dict(num_attention_heads=4, num_key_value_heads=4)
        config = MixtralConfig(**sizes, **heads, **shared, num_local_experts=setting.E)
    else:
        heads = dict(num_attention_heads=setting.heads, num_key_value_heads=4, head_dim=64)
        config = Qwen3MoeConfig(
            **sizes, **heads, **shared, num_experts=setting.E, moe_intermediate_size=setting.H, decoder_sparse_step=1
        )
    if alone:
        model: Any = fusedmoe.hf.apply(AutoModelForCausalLM.from_config(config))
    else:
        rank, world = dist.get_rank(), dist.get_world_size()
        names = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": setting.ranks_per_node}
        split = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="fusedmoe")
        # Rank 0 writes the model for all: transformers writes on no other rank.
        with tempfile.TemporaryDirectory() as own, patch.dict(os.environ, {k: str(v) for k, v in names.items()}):
            folder = [own]
            dist.broadcast_object_list(folder)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
            dist.barrier()
            model = AutoModelForCausalLM.from_pretrained(
                folder[0], experts_implementation="fusedmoe", distributed_config=split
            )
            dist.barrier()
    tokens = torch.randint(0, _VOCABULARY, (setting.S // setting.k // setting.sequence, setting.sequence))

    def step() -> None:
        model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        model.zero_grad()

    return Door(model, step)


class _Stack(nn.Module):
    """Sequential layers of experts with residual connections."""

    def __init__(self, layers: list[Any], call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self._call = nn.ModuleList(layers), call

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self._call(layer, x)
        return x


def _stack(layers: list[Any], call: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...]) -> Door:
    model, x = _Stack(layers, call), torch.randn(shape)

    def step() -> None:
        model(x.requires_grad_()).square().mean().backward()
        model.zero_grad()
        x.grad = None

    return Door(model, step)


def _titan(setting: Setting, alone: bool) -> Door:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

    draw: Any = partial(nn.init.normal_, std=0.05)
    sizes = dict(dim=setting.M, num_experts=setting.E, top_k=setting.k)
    layers = []
    for _ in range(setting.layers):
        init = {name: draw for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
        routed = make_routed_experts_config(**sizes, hidden_dim=setting.H, param_init=init, comm_backend="standard")
        router = make_router_config(
            **sizes, gate_param_init={"weight": draw}, score_func="softmax", route_norm=True, route_scale=1.0
        )
        config = make_moe_config(num_experts=setting.E, router=router, routed_experts=routed, shared_experts=None)
        assert len(apply_overrides(OverrideConfig(imports=["fusedmoe.titan.routed_experts"]), config)) == 1
        layer = config.build()
        layer.init_states()
        if not alone:
            for part in layer.routed_experts.inner_experts.parameters():
                part.data = part.data.chunk(setting.ranks)[dist.get_rank()].clone()
            layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (setting.ranks,)))
        layers.append(layer)
    shape = (setting.S // setting.k // setting.sequence, setting.sequence, setting.M)
    return _stack(layers, lambda layer, x: layer(x), shape)


def _megatron(setting: Setting, alone: bool) -> Door:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    import fusedmoe.megatron

    # Megatron assumes a GPU and Transformer Engine.
    patch("torch.cuda.current_device", lambda: "cpu").start()
    patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True).start()
    ep = 1 if alone else setting.ranks
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=ep)
    config = TransformerConfig(
        num_layers=setting.layers, num_attention_heads=4, hidden_size=setting.M, ffn_hidden_size=setting.H,
        moe_ffn_hidden_size=setting.H, num_moe_experts=setting.E, moe_router_topk=setting.k, add_bias_linear=False,
        moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather", gated_linear_unit=True,
        activation_func=nn.functional.silu, bias_activation_fusion=False, use_cpu_initialization=True,
        expert_model_parallel_size=ep, moe_router_dtype="fp64",
    )  # fmt: skip
    spec = fusedmoe.megatron.routed_experts(get_gpt_layer_local_spec(num_experts=setting.E).submodules.mlp)
    layers = [spec(config=config) for _ in range(setting.layers)]
    for number, layer in enumerate(layers, 1):
        layer.set_layer_number(number)
    return _stack(layers, lambda layer, x: layer(x)[0], (setting.S // setting.k, 1, setting.M))


@contextmanager
def _one_direction() -> Iterator[None]:
    begin = Topology._init_axes

    def simplex(self: Topology, job: Any, size: int, ranks_per_node: int = 1, duplex: bool = False) -> None:
        begin(self, job, size, ranks_per_node)

    # Do not share cached topologies with other models.
    with patch.object(Topology, "_init_axes", simplex), patch.dict(scheduled_exchange._topologies, clear=True):
        yield
