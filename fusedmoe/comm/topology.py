"""Where ranks stand: data, model, expert and expert-sharding parallelism over the ranks of a job."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import _StopRecomputationError

from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.failure import Board
from fusedmoe.comm.group import Group, Job
from fusedmoe.comm.process_group import launch_in_order_of_issue, make_process_group, patience
from fusedmoe.errors import ConfigError, RankError


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

    Attributes:
        rank, size: this rank and the number of ranks.
        ep, esp, mp, dp, edp, world: the `Group` along each axis.
        expert_mesh, dense_mesh: `DeviceMesh` with dims ("edp", "ep", "esp") and ("dp", "mp"); None in a world of one.
        ranks_per_node: consecutive ranks that share a node.
    """

    def __init__(self) -> None:
        self._lay_out(None, None, job=Job(), ranks_per_node=1, device_type="cpu")

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
            ConfigError: the sizes do not divide the world, ranks were launched that have no process group, or duplex is
                asked for on GPUs.
            RankError: the ranks pass different arguments, or one of them does not come.
        """
        size = _world_size()
        per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", size))
        job = _meet(timeout_s, f"ep={ep}, esp={esp}, mp={mp}, ranks_per_node={per_node}, duplex={duplex}")
        for name, need in (("ep·esp", ep * esp), ("mp", mp)):
            if need < 1 or size % need:
                alone = "" if dist.is_initialized() else " (torchrun, then torch.distributed.init_process_group)"
                raise ConfigError(
                    f"{name} = {need} does not divide the world of {size} ranks (ep={ep}, esp={esp}, mp={mp}). "
                    f"Start as many ranks as a multiple of both ep·esp and mp{alone}, or choose smaller sizes."
                )
        ranks = torch.arange(size)
        return cls._from_grids(ranks.view(-1, ep, esp), ranks.view(-1, mp), per_node, job, duplex)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        ep: str | None = None,
        esp: str | None = None,
        mp: str | None = None,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
        duplex: bool = False,
    ) -> Topology:
        """Takes the axes from the named dimensions of a `DeviceMesh` over all ranks; the rest is data parallel.

        `mp` and `esp` may name the same dimension. The other arguments are those of `from_sizes`.

        Raises:
            ConfigError: a name is not a dimension of the mesh, ep and esp are the same, the mesh lacks ranks, or duplex
                is asked for on GPUs.
            RankError: the ranks pass different arguments, or one of them does not come.
        """
        world = _world_size()
        per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", world))
        arguments = f"ep={ep}, esp={esp}, mp={mp}, ranks_per_node={per_node}, duplex={duplex}"
        job = _meet(timeout_s, f"{mesh}, {arguments}")
        names = mesh.mesh_dim_names or ()
        for axis, name in (("ep", ep), ("esp", esp), ("mp", mp)):
            if name is not None and name not in names:
                raise ConfigError(f"{axis}={name!r} is not a dimension of the mesh, which has {list(names)}")
        if ep is not None and ep == esp:
            raise ConfigError(f"ep and esp name the same mesh dimension {ep!r}; they need one each")
        if mesh.mesh.numel() != world:
            raise ConfigError(f"the mesh holds {mesh.mesh.numel()} ranks of a world of {world}; pass the whole mesh")

        def grid(*last: str | None) -> torch.Tensor:
            inner = [names.index(name) for name in last if name is not None]
            outer = [dim for dim in range(mesh.mesh.dim()) if dim not in inner]
            sizes = [1 if name is None else mesh.mesh.shape[names.index(name)] for name in last]
            return mesh.mesh.permute(*outer, *inner).reshape(-1, *sizes).cpu()

        return cls._from_grids(grid(ep, esp), grid(mp), per_node, job, duplex)

    @classmethod
    def from_group(
        cls,
        handle: dist.ProcessGroup | None,
        experts: torch.Tensor | None = None,
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
    ) -> Topology:
        """The ranks of one process group as a world of their own: for a layer that only some ranks of the job hold.

        Collective over that group only. Gradients of dense parts and of copies of an expert are not its business: it
        has no meshes, `dp` is the whole group, and `edp` is what lies beside `experts`.

        Args:
            handle: the group; None for a world of one.
            experts: [EP, ESP] or [EDP, EP, ESP], places in the group, each once; by default EP over all of them.
            ranks_per_node: as for `from_sizes`.
        Raises:
            ConfigError: `experts` does not hold every place once.
            RankError: the ranks pass different arguments, or one of them does not come.
        """
        ranks = tuple(dist.get_process_group_ranks(handle)) if handle is not None else (0,)
        if len(ranks) == 1:
            return cls()
        places = torch.arange(len(ranks)).view(-1, 1) if experts is None else experts
        if sorted(places.reshape(-1).tolist()) != list(range(len(ranks))):
            raise ConfigError(f"experts = {places.tolist()} must hold each place in a group of {len(ranks)} once")
        per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", _world_size()))
        job = _meet(timeout_s, f"experts={places.tolist()}, ranks_per_node={per_node}", ranks)
        topology = cls.__new__(cls)
        topology.job, topology.rank, topology.size = job, job.rank, len(ranks)
        topology.ranks_per_node, topology._duplex, topology._subgroups = per_node, False, {}
        topology.expert_mesh = topology.dense_mesh = None
        grid = torch.tensor(ranks)[places.view(-1, *places.shape[-2:])]
        at = [int(index) for index in (grid == job.rank).nonzero()[0]]
        topology.world = Group("world", ranks, ranks.index(job.rank), handle, job)
        for axis, name in enumerate(("edp", "ep", "esp")):
            line = grid.movedim(axis, -1)[*(place for i, place in enumerate(at) if i != axis)]
            setattr(topology, name, topology.subgroup(name, tuple(line.tolist())))
        topology.dp = replace(topology.subgroup("dp", ranks), axis="dp")
        topology.mp = topology.subgroup("mp", (job.rank,))
        return topology

    @classmethod
    def _from_grids(
        cls, experts: torch.Tensor, dense: torch.Tensor, ranks_per_node: int, job: Job, duplex: bool
    ) -> Topology:
        topology = cls.__new__(cls)
        if experts.numel() == 1:
            topology._lay_out(None, None, job=job, ranks_per_node=1, device_type="cpu")
            return topology
        device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if duplex and device_type != "cpu":
            raise ConfigError("duplex=True is for Gloo on CPUs; NCCL uses both directions of a link as it is")
        topology._lay_out(
            experts, dense, job=job, ranks_per_node=ranks_per_node, device_type=device_type, duplex=duplex
        )
        return topology

    def _lay_out(
        self,
        experts: torch.Tensor | None,
        dense: torch.Tensor | None,
        *,
        job: Job,
        ranks_per_node: int,
        device_type: str,
        duplex: bool = False,
    ) -> None:
        self.job = job
        self._duplex = duplex
        self.rank = job.rank
        self.ranks_per_node = ranks_per_node
        self.expert_mesh: DeviceMesh | None = None
        self.dense_mesh: DeviceMesh | None = None
        self._subgroups: dict[tuple[int, ...], Group] = {}
        if experts is None or dense is None:
            self.size = 1
            self.ep, self.esp, self.mp, self.dp, self.edp, self.world = (
                Group(axis, job=job) for axis in ("ep", "esp", "mp", "dp", "edp", "world")
            )
            return
        self.size = experts.numel()
        self.expert_mesh = DeviceMesh(device_type, experts, mesh_dim_names=("edp", "ep", "esp"))
        self.dense_mesh = DeviceMesh(device_type, dense, mesh_dim_names=("dp", "mp"))
        # The job's default group keeps its time-out; where ours matters, the library has a world group of its own.
        handle = dist.new_group(timeout=patience(job)) if device_type == "cpu" else dist.group.WORLD
        self.world = Group("world", tuple(range(self.size)), self.rank, handle, job)
        self.edp, self.ep, self.esp = (self._axis(self.expert_mesh, name) for name in ("edp", "ep", "esp"))
        self.dp, self.mp = (self._axis(self.dense_mesh, name) for name in ("dp", "mp"))

    def _axis(self, mesh: DeviceMesh, name: str) -> Group:
        handle: dist.ProcessGroup | None = mesh.get_group(name)
        ranks = tuple(dist.get_process_group_ranks(handle))
        if len(ranks) == 1:
            handle = None
        elif handle == dist.group.WORLD:
            # A group of its own, as all axes have: gradients travel over one while rows travel over another.
            handle = dist.new_group(timeout=patience(self.job))
        elif self.world.handle != dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(patience(self.job), handle)
        return Group(name, ranks, ranks.index(self.rank), handle, self.job, self._downward(ranks))

    def subgroup(self, axis: str, ranks: tuple[int, ...]) -> Group:
        """A group of some ranks, this one among them; made on first use, by its members only."""
        if ranks not in self._subgroups:
            handle = make_process_group(self.job, ranks) if len(ranks) > 1 else None
            self._subgroups[ranks] = Group(axis, ranks, ranks.index(self.rank), handle, self.job, self._downward(ranks))
        return self._subgroups[ranks]

    def beside(self, group: Group) -> Group:
        """Another group of the same ranks, for what goes on at the same time as something over `group`."""
        if group.size == 1:
            return group
        return replace(group, handle=make_process_group(self.job, group.ranks), downward=self._downward(group.ranks))

    def _downward(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        return make_process_group(self.job, ranks) if self._duplex and len(ranks) > 1 else None

    def agree(self, facts: dict[str, Any], what: str) -> None:
        """Checks that all ranks hold the same facts. Collective over all ranks.

        Raises:
            RankError: they do not; the message, the same everywhere, names a fact and who holds which value.
        """
        every = all_gather_object(self.world, facts, f"comparing {what}")
        for name in facts:
            holders: dict[str, list[int]] = {}
            for rank, others in enumerate(every):
                holders.setdefault(repr(others.get(name)), []).append(rank)
            if len(holders) > 1:
                found = " and ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
                raise RankError(f"{what}: {name} is {found}. Build {what} from the same configuration on every rank.")

    def check(self) -> None:
        """Raises what kernels missed that send and receive by themselves (`fusedmoe.puts`): on a GPU nobody else waits
        for them. Where there are such it waits for the current stream.

        Raises:
            RankError: a wait ended early; it names rank, peer, what was waited for, expected and seen signal.
        """
        for heap in list(self.job.heaps):
            if not heap.abandoned:
                heap.check()

    def fail(self, operation: str, message: str) -> None:
        """Posts that this rank failed, so that the others end with an error that names it."""
        if self.job.board is not None:
            self.job.board.post(self.rank, operation, message)

    def stop(self, operation: str, error: BaseException) -> None:
        """Posts an exception of this rank, but for one that the rank at fault, or who noticed first, has posted."""
        if not isinstance(error, RankError):
            self.fail(operation, f"{type(error).__name__}: {error}")

    @contextmanager
    def guard(self, operation: str = "the guarded block") -> Iterator[None]:
        """Posts any exception that leaves the block: other ranks, wherever they wait, end with it by name."""
        try:
            yield
        except _StopRecomputationError:
            raise  # no failure: activation checkpointing ends a recomputation with it
        except BaseException as error:
            self.stop(operation, error)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Topology:
        return self  # process groups cannot be copied, and a copied layer stands on the same ranks

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name).size}" for name in ("dp", "mp", "edp", "ep", "esp"))
        return f"Topology(rank {self.rank} of {self.size}; {sizes}; {self.ranks_per_node} ranks a node)"


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > 1:
        raise ConfigError(
            f"topology: rank {os.environ.get('RANK', '?')} of {launched} has no process group yet, so it would train a "
            "model of its own. Call torch.distributed.init_process_group first; Topology() is a world of one."
        )
    return 1


def _meet(timeout_s: float, arguments: str, ranks: Sequence[int] | None = None) -> Job:
    """The job of these ranks, by default all, once they are here with the same arguments."""
    ranks = range(_world_size()) if ranks is None else ranks
    if len(ranks) == 1:
        return Job(timeout_s=timeout_s)
    if dist.get_backend() == "nccl":
        launch_in_order_of_issue()
    rank = dist.get_rank()
    board = Board(dist.distributed_c10d._get_default_store(), rank)
    for other, theirs in zip(ranks, board.meet(ranks, arguments, timeout_s), strict=True):
        if theirs != arguments:
            raise RankError(
                f"topology: rank {rank} has {arguments}, rank {other} has {theirs}. Pass the same on every rank; "
                "ranks_per_node is the launcher's LOCAL_WORLD_SIZE unless given."
            )
    return Job(rank, timeout_s, board)
