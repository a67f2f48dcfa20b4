"""Decoder blocks of Hugging Face in micro-batches: losses and gradients equal those of the blocks without overlap."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Dots1Config,
    Glm4MoeConfig,
    MiniMaxM2Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

import fusedmoe.hf
from fusedmoe import routing
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.hf.callbacks import RouterMetrics, find_experts
from fusedmoe.hf.decoder_blocks import FAMILIES
from fusedmoe.schedule.cost import CostModel, Line, Observed
from tests.cluster import Cluster
from tests.integrations.models import _LATENT, _SHAPE, _TOP_2, CONFIGS, VOCABULARY
from tests.integrations.plans_run import forwards_of
from tests.integrations.test_hf_schedule import evaluated, found, load

SIZES = {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}
# A block without experts, then three with experts: attention of one overlaps with the experts of another.
_DEEP: dict[str, Any] = {"num_hidden_layers": 3, "use_cache": False}
_GROUPS = {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
MODELS: dict[str, PreTrainedConfig] = {
    **CONFIGS,
    "qwen2": Qwen2MoeConfig(
        **_SHAPE, **_TOP_2, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=8
    ),
    "deepseek-2": DeepseekV2Config(
        **_SHAPE, **_TOP_2, **_LATENT, n_routed_experts=8, moe_intermediate_size=16, first_k_dense_replace=1
    ),
    "glm-4": Glm4MoeConfig(**_SHAPE, **_TOP_2, **_GROUPS, head_dim=8, first_k_dense_replace=0),
    "dots.1": Dots1Config(**_SHAPE, **_TOP_2, **_GROUPS, head_dim=8, first_k_dense_replace=0),
    "minimax": MiniMaxM2Config(**_SHAPE, **_TOP_2, num_local_experts=4, head_dim=8, rotary_dim=8),
}


def make(family: str) -> Any:
    given = MODELS[family].to_dict() | _DEEP
    given.pop("layer_types", None)  # one per layer of the original model
    config = type(MODELS[family])(**given)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    return model.double()


def batches(rank: int) -> list[Tensor]:
    """Batches with other sample and position counts on each rank, including a single sample."""
    chance = torch.Generator().manual_seed(rank)
    shapes = [(3, 9), (1, 6)] if rank % 2 == 0 else [(1, 7), (2, 5)]
    return [torch.randint(0, VOCABULARY, shape, generator=chance) for shape in shapes]


CASES: dict[str, Callable[[Any, list[Tensor]], dict[str, Tensor]]] = {
    "step": lambda model, tokens: found(model, tokens[:1]),
    "accumulated": lambda model, tokens: found(model, tokens),
    "no sync": lambda model, tokens: found(model, tokens, last_syncs=True),
    "evaluation": evaluated,
    "autocast": lambda model, tokens: found(model, tokens[:1], autocast=True),
}


def compare(
    rank: int,
    world: int,
    folder: str,
    sizes: dict[str, int],
    degrees: Sequence[tuple[int, int]],
    cases: Sequence[str],
    recompute: bool = False,
) -> None:
    with all_in_float64(cases != ("autocast",)):  # includes routers, which transformers 5.24 builds in float32
        model = load(rank, world, folder, sizes).train()
    assert any(isinstance(module, FSDPModule) for module in model.modules())
    for name in cases:
        with all_in_float64(name != "autocast"):
            compare_case(rank, model, name, degrees, recompute)


@contextmanager
def all_in_float64(applies: bool) -> Iterator[None]:
    """Use float64 for norms and routers, which transformers computes in float32.

    In float32 another summation order may round differently.
    """
    with pytest.MonkeyPatch.context() as patch:
        if applies:
            patch.setattr(torch, "float32", torch.float64)
            patch.setattr(torch, "float", torch.float64)
            patch.setattr(Tensor, "float", Tensor.double)
        yield


def compare_case(rank: int, model: Any, name: str, degrees: Sequence[tuple[int, int]], recompute: bool) -> None:
    wanted = CASES[name](model, batches(rank))
    for each in degrees:
        names = list(model.state_dict())
        (blocks,) = fusedmoe.hf.pipeline(model, each, recompute=recompute)
        assert list(model.state_dict()) == names
        ran = forwards_of(blocks)
        values = CASES[name](model, batches(rank))
        assert len(ran) == (2 if name in ("accumulated", "no sync") else 1), name
        fusedmoe.hf.pipeline(model, None)
        assert values.keys() == wanted.keys() and len(wanted) > (1 if name != "evaluation" else 0)
        for key, value in wanted.items():
            if name == "autocast":
                least = max(float(value.norm()), 1e-3)
                assert float((values[key] - value).norm()) < 1e-2 * least, (name, key)
            else:
                torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "degrees", "cases"),
    [
        ("mixtral", [(2, 3)], ("accumulated",)),
        pytest.param("mixtral", [(1, 1), (2, 2), (3, 2)], tuple(CASES), marks=pytest.mark.slow),
        pytest.param("gpt-oss", [(2, 2), (3, 3)], tuple(CASES), marks=pytest.mark.slow),
        pytest.param("deepseek", [(3, 2)], ("step", "evaluation"), marks=pytest.mark.slow),
        *(
            pytest.param(family, [(2, 2)], ("step", "evaluation"), marks=pytest.mark.slow)
            for family in ("qwen2", "qwen3", "olmoe", "deepseek-2", "glm-4", "dots.1", "minimax")
        ),
    ],
)
def test_micro_batched_blocks_equal_plain_blocks(
    cluster: Cluster, tmp_path: Path, family: str, degrees: Any, cases: Sequence[str]
) -> None:
    make(family).save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), SIZES, degrees, cases)


def run_hooked_blocks(rank: int, world: int, folder: str) -> None:
    """Hooks receive whole batches and the experts' results, and may change them.

    After their removal blocks use the plan again.
    """
    with all_in_float64(True):
        model = load(rank, world, folder, SIZES).train()
        block = model.model.layers[1]
        mlp, attention = block.mlp, block.self_attn
        calls: list[int] = []

        def doubled(_: Any, __: Any, result: Any) -> Any:
            calls.append(1)
            return result * 2 if isinstance(result, Tensor) else (result[0] * 2, *result[1:])

        for module in (mlp, block, mlp.experts, mlp.gate, attention):
            values = []
            for degrees in (None, (2, 2)):
                blocks = fusedmoe.hf.pipeline(model, degrees)
                ran = forwards_of(blocks[0]) if blocks else []
                handle = module.register_forward_hook(doubled if module is not mlp.gate else _seen(calls))
                calls.clear()
                values.append(found(model, batches(rank)[:1]))
                assert len(calls) == 1 and not ran, type(module).__name__
                handle.remove()
            torch.testing.assert_close(values[1], values[0], rtol=1e-10, atol=1e-10)
        found(model, batches(rank)[:1])
        assert ran


def _seen(calls: list[int]) -> Callable[..., None]:
    return lambda *_: calls.append(1)


def test_block_hooks_receive_whole_batches(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    cluster.run(2, run_hooked_blocks, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_micro_batched_blocks_with_recompute_equal_plain(cluster: Cluster, tmp_path: Path, family: str) -> None:
    make(family).save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), SIZES, [(2, 2)], ("step", "accumulated"), True)


@pytest.mark.slow
def test_micro_batched_blocks_under_autocast(cluster: Cluster, tmp_path: Path) -> None:
    make("qwen3").float().save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), SIZES, [(2, 2)], ("autocast",))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ep"), [("mixtral", 2), ("qwen3", 4)])
def test_micro_batched_blocks_equal_plain_on_four_ranks(cluster: Cluster, tmp_path: Path, family: str, ep: int) -> None:
    make(family).save_pretrained(tmp_path)
    sizes = {"fsdp_size": 4, "ep_size": ep, "tp_size": 1}
    cluster.run(4, compare, str(tmp_path), sizes, [(2, 3)], tuple(CASES), timeout_s=300)


def count_metrics(metrics: RouterMetrics, model: Any, tokens: Tensor) -> dict[str, float]:
    model(input_ids=tokens).logits.sum().backward()
    model.zero_grad()
    return metrics.collect()


def call_unsupported(rank: int, world: int, folder: str) -> None:
    """Unsupported calls are rejected by name, some calls run without a plan, and metrics are counted as before."""
    model, tokens = load(rank, world, folder, SIZES).train(), batches(rank)[0]
    metrics = RouterMetrics(model)
    wanted = count_metrics(metrics, model, tokens)
    (blocks,) = fusedmoe.hf.pipeline(model)
    ran = forwards_of(blocks)
    values = count_metrics(metrics, model, tokens)
    assert values.keys() == wanted.keys() and len(wanted) > 3
    del values["moe/balance_loss"]  # of one router forward: here of one micro-batch
    assert values == pytest.approx({key: wanted[key] for key in values}, abs=1e-6)
    metrics.close()
    layers = model.model.layers

    def refuses(match: str, **given: Any) -> None:
        with pytest.raises(ConfigError, match=f"fusedmoe.hf.pipeline: model.layers.[01].*{match}"):
            model(input_ids=tokens, **given)

    with routing.record(model) as choices:
        model(input_ids=tokens)
    fusedmoe.hf.pipeline(model, None)
    with routing.record(model) as plainly:
        model(input_ids=tokens)
    assert len(choices) == 3 and all(torch.equal(choices[name], plainly[name]) for name in plainly)
    (blocks,) = fusedmoe.hf.pipeline(model)
    ran = forwards_of(blocks)
    with routing.replay(model, choices):
        model(input_ids=tokens)
    assert len(ran) == 1
    with pytest.raises(ConfigError, match="cannot be copied; first give degrees=None"):
        copy.deepcopy(layers[0].__dict__["fusedmoe_pipeline"])

    refuses("it has a cache; call the model with use_cache=False", use_cache=True)
    refuses("leave output_router_logits", output_router_logits=True)
    refuses("leave output_router_logits", output_hidden_states=True)
    model.gradient_checkpointing_enable()
    refuses("gradient_checkpointing_disable.*recompute=True")
    model.gradient_checkpointing_disable()
    layers[0].compile(backend="eager")
    refuses("it is compiled; leave compile")
    layers[0]._compiled_call_impl = None
    refuses("a tensor .7, 2., which nobody knows how to split into", other=torch.zeros(7, 2))
    forward = layers[0].forward
    layers[0].forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2
    refuses("is not called with what the block before it returned")
    layers[0].forward = forward
    fusedmoe.hf.mask_padding(model)
    refuses("mask_padding masks")
    for experts in find_experts(model).values():
        del experts._fusedmoe_padding
        experts._forward_pre_hooks.popitem()

    model.eval()
    ran.clear()
    given = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    generated = model.generate(tokens, **given)
    routed = model(input_ids=tokens, output_router_logits=True, use_cache=False).router_logits
    assert not ran and len(routed) == 3
    with torch.inference_mode():
        model(input_ids=tokens, use_cache=False)
    assert not ran
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    assert len(ran) == 1
    assert fusedmoe.hf.pipeline(model, None) == []
    assert torch.equal(model.generate(tokens, **given), generated) and len(ran) == 1
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, logits, rtol=1e-6, atol=1e-6)


def call_unequal_models(rank: int, world: int, folder: str) -> None:
    model = load(rank, world, folder, SIZES)
    with pytest.raises(RankError, match="chunks of dense part and rows is .* on ranks .0. and .* on ranks .1."):
        fusedmoe.hf.pipeline(model, (2, 2 + rank))
    theirs = load(rank, world, folder, SIZES, "all_to_all")
    with pytest.raises(ConfigError, match="transformers itself sends.*ep_implementation='fusedmoe'"):
        fusedmoe.hf.pipeline(theirs)
    adapted = get_peft_model(
        load(rank, world, folder, SIZES), LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"])
    )
    with pytest.raises(ConfigError, match="experts.base_layer is in peft's ParamWrapper; adapt attention alone"):
        fusedmoe.hf.pipeline(adapted)
    shared = load(rank, world, folder, {"fsdp_size": 1, "ep_size": 2, "tp_size": 2})
    with pytest.raises(ConfigError, match="the ranks of tp_size=2 share a batch.*use fsdp_size and ep_size alone"):
        fusedmoe.hf.pipeline(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedmoe.hf.decoder_blocks.TransformersBlocks.families", ("OlmoeDecoderLayer",))
        with pytest.raises(ConfigError, match="is a .*MixtralDecoderLayer; supported: OlmoeDecoderLayer.*sched"):
            fusedmoe.hf.pipeline(model)


def plan_by_costs(rank: int, world: int, folder: str) -> None:
    """The first forward makes a plan by costs, here of a slow link."""
    model = load(rank, world, folder, SIZES).train()
    line = Line(1e-5, 1e-7)
    costs = CostModel({"all-to-all/ep": line, "gemm": Line(0.0, 1e-9), "all-reduce/dp": line})
    with pytest.MonkeyPatch.context() as patch, all_in_float64(True):
        patch.setenv("FUSEDMOE_CACHE", folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_: costs)
        patch.setattr("fusedmoe.layers.measure.time_layer", lambda *_: Observed({}))
        wanted = found(model, batches(rank))
        for policy in ("auto", "flowmoe"):
            (blocks,) = fusedmoe.hf.pipeline(model, (1, 1), policy=policy)
            before = blocks.plans
            values = found(model, batches(rank))
            assert blocks.plans != before
            assert max(blocks.plans.forward.degrees.values()) > 1, policy
            for key, value in wanted.items():
                torch.testing.assert_close(values[key], value, rtol=1e-10, atol=1e-10)
    with pytest.raises(ConfigError, match="unknown policy 'fast' for whole layers; choose auto, "):
        fusedmoe.hf.pipeline(model, policy="fast")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_first_forward_plans_by_measured_costs(cluster: Cluster, tmp_path: Path, family: str) -> None:
    make(family).save_pretrained(tmp_path)
    cluster.run(2, plan_by_costs, str(tmp_path))


@pytest.mark.slow
def test_unsupported_calls_and_unequal_models_raise(cluster: Cluster, tmp_path: Path) -> None:
    make("mixtral").save_pretrained(tmp_path)
    cluster.run(2, call_unsupported, str(tmp_path))
    cluster.run(2, call_unequal_models, str(tmp_path))


def test_pipeline_in_one_process_has_no_effect() -> None:
    model = fusedmoe.hf.apply(make("mixtral"))
    assert fusedmoe.hf.pipeline(model) == [] and "forward" not in vars(model.model.layers[0])


@pytest.mark.parametrize("family", MODELS)
def test_block_output_is_linear_in_expert_output(family: str) -> None:
    """Replacing the experts changes a block's output by exactly the difference of the experts' results."""
    model = make(family).eval()
    experts, block = next((module, block) for block in model.model.layers for module in find_experts(block).values())
    assert type(block).__name__ in FAMILIES
    given = torch.zeros(2 * 6, 32, dtype=torch.float64)
    outputs: list[Tensor] = []
    block.register_forward_hook(lambda module, args, output: outputs.append(output))
    experts.forward = lambda *_: given.clone()
    tokens = torch.arange(12).view(2, 6)
    # Earlier blocks are called with the same tokens.
    model(input_ids=tokens)
    given = torch.randn(2 * 6, 32, dtype=torch.float64)
    model(input_ids=tokens)
    torch.testing.assert_close(outputs[1] - outputs[0], given.view(2, 6, 32), rtol=1e-10, atol=1e-10)


def test_every_block_family_is_tested() -> None:
    tried = {type(block).__name__ for family in MODELS for block in make(family).model.layers}
    assert tried == set(FAMILIES)
