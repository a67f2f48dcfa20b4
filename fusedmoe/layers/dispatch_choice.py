"""The choice of an all-to-all algorithm for `dispatch="auto"`: each is tried with as many tokens as the layer has."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusedmoe.autograd.order import order
from fusedmoe.comm.all_to_all import ALGORITHMS, AllToAll, make_all_to_all
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.collectives_dispatcher import Collectives
from fusedmoe.engine.dispatcher import Routed
from fusedmoe.layers.gates.base import Gate
from fusedmoe.layers.measure import rounded
from fusedmoe.layers.schedule import undisturbed

# How often each is tried, after a first time that is not counted.
_ROUNDS = 5
# By topology, as long as it is in use, and by all that the choice depends on: layers of a model share it.
_chosen: WeakKeyDictionary[Topology, dict[tuple[object, ...], AllToAll]] = WeakKeyDictionary()


def has_choice(topology: Topology) -> bool:
    """Tells whether algorithms differ: ranks of the ep group on several nodes, several on each, and all alike."""
    nodes = [rank // topology.ranks_per_node for rank in topology.ep.ranks]
    counts = {nodes.count(node) for node in nodes}
    return len(counts) == 1 and 1 < counts.pop() < len(nodes)


@undisturbed()
def choose_all_to_all(topology: Topology, gate: Gate, x_SM: Tensor) -> AllToAll:
    """Returns the algorithm that takes tokens like these to uniformly chosen experts and back in the least time.
    Collective over all ranks, where it was not chosen before for such tokens; the same on all of them.

    Args:
        x_SM: a batch of this rank; all ranks measure by the largest.
    """
    tokens = rounded(max(all_gather_object(topology.world, len(x_SM), "choosing a dispatch algorithm")))
    key = tokens, x_SM.shape[1], x_SM.dtype, x_SM.device, gate.experts, gate.k
    chosen = _chosen.setdefault(topology, {})
    if key not in chosen:
        candidates = [make_all_to_all(name, topology) for name in ALGORITHMS]
        chance = torch.Generator(x_SM.device).manual_seed(topology.rank)
        scores_SE = torch.rand(tokens, gate.experts, generator=chance, device=x_SM.device)
        layout = order(scores_SE.topk(min(gate.k, gate.experts)).indices, gate.experts)
        routed = Routed(x_SM.new_zeros(tokens, x_SM.shape[1]), layout)
        tried = [_seconds(topology, Collectives(topology, candidate), routed) for candidate in candidates]
        # A round is over once its last rank is through.
        every = all_gather_object(topology.world, tried, "choosing a dispatch algorithm")
        times = [statistics.median(map(max, zip(*of, strict=True))) for of in zip(*every, strict=True)]
        chosen[key] = candidates[times.index(min(times))]
    return chosen[key]


@torch.no_grad()
def _seconds(topology: Topology, through: Collectives, routed: Routed) -> list[float]:
    """Times dispatch and combine, round by round."""
    wait: Callable[[], None] = torch.cuda.synchronize if routed.x_SM.is_cuda else lambda: None
    seconds = []
    for _ in range(1 + _ROUNDS):
        wait()
        start = time.perf_counter()
        through.combine(*through.dispatch(routed))
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
