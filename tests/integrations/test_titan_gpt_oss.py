"""gpt-oss's experts in torchtitan with this library's override, compared with their definition in float64."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import pytest

pytest.importorskip(
    "torchtitan.distributed.fsdp",
    reason="torchtitan is not installed, or needs a newer PyTorch",
    exc_type=ImportError,
)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_token_dispatcher_config
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.models.gpt_oss.sharding import _GPT_OSS_EXPERTS_PARAM_LAYOUT as LAYOUT

import fusedmoe.titan
from fusedmoe import Schedule
from fusedmoe.kernels.activation import define_clamped_swiglu
from tests.cluster import Cluster
from tests.integrations.test_titan import DIM, EXPERTS, HIDDEN, K, error_on_ranks, inputs

LIMIT = 1.5
_NORMAL = partial(nn.init.normal_, std=0.5)


def config() -> RoutedExperts.Config:
    inner = GptOssGroupedExperts.Config(
        dim=DIM,
        hidden_dim=HIDDEN,
        num_experts=EXPERTS,
        swiglu_limit=LIMIT,
        param_init={name: _NORMAL for name in LAYOUT},
    )
    sends = make_token_dispatcher_config(num_experts=EXPERTS, top_k=K, comm_backend="standard", hidden_dim=DIM)
    return RoutedExperts.Config(inner_experts=inner, token_dispatcher=sends)


def build_module(cfg: RoutedExperts.Config) -> Any:
    torch.manual_seed(1)
    module = cfg.build()
    module.init_states()
    return module


def define(x_TD: Tensor, scores_TK: Tensor, ids_TK: Tensor, experts: Any) -> Tensor:
    """Σ over each token's experts of score·FFN(x), expert by expert."""
    rows = []
    for x_D, scores_K, ids_K in zip(x_TD, scores_TK, ids_TK, strict=True):
        y_D = torch.zeros_like(x_D)
        for score, e in zip(scores_K, ids_K.tolist(), strict=True):
            h_G = experts.mlp1_weight_EGD[e] @ x_D + experts.mlp1_bias_EG[e]
            a_F = define_clamped_swiglu(h_G[None], 1.702, LIMIT)[0]
            y_D = y_D + score * (experts.mlp2_weight_EDF[e] @ a_F + experts.mlp2_bias_ED[e])
        rows.append(y_D)
    return torch.stack(rows) if rows else x_TD * 1


def compare(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("tokens", "experts"), [(9, [0, 1, 2, 3]), (1, [1, 3]), (0, [0, 1]), (30, [2, 0])])
def test_gpt_oss_experts_equal_definition(tokens: int, experts: list[int]) -> None:
    """Compare values and all gradients, including experts without rows."""
    module = build_module(fusedmoe.titan.routed_experts(config())).double()
    given = inputs(tokens, experts, tokens)
    y = module(*given, torch.zeros(EXPERTS))
    exact = define(*(value[0] for value in given), module.inner_experts)[None]
    wants = [*given[:2], *module.inner_experts.parameters()]
    found, wanted = (torch.autograd.grad(out.square().sum(), wants, materialize_grads=True) for out in (y, exact))
    compare([y, *found], [exact, *wanted])


def test_gpt_oss_experts_equal_torchtitan_in_bfloat16() -> None:
    """In bfloat16, as torchtitan's own experts always compute; parameter names and shapes stay."""
    theirs, ours = build_module(config()), build_module(fusedmoe.titan.routed_experts(config()))
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    x, scores, ids = (value.detach() for value in inputs(50, [0, 1, 2, 3], 0))
    count_E = torch.bincount(ids.flatten(), minlength=EXPERTS)
    exact = define(x[0], scores[0], ids[0], deepcopy(ours.inner_experts).double()).detach()
    errors = [
        float((one(x.bfloat16(), scores.float(), ids, count_E)[0].detach().double() - exact).norm() / exact.norm())
        for one in (ours, theirs)
    ]
    assert errors[0] < 1.5 * errors[1] < 0.05, errors


def run_on_ranks(rank: int, world: int) -> None:
    module, whole = (build_module(fusedmoe.titan.routed_experts(config(), timeout_s=40.0)).double() for _ in range(2))
    module.token_dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (world,)))
    for part in module.inner_experts.parameters():
        part.data = part.data.chunk(world)[rank].clone()
    batches_of = ((5, 9), [0, 1, 2, 3]), ((0, 7), [0, 1, 2, 3]), ((6, 0), [2, 3])
    for schedule, (tokens, experts) in product(("off", Schedule("fsmoe", (2, 2))), batches_of):
        module.token_dispatcher.exchange.set_schedule(schedule)
        batches = [inputs(count, experts, seed) for seed, count in enumerate(tokens)]
        y = module(*batches[rank], torch.zeros(EXPERTS))
        totals = [define(*(value[0] for value in found), whole.inner_experts)[None] for found in batches]
        wants = [*batches[rank][:2], *module.inner_experts.parameters()]
        found = torch.autograd.grad(y.square().sum(), wants, materialize_grads=True)
        wants = [*batches[rank][:2], *whole.inner_experts.parameters()]
        total = sum(one.square().sum() for one in totals)
        of_tokens = torch.autograd.grad(total, wants, materialize_grads=True)
        own = [*of_tokens[:2], *(grad.chunk(world)[rank] for grad in of_tokens[2:])]
        compare([y, *found], [totals[rank], *own])
    for ep in (1, world):
        tensor_parallel(rank, world, ep)


def tensor_parallel(rank: int, world: int, ep: int) -> None:
    """Run a layer on ranks that share a sequence: each has a part of every expert, or all of some experts."""
    set_spmd_backend("partial_dtensor")
    sizes = {"dp_replicate": 1, "cp": 1, "pp": 1, "dp_shard": 1, "tp": world, "ep": ep}
    dims = ParallelDims(**sizes, world_size=world, spmd_backend="partial_dtensor")
    init = {"weight": _NORMAL, "bias": _NORMAL}
    gate = Linear.Config(in_features=DIM, out_features=EXPERTS, bias=True, param_init=init)
    router = TokenChoiceTopKRouter.Config(
        num_experts=EXPERTS, score_func="softmax", route_norm=True, gate=gate, top_k=K
    )
    cfg = GptOssMoE.Config(num_experts=EXPERTS, load_balance_coeff=None, routed_experts=config(), router=router)
    set_moe_sharding_config(cfg, enable_ep=ep > 1, enable_sp=True, expert_param_layout=LAYOUT)
    cfg.routed_experts = fusedmoe.titan.routed_experts(cfg.routed_experts, timeout_s=40.0)
    assert error_on_ranks(cfg, rank, world, dims) < 1e-5, ep


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_gpt_oss_experts_on_two_ranks_equal_definition(cluster: Cluster) -> None:
    cluster.run(2, run_on_ranks)
