"""Gradients over ranks: the sum over copies, by a call or inside PyTorch's wrappers, and the norm over all of them.

Each rank's loss is such that the losses of an MP group sum up to the mean loss of one replica, and the true loss is the
mean over the DP replicas. So the gradient of a parameter is 1/DP times the sum over the ranks that hold a copy of it:
all ranks for replicated parameters, the edp group for experts, the dp group for what MP splits.

In a model whose activations between layers are the same on all MP ranks, so is the loss, and the gradient of a
replicated parameter is whole on each of them: it is the mean over all ranks. That is `mp_loss="replicated"`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from fusedmoe.comm.group import bounded
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import WatchedDataParallel, call_after_backward, graph_task_id, hide_from_ddp, shard_over
from fusedmoe.engine import scheduled_operator  # noqa: F401  it registers an operator
from fusedmoe.errors import ConfigError
from fusedmoe.experts.networks import NAMED, experts_of
from fusedmoe.experts.sharding import EXPERT_AXES, active_shardings, parameter_shardings
from fusedmoe.training.copies import (
    MpLoss,
    broadcast,
    compare_copies,
    divisor,
    holders,
    reduce_gradients,
    replicas,
    sharded_with_experts,
    spread_overflow,
)
from fusedmoe.training.gradient_buckets import GradientBuckets
from fusedmoe.training.optimizers import check_first_step
from fusedmoe.training.repeated_sync import note_synchronised


def sync_gradients(
    model: nn.Module, topology: Topology, *, mp_loss: MpLoss = "summands", buckets: GradientBuckets | None = None
) -> None:
    """Turns each rank's gradients into those of the true loss, in place. Collective over all ranks.

    Call it after the last backward of an optimizer step and before `clip_grad_norm`. Calls after each micro-batch give
    the same gradients and send more: what is synchronised already stays as it is, scaled or set to zero in between or
    not. In a world of one, and for a model from `distributed_data_parallel`, whose backward has done it already,
    nothing is left to do.

    The gradient becomes (1/DP)·Σ over the ranks that hold a copy, with sums in at least float32 that have the same bits
    on all of them. A parameter without a gradient on some ranks only counts as zero there; without one on any rank, it
    stays without. Memory: one buffer of at most 32 MiB. What FSDP has averaged already is summed over what remains, the
    mp group. A gradient that is not finite in one rank's part of a parameter has NaN in every rank's part, so that a
    `GradScaler` on each rank, which looks afterwards, decides alike.

    The first two calls for a model, before and after its first step, compare the parameters that learn over the ranks
    that hold copies. The first step of an optimizer that looks at whole tensors (Adafactor, LAMB) is refused where a
    rank has parts: see `PerMatrix`.

    Args:
        mp_loss: what the losses of an MP group are, "summands" of its mean loss (each rank has tokens of its own, as in
            `fusedmoe.models`) or "replicated", the same loss on every rank (`MoELayer(mp_input="replicated")`).
        buckets: what has been reduced during the backward pass (`plan_step`); this is its end.
    Raises:
        ConfigError: a sparse gradient, or a model wrapped in PyTorch's own DistributedDataParallel; a gradient that was
            synchronised, and then written in place where no backward pass followed, unless it is zero.
        RankError: another rank failed or did not come; a parameter that some ranks have frozen; in the first two calls,
            copies that differ between ranks.
    """
    if isinstance(model, DataParallel):
        return
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"rank {topology.rank}: gradient sync of a model in PyTorch's DistributedDataParallel, which has averaged "
            "experts over ranks that hold different ones. Wrap it with fusedmoe.training.distributed_data_parallel."
        )
    if topology.size == 1:
        return
    # Buckets first: what a bucket has begun must be whole before the rest is reduced, in one order on all ranks.
    done = set() if buckets is None else buckets.close()
    every = replicas(model, topology)
    check_first_step(model, every)
    copies = [replica for replica in every if id(replica.parameter) not in done]
    reduce_gradients(copies, [divisor(replica, topology, mp_loss) for replica in copies], topology, model)
    spread_overflow(every, topology)
    for replica in every:
        if not replica.managed:  # FSDP adds to gradients where no hook sees it
            note_synchronised(replica.parameter, divisor(replica, topology, mp_loss) / replica.group.size)


def expert_parameter_names(model: nn.Module) -> set[str]:
    """Names the parameters that are split over ep or esp: those no wrapper may treat as replicated."""
    shardings = parameter_shardings(model)
    names = {name for name, axes in shardings.items() if not axes.keys().isdisjoint(EXPERT_AXES)}
    return names & {name for name, _ in model.named_parameters(remove_duplicate=False)}


def distributed_data_parallel(
    model: nn.Module, topology: Topology, *, mp_loss: MpLoss = "summands", **options: Any
) -> DataParallel | SingleRank:
    """Wraps a model such that each backward leaves the gradients of the true loss. Collective over all ranks.

    Replicated parameters are PyTorch's DistributedDataParallel's, reduced while backward runs. It never sees those that
    ep, esp or mp split: they are summed over the ranks that hold a copy at the end of the same backward. No call is
    left to forget, `no_sync()` holds for both, and gradients may be accumulated with it or without. Gradients that are
    not finite reach all ranks, as in `sync_gradients`.

    Copies start equal: rank 0's value for replicated parameters, the first holder's for the others.

    Args:
        mp_loss: what the losses of an MP group are, as in `sync_gradients`.
        options: for DistributedDataParallel. With `init_sync=False` copies are not made equal, but compared.
    Returns:
        The wrapper; the model is its attribute `module`. In a world of one it needs no process group.
    """
    if topology.size == 1:
        return SingleRank(model)
    # PyTorch would compare how many parameters learn, and name none.
    copies = [one for one in replicas(model, topology) if not one.named]
    learns = {f"requires_grad of {one.name}": one.parameter.requires_grad for one in copies}
    topology.agree(learns, "distributed_data_parallel")
    wrapped = DataParallel(model, topology, mp_loss, **options)
    # With init_sync PyTorch and the wrapper have made copies equal; without it copies were not compared.
    if not options.get("init_sync", True):
        compare_copies(replicas(model, topology), topology)
    return wrapped


class SingleRank(nn.Module):
    """Wrapper of `distributed_data_parallel` in a world of one: the same interface, nothing to do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield

    @contextmanager
    def join(self, *_: Any, **__: Any) -> Iterator[None]:
        yield


class DataParallel(WatchedDataParallel):
    """DistributedDataParallel for models with split parameters; made by `distributed_data_parallel`."""

    def __init__(self, model: nn.Module, topology: Topology, mp_loss: MpLoss, **options: Any) -> None:
        copies = replicas(model, topology)
        check_first_step(model, copies)
        split = [replica for replica in copies if replica.sharding]
        splits, _ = active_shardings(model, topology)
        hidden = [name for name, axes in splits.items() if axes]
        # It writes the names of the root module's own parameters with a dot in front.
        hidden += [f".{name}" for name in hidden if "." not in name]
        # PyTorch would average them over ranks that hold different ones.
        hide_from_ddp(model, hidden)
        self._topology, self._split, self._mp_loss, self._options = topology, split, mp_loss, options
        with bounded(topology.world, "comparing the copies of a model"):
            super().__init__(model, process_group=topology.world.handle, **options)
        if options.get("init_sync", True):
            for replica in split:
                broadcast(replica.parameter, replica.group)
        self._synced_backward = -1
        # Hooks live as long as the model: one that held the wrapper would keep it.
        own = weakref.ref(self)
        for replica in copies:
            if replica.parameter.requires_grad:
                # Means over the copies leave what was accumulated in earlier backwards as it is. The divided
                # sums that are wanted are means of gradients scaled like this.
                scale = replica.group.size / divisor(replica, topology, mp_loss)
                replica.parameter.register_hook(lambda gradient, scale=scale: _arrived(own(), gradient, scale))

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Wraps a copy of the model in the same way; nothing is sent, since copies of equal models are equal."""
        copied = DataParallel(
            copy.deepcopy(self.module, memo), self._topology, self._mp_loss, **self._options | {"init_sync": False}
        )
        copied.training = self.training
        memo[id(self)] = copied
        return copied

    def join_hook(self, **_: Any) -> Any:
        raise ConfigError(
            f"rank {self._topology.rank}: join() around a model of distributed_data_parallel. It repeats the gradient "
            "all-reduce on ranks that have run out of batches, and not the exchange of tokens that experts on other "
            "ranks wait for. Leave join() out, and give these ranks batches of no tokens"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._topology.job.refuse_pickle()
        return self.__dict__

    def around_agreement(self) -> AbstractContextManager[None]:
        # Ranks agree on buckets and broadcast buffers inside; the model itself runs after it, unbounded.
        return bounded(self._topology.world, "agreeing on gradient buckets")

    def _finish_backward(self) -> None:
        """Reduces what PyTorch does not know, and waits for all ranks to have begun what PyTorch reduces."""
        reduce_gradients(self._split, [replica.group.size for replica in self._split], self._topology)
        spread_overflow(self._split, self._topology)
        world = self._topology.world
        # PyTorch waits after this, on a CPU without learning of ranks that failed, and for as long as Gloo waits.
        if device_of(world).type == "cpu":
            all_reduce(world, torch.zeros(1, device="cpu"), operation="the end of a backward pass of PyTorch's wrapper")


def _arrived(wrapper: DataParallel | None, gradient: Tensor, scale: float) -> Tensor | None:
    """Scales a gradient on its way to be accumulated; the first one of a backward pass has the sync done at its end."""
    if wrapper is None:  # the model lives on without its wrapper
        return None
    backward = graph_task_id()
    # DistributedDataParallel decides in forward; `require_forward_param_sync` is what it decided.
    syncs = wrapper.require_backward_grad_sync or wrapper.require_forward_param_sync
    if syncs and backward != wrapper._synced_backward:
        wrapper._synced_backward = backward
        call_after_backward(wrapper._finish_backward)
    return gradient if scale == 1.0 else gradient * scale


def fully_shard(module: nn.Module, topology: Topology, *, experts: bool = False, **options: Any) -> nn.Module:
    """PyTorch's FSDP2 for a model, or one part of it after another, beside expert parallelism.

    The dense parameters are sharded over the dp group. Those split over ep or esp stay as they are, or, with `experts`,
    are sharded over the ranks that hold the same ones (edp): less memory, and each pass gathers them. The loop stays
    that of a model without FSDP: `sync_gradients`, then `clip_grad_norm`, then the step, once for each optimizer step.
    Ranks must hold equal parameters beforehand (`broadcast_parameters` makes them equal). With a dp group of one rank
    there is nothing to shard, and the module is returned as it is.

        for block in model.blocks:
            fully_shard(block, topology)
        fully_shard(model, topology)

    Args:
        experts: along their first dimension, or their second where ranks are more than experts and divide it. What an
            expert layer has on all ranks of ep or esp stays as it is.
        options: for `torch.distributed.fsdp.fully_shard`, without `mesh` and `ignored_params`; with `experts` without
            `shard_placement_fn`.
    Raises:
        ConfigError: `experts` with a PyTorch that has one mesh for all parameters of a module, or with experts that
            move between ranks.
    """
    if topology.dp.size == 1:
        return module  # FSDP over one rank would only copy parameters
    assert topology.dense_mesh is not None and topology.expert_mesh is not None
    splits, _ = active_shardings(module, topology)
    # Experts are not copies of each other on the dp ranks: FSDP may shard them over the ranks with the same ones only.
    ignored: set[nn.Parameter] = set()
    spread: set[nn.Parameter] = set()
    for name, parameter in module.named_parameters():
        axes = splits.get(name, {})
        if isinstance(parameter, DTensor) or axes.keys().isdisjoint(EXPERT_AXES):
            continue
        copies = holders(axes, topology) is topology.edp and NAMED not in axes.values()
        (spread if experts and copies and topology.edp.size > 1 else ignored).add(parameter)
    if spread:
        options["shard_placement_fn"] = _over_copies(module, topology, spread)
    _fully_shard(module, mesh=topology.dense_mesh["dp"], ignored_params=ignored, **options)
    if spread:
        # Tokens of all dp ranks reached the experts of each edp group. Dense parts have this divisor anyway.
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(topology.dp.size)
        # Such a divisor is part of FSDP's reduction in float32 and bfloat16, which NCCL alone knows.
        over = topology.expert_mesh["edp"].get_group()
        sharded.set_force_sum_reduction_for_comms(dist.get_backend(over) != "nccl")
        sharded_with_experts.add(module)
    return module


def _over_copies(module: nn.Module, topology: Topology, spread: set[nn.Parameter]) -> Callable[[nn.Parameter], Any]:
    """Makes FSDP2's `shard_placement_fn`, which puts parameters in `spread` over the edp group."""
    assert topology.expert_mesh is not None
    ranks, over = topology.edp.size, shard_over(topology.expert_mesh["edp"])
    if over is None:
        raise ConfigError(
            f"fully_shard(experts=True) needs a PyTorch whose FSDP2 has a mesh for each parameter; {torch.__version__} "
            "has one for all of a module. Update PyTorch, or leave experts=False."
        )
    if any(experts.moves for _, experts in experts_of(module)):
        raise ConfigError("fully_shard(experts=True) of experts that move between ranks: leave experts=False")

    def placement(parameter: nn.Parameter) -> Any:
        if parameter not in spread:
            return None
        # Fewer experts than ranks: FSDP would pad the first dimension, and some ranks would hold nothing.
        few = parameter.shape[0] < ranks and parameter.dim() > 1 and parameter.shape[1] % ranks == 0
        return over(Shard(1 if few else 0))

    return placement


#: Operators whose results `save_communication` keeps: the choice of experts, and all that ranks do together. For a
#: policy of one's own.
KEPT_OPERATORS = frozenset(
    getattr(torch.ops.fusedmoe, name).default
    for name in ("gate", "gate_from_logits", "order", "exchange_metadata", "dispatch", "combine", "scheduled_experts")
) | {torch.ops.aten.topk.default}


def save_communication() -> tuple[Any, Any]:
    """Contexts for a checkpoint that keeps routing and the rows that have travelled, and computes all else again.

        torch.utils.checkpoint.checkpoint(
            block, x, use_reentrant=False, context_fn=fusedmoe.training.save_communication
        )

    Each exchange between ranks happens once, and experts chosen among equals are the same in both passes. It keeps, for
    a layer, two numbers for each of a token's experts, the rows received, and the results sent back.

    In a graph of `torch.compile` a layer with a schedule is one operator: it is kept with all that it saves for
    backward, pre-activations too, and not computed again. (Without a compiler such a layer goes without its schedule
    here.) A checkpoint without this policy sends twice; with it so do layers with hooks or placement="fssdp", and
    Tutel's.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in KEPT_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE
