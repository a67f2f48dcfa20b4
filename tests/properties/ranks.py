"""Properties over ranks: functions of (rank, world) that each rank runs, from seeds that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import fusedmoe
from fusedmoe.autograd import moves, parallel
from fusedmoe.comm.all_to_all import make_all_to_all
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.exchange import exchange_metadata
from fusedmoe.comm.group import Group
from fusedmoe.comm.metadata import RowForm
from fusedmoe.comm.topology import Topology
from fusedmoe.gates.base import Routing
from fusedmoe.layers.moe import MoELayer
from tests.layers.gate_cases import make as make_gate
from tests.layers.test_refusals import Spy
from tests.oracle import ShardedExpert, assert_equal_to_dense, randomise
from tests.poison import poisoned
from tests.properties.draw import Draw, close
from tests.properties.invalid import Users, deeper, elsewhere, longer, whole, wider
from tests.properties.valid import GATES


def hold(rank: int, world: int, ep: int, esp: int, seeds: Sequence[int]) -> None:
    """Layers and operations over one topology, each from its seed."""
    topology = Topology.from_sizes(ep, esp, ranks_per_node=2)
    properties = (layer, layer, layer, rows_over_ranks, exchange)
    with poisoned():
        for seed in seeds:
            draw = Draw(seed)
            check = draw.one_of(properties)
            try:
                check(draw, rank, world, topology)
            except Exception as error:
                raise AssertionError(f"{check.__name__}, ep {ep}, esp {esp}, seed {seed}: {error!r}") from error


def layer(draw: Draw, rank: int, world: int, topology: Topology) -> None:
    """Compare with the dense computation of all ranks' tokens: outputs, losses, every gradient."""
    M, E = draw.size(2, 5), topology.ep.size * draw.size(1, 3)
    name, k = draw.one_of(GATES), draw.size(1, min(3, E))
    k = 1 if name in ("switch", "softmoe") else k
    factor = draw.one_of((None, 0.5, 1.0))
    options: dict[str, Any] = {"capacity_factor": 1.0 if name == "expert_choice" else factor}
    if name == "softmoe":
        options = {}
    network = draw.one_of(("swiglu", "gelu", "custom"))
    hidden = topology.esp.size * draw.size(1, 3)
    order = draw.one_of(("none", "Sparse", "Dropless", "Einsum"))
    schedule: Any = "off"
    if draw.maybe():
        degrees = (draw.size(1, 4), 1)
        degrees = (degrees[0], degrees[0] if network == "custom" else draw.size(1, 4))
        schedule = fusedmoe.Schedule(draw.one_of(("fsmoe", "tutel", "lina")), degrees=degrees)
    dispatch, seed = draw.one_of(("direct", "1dh", "2dh")), draw.random.randrange(2**31)

    def build(over: Topology | None) -> MoELayer:
        torch.manual_seed(seed)
        experts = {
            "swiglu": lambda: fusedmoe.experts.SwiGLU(hidden),
            "gelu": lambda: fusedmoe.experts.FeedForward(hidden, "gelu"),
            "custom": lambda: fusedmoe.experts.Custom(ShardedExpert),
        }[network]()
        return MoELayer(
            M,
            make_gate(name, E, k, **options),
            experts,
            order=None if order == "none" else getattr(fusedmoe.orders, order)(),
            topology=over,
            dispatch=dispatch if over is not None else "direct",
            mp_input="split",
            schedule=schedule if over is not None else "off",
            dtype=torch.float64,
        )

    made, dense = build(topology), build(None)
    randomise(made.gate)
    dense.gate.load_state_dict(made.gate.state_dict())
    x_W = [draw.floats(draw.size(), M) for _ in range(world)]
    dy_W = [torch.randn(x.shape, dtype=torch.float64) for x in x_W]
    assert_equal_to_dense(made, dense, x_W, dy_W, (name, order, network, dispatch, str(schedule)))


def _of_two(topology: Topology) -> Group:
    return topology.ep if topology.ep.size > 1 else topology.esp


def rows_over_ranks(draw: Draw, rank: int, world: int, topology: Topology) -> None:
    """The four collectives on rows of a group, against sums and slices of all ranks' rows."""
    group = _of_two(topology)
    counts = [draw.size(0, 4) for _ in range(group.size)]
    at, index = [sum(counts[:i]) for i in range(group.size)], group.index
    name = draw.one_of(("gather_rows", "reduce_scatter_rows", "split_rows", "join_rows"))
    split_in, split_out = name in ("gather_rows", "join_rows"), name in ("reduce_scatter_rows", "split_rows")
    replicated_in, replicated_out = name == "split_rows", name == "join_rows"

    def drawn(split: bool, replicated: bool) -> list[Tensor]:
        found = [draw.floats(counts[i] if split else sum(counts), 3, grad=False) for i in range(group.size)]
        return found[:1] * group.size if replicated else found

    x, dy = drawn(split_in, replicated_in), drawn(split_out, replicated_out)
    every = torch.cat(x) if split_in else sum(x, torch.zeros_like(x[0]))
    all_dy = torch.cat(dy) if split_out else sum(dy, torch.zeros_like(dy[0]))
    own = slice(at[index], at[index] + counts[index])
    y_own = {"gather_rows": every, "join_rows": every, "reduce_scatter_rows": every[own], "split_rows": x[0][own]}
    dx_own = {"gather_rows": all_dy[own], "join_rows": dy[0][own], "reduce_scatter_rows": all_dy, "split_rows": all_dy}
    mine = x[index].clone().requires_grad_()
    y = getattr(parallel, name)(mine, group, counts)
    (y * dy[index]).sum().backward()
    close(name, y, y_own[name])
    close(f"gradient of {name}", mine.grad, dx_own[name])


def exchange(draw: Draw, rank: int, world: int, topology: Topology) -> None:
    """Rows arrive by (sharding peer, source rank, local expert) and return; gradients move the opposite way."""
    ep, esp = topology.ep, topology.esp
    E = ep.size * draw.size(1, 3)
    counts_WE = torch.randint(0, 4, (world, E))
    algorithm = make_all_to_all(draw.one_of(("direct", "1dh", "2dh")), topology)
    met = exchange_metadata(algorithm, esp, counts_WE[rank], RowForm(torch.float64, 3, 1, None))
    # A row's value encodes its rank and its expert.
    expert_E1 = torch.arange(E, dtype=torch.float64)[:, None].expand(E, 3)
    x_W = [100.0 * r + expert_E1.repeat_interleave(counts_WE[r], 0) for r in range(world)]
    mine = x_W[rank].clone().requires_grad_()
    there = moves.all_gather(moves.dispatch(mine, met), met)
    local = range(ep.index * E // ep.size, (ep.index + 1) * E // ep.size)
    sources = [r for q in range(esp.size) for r in _sources(topology, q)]
    expected = [row for r in sources for row in x_W[r] if int(row[0]) % 100 in local]
    close("rows received", there, torch.stack(expected) if expected else there.new_zeros(0, 3))
    back = moves.combine(moves.reduce_scatter(there * 2.0, met), met)
    close("rows that came back", back, 2.0 * esp.size * x_W[rank])
    back.sum().backward()
    close("gradient", mine.grad, torch.full_like(mine, 2.0 * esp.size))


def _sources(topology: Topology, peer: int) -> Sequence[int]:
    """Ranks whose rows a sharding peer of this rank receives by dispatch, in order."""
    assert topology.expert_grid is not None
    edp = topology.edp.index
    return [int(r) for r in topology.expert_grid[edp, :, peer]]


# Input that one rank corrupts. Each case ends its job, so each needs its own.


def spoil(rank: int, world: int, ep: int, esp: int, seed: int) -> tuple[str, str, int, int]:
    """Return the type and text of this rank's error, the rank that corrupted its input, and the number of exchanges of
    rows that this rank had begun.
    """
    draw, topology = Draw(seed), Topology.from_sizes(ep, esp, ranks_per_node=2, timeout_s=20)
    # A rank may be ready while another still makes its process groups, which would end with the first error.
    all_reduce(topology.world, torch.zeros(1))
    culprit, moved = draw.random.randrange(world), []
    act = draw.one_of(SPOILS)(draw, topology, moved)
    try:
        act(rank == culprit)
    except Exception as error:
        return type(error).__name__, str(error), culprit, len(moved)
    return "", "accepted", culprit, len(moved)


def _layer(topology: Topology, gate: Any, moved: list[str]) -> MoELayer:
    made = MoELayer(3, gate, fusedmoe.experts.FeedForward(2), topology=topology, mp_input="split", dtype=torch.float64)
    made.dispatcher.all_to_all = Spy(made.dispatcher.all_to_all, moved)
    return made


def input_of_one(draw: Draw, topology: Topology, moved: list[str]) -> Callable[[bool], Any]:
    made = _layer(topology, fusedmoe.gates.TopK(2 * topology.ep.size, 2), moved)
    x, way = draw.floats(draw.size(1), 3), draw.one_of((wider, whole, elsewhere))
    return lambda spoilt: made(way(draw, x) if spoilt else x)


def gate_of_one(draw: Draw, topology: Topology, moved: list[str]) -> Callable[[bool], Any]:
    E, S = 2 * topology.ep.size, draw.size(1)
    gate = Users(E, 1)
    made = _layer(topology, gate, moved)
    expert_S1, weight_S1 = torch.randint(0, E, (S, 1)), torch.rand(S, 1).double()
    bad_S1 = expert_S1.clone()
    bad_S1[draw.random.randrange(S)] = draw.one_of((E, -2, 2**40))
    bad = draw.one_of(((bad_S1, weight_S1), (expert_S1, longer(draw, weight_S1)), (deeper(draw, expert_S1), weight_S1)))

    def call(spoilt: bool) -> Any:
        gate.gives = Routing(*(bad if spoilt else (expert_S1, weight_S1)), None, None, torch.zeros(()), None)
        return made(torch.randn(S, 3, dtype=torch.float64))

    return call


def counts_of_one(draw: Draw, topology: Topology, moved: list[str]) -> Callable[[bool], Any]:
    algorithm = Spy(make_all_to_all("direct", topology), moved)
    counts_E = torch.randint(0, 4, (2 * topology.ep.size,))
    bad = draw.one_of((counts_E - 5, counts_E[None], counts_E.double(), counts_E[:0]))
    form = RowForm(torch.float64, 3, 1, None)
    return lambda spoilt: exchange_metadata(algorithm, topology.esp, bad if spoilt else counts_E, form)


def rows_of_one(draw: Draw, topology: Topology, moved: list[str]) -> Callable[[bool], Any]:
    group = topology.world
    counts = [draw.size(1, 4) for _ in range(group.size)]
    x = draw.floats(counts[group.index], 3)

    def call(spoilt: bool) -> Any:
        if not spoilt:
            return parallel.gather_rows(x, group, counts)
        return parallel.gather_rows(longer(draw, x), group, counts)

    return call


SPOILS = (input_of_one, gate_of_one, counts_of_one, rows_of_one)
