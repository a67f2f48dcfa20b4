"""Gradient synchronisation over ranks: by an explicit call, inside DistributedDataParallel, or with FSDP2.

The losses of an MP group sum to the mean loss of one replica; the true loss is the mean over the DP replicas. A
parameter's gradient is therefore 1/DP times the sum over the ranks that hold a replica of it: all ranks for replicated
parameters, the edp group for experts, the dp group for parameters split by MP.

With `mp_loss="replicated"`, activations between layers and the loss are equal on all MP ranks. Each MP rank then has
the complete gradient of a replicated parameter, and the result is the mean over all ranks.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as _fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fusedmoe.autograd import exchange_operators, gate, order  # noqa: F401  they register the operators
from fusedmoe.comm.collectives import all_reduce, device_of
from fusedmoe.comm.group import limit_collective_time
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import (
    WatchedDataParallel,
    call_after_backward,
    graph_task_id,
    hide_from_ddp,
    shard_placement_maker,
)
from fusedmoe.engine import scheduled_operator  # noqa: F401  it registers an operator
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import NAMED, experts_of
from fusedmoe.experts.sharding import EXPERT_AXES, active_shardings, parameter_shardings
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.optimizers import check_first_step
from fusedmoe.training.replicated_parameters import (
    MpLoss,
    broadcast,
    compare_replicas,
    gradient_divisor,
    list_replicas,
    note_synchronised,
    propagate_nonfinite,
    reduce_gradients,
    replica_group,
    sharded_with_experts,
)


def sync_gradients(
    model: nn.Module, topology: Topology, *, mp_loss: MpLoss = "summands", buckets: GradientBuckets | None = None
) -> None:
    """Reduce all gradients in place to the gradients of the true loss. Collective over all ranks.

    Call it after the last backward of an optimizer step and before `clip_grad_norm`. Further calls, such as after each
    micro-batch, do not reduce a gradient twice. It is a no-op in a world of one and for models from
    `distributed_data_parallel`.

    Sums are computed in at least float32 and bitwise equal on all ranks with a replica. A rank without a gradient
    contributes zeros; if no rank has one, it stays None. Temporary memory is at most 32 MiB. A non-finite value on any
    rank sets NaN on all ranks: `GradScaler` then skips the step everywhere.

    The first two calls, before and after the model's first step, compare the replicas of trainable parameters. An
    optimizer that is not elementwise (Adafactor, LAMB) raises at its first step if a rank has only part of a tensor;
    `PerMatrix` runs such optimizers per matrix.

    Args:
        mp_loss: "summands" if the losses of an MP group add up to its mean loss (each rank has its own tokens, as in
            `fusedmoe.models`); "replicated" if all its ranks compute the same loss (`MoELayer(mp_input="replicated")`).
        buckets: gradients already reduced during backward (`plan_step`). The call closes them.
    Raises:
        ConfigError: a sparse gradient; a model in PyTorch's own DistributedDataParallel; or a nonzero synchronised
            gradient that was written in place outside of a backward pass.
        RankError: another rank failed or is missing; a parameter is frozen on some ranks only; or, in the first two
            calls, replicas differ.
    """
    if isinstance(model, DataParallel):
        return
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"rank {topology.rank}: sync_gradients of a model in PyTorch's DistributedDataParallel, which has averaged "
            "gradients of different experts. Wrap the model with fusedmoe.training.distributed_data_parallel."
        )
    if topology.size == 1:
        return
    # All ranks reduce started buckets before other gradients, in the same order.
    done = set() if buckets is None else buckets.close()
    all_replicas = list_replicas(model, topology)
    check_first_step(model, all_replicas)
    copies = [replica for replica in all_replicas if id(replica.parameter) not in done]
    reduce_gradients(copies, [gradient_divisor(replica, topology, mp_loss) for replica in copies], topology, model)
    propagate_nonfinite(all_replicas, topology)
    for replica in all_replicas:
        if not replica.is_fsdp:  # FSDP accumulates gradients without running hooks
            note_synchronised(replica.parameter, gradient_divisor(replica, topology, mp_loss) / replica.group.size)


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Return the names of parameters split over ep or esp, which wrappers must not treat as replicated."""
    shardings = parameter_shardings(model)
    names = {name for name, axes in shardings.items() if not axes.keys().isdisjoint(EXPERT_AXES)}
    return names & {name for name, _ in model.named_parameters(remove_duplicate=False)}


def distributed_data_parallel(
    model: nn.Module, topology: Topology, *, mp_loss: MpLoss = "summands", **options: Any
) -> DataParallel | SingleRank:
    """Wrap a model so that each backward yields the gradients of the true loss. Collective over all ranks.

    PyTorch's DistributedDataParallel reduces replicated parameters during backward. Parameters split by ep, esp or mp
    are hidden from it and reduced over their replicas at the end of the same backward. `no_sync()` applies to both. A
    non-finite value on any rank sets NaN on all ranks.

    Args:
        mp_loss: as in `sync_gradients`.
        options: for DistributedDataParallel. With `init_sync=False`, replicas are compared instead of broadcast from
            the first rank that holds each.
    Returns:
        The wrapper; its attribute `module` is the model.
    Raises:
        RankError: a parameter is frozen on some ranks only, or, with `init_sync=False`, replicas differ.
    """
    if topology.size == 1:
        return SingleRank(model)
    copies = [one for one in list_replicas(model, topology) if not one.has_local_name]
    trainable = {f"requires_grad of {one.name}": one.parameter.requires_grad for one in copies}
    topology.require_equal_facts(trainable, "distributed_data_parallel")
    wrapped = DataParallel(model, topology, mp_loss, **options)
    if not options.get("init_sync", True):
        compare_replicas(list_replicas(model, topology), topology)
    return wrapped


class SingleRank(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


class DataParallel(WatchedDataParallel):
    """DistributedDataParallel for models with sharded parameters; created by `distributed_data_parallel`."""

    def __init__(self, model: nn.Module, topology: Topology, mp_loss: MpLoss, **options: Any) -> None:
        copies = list_replicas(model, topology)
        check_first_step(model, copies)
        split = [replica for replica in copies if replica.sharding]
        splits, _ = active_shardings(model, topology)
        hidden = [name for name, axes in splits.items() if axes]
        # DDP prefixes the names of the root module's own parameters with a dot.
        hidden += [f".{name}" for name in hidden if "." not in name]
        hide_from_ddp(model, hidden)
        self._topology, self._sharded, self._mp_loss, self._options = topology, split, mp_loss, options
        with limit_collective_time(topology.world, "comparing the copies of a model"):
            super().__init__(model, process_group=topology.world.handle, **options)
        if options.get("init_sync", True):
            for replica in split:
                broadcast(replica.parameter, replica.group)
        self._synced_backward = -1
        # Hooks live as long as the model; a strong reference would keep the wrapper alive.
        own = weakref.ref(self)
        for replica in copies:
            if replica.parameter.requires_grad:
                # The later average over replicas then yields the divided sum, and keeps earlier gradients unchanged.
                scale = replica.group.size / gradient_divisor(replica, topology, mp_loss)
                replica.parameter.register_hook(lambda gradient, scale=scale: _scale_gradient(own(), gradient, scale))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Wrap a copy of the model with the same options, without communication."""
        copied = DataParallel(
            copy.deepcopy(self.module, memo), self._topology, self._mp_loss, **self._options | {"init_sync": False}
        )
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def join_hook(self, **_: Any) -> Any:
        raise ConfigError(
            f"rank {self._topology.rank}: join() does not support distributed_data_parallel. It repeats the gradient "
            "all-reduce on ranks without batches, but not the exchange of tokens that other ranks' experts wait for. "
            "Remove join(), and pass these ranks batches of no tokens"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._topology.job.refuse_pickle()
        return self.__dict__

    def pre_forward_context(self) -> AbstractContextManager[None]:
        # DDP agrees on buckets and broadcasts buffers here; the model's forward runs later, without this timeout.
        return limit_collective_time(self._topology.world, "agreeing on gradient buckets")

    def _finish_backward(self) -> None:
        reduce_gradients(self._sharded, [replica.group.size for replica in self._sharded], self._topology)
        propagate_nonfinite(self._sharded, self._topology)
        world = self._topology.world
        # DDP waits next. On a CPU it would not detect a failed rank until Gloo's timeout.
        if device_of(world).type == "cpu":
            all_reduce(world, torch.zeros(1, device="cpu"), operation="the end of a backward pass of PyTorch's wrapper")


def _scale_gradient(wrapper: DataParallel | None, gradient: Tensor, scale: float) -> Tensor | None:
    """Scale a gradient before accumulation. The first call in a backward pass schedules the final reduction."""
    if wrapper is None:
        return None
    backward = graph_task_id()
    # DistributedDataParallel decides in forward and stores the decision in `require_forward_param_sync`.
    syncs = wrapper.require_backward_grad_sync or wrapper.require_forward_param_sync
    if syncs and backward != wrapper._synced_backward:
        wrapper._synced_backward = backward
        call_after_backward(wrapper._finish_backward)
    return gradient if scale == 1.0 else gradient * scale


def fully_shard(module: nn.Module, topology: Topology, *, shard_experts: bool = False, **options: Any) -> nn.Module:
    """Apply PyTorch's FSDP2 to a model or one of its modules, in combination with expert parallelism.

    Dense parameters are sharded over the dp group. With `shard_experts`, parameters split over ep or esp are sharded
    over the ranks that hold the same experts (edp), which saves memory and adds an all-gather per pass. Ranks must
    start from equal parameters (`broadcast_parameters`). With a dp group of one rank, the module is unchanged.

        for block in model.blocks:
            fully_shard(block, topology)
        fully_shard(model, topology)

    Args:
        shard_experts: shard experts along dimension 0; along dimension 1 if there are more ranks than experts and the
            number of ranks divides it. Parameters that an expert layer replicates over ep or esp are not sharded.
        options: for `torch.distributed.fsdp.fully_shard`, except `mesh`, `ignored_params` and, with `shard_experts`,
            `shard_placement_fn`.
    Raises:
        ConfigError: `shard_experts` with a PyTorch that supports one mesh per module only, or with experts that migrate
            between ranks.
    """
    if topology.dp.size == 1:
        return module
    assert topology.dense_mesh is not None and topology.expert_mesh is not None
    splits, _ = active_shardings(module, topology)
    ignored: set[nn.Parameter] = set()
    sharded_parameters: set[nn.Parameter] = set()
    for name, parameter in module.named_parameters():
        axes = splits.get(name, {})
        if isinstance(parameter, DTensor) or axes.keys().isdisjoint(EXPERT_AXES):
            continue
        copies = replica_group(axes, topology) is topology.edp and NAMED not in axes.values()
        (sharded_parameters if shard_experts and copies and topology.edp.size > 1 else ignored).add(parameter)
    if sharded_parameters:
        options["shard_placement_fn"] = _shard_placement(module, topology, sharded_parameters)
    _fully_shard(module, mesh=topology.dense_mesh["dp"], ignored_params=ignored, **options)
    if sharded_parameters:
        # Each expert received tokens from all dp ranks. Dense parameters use this divisor by default.
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(topology.dp.size)
        # A custom divisor uses PreMulSum in float32 and bfloat16, which only NCCL supports.
        over = topology.expert_mesh["edp"].get_group()
        sharded.set_force_sum_reduction_for_comms(dist.get_backend(over) != "nccl")
        sharded_with_experts.add(module)
    return module


def _shard_placement(
    module: nn.Module, topology: Topology, sharded_parameters: set[nn.Parameter]
) -> Callable[[nn.Parameter], Any]:
    assert topology.expert_mesh is not None
    ranks, to_placement_result = topology.edp.size, shard_placement_maker(topology.expert_mesh["edp"])
    if to_placement_result is None:
        raise ConfigError(
            f"fully_shard(shard_experts=True) needs a PyTorch whose FSDP2 supports a mesh per parameter; "
            f"{torch.__version__} supports one per module. Update PyTorch, or pass shard_experts=False."
        )
    if any(experts.is_placed for _, experts in experts_of(module)):
        raise ConfigError(
            "fully_shard(shard_experts=True) of experts that move between ranks: pass shard_experts=False"
        )

    def placement(parameter: nn.Parameter) -> Any:
        if parameter not in sharded_parameters:
            return None
        # With fewer experts than ranks, FSDP would pad dimension 0 and leave some ranks without elements.
        few = parameter.shape[0] < ranks and parameter.dim() > 1 and parameter.shape[1] % ranks == 0
        return to_placement_result(Shard(1 if few else 0))

    return placement


#: Operators whose results `save_communication` saves: routing, and all communication. Usable in custom policies.
KEPT_OPERATORS = frozenset(
    getattr(torch.ops.fusedmoe, name).default
    for name in ("gate", "gate_from_logits", "order", "exchange_metadata", "dispatch", "combine", "scheduled_experts")
) | {torch.ops.aten.topk.default}


def save_communication() -> tuple[Any, Any]:
    """Return selective-checkpoint contexts that save routing and received rows and recompute everything else.

        torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=fusedmoe.training.save_communication
        )

    Each exchange between ranks runs once instead of once per pass, and routing ties are resolved alike in both passes.
    Saved per layer: two numbers per token and expert, the received rows, and the returned results.

    In a `torch.compile` graph a scheduled layer is a single operator, saved with everything it needs for backward
    (including pre-activations). In eager mode it runs without its schedule. Layers with hooks or placement="fssdp" and
    Tutel's layers repeat their exchanges even with this policy.
    """
    return create_selective_checkpoint_contexts(_save_policy)


def _save_policy(ctx: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
