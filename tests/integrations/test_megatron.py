"""Megatron-core's layer with this library, compared with the definition and Megatron's experts in float64."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron.core is not installed")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

import fusedmoe.megatron
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.megatron import experts_from_map
from tests.cluster import Cluster

DIM, HIDDEN, EXPERTS, K = 16, 24, 4, 2
OURS = [fusedmoe.megatron.token_dispatcher, fusedmoe.megatron.routed_experts]
PLAIN: dict[str, Any] = {"gated_linear_unit": True, "activation_func": functional.silu}


def config(**other: Any) -> TransformerConfig:
    given = {
        "num_layers": 2, "num_attention_heads": 2, "hidden_size": DIM, "ffn_hidden_size": 2 * HIDDEN,
        "moe_ffn_hidden_size": HIDDEN, "num_moe_experts": EXPERTS, "moe_router_topk": K, "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "allgather", "add_bias_linear": False,
        "bias_activation_fusion": False, "use_cpu_initialization": True, "params_dtype": torch.float64,
    }  # fmt: skip
    return TransformerConfig(**{**given, **PLAIN, **other})


@contextmanager
def megatron(**sizes: int) -> Iterator[None]:
    """Provide Megatron's process groups and its prerequisites: a GPU, NVIDIA's Transformer Engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.current_device", lambda: "cpu")
        patch.setattr("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, raising=False)
        parallel_state.initialize_model_parallel(**sizes)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


def layer_of(cfg: TransformerConfig, ours: Any = None) -> Any:
    """Build a layer whose parameter values do not depend on the rank that holds them."""
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS).submodules.mlp
    layer = (spec if ours is None else ours(spec, timeout_s=40.0))(config=cfg)
    layer.set_layer_number(1)
    up, down, router = weights(cfg.gated_linear_unit)
    layer.router.weight.data.copy_(router)
    parts, part = layer.experts.tp_group.size(), layer.experts.tp_group.rank()
    for e, expert in zip(layer.local_expert_indices, layer.experts.local_experts, strict=True):
        mine = torch.cat([half.chunk(parts)[part] for half in up[e].chunk(2 if cfg.gated_linear_unit else 1)])
        expert.linear_fc1.weight.data.copy_(mine)
        expert.linear_fc2.weight.data.copy_(down[e].chunk(parts, 1)[part])
    return layer


def weights(gated: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """[E, (2·)H, D], [E, D, H], [E, D], of all experts."""
    seed, width = torch.Generator().manual_seed(1), HIDDEN * (2 if gated else 1)
    shapes = ((EXPERTS, width, DIM), (EXPERTS, DIM, HIDDEN), (EXPERTS, DIM))
    up, down, router = (0.3 * torch.randn(shape, generator=seed, dtype=torch.float64) for shape in shapes)
    return up, down, router


def tokens(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def define(x: Tensor, router: Any, up: Tensor, down: Tensor, cfg: TransformerConfig) -> Tensor:
    """Σ over experts of weight·FFN(x), with the weights of Megatron's router."""
    probs, _ = router(x)
    y = torch.zeros_like(x)
    for e in range(EXPERTS):
        h = x @ up[e].T
        if cfg.gated_linear_unit:
            gate, h = h.chunk(2, -1)
            h = cfg.activation_func(gate) * h
        else:
            h = cfg.activation_func(h)
        y = y + probs[:, e].view(-1, 1, 1) * (h @ down[e].T)
    return y


def definition(
    rank: int, ours: Any, counts: list[int], cfg: TransformerConfig, wanted: Sequence[int] = range(EXPERTS)
) -> None:
    """Compare all values and gradients with those of all ranks' tokens and all experts in one process.

    No token chooses experts outside `wanted`. (Megatron's router does not support a rank without tokens.)
    """
    layer = layer_of(cfg, ours)
    router = layer.router
    router.weight.data[:, 0] = torch.tensor([0.0 if e in wanted else -99.0 for e in range(EXPERTS)])
    up, down = (weight.requires_grad_() for weight in weights(cfg.gated_linear_unit)[:2])
    batches = [tokens(count, seed) for seed, count in enumerate(counts)]
    for x in batches:
        x[..., 0] = 1.0
        x.requires_grad_()
    totals = [define(x, router, up, down, cfg) for x in batches]
    x = batches[rank].detach().clone().requires_grad_()
    y, bias = layer(x)
    assert bias is None
    linears = [getattr(expert, name).weight for name in ("linear_fc1", "linear_fc2") for expert in
               layer.experts.local_experts]  # fmt: skip
    found = torch.autograd.grad(y.square().sum(), [x, layer.router.weight, *linears], materialize_grads=True)
    own = torch.autograd.grad(
        totals[rank].square().sum(), [batches[rank], router.weight], materialize_grads=True, retain_graph=True
    )
    total = sum(one.square().sum() for one in totals)
    dup, ddown = torch.autograd.grad(total, [up, down], materialize_grads=True)
    parts, part = layer.experts.tp_group.size(), layer.experts.tp_group.rank()
    here, halves = layer.local_expert_indices, 2 if cfg.gated_linear_unit else 1
    of_up = [torch.cat([half.chunk(parts)[part] for half in dup[e].chunk(halves)]) for e in here]
    of_down = [ddown[e].chunk(parts, 1)[part] for e in here]
    for one, other in zip([y, *found], [totals[rank], *own, *of_up, *of_down], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def compare_with_megatron(rank: int, ours: Any, count: int, cfg: TransformerConfig) -> None:
    """Train two layers for ten steps, with Megatron's experts and with ours, and compare the losses."""
    losses = []
    for which in (None, ours):
        layers = [layer_of(cfg, which) for _ in range(2)]
        optimizer, found = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.01), []
        for _ in range(10):
            x = tokens(count, rank)
            y = x + layers[0](x)[0]
            loss = (y + layers[1](y)[0] - x.flip(-1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    assert losses[0][-1] < losses[0][0], losses[0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-10, atol=0)


def run_on_ranks(rank: int, counts: list[list[int]], **sizes: int) -> None:
    tp = sizes.get("tensor_model_parallel_size", 1)
    names = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
    told = {name: sizes[name] for name in names if name in sizes}
    cfg = config(sequence_parallel=tp > 1, **told)
    dropping = config(sequence_parallel=tp > 1, moe_expert_capacity_factor=0.6, **told)
    with megatron(**sizes):
        for ours in OURS:
            for each in counts:
                definition(rank, ours, each, cfg)
            definition(rank, ours, counts[0], cfg, wanted=(2, 3))
            definition(rank, ours, counts[0], dropping)
            for capacity, policy in ((0.6, "probs"), (0.6, "position"), (9.0, "probs")):
                padding = {"moe_pad_expert_input_to_capacity": True, "moe_token_drop_policy": policy}
                sizes_and_padding = dict(sequence_parallel=tp > 1, moe_expert_capacity_factor=capacity) | padding | told
                definition(rank, ours, counts[0], config(**sizes_and_padding))
            compare_with_megatron(rank, ours, 7, cfg)
            bad_numbers(rank, layer_of(cfg, ours))


def bad_numbers(rank: int, layer: Any) -> None:
    """Non-finite tokens on the last rank end the call on all ranks, and the next call succeeds."""
    last = dist.get_world_size() - 1
    for bad in (torch.nan, torch.inf):
        x = tokens(8, rank)
        if rank == last:
            x[3] = bad
        with pytest.raises((RankError, ConfigError), match=f"rank {last}.* are NaN or infinite"):
            layer(x)
        assert layer(tokens(8, rank))[0].isfinite().all()


def run_one_rank(rank: int, world: int) -> None:
    run_on_ranks(rank, [[9], [1]])
    with megatron():
        for act in (functional.silu, functional.gelu, functional.relu):
            for gated in (False, True):
                if not (gated and act is functional.relu):
                    cfg = config(activation_func=act, gated_linear_unit=gated)
                    definition(rank, fusedmoe.megatron.routed_experts, [9], cfg)
        compare_checkpoints()
        refusals()


def compare_checkpoints() -> None:
    """Parameter names, and names and shapes of their parts in distributed checkpoints, equal Megatron's."""
    theirs, *ours = (layer_of(config(), which) for which in (None, *OURS))

    def own(layer: Any) -> Any:
        return {name: getattr(value, "shape", None) for name, value in layer.state_dict().items()}

    def sharded(layer: Any) -> Any:
        found = layer.sharded_state_dict(prefix="mlp.").items()
        return {name: (part.key, getattr(part, "global_shape", None)) for name, part in found}

    for layer in ours:
        assert own(layer) == own(theirs) and sharded(layer) == sharded(theirs)


def refusals() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("flex", {"moe_token_dispatcher_type": "flex"}),
        ("overlap_moe_expert_parallel_comm", {"overlap_moe_expert_parallel_comm": True}),
        ("cuda_graph_scope", {"cuda_graph_impl": "local"}),
        ("add_bias_linear", {"add_bias_linear": True}),
        ("activation_func_clamp_value", {"activation_func_clamp_value": 7.0}),
        ("relu with a gate", {"activation_func": functional.relu}),
        ("activation_func=tanh", {"activation_func": torch.tanh, "gated_linear_unit": False}),
    ]
    for named, setting in cases:
        cfg = config()
        for name, value in setting.items():  # Megatron itself may reject this combination
            setattr(cfg, name, value)
        with pytest.raises(ConfigError, match=named):
            layer_of(cfg, fusedmoe.megatron.routed_experts)


def test_layer_equals_definition_and_megatron(world: None) -> None:
    run_one_rank(0, 1)


@pytest.mark.slow
def test_expert_parallel_layer_equals_definition(cluster: Cluster) -> None:
    """Uneven ranks, and one that receives no rows."""
    cluster.run(2, run_expert_parallel)


def run_expert_parallel(rank: int, world: int) -> None:
    run_on_ranks(rank, [[5, 9], [1, 7]], expert_model_parallel_size=2)


def unequal_rows(rank: int, world: int) -> str:
    """Tokens of another width on the last rank, through the dispatcher's stages."""
    with megatron(expert_model_parallel_size=world):
        stages = layer_of(config(), OURS[0]).token_dispatcher
        routing_TE = torch.tensor([[True, False, True, False], [False, True, False, True]])
        x_TD = torch.randn(2, DIM + (rank == world - 1), dtype=torch.float64)
        with pytest.raises(RankError) as caught:
            stages.token_dispatch(*stages.dispatch_preprocess(x_TD, routing_TE, routing_TE.double()))
    return str(caught.value)


def test_unequal_row_widths_raise_before_dispatch(cluster: Cluster) -> None:
    for rank, text in enumerate(cluster.run(2, unequal_rows, timeout_s=60.0)):
        found = f"rows of different widths cannot be exchanged: {DIM} on rank 0, {DIM + 1} on rank 1"
        assert text.startswith(f"rank {rank}: ") and found in text


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_expert_tensor_parallel_layer_equals_definition(cluster: Cluster, world: int) -> None:
    cluster.run(world, split_experts)


def split_experts(rank: int, world: int) -> None:
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    counts = [[5, 9, 3, 1]]
    run_on_ranks(rank, [each[:world] for each in counts], expert_model_parallel_size=world // 2, **sizes)


def test_experts_from_map_returns_numbers_and_weights() -> None:
    routing_TE = torch.tensor([[True, False, True, False], [False, False, False, True], [False] * 4])
    probs_TE = torch.rand(3, 4) * routing_TE
    number_TK, weight_TK = experts_from_map(routing_TE, probs_TE, 2)
    assert number_TK.tolist() == [[0, 2], [3, -1], [-1, -1]]
    assert weight_TK[0].tolist() == probs_TE[0, [0, 2]].tolist() and weight_TK[1, 0] == probs_TE[1, 3]


def choice(mlp: Any) -> tuple[type, dict[str, Any]]:
    """Return the class and the arguments of a spec, or of a constructor from Megatron 0.19 on."""
    return (mlp.func, mlp.keywords) if isinstance(mlp, partial) else (mlp.module, mlp.params)


def test_overridden_specs_have_expected_modules() -> None:
    """Specs of a layer, of a block in which only some layers have experts, and of a block without experts."""
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS)
    for ours in OURS:
        made = ours(spec, timeout_s=7.0)
        (made_class, arguments), (given_class, given) = choice(made.submodules.mlp), choice(spec.submodules.mlp)
        assert issubclass(made_class, MoELayer) and arguments["timeout_s"] == 7.0
        assert given_class is MoELayer and "timeout_s" not in given
        assert made.submodules.self_attention is spec.submodules.self_attention
        with pytest.raises(ConfigError, match="MLP"):
            ours(get_gpt_layer_local_spec(num_experts=None))
        with pytest.raises(ConfigError, match="MegatronMoELayer"):
            ours(made)
    cfg = config(moe_layer_freq=[0, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_world_size", lambda: 1)
        patch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_rank", lambda: 0)
        block = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False)
    dense, sparse = OURS[1](block).layer_specs
    assert dense == block.layer_specs[0] and issubclass(choice(sparse.submodules.mlp)[0], MoELayer)


def table() -> dict[str, tuple[str, str]]:
    """Rows of the guide's table of settings: per name, the effect in `routed_experts` and in `token_dispatcher`."""
    text = (Path(__file__).parents[2] / "docs/guides/megatron.md").read_text().split("## Settings of Megatron")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]
    found: dict[str, tuple[str, str]] = {}
    for names, both in ((re.findall(r"`([^`]+)`", row[0]), (row[1], row[2])) for row in rows):
        assert not found.keys() & set(names)
        found |= dict.fromkeys(names, both)
    return found


def test_guide_table_equals_rejected_settings() -> None:
    rows = table()
    assert {cell for both in rows.values() for cell in both} <= {"supported", "refused", "no effect", "Megatron's"}
    refused = [{name for name, both in rows.items() if both[column] == "refused"} for column in (0, 1)]
    assert refused[1] == set(fusedmoe.megatron.REFUSED)
    assert refused[0] == refused[1] | set(fusedmoe.megatron.REFUSED_EXPERTS)
    settings = {name.split("=")[0] for name in rows}
    assert all(hasattr(config(), name) for name in settings - {*fusedmoe.megatron.SINCE_0_19})


SET: dict[str, Any] = {
    "cuda_graph_scope": {"cuda_graph_impl": "local"},
    "fp8": {"fp8": "e4m3"},
    "fp4": {"fp4": "e2m1"},
    "activation_func_clamp_value": {"activation_func_clamp_value": 7.0},
    "glu_linear_offset": {"glu_linear_offset": 1.0},
    "activation_func": {"activation_func": torch.tanh},
    "moe_token_dispatcher_type='flex'": {"moe_token_dispatcher_type": "flex"},
    "transformer_impl='inference_optimized'": {"transformer_impl": "inference_optimized"},
    "moe_mlp_glu_interleave_size": {"moe_mlp_glu_interleave_size": 32},
    "moe_expert_rank_capacity_factor": {"moe_expert_rank_capacity_factor": 1.5},
}


@pytest.mark.parametrize("name", [*fusedmoe.megatron.REFUSED, *fusedmoe.megatron.REFUSED_EXPERTS])
def test_error_names_rejected_setting(name: str) -> None:
    cfg = config()
    for setting, value in SET.get(name, {name: True}).items():
        setattr(cfg, setting, value)
    check = fusedmoe.megatron._require_supported if name in fusedmoe.megatron.REFUSED else fusedmoe.megatron._activation
    with pytest.raises(ConfigError, match=name):
        check(cfg)
