"""Schedules of the torchtitan integration: results and gradients equal those without, under all trainer features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from tests.marks import slowly

pytest.importorskip(
    "torchtitan.distributed.fsdp",
    reason="torchtitan is not installed, or needs a newer PyTorch",
    exc_type=ImportError,
)

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, activation_checkpoint
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.models.qwen3 import parallelize_qwen3
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

import fusedmoe.titan
from fusedmoe import Schedule
from fusedmoe.errors import ConfigError
from fusedmoe.layers.scheduled_exchange import exchanges_in
from tests.cluster import Cluster
from tests.integrations.plans_run import plans_run
from tests.integrations.test_titan import (
    EXPERTS,
    OURS,
    batch,
    config,
    definition_on_ranks,
    inputs,
    loss_of,
    model_of,
    split_over,
    tensor_parallel,
)

SCHEDULE = Schedule("fsmoe", (2, 3))


def found(model: nn.Module, tokens: list[Tensor], *, autocast: bool = False, last_syncs: bool = False) -> Any:
    """Return losses and accumulated gradients of batches; with `last_syncs` gradients are reduced at the end."""
    losses = []
    for number, one in enumerate(tokens):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(not last_syncs or number == len(tokens) - 1)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(model, one)
        loss.backward()
        losses.append(loss.detach())
    grads = {}
    for name, parameter in model.named_parameters():
        grads[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
    model.zero_grad()
    return {"losses": torch.stack(losses), **grads}


def evaluated(model: nn.Module, tokens: list[Tensor]) -> dict[str, Tensor]:
    model.eval()
    with torch.no_grad():
        values = {"loss": loss_of(model, tokens[0])}
    model.train()
    return values


CASES: dict[str, Callable[[nn.Module, list[Tensor]], dict[str, Tensor]]] = {
    "step": lambda model, tokens: found(model, tokens[:1]),
    "accumulated": lambda model, tokens: found(model, tokens),
    "no sync": lambda model, tokens: found(model, tokens, last_syncs=True),
    "evaluation": evaluated,
    "autocast": lambda model, tokens: found(model, tokens[:1], autocast=True),
}
POLICIES = {
    "none": None,
    "full": activation_checkpoint.FullAC.Config(),
    "selective": activation_checkpoint.SelectiveAC.Config(),
    "saved": fusedmoe.titan.selective_ac(activation_checkpoint.SelectiveAC.Config()),
}


def parallel(rank: int, world: int, policy: Any, sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    """Build the model in float64 over ranks as torchtitan configures it; return it with the context of its runs."""
    backend = "partial_dtensor"
    set_spmd_backend(backend)
    dims = ParallelDims(dp_replicate=1, cp=1, pp=1, **sizes, world_size=world, spmd_backend=backend)
    made = config()
    set_qwen3_sharding_config(made, enable_sp=True, enable_ep=True)
    given = {"timeout_s": 40.0, "schedule": SCHEDULE}
    apply_overrides(OverrideConfig(imports=[(OURS[1], given)]), made)
    with pytest.MonkeyPatch.context() as patch:
        # Torchtitan builds GPU meshes, even without GPUs.
        patch.setattr("torchtitan.distributed.parallel_dims.device_type", "cpu")
        patch.setitem(TORCH_DTYPE_MAP, "float32", torch.float64)
        context = get_spmd_context(parallel_dims=dims)
        with context():
            model = parallelize_qwen3(
                model_of(made).double(), parallel_dims=dims, training=TrainingConfig(mixed_precision_param="float32"),
                parallelism=ParallelismConfig(spmd_backend=backend), compile_config=CompileConfig(),
                ac_config=policy, dump_folder="", skip_dp=False,
            )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo supports no other reduction
    return model, context


def compare(rank: int, world: int, sizes: dict[str, int], policies: Sequence[str] = tuple(POLICIES)) -> None:
    tokens = [batch(step, 2 * world).chunk(world)[rank] for step in range(2)]
    for policy_name in policies:
        policy = POLICIES[policy_name]
        model, context = parallel(rank, world, policy, sizes)
        exchanges = exchanges_in(model)
        assert len(exchanges) == 2 and all(one.topology.ep.downward is not None for one in exchanges)
        for name, case in CASES.items() if policy is None else list(CASES.items())[:1]:
            values = {}
            for schedule in ("off", SCHEDULE):
                for exchange in exchanges:
                    exchange.set_schedule(schedule)
                with plans_run() as ran, context():
                    values[str(schedule)] = case(model, tokens)
                # A selective checkpoint needs operators without overlap.
                by_plan = schedule is SCHEDULE and policy_name in ("none", "full")
                assert set(ran) == ({SCHEDULE.degrees} if by_plan else set()), (policy_name, name, schedule)
            wanted, scheduled = values["off"], values[str(SCHEDULE)]
            assert wanted.keys() == scheduled.keys()
            for key, value in wanted.items():
                if name == "autocast":
                    error = (scheduled[key] - value).norm()
                    assert float(error) < 1e-2 * max(float(value.norm()), 1e-3), (policy_name, name, key)
                else:
                    torch.testing.assert_close(scheduled[key], value, rtol=1e-10, atol=1e-10)


def run_two_ranks(rank: int, world: int, policies: Sequence[str]) -> None:
    # A rank without tokens, one without rows, one with all rows: values and gradients equal the definition's.
    with plans_run() as ran:
        assert definition_on_ranks(rank, world, OURS[1], SCHEDULE) < 1e-10
    assert set(ran) == {SCHEDULE.degrees}
    with plans_run() as ran:
        assert tensor_parallel(rank, world, world, SCHEDULE) < 1e-5
    assert ran
    compare(rank, world, {"dp_shard": world, "tp": 1, "ep": world}, policies)
    check_saved_tensors(rank, world)
    shard_separately(rank, world)


def check_saved_tensors(rank: int, world: int) -> None:
    """With a schedule, too, backward keeps only the parameters themselves."""
    module, _ = split_over(world, rank, OURS[1])
    module.token_dispatcher.exchange.set_schedule(SCHEDULE)
    x, scores, ids = inputs(3, [0, 1, 2, 3], rank)
    y = module(x, scores, ids, torch.zeros(EXPERTS))
    experts = next(one.batch.experts for one in _nodes(y.grad_fn) if hasattr(one, "batch"))
    assert experts._grouped is None
    own = [parameter.data_ptr() for parameter in module.inner_experts.parameters()]
    assert sorted(part.data_ptr() for part in experts.parameters) == sorted(own)
    y.square().sum().backward()
    assert experts._grouped is None


def _nodes(node: Any) -> Any:
    yield node
    for child, _ in node.next_functions:
        if child is not None:
            yield from _nodes(child)


def shard_separately(rank: int, world: int) -> None:
    module, _ = split_over(world, rank, OURS[1])
    module.token_dispatcher.exchange.set_schedule(SCHEDULE)
    given = *inputs(3, [0, 1, 2, 3], rank), torch.zeros(EXPERTS)
    wanted = module(*given)
    # FSDP gathers the parameters on a call of the experts, which chunks never make.
    fully_shard(module.inner_experts, mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("own", "one"))["one"])
    torch.testing.assert_close(module(*given), wanted)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
@pytest.mark.parametrize("policies", [["full"], *slowly(["none"])], ids=str)
def test_scheduled_model_equals_unscheduled(cluster: Cluster, policies: Sequence[str]) -> None:
    cluster.run(2, run_two_ranks, policies)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_scheduled_model_equals_unscheduled_on_four_ranks(cluster: Cluster) -> None:
    cluster.run(4, compare, {"dp_shard": 4, "tp": 1, "ep": 2}, timeout_s=300)


def test_unknown_schedule_raises() -> None:
    cfg = config().layers[0].moe.routed_experts
    with pytest.raises(ConfigError, match="unknown schedule 'fast'; choose off, auto"):
        fusedmoe.titan.routed_experts(cfg, schedule="fast")
    assert fusedmoe.titan.routed_experts(cfg, schedule="auto").token_dispatcher.schedule == "auto"
