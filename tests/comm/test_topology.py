"""Topologies: rank grids, shared and closed groups, ragged rows, and refused sizes."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fusedmoe.comm.collectives import (
    all_gather_object,
    all_gather_rows,
    all_reduce,
    all_to_all_rows,
    reduce_scatter_rows,
)
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from tests.cluster import Cluster
from tests.marks import slowly


def axis_ranks(topology: Topology) -> dict[str, tuple[int, ...]]:
    return {name: getattr(topology, name).ranks for name in ("ep", "esp", "mp", "dp", "edp", "world")}


def from_sizes(rank: int, world: int, ep: int, esp: int, mp: int) -> dict[str, tuple[int, ...]]:
    return axis_ranks(Topology.from_sizes(ep=ep, esp=esp, mp=mp))


def from_mesh(rank: int, world: int) -> dict[str, tuple[int, ...]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "gpu"))
    return axis_ranks(Topology.from_mesh(mesh, ep="node", esp="gpu", mp="gpu"))


def warn_of_backends(rank: int, world: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        for backend in ("nccl", "gloo"):
            patch.setattr("fusedmoe.comm.topology.device_backend", lambda *_, backend=backend: backend)
            Topology.from_sizes().close()
    return [str(warning.message) for warning in caught if warning.filename == __file__]


def test_groups_of_both_backends_on_gpus_warn(cluster: Cluster) -> None:
    for messages in cluster.run(2, warn_of_backends):
        assert len(messages) == 1 and 'call init_process_group("nccl")' in messages[0]


def test_world_of_one_needs_no_process_group() -> None:
    topology = Topology()
    assert topology.size == 1 and topology.rank == 0 and topology.expert_mesh is None
    assert all(group.handle is None and group.size == 1 for group in (topology.ep, topology.esp, topology.world))
    assert Topology.from_sizes().size == 1


def test_indivisible_sizes_raise_without_process_group() -> None:
    with pytest.raises(ConfigError, match="ep·esp = 2 does not divide the world of 1"):
        Topology.from_sizes(ep=2)
    with pytest.raises(ConfigError, match="mp = 3"):
        Topology.from_sizes(mp=3)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"ep": -1, "esp": -1}, "ep·esp = 1 does not divide"),
        ({"mp": -1}, "mp = -1 does not divide"),
        ({"ranks_per_node": -2}, "ranks_per_node = -2"),
        ({"timeout_s": 0.0}, "timeout_s = 0.0"),
        ({"timeout_s": float("nan")}, "timeout_s = nan"),
    ],
)
def test_non_positive_sizes_raise(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Topology.from_sizes(**arguments)


def test_launched_ranks_without_process_group_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    # Without an error each rank would silently be a world of one.
    with pytest.raises(ConfigError, match=r"rank 1 of 2 has no process group.*init_process_group first"):
        Topology.from_sizes()
    assert Topology().size == 1


def test_rank_grids_equal_definition_and_mesh(cluster: Cluster) -> None:
    rows = cluster.run(4, from_sizes, 2, 2, 2)
    assert rows[0]["ep"] == (0, 2) and rows[3]["ep"] == (1, 3)
    assert rows[0]["esp"] == (0, 1) and rows[2]["esp"] == (2, 3)
    assert rows[1]["mp"] == (0, 1) and rows[1]["dp"] == (1, 3) and rows[1]["edp"] == (1,)
    assert cluster.run(4, from_mesh) == rows
    rows = cluster.run(4, from_sizes, 2, 1, 4)
    assert rows[0]["ep"] == (0, 1) and rows[0]["edp"] == (0, 2) and rows[0]["mp"] == (0, 1, 2, 3)


def exchange_ragged_rows(rank: int, world: int, dtype: torch.dtype) -> None:
    group = Topology.from_sizes(ep=world).ep
    # Rank s sends (s + 2d) mod 4 rows to rank d, each row marked with its source, destination and number.
    counts = [[(s + 2 * d) % 4 if s != 1 else 0 for d in range(world)] for s in range(world)]

    def block(s: int, d: int) -> torch.Tensor:
        return torch.tensor([[s, d, i] for i in range(counts[s][d])], dtype=torch.float64).view(-1, 3)

    rows = torch.cat([block(rank, d) for d in range(world)]).to(dtype)
    got = all_to_all_rows(group, rows, counts[rank], [counts[s][rank] for s in range(world)])
    assert got.dtype == dtype and torch.equal(got.double(), torch.cat([block(s, rank) for s in range(world)]))

    sizes = [3, 0, 2, 5][:world]
    own = torch.full((sizes[rank], 2), rank + 1.0).to(dtype)
    every = torch.cat([torch.full((size, 2), r + 1.0) for r, size in enumerate(sizes)])
    assert torch.equal(all_gather_rows(group, own, sizes).float(), every)
    if dtype.is_floating_point and dtype.itemsize > 1:
        part = reduce_scatter_rows(group, (every * (rank + 1)).to(dtype), sizes)
        expected = torch.full((sizes[rank], 2), (rank + 1.0) * world * (world + 1) / 2)
        assert part.dtype == dtype and torch.equal(part.float(), expected)
    assert all_gather_object(group, {"rank": rank, "text": "x" * rank}) == [
        {"rank": r, "text": "x" * r} for r in range(world)
    ]
    assert all_reduce(group, torch.tensor([rank + 1.0])).item() == world * (world + 1) / 2
    assert all_reduce(group, torch.tensor([rank]), "max").item() == world - 1
    # More than an envelope holds: strided on rank 0, column-major on rank 1, row-major elsewhere.
    values = torch.arange(800.0).view(20, 40)
    stores = (torch.zeros(20, 80)[:, ::2], torch.zeros(40, 20).t(), torch.zeros(20, 40))
    summed = stores[min(rank, 2)].copy_(values)
    assert all_reduce(group, summed) is summed and torch.equal(summed, world * values)


@pytest.mark.parametrize(
    ("world", "dtype"),
    [
        (4, torch.float8_e4m3fn),
        (2, torch.float64),
        *slowly(*((2, dtype) for dtype in (torch.bfloat16, torch.uint8, torch.float8_e4m3fn))),
        *slowly(*((4, dtype) for dtype in (torch.float64, torch.bfloat16, torch.uint8))),
    ],
    ids=str,
)
def test_collectives_exchange_ragged_and_empty_rows(cluster: Cluster, world: int, dtype: torch.dtype) -> None:
    cluster.run(world, exchange_ragged_rows, dtype)


def call_with_wrong_row_count(rank: int, world: int, name: str) -> str:
    with pytest.raises(ConfigError, match=r"as \[EP, ESP\]"):
        Topology.from_group(dist.group.WORLD, torch.arange(world))
    group = Topology.from_sizes(ep=world, timeout_s=20).ep
    rows = torch.ones(3 + (rank == 0), 2)  # rank 0 has one more row than it announces
    try:
        if name == "all-to-all":
            all_to_all_rows(group, rows, [1, 2], [1 + rank, 1 + rank])
        elif name == "all-gather":
            all_gather_rows(group, rows, [3, 3])
        else:
            reduce_scatter_rows(group, rows, [1, 2])
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["all-to-all", *slowly("all-gather", "reduce-scatter")])
def test_wrong_row_count_error_names_operation(cluster: Cluster, name: str) -> None:
    for error in cluster.run(2, call_with_wrong_row_count, name):
        assert f"{name} over the ep group [0, 1]" in error and "4 rows" in error, error


def test_unknown_reduction_raises() -> None:
    with pytest.raises(ConfigError, match="'mean' is not one of sum, max, min"):
        all_reduce(Topology().world, torch.ones(2), "mean")


def create_groups_in_different_order(rank: int, world: int) -> list[float]:
    """Ranks 0 and 1 have created more groups than the others, by PyTorch and by topologies."""
    dist.new_group([0, 1])
    if rank < 2:
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        Topology.from_group(pair, timeout_s=15)
    topology = Topology.from_sizes(ep=2, esp=2, timeout_s=15)
    groups = [
        topology.duplicate_group(topology.ep, "one"),
        topology.duplicate_group(topology.ep, "two"),
        topology.subgroup("all", (0, 1, 2, 3)),
    ]
    return [all_reduce(group, torch.tensor(10.0**rank)).item() for group in groups]


def test_groups_work_after_unequal_group_creation(cluster: Cluster) -> None:
    found = cluster.run(4, create_groups_in_different_order, timeout_s=60)
    assert [of[0] for of in found] == [101.0, 1010.0] * 2
    assert all(of[1] == of[0] and of[2] == 1111.0 for of in found)


def gather_in_group_order(rank: int, world: int) -> tuple[tuple[int, ...], list[float]]:
    """Experts on ranks in an order other than rank order."""
    experts = torch.tensor([[2], [0], [1]])
    ep = Topology.from_group(dist.group.WORLD, experts, timeout_s=15).ep
    return ep.ranks, all_gather_rows(ep, torch.tensor([[float(rank)]]), [1] * world)[:, 0].tolist()


def test_group_preserves_given_rank_order(cluster: Cluster) -> None:
    assert cluster.run(3, gather_in_group_order) == [((2, 0, 1), [2.0, 0.0, 1.0])] * 3


def list_split_groups(rank: int, world: int) -> list[str]:
    """Return the groups from which subgroups are split, with a default group bound to a device."""
    default, asked = dist.group.WORLD, []
    default.bound_device_id = torch.device("cpu", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_split_source", lambda group: asked.append(str(group)))
        assert Topology.from_group(default, timeout_s=15).ep.handle != default
    assert default.bound_device_id == torch.device("cpu", 0)
    default.bound_device_id = None
    return asked


def test_subgroup_creation_never_splits_default_group(cluster: Cluster) -> None:
    """An NCCL split would wait for all ranks."""
    assert cluster.run(2, list_split_groups) == [[], []]


def test_nccl_launch_order_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for backend, wanted in (("gloo", None), ("nccl", "1")):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        monkeypatch.setattr(dist, "get_rank", lambda: 1 / 0)  # stops here
        with pytest.raises(ZeroDivisionError):
            Topology.from_sizes()
        assert os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == wanted
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    with pytest.raises(ZeroDivisionError):
        Topology.from_sizes()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0"


def send_and_resize(rank: int, world: int) -> None:
    topology = Topology.from_sizes()
    for call in (
        lambda rows: all_gather_rows(topology.world, rows, [3] * world),
        lambda rows: all_reduce(topology.world, rows),
    ):
        rows = torch.full((3, 2), float(rank))
        call(rows)
        rows.untyped_storage().resize_(0)


def test_collectives_leave_storage_resizable(cluster: Cluster) -> None:
    """FSDP2 frees a parameter gathered this way."""
    cluster.run(2, send_and_resize)
