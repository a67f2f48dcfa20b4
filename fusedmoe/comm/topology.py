"""Topologies: data, model, expert and expert-sharding parallelism over the ranks of a job."""

from __future__ import annotations

import math
import os
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
from fusedmoe.comm.failure.board import Board, tell_others_of_uncaught
from fusedmoe.comm.group import Group, Held, Job, Leased, launch_in_order_of_issue, process_groups
from fusedmoe.comm.job_identity import identity, require_one_job
from fusedmoe.compat.torch import default_store, graph_task_id, is_early_stop
from fusedmoe.errors import ConfigError, RankError

# The job of ranks that have met, and the process groups that each of them holds.
_Met = tuple[Job, list[dict[str, Held]] | None]


class Topology:
    """The parallel axes of a job and this rank's group along each.

    Two grids lie over the same ranks, the innermost axis varying fastest:

    - experts: rank = (edp·EP + ep)·ESP + esp. The E experts are split over `ep`, each expert's hidden dimension over
      `esp`; `edp` ranks hold copies of the same shard.
    - dense parts: rank = dp·MP + mp. Attention is split over `mp`, `dp` ranks hold copies.

    With EP = nodes and ESP = MP = ranks of a node, all-to-all crosses nodes while all-gather and reduce-scatter stay
    inside one (FSMoE §2.2, Fig. 2).

    `Topology()` is a world of one and needs no process group. `from_sizes` and `from_mesh` are collective: every rank
    of the job calls them with the same arguments.

    Topologies share the job's process groups: a second one with the same axes makes none. They stay when a topology is
    dropped, for the next; `close()`, or the end of a `with` block, frees those that no other topology uses.

    Attributes:
        rank, size: this rank and the number of ranks.
        ep, esp, mp, dp, edp, world: the `Group` along each axis.
        expert_grid, dense_grid: the ranks, [EDP, EP, ESP] and [DP, MP]; None in a world of one.
        expert_mesh, dense_mesh: the same as `DeviceMesh` with dims ("edp", "ep", "esp") and ("dp", "mp").
        ranks_per_node: consecutive ranks that share a node.
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
        self._begin(Job(), 1)

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
        """Lays out the ranks of the initialised process group by the sizes of the axes.

        Args:
            ep, esp, mp: sizes of the axes; what is left over is data parallel.
            ranks_per_node: defaults to the launcher's LOCAL_WORLD_SIZE.
            timeout_s: how long any wait for other ranks may last, in seconds.
            duplex: on CPUs, two process groups an axis, so that all-to-all, all-gather and reduce-scatter use both
                directions of a link at once: up to twice as fast between hosts, no gain on loopback.
        Raises:
            ConfigError: the sizes do not divide the world, a number is not positive, ranks were launched that have no
                process group, or duplex is asked for on GPUs.
            RankError: the ranks pass different arguments, or one of them does not come.
        """
        size, per_node = _world_size(), _ranks_per_node(ranks_per_node)
        met = _meet(timeout_s, f"ep={ep}, esp={esp}, mp={mp}, ranks_per_node={per_node}, duplex={duplex}")
        for name, axes in (("ep·esp", (ep, esp)), ("mp", (mp,))):
            need = math.prod(axes)
            if min(axes) < 1 or size % need:
                alone = "" if dist.is_initialized() else " (torchrun, then torch.distributed.init_process_group)"
                raise ConfigError(
                    f"{name} = {need} does not divide the world of {size} ranks (ep={ep}, esp={esp}, mp={mp}). "
                    f"Start as many ranks as a multiple of both ep·esp and mp{alone}, or choose smaller sizes."
                )
        ranks = torch.arange(size, device="cpu")
        return cls._from_grids(ranks.view(-1, ep, esp), ranks.view(-1, mp), per_node, met, duplex)

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
        """Takes the axes from the named dimensions of a `DeviceMesh` over all ranks; the rest is data parallel.

        Args:
            ep, esp, mp: dimensions of the mesh; `mp` and `esp` may name the same.
            pp: the dimension along which ranks hold different layers (pipeline stages). The topology is then of this
                rank's stage: gradients, norms and checkpoints of its layers are over the stage's ranks alone.
            ranks_per_node, timeout_s: as for `from_sizes`.
        Raises:
            ConfigError: a name is not a dimension of the mesh, two axes that need one each have the same, or the mesh
                lacks ranks.
            RankError: the ranks pass different arguments, or one of them does not come.
        """
        world, per_node = _world_size(), _ranks_per_node(ranks_per_node)
        arguments = f"ep={ep}, esp={esp}, mp={mp}, pp={pp}, ranks_per_node={per_node}"
        met = _meet(timeout_s, f"{mesh}, {arguments}")
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
            ranks = ranks.select(stages, int((ranks == met[0].rank).nonzero()[0, stages]))
            names = (*names[:stages], *names[stages + 1 :])

        def grid(*last: str | None) -> torch.Tensor:
            inner = [names.index(name) for name in last if name is not None]
            outer = [dim for dim in range(ranks.dim()) if dim not in inner]
            sizes = [1 if name is None else ranks.shape[names.index(name)] for name in last]
            return ranks.permute((*outer, *inner)).reshape(-1, *sizes)

        return cls._from_grids(grid(ep, esp), grid(mp), per_node, met, duplex=False)

    @classmethod
    def from_group(
        cls,
        handle: dist.ProcessGroup | None,
        experts: torch.Tensor | None = None,
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
    ) -> Topology:
        """Makes a world of the ranks of one process group, for a layer that only some ranks of the job hold.

        Collective over that group only. Gradients of dense parts and of copies of an expert are not its business: it
        has no meshes, `dp` is the whole group, and `edp` the axis of `experts` before the last two. On CPUs it is
        duplex, as `from_sizes` describes.

        Args:
            handle: the group; None for a world of one.
            experts: [EP, ESP] or [EDP, EP, ESP], places in the group, each once; by default EP over all of them.
            ranks_per_node: as for `from_sizes`.
        Raises:
            ConfigError: `experts` does not hold every place once, or has another number of axes.
            RankError: the ranks pass different arguments, or one of them does not come.
        """
        ranks = tuple(dist.get_process_group_ranks(handle)) if handle is not None else (0,)
        if handle is None or len(ranks) == 1:
            return cls()
        places = torch.arange(len(ranks), device="cpu").view(-1, 1) if experts is None else experts
        if places.dim() not in (2, 3) or sorted(places.reshape(-1).tolist()) != list(range(len(ranks))):
            raise ConfigError(
                f"experts = {places.tolist()} must hold each place in a group of {len(ranks)} once, as [EP, ESP] or "
                "[EDP, EP, ESP]"
            )
        per_node = _ranks_per_node(ranks_per_node)
        job, _ = _meet(timeout_s, f"experts={places.tolist()}, ranks_per_node={per_node}", ranks)
        topology = cls.__new__(cls)
        # Other libraries' layers, which it is for, have no argument to ask for a link's second direction with.
        topology._begin(job, len(ranks), per_node, duplex=dist.get_backend() != "nccl")
        grid = torch.tensor(ranks, device="cpu")[places.view(-1, *places.shape[-2:])]
        for axis, name in enumerate(("edp", "ep", "esp")):
            setattr(topology, name, topology.subgroup(name, _line(grid, axis, job.rank)))
        # The group of `ep` perhaps. The given handle is not kept: its owner may destroy it, which frees it then.
        everyone = topology.subgroup("dp", ranks)
        topology.dp, topology.world = (
            Group(name, ranks, everyone.index, everyone.handle, job) for name in ("dp", "world")
        )
        topology._groups += [topology.dp, topology.world]
        topology.mp = topology.subgroup("mp", (job.rank,))
        return topology

    @classmethod
    def _from_grids(
        cls, experts: torch.Tensor, dense: torch.Tensor, ranks_per_node: int, met: _Met, duplex: bool
    ) -> Topology:
        (job, held), topology, size = met, cls.__new__(cls), experts.numel()
        # The only rank of its pipeline stage perhaps.
        if size == 1:
            topology._begin(Job(timeout_s=job.timeout_s), 1)
            return topology
        nccl = dist.get_backend() == "nccl"
        if duplex and nccl:
            raise ConfigError("duplex=True is for Gloo on CPUs; NCCL uses both directions of a link as it is")
        topology._begin(job, size, ranks_per_node, duplex)
        topology.expert_grid, topology.dense_grid = experts, dense
        everyone = tuple(sorted(experts.flatten().tolist()))
        default: Any = dist.group.WORLD
        if nccl and size == dist.get_world_size():
            # The job's default group keeps its time-out; NCCL's watchdog bounds it.
            topology.world = Group("world", everyone, everyone.index(job.rank), default, job)
        else:
            topology.world = topology._group("world", "world", everyone, held)
        # Each axis has a group of its own, of the same ranks as another's, too: gradients travel over one while rows
        # travel over another.
        for grid, names in ((experts, ("edp", "ep", "esp")), (dense, ("dp", "mp"))):
            for axis, name in enumerate(names):
                setattr(topology, name, topology._group(name, name, _line(grid, axis, job.rank), held))
        return topology

    def _begin(self, job: Job, size: int, ranks_per_node: int = 1, duplex: bool = False) -> None:
        """Sets what all topologies have; every axis of one rank, at first."""
        self.job, self.rank, self.size = job, job.rank, size
        self.ranks_per_node, self._duplex = ranks_per_node, duplex
        for axis in ("ep", "esp", "mp", "dp", "edp", "world"):
            setattr(self, axis, Group(axis, job=job))
        self._subgroups: dict[tuple[int, ...], Group] = {}
        # Those of leased process groups.
        self._groups: list[Group] = []
        self._leases: list[Leased] = []
        if dist.is_available() and dist.is_initialized():
            # With the last reference to the topology its leases end.
            finalize(self, process_groups().give_back, self._leases)

    def _group(
        self, axis: str, purpose: str, ranks: tuple[int, ...], held: Sequence[Mapping[str, Held]] | None = None
    ) -> Group:
        if len(ranks) == 1:
            return Group(axis, ranks, 0, None, self.job)
        mine = held if held is None else [held[rank] for rank in ranks]
        downward = self._lease(f"{purpose} down", ranks, mine) if self._duplex and purpose != "world" else None
        group = Group(axis, ranks, ranks.index(self.rank), self._lease(purpose, ranks, mine), self.job, downward)
        self._groups.append(group)
        return group

    def _lease(
        self, purpose: str, ranks: tuple[int, ...], held: Sequence[Mapping[str, Held]] | None = None
    ) -> dist.ProcessGroup:
        lease = process_groups().lease(self.job, purpose, ranks, held)
        self._leases.append(lease)
        handle = lease.handle()
        assert handle is not None
        return handle

    @cached_property
    def expert_ranks(self) -> tuple[int, ...] | None:
        """The ranks that hold a part of one copy of the experts, ep by ep, their shards in order; None: it is not said
        which they are."""
        return None if self.expert_grid is None else tuple(self.expert_grid[self.edp.index].flatten().tolist())

    def subgroup(self, axis: str, ranks: tuple[int, ...]) -> Group:
        """Returns a group of some ranks, this one among them; its members alone make it, on first use."""
        if ranks not in self._subgroups:
            self._subgroups[ranks] = self._group(axis, "subgroup", ranks)
        return self._subgroups[ranks]

    def beside(self, group: Group, purpose: str) -> Group:
        """Returns another group of the same ranks, for collectives that run at the same time as those over `group`.

        Collective over the group. The same purpose gives the same process group.
        """
        return self._group(group.axis, f"{group.axis} {purpose}", group.ranks)

    def number_layer(self) -> int:
        """Counts another layer on these ranks; by its number ranks find out that they call different layers."""
        return 0 if self.size == 1 else process_groups().number_layer(self.world.ranks)

    @property
    def is_first(self) -> bool:
        """True on the first rank of its world, which writes files and shows progress."""
        return self.world.index == 0

    @cached_property
    def expert_mesh(self) -> DeviceMesh | None:
        return self._mesh(self.expert_grid, ("edp", "ep", "esp"))

    @cached_property
    def dense_mesh(self) -> DeviceMesh | None:
        return self._mesh(self.dense_grid, ("dp", "mp"))

    def _mesh(self, grid: torch.Tensor | None, names: tuple[str, ...]) -> DeviceMesh | None:
        if grid is None:
            return None
        groups = [getattr(self, name).handle or self._lease("alone", (self.rank,)) for name in names]
        return DeviceMesh.from_group(groups, device_of(self.world).type, grid, mesh_dim_names=names)

    def close(self) -> None:
        """Frees the process groups that no other topology uses. Collective over all ranks, when nothing travels.

        Layers on this topology cannot communicate from then on.

        Raises:
            RankError: a rank failed, or did not come within `timeout_s`.
        """
        leases, self._leases[:] = list(self._leases), []
        if not leases or not dist.is_initialized():
            return
        pool = process_groups()
        # A process group goes when none of its ranks has another lease: topologies need not be alike on all ranks.
        own, timeout_s = pool.give_back(leases), self.job.timeout_s
        leases_out = self.world.board.meet(self.world.ranks, own, timeout_s, operation="closing the topology")
        for lease in leases:
            if all(out.get(lease.key[0], 0) == 0 for out in leases_out):
                pool.destroy(lease)
        for group in self._groups:
            group.close()

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may never come.
        if kind is None:
            self.close()

    def agree(self, facts: dict[str, Any], subject: str, more: str = "") -> None:
        """Check that all ranks hold the same facts about a subject. Collective over all ranks.

        Args:
            more: a sentence for the end of the error.
        Raises:
            RankError: they do not; the message, the same everywhere, names a fact and who holds which value.
        """
        facts_of_ranks = all_gather_object(self.world, facts, f"comparing {subject}")
        # Names of all ranks, in one order: a part of another class has other arguments.
        for name in dict.fromkeys(name for its_facts in facts_of_ranks for name in its_facts):
            holders: dict[str, list[int]] = {}
            for rank, its_facts in zip(self.world.ranks, facts_of_ranks, strict=True):
                holders.setdefault(repr(its_facts[name]) if name in its_facts else "missing", []).append(rank)
            if len(holders) > 1:
                values = " and ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
                text = f"{subject}: {name} is {values}. Build {subject} from the same configuration on every rank."
                raise RankError(f"{text} {more}".rstrip())

    def check(self) -> None:
        """Raises the failed waits of kernels that send and receive by themselves (`fusedmoe.comm.one_sided`).

        Raises:
            RankError: a wait ended early; it names rank, peer, the awaited rows, expected and seen signal.
        """
        # On a GPU the host waits for these kernels nowhere else.
        for heap in list(self.job.heaps):
            if not heap.abandoned:
                heap.check()

    def fail(self, operation: str, message: str) -> None:
        """Posts that this rank failed, so that the other ranks end with an error that names it."""
        if self.job.board is not None:
            self.job.board.post(self.rank, operation, message)

    def stop(self, operation: str, error: BaseException) -> None:
        """Posts an exception of this rank, unless the rank at fault, or the first to notice, has posted it already."""
        if self.size > 1:
            _forget_failed_backward()
        if not isinstance(error, RankError) and not is_early_stop(error):
            self.fail(operation, f"{type(error).__name__}: {error}")

    @contextmanager
    def guard(self, operation: str = "the guarded block") -> Iterator[None]:
        """Posts any exception that leaves the block, with which all ranks end then, wherever they wait."""
        try:
            yield
        except BaseException as error:
            self.stop(operation, error)
            raise

    def __getstate__(self) -> dict[str, Any]:
        self.job.refuse_pickle()
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        # Process groups cannot be copied, and a copied layer stands on the same ranks.
        return self

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name).size}" for name in ("dp", "mp", "edp", "ep", "esp"))
        world = self.size if self.world.index == self.rank else f"the ranks {list(self.world.ranks)}"
        return f"Topology(rank {self.rank} of {world}; {sizes}; {self.ranks_per_node} ranks a node)"


def group_of(handle: dist.ProcessGroup, name: str, timeout_s: float) -> Group:
    """Returns a process group that somebody else made as a `Group`: waits over it are bounded, errors name ranks.

    Nothing is sent. `name`: the word for the group in errors.
    """
    rank, ranks = dist.get_rank(), tuple(dist.get_process_group_ranks(handle))
    job = Job(rank, timeout_s, Board(default_store(), rank))
    return Group(name, ranks, ranks.index(rank), handle, job)


def _forget_failed_backward() -> None:
    """Frees what a backward pass that raised has left to do, and with it the process groups that its graph holds."""
    # The queue of this thread keeps the nodes that were ready, and so their graph, until it runs another pass. As long
    # as this rank has a process group, its peers cannot free theirs: Gloo waits there for what this rank owes.
    if graph_task_id() != -1:
        return  # inside a backward pass, whose nodes are still wanted
    # Whatever goes wrong here must not hide the error itself.
    with suppress(Exception), torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).clone().backward()


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    launched = environment.integer("WORLD_SIZE", 1, 1)
    if launched > 1:
        raise ConfigError(
            f"topology: rank {os.environ.get('RANK', '?')} of {launched} has no process group yet, so it would train a "
            "model of its own. Call torch.distributed.init_process_group first; Topology() is a world of one."
        )
    return 1


def _ranks_per_node(given: int | None) -> int:
    if given is not None and given < 1:
        raise ConfigError(f"topology: ranks_per_node = {given} must be at least 1; None takes the launcher's")
    return given or environment.integer("LOCAL_WORLD_SIZE", _world_size(), 1)


def _line(grid: torch.Tensor, axis: int, rank: int) -> tuple[int, ...]:
    """Returns the ranks on this rank's line along one axis of a grid."""
    at = [int(index) for index in (grid == rank).nonzero()[0]]
    return tuple(grid.movedim(axis, -1)[*(place for i, place in enumerate(at) if i != axis)].tolist())


def _meet(timeout_s: float, arguments: str, ranks: Sequence[int] | None = None) -> _Met:
    """Waits for these ranks, by default all; returns their job, and the process groups that each of them holds."""
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"topology: timeout_s = {timeout_s} must be above 0 and finite, as it bounds all waits")
    ranks = range(_world_size()) if ranks is None else ranks
    if len(ranks) == 1:
        return Job(timeout_s=timeout_s), None
    if dist.get_backend() == "nccl":
        launch_in_order_of_issue()
    rank = dist.get_rank()
    board = Board(default_store(), rank)
    tell_others_of_uncaught(board)
    # One meeting for both: the ranks compare arguments, and hold what their process groups are made from.
    facts = board.meet(ranks, (arguments, process_groups().held(timeout_s), identity()), timeout_s)
    if len(ranks) == dist.get_world_size():
        board.forget_addresses()
    require_one_job(rank, ranks, [its_identity for *_, its_identity in facts])
    for peer, (its_arguments, *_) in zip(ranks, facts, strict=True):
        if its_arguments != arguments:
            raise RankError(
                f"topology: rank {rank} has {arguments}, rank {peer} has {its_arguments}. Pass the same on every rank; "
                "ranks_per_node is the launcher's LOCAL_WORLD_SIZE unless given."
            )
    return Job(rank, timeout_s, board), [held for _, held, _ in facts]
