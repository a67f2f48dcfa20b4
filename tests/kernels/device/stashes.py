"""What ranks do in tests of stashes: functions for `Cluster.run`, in Triton's interpreter."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe.autograd.order import order
from fusedmoe.comm.one_sided.heaps import open_heap
from fusedmoe.comm.one_sided.receive_buffers import BufferSizes, ReceiveBuffers
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.chunk_experts import GroupedExperts
from fusedmoe.engine.one_sided_dispatcher import _shared
from fusedmoe.engine.one_sided_experts import fused_experts
from fusedmoe.engine.stash import Stash
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.kernels.experts import Weights
from tests.kernels.device.capture import Recording
from tests.kernels.device.fused_layers import WIDTH as MODEL_DIM
from tests.kernels.device.fused_layers import layer_of, train
from tests.kernels.device.on_buffers import CPU, EXPERTS, SLOTS, WIDTH, Case
from tests.memory import PeakMemory

PAGE = 4


class Passes:
    """Forwards of some layers and micro-batches, all alive at once, then their backwards in another order."""

    def __init__(self, rank: int, world: int, tokens: int, count: int, frozen: bool = False) -> None:
        cases = [Case(rank, world, tokens, place, False) for place in range(count)]
        self.tensors = [[case.expert_SK.clone(), case.dy_SM.clone()] for case in cases]
        self.leaves = [
            [one.clone().requires_grad_() for one in (case.x_SM, case.weight_SK, *case.own)] for case in cases
        ]
        if frozen:
            for leaves in self.leaves:
                leaves[2].requires_grad_(False)

    def load(self, rank: int, world: int, tokens: int, seed: int) -> None:
        """Other tokens, loads and parameters in the same memory."""
        with torch.no_grad():
            for place, (tensors, leaves) in enumerate(zip(self.tensors, self.leaves, strict=True)):
                case = Case(rank, world, tokens, 31 * seed + place, False)
                given = [case.expert_SK, case.dy_SM, case.x_SM, case.weight_SK, *case.own]
                for at, value in zip([*tensors, *leaves], given, strict=True):
                    at.copy_(value)

    def run(
        self, buffers: ReceiveBuffers, degrees: tuple[int, int], rows: int, stash: Stash | None, back: Sequence[int]
    ) -> list[Tensor]:
        """Results and gradients. `back`: the order of the backwards."""
        outputs = []
        for (expert_SK, _), (x, weight, *own) in zip(self.tensors, self.leaves, strict=True):
            experts = GroupedExperts(Weights(*own), "swiglu")
            layout = order(expert_SK, EXPERTS)
            outputs.append(fused_experts(x, weight, layout, buffers, experts, degrees, rows=rows, stash=stash))
        found = [y.detach() for y in outputs]
        for place in back:
            wanted = [leaf for leaf in self.leaves[place] if leaf.requires_grad]
            found += torch.autograd.grad(outputs[place], wanted, self.tensors[place][1])
        return found


def most_rows(world: int, tokens: Sequence[int], seeds: Sequence[int]) -> int:
    """The rows that come to the fullest rank of all cases with these numbers."""
    return max(max(_rows(world, tokens, seed)) for seed in seeds)


def _rows(world: int, tokens: Sequence[int], seed: int) -> list[int]:
    cases = [Case(rank, world, count, seed, False) for rank, count in enumerate(tokens)]
    counts = [order(case.expert_SK, EXPERTS).counts_E for case in cases]
    return sum(counts).view(world, -1).sum(1).tolist()  # type: ignore[union-attr]


def pages_needed(world: int, tokens: Sequence[int], seeds: Sequence[int]) -> list[int]:
    """Pages that each rank needs for passes of these cases, alive at once."""
    rows = [_rows(world, tokens, seed) for seed in seeds]
    return [sum(-(-of[rank] // PAGE) for of in rows) for rank in range(world)]


@contextmanager
def _buffers(topology: Topology, tokens: Sequence[int]) -> Iterator[ReceiveBuffers]:
    with open_heap(topology.ep, CPU) as heap:
        yield ReceiveBuffers(heap, BufferSizes(max(tokens), SLOTS, EXPERTS, WIDTH, torch.float32))


def replay_stash(
    rank: int,
    world: int,
    tokens: Sequence[int],
    degrees: tuple[int, int],
    back: Sequence[int],
    steps: int,
    short: int = 0,
    frozen: bool = False,
) -> list[str]:
    """Replays passes that share a stash, with other loads in each step; returns what differs from passes without one.

    Args:
        back: the order of the backwards; as many passes are alive at once.
        short: pages that the stash lacks of what the fullest rank and step need.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    seeds = [[31 * step + place for place in range(len(back))] for step in range(steps + 1)]
    rows = most_rows(world, tokens, [seed for of in seeds for seed in of])
    pages = max(max(pages_needed(world, tokens, of)) for of in seeds) - short
    passes, wrong = Passes(rank, world, tokens[rank], len(back), frozen), []
    with _buffers(topology, tokens) as buffers:
        stash = Stash(pages * PAGE, PAGE)
        Passes(rank, world, tokens[rank], 1, frozen).run(buffers, (1, 1), rows, stash, (0,))  # makes the memory
        passes.load(rank, world, tokens[rank], 0)
        with Recording() as graph:
            found = passes.run(buffers, degrees, rows, stash, back)
        for step in range(steps + 1):
            if step:  # the first has run while it was noted
                passes.load(rank, world, tokens[rank], step)
                with buffers.watch.over():
                    graph.replay()
            right = passes.run(buffers, degrees, rows, None, back)
            for place, (one, other) in enumerate(zip(found, right, strict=True)):
                if not torch.equal(one, other):
                    wrong.append(f"step {step}, result {place}: {float((one - other).abs().max())}")
        if frozen and stash._memory is not None and len(stash._memory.x):
            wrong.append("memory for rows that no backward reads")
        if free_pages(stash) != pages:
            wrong.append(f"{free_pages(stash)} of {pages} pages are free")
    return wrong


def free_pages(stash: Stash) -> int:
    assert stash._memory is not None
    return int(stash._memory.pages.state[0])


def give_and_take(rank: int, world: int) -> list[int]:
    """Free pages of 8: after a forward without gradients, a forward, another one when the graph has been dropped, the
    backward of that, a checkpoint's forward and its backward; and whether calls are refused: of a layer of another
    shape, and without a bound."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    case = Case(rank, world, 6, 0, False)
    stash, found = Stash(8 * 16, 16), []
    with _buffers(topology, [6, 6]) as buffers:

        def forward(case: Case) -> Tensor:
            parameters = [p.clone().requires_grad_() for p in case.own]
            experts = GroupedExperts(Weights(*parameters), "swiglu")
            return fused_experts(case.x_SM, case.weight_SK, case.layout, buffers, experts, rows=24, stash=stash)

        with torch.no_grad():
            forward(case)
        found.append(free_pages(stash))
        y = forward(case)
        found.append(free_pages(stash))
        del y
        gc.collect()
        y = forward(case)
        found.append(free_pages(stash))
        y.sum().backward()
        found.append(free_pages(stash))
        x_SM = case.x_SM = case.x_SM.requires_grad_()
        y = checkpoint(lambda _: forward(case), x_SM, use_reentrant=True)
        found.append(free_pages(stash))
        y.sum().backward()
        found.append(free_pages(stash))
        case.own = [case.own[0][:, :, :7], case.own[1][..., :7]]
        for bound, message in ((24, "do not fit a stash"), (None, "give rows, too")):
            try:
                experts = GroupedExperts(Weights(*case.own), "swiglu")
                fused_experts(case.x_SM, None, case.layout, buffers, experts, rows=bound, stash=stash)
            except ConfigError as error:
                found.append(message in str(error))
    return found


def lose_pages(rank: int, world: int) -> str:
    """What ranks are told where rank 1's stash gives a page to a second forward before the first one's backward."""
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    passes = Passes(rank, world, 6, 2)
    stash = Stash(20 * PAGE, PAGE)
    try:
        with _buffers(topology, [6, 6]) as buffers:
            outputs = []
            for (expert_SK, _), (x, weight, *own) in zip(passes.tensors, passes.leaves, strict=True):
                layout, experts = order(expert_SK, EXPERTS), GroupedExperts(Weights(*own), "swiglu")
                more = {"rows": 24, "stash": stash, "name": f"layer {len(outputs)}"}
                outputs.append(fused_experts(x, weight, layout, buffers, experts, **more))  # type: ignore[arg-type]
                if rank == 1 and len(outputs) == 1:
                    assert stash._memory is not None
                    stash._memory.pages.state[0] += 1
            for y in outputs:
                y.sum().backward()
    except RankError as error:
        return str(error)
    return "nothing"


def too_few_pages(rank: int, world: int, how: str) -> str:
    """What ranks are told of a second forward for which rank 1's stash has no page: by the next one ("eager"), where
    the layer is asked, or nothing where the first forward's backward comes between ("in turn")."""
    topology = Topology.from_sizes(ep=world, timeout_s=20)
    schedule = fusedmoe.Schedule("fused", degrees=(2, 1), row_factor=2.0, stash_factor=2.0)
    layer = layer_of(topology, schedule, fusedmoe.experts.SwiGLU(24))
    layer.gate.weight_EM.data[2:] = 1.0  # rank 1 has all rows
    x = torch.randn(12, MODEL_DIM, generator=torch.Generator().manual_seed(rank)).abs()
    outputs = []
    try:
        for _ in range(2):
            outputs.append(layer(x))
            if how == "in turn":
                outputs.pop().sum().backward()
        if how == "eager":
            layer(x)
        layer.check()
    except RankError as error:
        return str(error)
    return "nothing"


def layers_alike(rank: int, world: int, sizes: dict[str, int]) -> list[int]:
    """Numbers of results and gradients of some steps in which a layer with a stash differs from one without."""
    topology = Topology.from_sizes(**sizes, timeout_s=30)
    schedule = fusedmoe.Schedule("fused", degrees=(2, 2), row_factor=2.0)
    found = []
    for one in (schedule, replace(schedule, stash_factor=12.0)):
        layer = layer_of(topology, one, fusedmoe.experts.SwiGLU(24))
        found.append(train(layer, rank, 2))
        layer.check()
    assert sum(isinstance(one, Stash) for one in _shared[topology].values()) == 1
    return [place for place, (one, other) in enumerate(zip(*found, strict=True)) if not torch.equal(one, other)]


def kept_bytes(rank: int, world: int, stash_factor: float | None) -> tuple[int, int]:
    """Bytes of a stash, and those that live after a layer's forward more than before it, where there is room for all
    rows that can come."""
    topology = Topology.from_sizes(ep=world, timeout_s=60)
    schedule = fusedmoe.Schedule("fused", degrees=(1, 1), row_factor=float(world), stash_factor=stash_factor)
    torch.manual_seed(5)
    gate, experts = fusedmoe.gates.TopK(2 * world, k=2), fusedmoe.experts.SwiGLU(128)
    layer = fusedmoe.MoELayer(256, gate, experts, topology=topology, schedule=schedule)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    layer(x)  # makes buffers, and the stash
    shared = 0
    for stash in _shared[topology].values():
        if isinstance(stash, Stash) and stash._memory is not None:
            shared = sum(one.nbytes for one in (stash._memory.x, stash._memory.h, *stash._memory.pages[1:]))
    gc.collect()
    with PeakMemory() as memory:
        before, y = memory.now, layer(x)
        gc.collect()
        kept = memory.now - before
    layer.check()
    assert y.requires_grad
    return shared, kept
