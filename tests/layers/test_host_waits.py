"""On CUDA the host waits for the device once per forward over ranks, and once per pass with new chunks.

The first wait covers sizes, refusals and non-finite logits together, the second the pair count of each chunk.

CPU ranks stand in for GPUs: their tensors report a CUDA device, and every method by which the host can read a value of
such a tensor is counted. Plain torch stands in for kernels; its own reads do not count.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusedmoe
from fusedmoe.autograd import checks
from fusedmoe.blocks.pipeline import pipeline
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.kernels import backend
from fusedmoe.layers import input_checks
from fusedmoe.layers.schedule import Schedule
from tests.cluster import Cluster
from tests.marks import slowly
from tests.training.placed import Between

M, E, K = 6, 8, 2
CHUNKS = Schedule("fsmoe", degrees=(2, 3))
_READS = ("item", "tolist", "numpy", "__int__", "__bool__", "__float__", "__index__")
# Operators that return a number to the host, or whose result size the host must know.
_OF_LAYOUTS = ("counts", "exact", "cut", "rows", "__getattr__")
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim", "masked_select")


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.__name__.split(".")[0]
        masks = name == "index" and any(one is not None and one.dtype == torch.bool for one in args[1])
        if name in _WAITS or masks or (name == "repeat_interleave" and not (kwargs or {}).get("output_size")):
            self._note(name)
        return operator(*args, **(kwargs or {}))


@contextmanager
def as_on_cuda(topology: Topology) -> Iterator[list[str]]:
    """Make tensors and groups report a GPU; return the source locations at which the host reads one, in order."""
    waits: list[str] = []
    # One flag per thread: with a schedule, reads on two threads overlap.
    reading = threading.local()

    def note(how: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/fusedmoe/" in frame.filename]
        while frames and frames[-1].filename.endswith("kernels/layout.py") and frames[-1].name in _OF_LAYOUTS:
            frames.pop()  # count the layout's caller
        kernel = frames and "/kernels/" in frames[-1].filename and not frames[-1].filename.endswith("deduplicate.py")
        if not (getattr(reading, "inside", False) or kernel):
            waits.append(f"{how} in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno}" if frames else how)

    def counted(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def read_once(self: Tensor, *args: Any) -> Any:
            if self.is_cuda:
                note(name)
            outer, reading.inside = getattr(reading, "inside", False), True
            try:
                found = read(self, *args)
            finally:
                reading.inside = outer
            if name == "cpu":
                found = found.clone()  # on the host from here on; later reads are free
                found.on_host = True
            return found

        return read_once

    with pytest.MonkeyPatch.context() as patch, _Operators(note):
        for name in ("cpu", *_READS):
            patch.setattr(Tensor, name, counted(name))
        patch.setattr(Tensor, "is_cuda", property(lambda self: not hasattr(self, "on_host")), raising=False)
        for name, served in (("uses_triton", False), ("has_kernels", False)):
            for module in list(sys.modules.values()):
                if getattr(module, name, None) is getattr(backend, name) and module is not backend:
                    patch.setattr(module, name, lambda tensor, served=served: served)
        for module in (input_checks, checks):
            patch.setattr(module, "uses_triton", lambda tensor: True)
        for group in (topology.world, topology.ep, topology.esp, topology.dp):
            patch.setattr(group, "uses_nccl", group.handle is not None)
        yield waits


def make(topology: Topology, schedule: Any = None) -> fusedmoe.MoELayer:
    torch.manual_seed(5)
    gate, experts = fusedmoe.gates.TopK(E, k=K), fusedmoe.experts.FeedForward(8)
    return fusedmoe.MoELayer(M, gate, experts, topology=topology, schedule=schedule, dtype=torch.float64)


def wait_locations(rank: int, world: int, esp: int, schedule: Any) -> list[list[str]]:
    """Return the wait locations of a forward, a backward, and a forward without non-finite report in its exchange."""
    topology = Topology.from_sizes(world // esp, esp)
    layer = make(topology, schedule)
    x_SM = torch.randn(5 + rank, M, dtype=torch.float64).requires_grad_()
    layer(x_SM).sum().backward()
    with as_on_cuda(topology) as waits:
        y_SM = layer(x_SM)
        forward, waits[:] = list(waits), []
        y_SM.sum().backward()
        backward, waits[:] = list(waits), []
        layer.checks._exchange_reports_logits = False
        layer(x_SM)
    return [forward, backward, list(waits)]


@pytest.mark.parametrize(
    ("world", "esp", "schedule"), [(2, 1, None), (2, 1, CHUNKS), pytest.param(4, 2, None, marks=pytest.mark.slow)]
)
def test_forward_waits_for_device_once(cluster: Cluster, world: int, esp: int, schedule: Any) -> None:
    chunks = ["kernels/deduplicate.py"] * (schedule is not None)
    for places in cluster.run(world, wait_locations, esp, schedule):
        files = [[place.split("/fusedmoe/")[1].split(":")[0] for place in of] for of in places]
        assert files[0] == ["comm/exchange.py", *chunks], places[0]
        assert files[1] == chunks, places[1]
        assert files[2] == ["layers/input_checks.py", *files[0]], places[2]  # the counter counts


@pytest.mark.parametrize("real", [[1, 1, 1, 0, 0, 0, 1, 1, 1], [0] * 9, [1] * 9, [1, 1, 1, 0, 1, 0, 0, 0, 0]])
@pytest.mark.parametrize("sequence", [None, 3, 1])
def test_mask_waits_for_device_once(real: list[int], sequence: int | None) -> None:
    """One wait for the token count, which also reports whether the mask cuts a sequence of a loss."""
    gate = fusedmoe.gates.DeepSeekV3(E, K, groups=1, groups_kept=1, sequence=sequence, aux={"balance": 1.0})
    mask_BL, x_BLM = torch.tensor(real).bool().view(3, 3), torch.randn(3, 3, M)
    wanted_S = mask_BL.flatten().nonzero().squeeze(1)
    with as_on_cuda(Topology()) as waits:
        real_S, refusal = input_checks.find_tokens(mask_BL, x_BLM, None, gate)
    assert [wait.split(" ")[0] for wait in waits] == ["nonzero"]
    if sequence == 3 and sum(real) == 4:
        assert refusal is not None and "cuts sequences of 3 tokens" in refusal and len(real_S) == 0
    else:
        assert refusal is None and torch.equal(real_S, wanted_S)


def check_non_finite_ends_all_ranks(
    rank: int, world: int, culprits: list[int], esp: int, schedule: Any, blocks: bool
) -> None:
    """Non-finite logits counted on a device end all ranks in the same batch and name the first bad rank."""
    topology = Topology.from_sizes(world // esp, esp)
    layer = make(topology, schedule)
    call: Callable[[Tensor], Tensor] = layer
    if blocks:
        call = pipeline([(Between(torch.nn.Linear(M, M, dtype=torch.float64)), layer)], (2, 2))
    generator = torch.Generator().manual_seed(rank)
    x_SM = torch.randn(6, M, dtype=torch.float64, generator=generator)
    wanted_SM = call(x_SM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_checks, "uses_triton", lambda tensor: True)
        bad_SM = x_SM.clone()
        if rank in culprits:
            bad_SM[4] = math.nan
        named = "" if rank in culprits else f"ended because rank {culprits[0]} failed in the check of .*: "
        with pytest.raises(RankError, match=f"^rank {rank}: {named}tokens with router logits that are NaN"):
            call(bad_SM)
        torch.testing.assert_close(call(x_SM), wanted_SM, rtol=0, atol=0)
    assert topology.world.board.read() is None


@pytest.mark.parametrize(
    ("world", "esp", "schedule", "blocks"),
    [
        *((2, 1, CHUNKS, False), (2, 1, None, True), (4, 2, None, False)),
        *slowly((2, 1, None, False), (2, 2, None, False)),
    ],
)
def test_non_finite_logits_end_all_ranks(cluster: Cluster, world: int, esp: int, schedule: Any, blocks: bool) -> None:
    culprits = sorted(random.sample(range(world), random.randint(1, world - 1)))
    cluster.run(world, check_non_finite_ends_all_ranks, culprits, esp, schedule, blocks)
