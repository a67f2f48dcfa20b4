"""Topologies: data, model, expert and expert-sharding parallelism over the ranks of a job."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fusedmoe import environment
from fusedmoe.comm.collectives import all_gather_object, device_of
from fusedmoe.comm.failure.board import Board, post_uncaught_exceptions
from fusedmoe.comm.group import (
    Group,
    GroupNumber,
    Job,
    PooledGroup,
    device_backend,
    process_groups,
    set_nccl_launch_order,
)
from fusedmoe.comm.job_identity import read_identity, require_one_job
from fusedmoe.compat.torch import default_store, graph_task_id, is_early_stop
from fusedmoe.errors import ConfigError, RankError

# A job, and the numbers of each rank's process groups.
_JobAndGroupNumbers = tuple[Job, list[dict[str, GroupNumber]] | None]


class Topology:
    """The parallel axes of a job and this rank's group along each.

    Two grids cover the same ranks, the innermost axis varying fastest:

    - experts: rank = (edp·EP + ep)·ESP + esp. The E experts are split over `ep`, each expert's hidden dimension over
      `esp`; `edp` ranks hold copies of the same shard.
    - dense parts: rank = dp·MP + mp. Attention is split over `mp`, `dp` ranks hold copies.

    With EP = nodes and ESP = MP = ranks per node, all-to-all crosses nodes while all-gather and reduce-scatter stay
    inside one (FSMoE §2.2, Fig. 2).

    `Topology()` is a world of one rank and needs no process group. Topologies with the same axes share process groups.
    `close()`, or the end of a `with` block, destroys the groups that no other topology uses.

    Attributes:
        ep, esp, mp, dp, edp, world: the `Group` along each axis.
        expert_grid, dense_grid: the ranks, [EDP, EP, ESP] and [DP, MP]; None in a world of one rank.
        expert_mesh, dense_mesh: the same as `DeviceMesh` with dims ("edp", "ep", "esp") and ("dp", "mp").
        ranks_per_node: number of consecutive ranks that share a node.
    """

    ep: Group
    esp: Group
    mp: Group
    dp: Group
    edp: Group
    world: Group
    expert_grid: torch.Tensor | None = None
    dense_grid: torch.Tensor | None = None

    def __init__(self) -> None:
        self._init_axes(Job(), 1)

    @classmethod
    def from_sizes(
        cls,
        ep: int = 1,
        esp: int = 1,
        mp: int = 1,
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
        duplex: bool = False,
    ) -> Topology:
        """Lay out the ranks of the default process group by axis sizes. Collective over all ranks.

        Args:
            ep, esp, mp: axis sizes; the remaining factor is data parallel.
            ranks_per_node: defaults to the launcher's LOCAL_WORLD_SIZE.
            timeout_s: bound of every wait for other ranks, in seconds.
            duplex: on CPUs, create two process groups per axis, so that collectives on rows use both directions of a
                link at once: up to twice as fast between hosts, no gain on loopback.
        Raises:
            ConfigError: sizes that do not divide the world, several ranks without a process group, or duplex on GPUs.
            RankError: the ranks pass different arguments, or a rank did not join.
        """
        size, per_node = _world_size(), _ranks_per_node(ranks_per_node)
        joined_job = _join_job(timeout_s, f"ep={ep}, esp={esp}, mp={mp}, ranks_per_node={per_node}, duplex={duplex}")
        for name, axes in (("ep·esp", (ep, esp)), ("mp", (mp,))):
            need = math.prod(axes)
            if min(axes) < 1 or size % need:
                alone = "" if dist.is_initialized() else " (torchrun, then torch.distributed.init_process_group)"
                raise ConfigError(
                    f"{name} = {need} does not divide the world of {size} ranks (ep={ep}, esp={esp}, mp={mp}). "
                    f"Start as many ranks as a multiple of both ep·esp and mp{alone}, or choose smaller sizes."
                )
        ranks = torch.arange(size, device="cpu")
        return cls._from_grids(ranks.view(-1, ep, esp), ranks.view(-1, mp), per_node, joined_job, duplex)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        ep: str | None = None,
        esp: str | None = None,
        mp: str | None = None,
        pp: str | None = None,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
    ) -> Topology:
        """Use dimensions of a `DeviceMesh` over all ranks as axes; the rest is data parallel. Collective.

        Args:
            ep, esp, mp: mesh dimensions; `mp` and `esp` may be the same.
            pp: mesh dimension of pipeline stages. The topology then covers this rank's stage: gradients, norms and
                checkpoints of its layers are computed over the stage's ranks only.
            ranks_per_node, timeout_s: as for `from_sizes`.
        Raises:
            ConfigError: a name is not a mesh dimension, two axes that must differ have the same one, or the mesh does
                not cover all ranks.
            RankError: as for `from_sizes`.
        """
        world, per_node = _world_size(), _ranks_per_node(ranks_per_node)
        arguments = f"ep={ep}, esp={esp}, mp={mp}, pp={pp}, ranks_per_node={per_node}"
        joined_job = _join_job(timeout_s, f"{mesh}, {arguments}")
        names = mesh.mesh_dim_names or ()
        named = {"ep": ep, "esp": esp, "mp": mp, "pp": pp}
        for axis, name in named.items():
            if name is not None and name not in names:
                raise ConfigError(f"{axis}={name!r} is not a dimension of the mesh, which has {list(names)}")
        for first, second in (("ep", "esp"), ("ep", "pp"), ("esp", "pp"), ("mp", "pp")):
            if (name := named[first]) is not None and name == named[second]:
                raise ConfigError(f"{first} and {second} name the same mesh dimension {name!r}; they need one each")
        if mesh.mesh.numel() != world:
            raise ConfigError(f"the mesh holds {mesh.mesh.numel()} ranks of a world of {world}; pass the whole mesh")
        ranks = mesh.mesh.cpu()
        if pp is not None:
            stages = names.index(pp)
            ranks = ranks.select(stages, int((ranks == joined_job[0].rank).nonzero()[0, stages]))
            names = (*names[:stages], *names[stages + 1 :])

        def grid(*last: str | None) -> torch.Tensor:
            inner = [names.index(name) for name in last if name is not None]
            outer = [dim for dim in range(ranks.dim()) if dim not in inner]
            sizes = [1 if name is None else ranks.shape[names.index(name)] for name in last]
            return ranks.permute((*outer, *inner)).reshape(-1, *sizes)

        return cls._from_grids(grid(ep, esp), grid(mp), per_node, joined_job, duplex=False)

    @classmethod
    def from_group(
        cls,
        handle: dist.ProcessGroup | None,
        experts: torch.Tensor | None = None,
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
    ) -> Topology:
        """Make a topology over one process group, for layers that only some ranks hold. Collective over that group.

        The topology has no meshes, and does not reduce gradients of dense parts or of expert copies. `dp` is the whole
        group, and `edp` the first axis of a three-dimensional `experts`. On CPUs it is duplex.

        Args:
            handle: the process group; None for a world of one rank.
            experts: [EP, ESP] or [EDP, EP, ESP], a permutation of the indices in the group; default: EP over all.
        Raises:
            ConfigError: `experts` is not such a permutation.
            RankError: as for `from_sizes`.
        """
        ranks = tuple(dist.get_process_group_ranks(handle)) if handle is not None else (0,)
        if handle is None or len(ranks) == 1:
            return cls()
        indices = torch.arange(len(ranks), device="cpu").view(-1, 1) if experts is None else experts
        if indices.dim() not in (2, 3) or sorted(indices.reshape(-1).tolist()) != list(range(len(ranks))):
            raise ConfigError(
                f"experts = {indices.tolist()} must hold each index in a group of {len(ranks)} ranks once, as [EP, "
                "ESP] or [EDP, EP, ESP]"
            )
        per_node = _ranks_per_node(ranks_per_node)
        job, _ = _join_job(timeout_s, f"experts={indices.tolist()}, ranks_per_node={per_node}", ranks)
        topology = cls.__new__(cls)
        topology._init_axes(job, len(ranks), per_node, duplex=dist.get_backend() != "nccl")
        grid = torch.tensor(ranks, device="cpu")[indices.view(-1, *indices.shape[-2:])]
        for axis, name in enumerate(("edp", "ep", "esp")):
            setattr(topology, name, topology.subgroup(name, _ranks_along(grid, axis, job.rank)))
        # May be the group of `ep`. The owner of the given handle may destroy it, so it is not kept.
        whole = topology.subgroup("dp", ranks)
        topology.dp, topology.world = (Group(name, ranks, whole.index, whole.handle, job) for name in ("dp", "world"))
        topology._groups += [topology.dp, topology.world]
        topology.mp = topology.subgroup("mp", (job.rank,))
        return topology

    @classmethod
    def _from_grids(
        cls,
        experts: torch.Tensor,
        dense: torch.Tensor,
        ranks_per_node: int,
        joined_job: _JobAndGroupNumbers,
        duplex: bool,
    ) -> Topology:
        (job, numbers_of_ranks), topology, size = joined_job, cls.__new__(cls), experts.numel()
        if size == 1:
            topology._init_axes(Job(timeout_s=job.timeout_s), 1)
            return topology
        nccl = dist.get_backend() == "nccl"
        if duplex and nccl:
            raise ConfigError("duplex=True is for Gloo on CPUs; NCCL already uses both directions of a link")
        topology._init_axes(job, size, ranks_per_node, duplex)
        topology.expert_grid, topology.dense_grid = experts, dense
        all_ranks = tuple(sorted(experts.flatten().tolist()))
        default: Any = dist.group.WORLD
        if nccl and size == dist.get_world_size():
            # NCCL's watchdog enforces the default group's timeout.
            topology.world = Group("world", all_ranks, all_ranks.index(job.rank), default, job)
        else:
            topology.world = topology._group("world", "world", all_ranks, numbers_of_ranks)
        # Separate process groups even over equal ranks: one may reduce gradients while another sends rows.
        for grid, names in ((experts, ("edp", "ep", "esp")), (dense, ("dp", "mp"))):
            for axis, name in enumerate(names):
                ranks = _ranks_along(grid, axis, job.rank)
                setattr(topology, name, topology._group(name, name, ranks, numbers_of_ranks))
        return topology

    def _init_axes(self, job: Job, size: int, ranks_per_node: int = 1, duplex: bool = False) -> None:
        self.job, self.rank, self.size = job, job.rank, size
        self.ranks_per_node, self._uses_duplex = ranks_per_node, duplex
        for axis in ("ep", "esp", "mp", "dp", "edp", "world"):
            setattr(self, axis, Group(axis, job=job))
        self._subgroups: dict[tuple[int, ...], Group] = {}
        self._groups: list[Group] = []
        self._pooled_groups: list[PooledGroup] = []
        if dist.is_available() and dist.is_initialized():
            finalize(self, process_groups().release, self._pooled_groups)

    def _group(
        self,
        axis: str,
        purpose: str,
        ranks: tuple[int, ...],
        numbers_of_ranks: Sequence[Mapping[str, GroupNumber]] | None = None,
    ) -> Group:
        if len(ranks) == 1:
            return Group(axis, ranks, 0, None, self.job)
        numbers = None if numbers_of_ranks is None else [numbers_of_ranks[rank] for rank in ranks]
        downward = self._lease(f"{purpose} down", ranks, numbers) if self._uses_duplex and purpose != "world" else None
        group = Group(axis, ranks, ranks.index(self.rank), self._lease(purpose, ranks, numbers), self.job, downward)
        self._groups.append(group)
        return group

    def _lease(
        self, purpose: str, ranks: tuple[int, ...], numbers_of_ranks: Sequence[Mapping[str, GroupNumber]] | None = None
    ) -> dist.ProcessGroup:
        pooled = process_groups().lease(self.job, purpose, ranks, numbers_of_ranks)
        self._pooled_groups.append(pooled)
        handle = pooled.handle()
        assert handle is not None
        return handle

    @cached_property
    def expert_ranks(self) -> tuple[int, ...] | None:
        """Ranks that hold one copy of the experts, ordered by (ep, esp); None if unknown."""
        return None if self.expert_grid is None else tuple(self.expert_grid[self.edp.index].flatten().tolist())

    def subgroup(self, axis: str, ranks: tuple[int, ...]) -> Group:
        """Return a group of some ranks including this one. The first use is collective over these ranks."""
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._group(axis, "subgroup", ranks)
        return self._subgroups[ranks]

    def duplicate_group(self, group: Group, purpose: str) -> Group:
        """Return another group of the same ranks, for collectives that overlap with those over `group`. Collective.

        Equal purposes share a process group.
        """
        return self._group(group.axis, f"{group.axis} {purpose}", group.ranks)

    def next_layer_number(self) -> int:
        """Number a new layer on these ranks. The number detects ranks that call different layers."""
        return 0 if self.size == 1 else process_groups().next_layer_number(self.world.ranks)

    @property
    def is_first(self) -> bool:
        return self.world.index == 0

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        return self._make_device_mesh(self.expert_grid, ("edp", "ep", "esp"))

    @cached_property
    def dense_mesh(self) -> DeviceMesh | None:
        return self._make_device_mesh(self.dense_grid, ("dp", "mp"))

    def _make_device_mesh(self, grid: torch.Tensor | None, names: tuple[str, ...]) -> DeviceMesh | None:
        if grid is None:
            return None
        groups = [getattr(self, name).handle or self._lease("alone", (self.rank,)) for name in names]
        return DeviceMesh.from_group(groups, device_of(self.world).type, grid, mesh_dim_names=names)

    def close(self) -> None:
        """Destroy the process groups that no other topology uses. Collective over all ranks, with no traffic pending.

        Layers on this topology cannot communicate afterwards.

        Raises:
            RankError: a rank failed, or did not call within `timeout_s`.
        """
        pooled_groups, self._pooled_groups[:] = list(self._pooled_groups), []
        if not pooled_groups or not dist.is_initialized():
            return
        pool = process_groups()
        # Members may have different topologies: destroy a group only if none has another lease.
        own, timeout_s = pool.release(pooled_groups), self.job.timeout_s
        leases_out = self.world.board.all_gather_json(
            self.world.ranks, own, timeout_s, operation="closing the topology"
        )
        for pooled in pooled_groups:
            if all(out.get(pooled.key[0], 0) == 0 for out in leases_out):
                pool.destroy(pooled)
        for group in self._groups:
            group.close()

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may never call `close`.
        if kind is None:
            self.close()

    def require_equal_facts(self, facts: dict[str, Any], subject: str, hint: str = "") -> None:
        """Check that all ranks hold the same facts about a subject. Collective over all ranks.

        Raises:
            RankError: a fact differs; names it, and its value on each rank. `hint` is appended.
        """
        facts_of_ranks = all_gather_object(self.world, facts, f"comparing {subject}")
        # The union of names: classes may have different arguments.
        for name in dict.fromkeys(name for its_facts in facts_of_ranks for name in its_facts):
            holders: dict[str, list[int]] = {}
            for rank, its_facts in zip(self.world.ranks, facts_of_ranks, strict=True):
                holders.setdefault(repr(its_facts[name]) if name in its_facts else "missing", []).append(rank)
            if len(holders) > 1:
                values = " and ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
                text = f"{subject}: {name} is {values}. Build {subject} from the same configuration on every rank."
                raise RankError(f"{text} {hint}".rstrip())

    def check(self) -> None:
        """Raise if a wait of a one-sided kernel has failed (`fusedmoe.comm.one_sided`).

        On a GPU the host waits for these kernels only here.

        Raises:
            RankError: a wait timed out or a peer failed; names rank, peer, rows, expected and seen signal.
        """
        for heap in list(self.job.heaps):
            if not heap.is_abandoned:
                heap.check()

    def fail(self, operation: str, message: str) -> None:
        if self.job.board is not None:
            self.job.board.post(self.rank, operation, message)

    def stop(self, operation: str, error: BaseException) -> None:
        """Report an exception of this rank to the other ranks, which then raise at their next wait.

        Not reported: a `RankError`, which another rank has reported, and the exception by which a checkpoint ends its
        recomputation early.
        """
        if self.size > 1:
            _forget_failed_backward()
        if not isinstance(error, RankError) and not is_early_stop(error):
            self.fail(operation, f"{type(error).__name__}: {error}")

    @contextmanager
    def guard(self, operation: str = "the guarded block") -> Iterator[None]:
        """Report any exception that leaves the block (`stop`)."""
        try:
            yield
        except BaseException as error:
            self.stop(operation, error)
            raise

    def __getstate__(self) -> dict[str, Any]:
        self.job.refuse_pickle()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        return self

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name).size}" for name in ("dp", "mp", "edp", "ep", "esp"))
        world = self.size if self.world.index == self.rank else f"the ranks {list(self.world.ranks)}"
        return f"Topology(rank {self.rank} of {world}; {sizes}; {self.ranks_per_node} ranks a node)"


def group_of(handle: dist.ProcessGroup, name: str, timeout_s: float) -> Group:
    """Wrap an existing process group as a `Group` with bounded waits. Does not communicate."""
    rank, ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(handle))
    job = Job(rank, timeout_s, Board(default_store(), rank))
    return Group(name, ranks, ranks.index(rank), handle, job)


def _forget_failed_backward() -> None:
    """Drop the nodes that autograd still queues after a failed backward pass, and the process groups that they hold.

    Runs an empty backward pass on this thread. Does nothing inside a backward pass.
    """
    # The thread's autograd queue keeps the ready nodes until the next pass. Meanwhile peers cannot free their process
    # groups: Gloo waits for this rank's pending data.
    if graph_task_id() != -1:
        return  # inside a backward pass that still needs its nodes
    # The original error must stay visible.
    with suppress(Exception), torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).clone().backward()


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    launched = environment.read_integer("WORLD_SIZE", 1, 1)
    if launched > 1:
        raise ConfigError(
            f"topology: rank {os.environ.get('RANK', '?')} of {launched} has no process group, so it would train a "
            "separate model. Call torch.distributed.init_process_group first; Topology() is a world of one rank."
        )
    return 1


def _ranks_per_node(given: int | None) -> int:
    if given is not None and given < 1:
        raise ConfigError(f"topology: ranks_per_node = {given} must be at least 1; None uses LOCAL_WORLD_SIZE")
    return given or environment.read_integer("LOCAL_WORLD_SIZE", _world_size(), 1)


def _ranks_along(grid: torch.Tensor, axis: int, rank: int) -> tuple[int, ...]:
    at = [int(index) for index in (grid == rank).nonzero()[0]]
    return tuple(grid.movedim(axis, -1)[*(place for i, place in enumerate(at) if i != axis)].tolist())


def _join_job(timeout_s: float, arguments: str, ranks: Sequence[int] | None = None) -> _JobAndGroupNumbers:
    """Join these ranks (default: all) and compare arguments. Return the job and each rank's process groups."""
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"topology: timeout_s = {timeout_s} must be positive and finite, as it bounds all waits")
    ranks = range(_world_size()) if ranks is None else ranks
    if len(ranks) == 1:
        return Job(timeout_s=timeout_s), None
    default: Any = dist.group.WORLD
    if dist.get_backend() == "nccl":
        set_nccl_launch_order()
    elif torch.cuda.is_available() and device_backend(default, "cuda") == "nccl":
        warnings.warn(
            "topology: init_process_group() without a backend made groups of both Gloo and NCCL. On GPUs fusedmoe then "
            'waits on the host for each collective, and schedules cannot overlap: call init_process_group("nccl")',
            stacklevel=3,
        )
    rank = dist.get_rank()
    board = Board(default_store(), rank)
    post_uncaught_exceptions(board)
    facts = board.all_gather_json(
        ranks, (arguments, process_groups().group_numbers(timeout_s), read_identity()), timeout_s
    )
    if len(ranks) == dist.get_world_size():
        board.forget_addresses()
    require_one_job(rank, ranks, [its_identity for *_, its_identity in facts])
    for peer, (its_arguments, *_) in zip(ranks, facts, strict=True):
        if its_arguments != arguments:
            raise RankError(
                f"topology: rank {rank} has {arguments}, rank {peer} has {its_arguments}. Pass the same on every rank; "
                "ranks_per_node is the launcher's LOCAL_WORLD_SIZE unless given."
            )
    return Job(rank, timeout_s, board), [numbers_of_ranks for _, numbers_of_ranks, _ in facts]
