"""Torchtitan's own models with this library's overrides, compared with the definition of experts in float64."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip(
    "torchtitan.distributed.fsdp",
    reason="torchtitan is not installed, or needs a newer PyTorch",
    exc_type=ImportError,
)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig, derive
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, activation_checkpoint
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import (
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.token_dispatcher import TorchAOTokenDispatcher
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import fusedmoe.titan
from fusedmoe import Schedule
from fusedmoe.comm.collectives import all_to_all_rows, compare_calls
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.titan import SelectiveAC
from fusedmoe.training import KEPT_OPERATORS
from tests.cluster import Cluster
from tests.marks import slowly

VOCABULARY, DIM, HIDDEN, EXPERTS, K, HEADS, HEAD_DIM = 32, 16, 24, 4, 2, 2, 8
OURS = ["fusedmoe.titan.token_dispatcher", "fusedmoe.titan.routed_experts"]
_ONES, _NORMAL = {"weight": nn.init.ones_}, {"weight": lambda weight: nn.init.normal_(weight, std=0.3)}


class DefinedExperts(GroupedExperts):
    """Torchtitan's experts in the dtype of their rows; torchtitan always computes in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        weights = zip(parts, self.w1_EFD, self.w2_EDF, self.w3_EFD, strict=True)
        return torch.cat([nn.functional.silu(x @ w1.T).mul(x @ w3.T) @ w2.T for x, w1, w2, w3 in weights])


class Job(Configurable):
    """The parts of torchtitan's trainer that these tests need; the trainer itself requires more packages."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        activation_checkpoint: activation_checkpoint.SelectiveAC.Config
        model: Qwen3Model.Config


def config() -> Qwen3Model.Config:
    """Two small blocks of Qwen 3 with experts, and a third with shared experts and sigmoid scores, as in DeepSeek."""
    norm = RMSNorm.Config(normalized_shape=DIM, eps=1e-6, param_init=_ONES)
    init = {name: _NORMAL["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}

    def block(shared: bool) -> Qwen3TransformerBlock.Config:
        score = "sigmoid" if shared else "softmax"
        ffn = make_ffn_config(dim=DIM, hidden_dim=HIDDEN, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL)
        return Qwen3TransformerBlock.Config(
            attention_norm=norm,
            ffn_norm=norm,
            attention=make_gqa_config(
                dim=DIM, n_heads=HEADS, n_kv_heads=HEADS, head_dim=HEAD_DIM,
                wqkv_param_init=_NORMAL, wo_param_init=_NORMAL, fuse_qkv=True,
                inner_attention=ScaledDotProductAttention.Config(),
                rope=CosSinRoPE.Config(dim=HEAD_DIM, max_seq_len=64, theta=1e4),
                qk_norm=RMSNorm.Config(normalized_shape=HEAD_DIM, eps=1e-6, param_init=_ONES),
            ),
            moe=make_moe_config(
                num_experts=EXPERTS,
                router=make_router_config(
                    dim=DIM, num_experts=EXPERTS, gate_param_init=_NORMAL, top_k=K, score_func=score,
                    route_norm=not shared, route_scale=1.5,
                ),
                routed_experts=make_routed_experts_config(
                    dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, top_k=K, param_init=init, comm_backend="standard"
                ),
                shared_experts=ffn if shared else None,
            ),
        )  # fmt: skip

    return Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=DIM,
        norm=norm,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=_NORMAL),
        lm_head=Linear.Config(in_features=DIM, out_features=VOCABULARY, param_init=_NORMAL),
        layers=[block(shared=False), block(shared=True)],
    )


def model_of(made: Qwen3Model.Config) -> Qwen3Model:
    torch.manual_seed(0)
    model = made.build()
    model.init_states()
    return model


def defined() -> Qwen3Model:
    """Build the unsplit model in float64, with the definition of its experts."""
    made = config()
    for layer in made.layers:
        layer.moe.routed_experts.inner_experts = derive(layer.moe.routed_experts.inner_experts, DefinedExperts.Config)
    return model_of(made).double()


def overridden(*names: Any) -> Qwen3Model.Config:
    made = config()
    replaced = apply_overrides(OverrideConfig(imports=list(names)), made)
    assert len(replaced) == 2 * len(names)
    return made


def batch(step: int, samples: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (samples, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    position = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    return nn.functional.cross_entropy(model(tokens[:, :-1], position).flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, steps: int = 10) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def routed(name: str) -> Any:
    """Build overridden routed experts; if the override keeps torchtitan's experts, the definition replaces them."""
    cfg = config().layers[0].moe.routed_experts
    if name == OURS[0]:
        cfg.inner_experts = derive(cfg.inner_experts, DefinedExperts.Config)
        cfg.token_dispatcher = fusedmoe.titan.token_dispatcher(cfg.token_dispatcher, timeout_s=40.0)
    else:
        cfg = fusedmoe.titan.routed_experts(cfg, timeout_s=40.0)
    torch.manual_seed(1)
    module = cfg.build()
    module.init_states()
    return module


def define(x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, experts: nn.Module) -> Tensor:
    """Σ over each token's experts of score·FFN(x)."""
    rows = []
    for x_D, scores_K, ids_K in zip(x_TD, scores_TK, ids_TK, strict=True):
        found = (
            score * (experts.w2_EDF[e] @ (nn.functional.silu(experts.w1_EFD[e] @ x_D) * (experts.w3_EFD[e] @ x_D)))
            for score, e in zip(scores_K, ids_K.tolist(), strict=True)
        )
        rows.append(sum(found, torch.zeros_like(x_D)))
    return torch.stack(rows) if rows else x_TD * 1


def inputs(tokens: int, experts: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """[1, T, ·] tokens, scores and experts; experts are drawn from the given ones only."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, DIM, generator=chance, dtype=torch.float64)
    scores = torch.rand(1, tokens, K, generator=chance, dtype=torch.float64)
    order = torch.rand(1, tokens, len(experts), generator=chance).argsort(-1)[..., :K]
    return x.requires_grad_(), scores.requires_grad_(), torch.tensor(experts)[order]


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    return largest(
        float((a - b).abs().max()) if b.numel() else float(a.numel()) for a, b in zip(found, wanted, strict=True)
    )


def largest(errors: Iterable[float]) -> float:
    return float(torch.tensor(list(errors)).max())  # keeps NaN, which Python's max may lose


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_training_losses_equal_torchtitan() -> None:
    exact, theirs = train(defined()), train(model_of(config()))
    found = {name: train(model_of(overridden(name))) for name in OURS}
    # Torchtitan's own experts compute in bfloat16, equally with its dispatcher and ours.
    assert found[OURS[0]] == pytest.approx(theirs, abs=1e-5)
    assert found[OURS[1]] == pytest.approx(exact, abs=1e-4)
    assert found[OURS[1]][0] == pytest.approx(theirs[0], abs=0.02)  # after the first step tokens choose other experts
    assert max(exact) - min(exact) > 0.1


def test_parameter_names_and_shapes_are_preserved() -> None:
    shapes = {name: value.shape for name, value in model_of(config()).state_dict().items()}
    for name in OURS:
        assert {name: value.shape for name, value in model_of(overridden(name)).state_dict().items()} == shapes


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("tokens", "experts"), [(9, [0, 1, 2, 3]), (1, [1, 3]), (0, [0, 1]), (30, [2, 0])])
def test_routed_experts_equal_definition(name: str, tokens: int, experts: list[int]) -> None:
    """Compare values and all gradients, including experts without rows."""
    module = routed(name).double()
    given = inputs(tokens, experts, tokens)
    direction = torch.randn(1, tokens, DIM, dtype=torch.float64)
    wants = [*given[:2], *module.inner_experts.parameters()]
    y = module(*given, torch.zeros(EXPERTS))
    exact = define(*(value[0] for value in given), module.inner_experts)[None]
    found, wanted = (torch.autograd.grad((out * direction).sum(), wants, materialize_grads=True) for out in (y, exact))
    assert difference([y, *found], [exact, *wanted]) < 1e-10


def test_backward_saves_no_expert_sized_tensors() -> None:
    """Backward keeps only the parameters themselves, which FSDP frees between the passes."""
    module, kept = routed(OURS[1]), []
    x, scores, ids = inputs(3, [0, 1, 2, 3], 0)

    def pack(value: Tensor) -> Tensor:
        kept.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        module(x.float(), scores.float(), ids, torch.zeros(EXPERTS))
    own = {parameter.data_ptr() for parameter in module.parameters()}
    assert own <= {value.data_ptr() for value in kept}
    least = min(parameter.numel() for parameter in module.parameters())
    assert all(value.numel() < least for value in kept if value.data_ptr() not in own)


def test_matmul_dtype_follows_tokens_or_autocast() -> None:
    module, seen = routed(OURS[1]), []
    module.inner_experts.register_forward_pre_hook(lambda _, given: seen.append((given[0].dtype, given[2].dtype)))
    x, scores, ids = inputs(12, [0, 1, 2, 3], 0)
    exact = module(x.float(), scores.float(), ids, torch.zeros(EXPERTS))
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = module(x.to(dtype), scores.float(), ids, torch.zeros(EXPERTS))
        assert y.dtype is dtype and seen.pop() == (torch.bfloat16, torch.float32)
        assert 0 < (y - exact).norm() / exact.norm() < 0.02


def test_unsupported_torchtitan_dispatcher_raises() -> None:
    cfg = config().layers[0].moe.routed_experts
    padding = TorchAOTokenDispatcher.Config(num_experts=EXPERTS, top_k=K, pad_multiple=16)
    with pytest.raises(ConfigError, match="TorchAOTokenDispatcher.Config does more.*leave"):
        fusedmoe.titan.token_dispatcher(padding)
    with pytest.raises(ConfigError, match="but .*TorchAOTokenDispatcher.Config was chosen; set"):
        fusedmoe.titan.routed_experts(derive(cfg, type(cfg), token_dispatcher=padding))
    with pytest.raises(ConfigError, match="not .*DefinedExperts.Config in .*; use fusedmoe.titan.token_dispatcher"):
        fusedmoe.titan.routed_experts(
            derive(cfg, type(cfg), inner_experts=derive(cfg.inner_experts, DefinedExperts.Config))
        )
    with pytest.raises(ConfigError, match="lose what .*titan.*SelectiveAC.Config saves; leave"):
        fusedmoe.titan.selective_ac(SelectiveAC.Config())


def test_job_config_accepts_overrides_by_name() -> None:
    """Overrides have arguments, and keep torchtitan's earlier settings of the parts: initialization and sharding."""
    made = config()
    set_qwen3_sharding_config(made, enable_sp=True, enable_ep=True)
    job = Job.Config(activation_checkpoint=activation_checkpoint.SelectiveAC.Config(debug=True), model=made)
    before = deepcopy(made.layers[0].moe.routed_experts)
    names = [("fusedmoe.titan.routed_experts", {"timeout_s": 7.0}), "fusedmoe.titan.selective_ac"]
    assert len(apply_overrides(OverrideConfig(imports=names), job)) == 3
    after = made.layers[0].moe.routed_experts
    assert after.token_dispatcher.timeout_s == 7.0 and after.sharding_config == before.sharding_config
    assert after.inner_experts.param_init == before.inner_experts.param_init
    assert after.inner_experts.sharding_config == before.inner_experts.sharding_config is not None
    policy = job.activation_checkpoint.build()
    assert type(policy) is SelectiveAC and policy.config.debug
    assert policy.get_save_ops() > KEPT_OPERATORS


TITANS = "torchtitan.overrides.fused_swiglu.fused_grouped_experts"


def after(*lists: list[str]) -> Any:
    """Return the routed experts' configuration after overrides, with one call per list."""
    made = config()
    job = Job.Config(activation_checkpoint=activation_checkpoint.SelectiveAC.Config(), model=made)
    for names in lists:
        apply_overrides(OverrideConfig(imports=list(names)), job)
    return made.layers[0].moe.routed_experts


def test_overrides_combine_with_torchtitan_overrides() -> None:
    """Combine overrides in one list or two, in both orders: both take effect, or a warning or error follows."""
    dispatcher, routed = OURS
    for pair in ((routed, TITANS), (TITANS, routed), (routed, dispatcher), (dispatcher, routed)):
        with pytest.raises(ValueError, match="Nested overrides are order-dependent"):
            after(list(pair))
    with pytest.warns(UserWarning, match="claims inner_experts without effect: the experts are .*FusedExperts.Config"):
        found = after([routed], [TITANS])
    assert type(found.inner_experts) is fusedmoe.titan.FusedExperts.Config
    with pytest.raises(ConfigError, match="not .*FusedGroupedExperts.Config in .*; use fusedmoe.titan.token_disp"):
        after([TITANS], [routed])
    for first in (routed, dispatcher):
        with pytest.raises(ConfigError, match=f"{first} was applied before; name one of them, once"):
            after([first], [routed])
    for lists in ([[dispatcher, TITANS]], [[TITANS, dispatcher]], [[dispatcher], [TITANS]], [[TITANS], [dispatcher]]):
        found = after(*lists)
        assert type(found.token_dispatcher) is fusedmoe.titan.TokenDispatcher.Config
        assert type(found.inner_experts).__qualname__ == "FusedGroupedExperts.Config"
    dense = TITANS.replace("fused_grouped_experts", "fused_swiglu")
    for lists in ([[routed, dense]], [[dense, routed]], [[routed], [dense]], [[dense], [routed]]):
        assert type(after(*lists)) is fusedmoe.titan.FusedRoutedExperts.Config


def test_replaced_parts_of_routed_experts_raise() -> None:
    cfg = fusedmoe.titan.routed_experts(config().layers[0].moe.routed_experts)
    copied = deepcopy(cfg)
    copied.inner_experts = derive(cfg.inner_experts, type(cfg.inner_experts))
    with pytest.raises(ConfigError, match="replaces inner_experts by .*DefinedExperts.Config"):
        cfg.inner_experts = derive(cfg.inner_experts, DefinedExperts.Config)
    with pytest.raises(ConfigError, match="replaces token_dispatcher by .*TorchAOTokenDisp"):
        cfg.token_dispatcher = TorchAOTokenDispatcher.Config(num_experts=EXPERTS, top_k=K, pad_multiple=16)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_two_rank_training_equals_torchtitan(cluster: Cluster) -> None:
    exact = defined()
    loss_of(exact, batch(0)).backward()
    wanted = {name: parameter.grad for name, parameter in exact.named_parameters()}
    losses, theirs = train(defined()), train(model_of(config()))
    # torchtitan's meshes and FSDP keep process groups with three threads each, in addition to those of earlier tests.
    for found in cluster.run(2, run_on_ranks, most_threads=90):
        assert found["definition"] < 1e-10, found["definition"]
        for rank, error in enumerate(found["refused"]):
            assert f"rank {rank}" in error and "rows of different dtypes" in error
        assert found["tensor parallel"] < 1e-5
        assert found["dispatcher"]["losses"] == pytest.approx(theirs[:3], abs=1e-2)
        kinds = ("plain", "spmd", "saved", "again")
        for each in (found[kind] for kind in kinds):
            assert each["losses"] == pytest.approx(losses[: len(each["losses"])], abs=1e-4)
            assert each["keys"] == sorted(exact.state_dict())
            for name, grad in each["grads"].items():
                want = wanted[name]
                own = want if want.shape == grad.shape else want.chunk(2)[found["rank"]]
                assert (grad - own).norm() < 1e-4 * own.norm().clamp(min=1e-2), name
        calls = {kind: found[kind]["calls"] for kind in kinds}
        # A layer exchanges its row counts, and sends rows and scores, forward and backward, once each.
        assert calls["plain"] == {"exchange of counts": 2, "dispatch": 2 * 3, "combine": 2 * 3}
        assert calls["saved"] == calls["plain"]
        assert calls["again"]["exchange of counts"] == 4


def run_on_ranks(rank: int, world: int) -> dict[str, Any]:
    policy = activation_checkpoint.SelectiveAC.Config()
    saving = fusedmoe.titan.selective_ac(policy)
    return {
        "rank": rank,
        "definition": largest(definition_on_ranks(rank, world, name) for name in OURS),
        "refused": different_dtypes(rank, world),
        "not finite": [run_non_finite(rank, world, name) for name in OURS],
        "tensor parallel": largest(tensor_parallel(rank, world, ep) for ep in (1, world)),
        "dispatcher": steps_on_ranks(rank, world, OURS[0], 3),
        "plain": steps_on_ranks(rank, world, OURS[1], 1),
        "spmd": steps_on_ranks(rank, world, OURS[1], 10, backend="spmd_types"),
        "saved": steps_on_ranks(rank, world, OURS[1], 2, policy=saving),
        "again": steps_on_ranks(rank, world, OURS[1], 1, policy=policy),
    }


def split_over(world: int, rank: int, name: str) -> tuple[Any, Any]:
    """Build routed experts with this rank's part of the parameters, and with all of them."""
    module, whole = routed(name).double(), routed(name).double()
    module.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,)))
    for part in module.inner_experts.parameters():
        part.data = part.data.chunk(world)[rank].clone()
    return module, whole


def definition_on_ranks(rank: int, world: int, name: str, schedule: Any = "off") -> float:
    """Return the largest difference of values and gradients on uneven ranks.

    A rank without tokens, one without rows, one with all rows.
    """
    module, whole = split_over(world, rank, name)
    if schedule != "off":
        module.token_dispatcher.exchange.set_schedule(schedule)
    worst = 0.0
    for tokens, experts in (((5, 9), [0, 1, 2, 3]), ((0, 7), [0, 1, 2, 3]), ((6, 0), [2, 3]), ((0, 0), [0, 1])):
        batches = [inputs(count, experts, seed) for seed, count in enumerate(tokens)]
        given, totals = batches[rank], []
        y = module(*given, torch.zeros(EXPERTS))
        for found in batches:
            totals.append(define(*(value[0] for value in found), whole.inner_experts)[None])
        wants = [*given[:2], *module.inner_experts.parameters()]
        found = torch.autograd.grad(y.square().sum(), wants, materialize_grads=True)
        of_tokens = torch.autograd.grad(
            totals[rank].square().sum(), given[:2], materialize_grads=True, retain_graph=True
        )
        of_experts = torch.autograd.grad(
            sum(total.square().sum() for total in totals),
            list(whole.inner_experts.parameters()),
            materialize_grads=True,
        )
        own = [grad.chunk(world)[rank] for grad in of_experts]
        worst = largest((worst, difference([y, *found], [totals[rank], *of_tokens, *own])))
    return worst


def different_dtypes(rank: int, world: int) -> list[str]:
    """Return the errors on ranks whose rows cannot be exchanged."""
    module, _ = split_over(world, rank, OURS[1])
    x, scores, ids = inputs(3, [0, 1, 2, 3], 0)
    with pytest.raises(RankError) as error:
        module(x.float() if rank else x, scores, ids, torch.zeros(EXPERTS))
    said: list[Any] = [None] * world
    dist.all_gather_object(said, str(error.value))
    return said


def send_unequal_rows(rank: int, world: int, name: str, schedule: Any) -> list[str]:
    """Tokens of another width, scores of another dtype and another number of scores on the last rank."""
    module, _ = split_over(world, rank, name)
    if schedule != "off":
        module.token_dispatcher.exchange.set_schedule(schedule)
    texts = []
    for what in ("width", "scores", "K"):
        x, scores, ids = (tensor.detach() for tensor in inputs(3, [0, 1, 2, 3], 0))
        if rank == world - 1:
            x = torch.cat([x, x[..., :2]], -1) if what == "width" else x
            scores = scores.float() if what == "scores" else scores[..., :1] if what == "K" else scores
            ids = ids[..., :1] if what == "K" else ids
        with pytest.raises(RankError) as error:
            module(x, scores, ids, torch.zeros(EXPERTS))
        texts.append(str(error.value))
        assert module(*inputs(3, [0, 1, 2, 3], 0), torch.zeros(EXPERTS)).isfinite().all()
    return texts


@pytest.mark.parametrize(
    ("name", "schedule"), [(OURS[0], "off"), *slowly((OURS[1], "off"), (OURS[1], Schedule("fsmoe", degrees=(2, 2))))]
)
def test_unequal_row_forms_raise_before_dispatch(cluster: Cluster, name: str, schedule: Any) -> None:
    for rank, texts in enumerate(cluster.run(2, send_unequal_rows, name, schedule, timeout_s=60.0)):
        for text, what in zip(texts, ("widths", "dtypes of router weights", r"numbers of .*\(K\)"), strict=True):
            assert re.search(f"^rank {rank}: .*rows of different {what} cannot be exchanged: .* on rank 1", text)


def run_non_finite(rank: int, world: int, name: str) -> None:
    """Non-finite tokens or scores on one rank end the call on all ranks, and the next call succeeds."""
    module = split_over(world, rank, name)[0] if world > 1 else routed(name).double()
    for bad, place in itertools.product((torch.nan, torch.inf), (0, 1)):
        *given, ids = (tensor.detach() for tensor in inputs(3, [0, 1, 2, 3], 0))
        if rank == world - 1:
            given[place][0, 1, 1] = bad
        with pytest.raises(RankError if world > 1 else ConfigError, match=f"rank {world - 1}.* are NaN or infinite"):
            module(*given, ids, torch.zeros(EXPERTS))
        assert module(*inputs(3, [0, 1, 2, 3], 0), torch.zeros(EXPERTS)).isfinite().all()


@pytest.mark.parametrize("name", OURS)
def test_non_finite_tokens_or_scores_raise(name: str) -> None:
    run_non_finite(0, 1, name)


def tensor_parallel(rank: int, world: int, ep: int, schedule: Any = "off") -> float:
    """Return a layer's largest relative error on ranks that share a sequence.

    Each rank has a part of every expert, or all of some experts and a part of the sequence.
    """
    set_spmd_backend("partial_dtensor")
    sizes = {"dp_replicate": 1, "cp": 1, "pp": 1, "dp_shard": 1, "tp": world, "ep": ep}
    dims = ParallelDims(**sizes, world_size=world, spmd_backend="partial_dtensor")
    made = config()
    set_qwen3_sharding_config(made, enable_sp=True, enable_ep=ep > 1)
    cfg = made.layers[1].moe
    cfg.routed_experts = fusedmoe.titan.routed_experts(cfg.routed_experts, schedule=schedule)
    return error_on_ranks(cfg, rank, world, dims)


def error_on_ranks(cfg: Any, rank: int, world: int, dims: ParallelDims) -> float:
    """Return a layer's largest relative error on ranks that share a sequence, compared with the unsplit layer.

    Includes gradients.
    """
    torch.manual_seed(2)
    module = cfg.build()
    module.init_states()
    whole = deepcopy(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
        module.parallelize(dims)
    x = torch.randn(2, 4 * world, DIM, generator=torch.Generator().manual_seed(3))
    part = x.chunk(world, 1)[rank].clone().requires_grad_()
    x.requires_grad_()
    exact, y = whole(x), module(part).full_tensor()
    exact.square().sum().backward()
    y.square().sum().backward()
    found = [y, part.grad, *(parameter.grad.full_tensor() for parameter in module.parameters())]
    wanted = [exact, x.grad.chunk(world, 1)[rank], *(parameter.grad for parameter in whole.parameters())]
    return largest(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


def steps_on_ranks(
    rank: int, world: int, name: str, steps: int, backend: Any = "partial_dtensor", policy: Any = None
) -> dict[str, Any]:
    """Train the model over ranks as torchtitan configures it, with split experts.

    The other parameters are sharded by FSDP or replicated.
    """
    by_fsdp = backend != "spmd_types"  # FSDP there requires a PyTorch that supports its annotations
    set_spmd_backend(backend)
    sizes = {"dp_replicate": 1, "cp": 1, "pp": 1, "dp_shard": world, "tp": 1, "ep": world}
    dims = ParallelDims(**sizes, world_size=world, spmd_backend=backend)
    made = config()
    set_qwen3_sharding_config(made, enable_sp=True, enable_ep=True)
    apply_overrides(OverrideConfig(imports=[(name, {"timeout_s": 40.0})]), made)
    calls: Counter[str] = Counter()

    def met(group: Any, operation: str, *rest: Any) -> list[bytes]:
        if operation == "exchange of counts":
            calls[operation] += 1
        return compare_calls(group, operation, *rest)

    def counted(
        group: Any, rows: Tensor, send: Any, recv: Any, operation: str = "", is_compared: bool = False
    ) -> Tensor:
        calls[operation] += 1
        return all_to_all_rows(group, rows, send, recv, operation, is_compared)

    with pytest.MonkeyPatch.context() as patch:
        # Torchtitan builds GPU meshes, even without GPUs.
        patch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
        patch.setattr("fusedmoe.comm.exchange.compare_calls", met)
        for module in ("exchange", "all_to_all"):
            patch.setattr(f"fusedmoe.comm.{module}.all_to_all_rows", counted)
        context = get_spmd_context(parallel_dims=dims)
        with context():
            model = parallelize_qwen3(
                model_of(made), parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
                parallelism=ParallelismConfig(spmd_backend=backend), compile_config=CompileConfig(),
                ac_config=policy, dump_folder="", skip_dp=not by_fsdp,
            )  # fmt: skip
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo supports no other reduction
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        losses, grads, first = [], {}, {}
        for step in range(steps):
            tokens = batch(step).chunk(world)[rank]
            with context():
                loss = loss_of(model, tokens) / world
                loss.backward()
            for full, parameter in model.named_parameters():
                if not by_fsdp and "inner_experts" not in full:
                    dist.all_reduce(parameter.grad)
                if step == 0:
                    grad = parameter.grad
                    grads[full.replace("_checkpoint_wrapped_module.", "")] = (
                        grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
                    )
            first = first or dict(calls)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
    return {"losses": losses, "grads": grads, "calls": first, "keys": sorted(model.state_dict())}


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_layer_compiles_as_one_graph(cluster: Cluster, name: str) -> None:
    assert largest(cluster.run(2, compare_compiled, name)) < 1e-10


def compare_compiled(rank: int, world: int, name: str) -> float:
    """Return the largest difference from eager mode, including gradients."""
    module, _ = split_over(world, rank, name)
    if name == OURS[0]:
        # The definition of experts reads row counts, which a graph does not have.
        module.inner_experts.forward = lambda rows_RD, counts_e: rows_RD * 2  # type: ignore[method-assign]
    graph, worst = torch.compile(module, backend="aot_eager", fullgraph=True), 0.0
    for tokens in (5, 8):
        given, found = inputs(tokens + rank, [0, 1, 2, 3], tokens), []
        for one in (module, graph):
            y = one(*given, torch.zeros(EXPERTS))
            found.append([y, *torch.autograd.grad(y.square().sum(), given[:2])])
        worst = largest((worst, difference(*found)))
    return worst
