"""Rank functions for `Cluster.run` in tests of layers whose kernels send and receive."""

from __future__ import annotations

import gc
import tempfile
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.comm.one_sided import heaps
from fusedmoe.comm.one_sided.receive_buffers import TOKEN_TILE
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import RankError
from fusedmoe.layers import measure
from fusedmoe.layers.measure import time_fused
from fusedmoe.runtime import cache
from fusedmoe.runtime.recorder import Recorder
from fusedmoe.schedule.cost import MeasuredPart
from fusedmoe.schedule.task import FUSED, PHASES
from tests.memory import PeakMemory

WIDTH = 32


def layer_of(topology: Topology, schedule: str | fusedmoe.Schedule, experts: fusedmoe.experts.Experts) -> nn.Module:
    torch.manual_seed(5)
    gate = fusedmoe.gates.TopK(4, k=2, capacity_factor=1.5)
    return fusedmoe.MoELayer(WIDTH, gate, experts, topology=topology, schedule=schedule)


def train(layer: nn.Module, rank: int, steps: int) -> list[Tensor]:
    """Return outputs, and gradients of inputs and parameters, of several steps with batches of different lengths."""
    draw = torch.Generator().manual_seed(17 + rank)
    found = []
    for step in range(steps):
        x = torch.randn(12 - 3 * step + rank, WIDTH, generator=draw, requires_grad=True)
        y = layer(x)
        (y.square().mean() + layer.aux_loss).backward()
        found += [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]
        layer.zero_grad()
    return found


def same_as_collectives(rank: int, world: int, sizes: dict[str, int]) -> list[str]:
    """Describe differences between fused operations and collectives.

    Also checks that kernels sent, with other chunks in backward than in forward.
    """
    topology = Topology.from_sizes(**sizes, timeout_s=30)
    recorder = Recorder(rank)
    layers = {}
    for name, schedule in (("off", "off"), ("fused", fusedmoe.Schedule("fused", degrees=(2, 3)))):
        layers[name] = layer_of(topology, schedule, fusedmoe.experts.SwiGLU(24))
    layers["fused"].load_state_dict(layers["off"].state_dict())
    plain = train(layers["off"], rank, 2)
    layers["fused"].recorder = recorder
    own = train(layers["fused"], rank, 2)
    kinds = {one.kind for one in recorder.timeline().spans}
    wrong = [] if kinds & FUSED.keys() else [f"no fused operation among {sorted(kinds)}"]
    if not wrong and chunks_of(recorder) != (2, 3):
        wrong.append(f"in {chunks_of(recorder)} chunks")
    for place, (one, other) in enumerate(zip(own, plain, strict=True)):
        if not torch.allclose(one, other, 1e-4, 1e-5):
            wrong.append(f"result {place}: {(one - other).abs().max()}")
    return wrong


def chunks_of(recorder: Recorder) -> tuple[int, ...]:
    """Return the chunk counts of fused operations, forward and backward."""
    spans = [one for one in recorder.timeline().spans if one.kind in FUSED]
    return tuple(len({one.chunk for one in spans if one.phase == phase}) for phase in PHASES)


def no_room(rank: int, world: int) -> str:
    topology = Topology.from_sizes(ep=world, timeout_s=15)
    layer = layer_of(topology, fusedmoe.Schedule("fused", degrees=(1, 1)), fusedmoe.experts.SwiGLU(24))
    train(layer, rank, 1)
    try:
        layer(torch.randn(200 if rank == 0 else 3, WIDTH))
    except RankError as error:
        return str(error)
    except fusedmoe.ConfigError as error:
        return f"refused: {error}"
    return "taken"


def without_a_heap(rank: int, world: int) -> list[str]:
    """One rank cannot allocate a heap: describe differences from collectives."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(heaps.HostHeap, "unavailable_reason", staticmethod(lambda device: "no memory"))
        wrong = same_as_collectives(rank, world, {"ep": world})
    return wrong


def by_collectives_where_it_must(rank: int, world: int) -> set[str]:
    """Any kind of experts, which reject other chunks in backward than in forward, and doubles."""
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    recorder = Recorder(rank)
    schedule = fusedmoe.Schedule("fused", degrees=(1, 1))
    layer = layer_of(topology, schedule, fusedmoe.experts.Custom(lambda dim: nn.Linear(dim, dim)))
    double = layer_of(topology, schedule, fusedmoe.experts.SwiGLU(24)).double()
    layer.recorder = double.recorder = recorder
    train(layer, rank, 1)
    double(torch.randn(3, WIDTH, dtype=torch.float64))
    uneven = fusedmoe.Schedule("fused", degrees=(2, 3))
    layer = layer_of(topology, uneven, fusedmoe.experts.Custom(lambda dim: nn.Linear(dim, dim)))
    with pytest.raises(fusedmoe.ConfigError, match="need one degree for both passes, not 2 forward and 3 backward"):
        layer(torch.randn(3, WIDTH))
    return {one.kind for one in recorder.timeline().spans} & {*FUSED, "dispatch"}


def hooked(rank: int, world: int) -> list[set[str]]:
    """Return the kinds of tasks without a hook on the experts, with it, and after its removal.

    Results equal those of "off".
    """
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    schedules = "off", fusedmoe.Schedule("fused", degrees=(1, 1))
    layers = [layer_of(topology, schedule, fusedmoe.experts.SwiGLU(24)) for schedule in schedules]
    layers[1].load_state_dict(layers[0].state_dict())
    kinds = []
    for doubles in (False, True, False):
        handles = [layer.experts.register_forward_hook(lambda _, __, y: y * 2) for layer in layers if doubles]
        layers[1].recorder = recorder = Recorder(rank)
        plain, own = (train(layer, rank, 1) for layer in layers)
        for one, other in zip(own, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        kinds.append({one.kind for one in recorder.timeline().spans} & {*FUSED, "dispatch"})
        for handle in handles:
            handle.remove()
    return kinds


def hooked_on_one_rank(rank: int, world: int) -> str:
    """Only one rank has a hook: no rank waits beyond its limit, and all raise."""
    topology = Topology.from_sizes(ep=world, timeout_s=4)
    layer = layer_of(topology, fusedmoe.Schedule("fused", degrees=(1, 1)), fusedmoe.experts.SwiGLU(24))
    train(layer, rank, 1)
    if rank:
        layer.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(RankError) as error:
        train(layer, rank, 1)
    return str(error.value)


def auto(rank: int, world: int, quick: bool) -> tuple[set[str], tuple[int, ...], list[str]]:
    """Describe a layer with "auto": its plan, the chunks in which kernels send, and differences from "off".

    Instead of measured times, kernels take almost no time in 2 chunks forward and 4 backward (`quick`), or 1e6 s.
    """
    topology = Topology.from_sizes(ep=world, timeout_s=60)
    recorder, found = Recorder(rank), []
    layers = {name: layer_of(topology, name, fusedmoe.experts.SwiGLU(24)) for name in ("off", "auto")}
    layers["auto"].load_state_dict(layers["off"].state_dict())
    plain = train(layers["off"], rank, 2)

    def observe(*args: Any, **more: Any) -> dict[MeasuredPart, float]:
        measured = time_fused(*args, **more)
        found.append(measured)
        best = {
            MeasuredPart(sample.kind, phase, of)
            for sample in measured
            for phase, of in zip(PHASES, (2, 4), strict=True)
        }
        return dict.fromkeys(measured, 1e6) | dict.fromkeys(best, 1e-9 if quick else 1e6)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv(cache.CACHE, folder)
        patch.setattr(cache, "profile", partial(cache.profile, budget_s=1.0))
        patch.setattr(measure, "time_fused", observe)
        layers["auto"].recorder = recorder
        own = train(layers["auto"], rank, 2)
        (costs,) = layers["auto"].plans._costs.values()
    (seen,) = costs.observed.values()
    (measured,) = found
    assert costs.fused is not None and 0 < costs.fused.signal_s["inter"] < 1 and costs.fused.tile_rows == TOKEN_TILE
    assert len(measured) == 2 and all(0 < s < 60 and sample in seen.seconds for sample, s in measured.items())
    wrong = []
    for place, (one, other) in enumerate(zip(own, plain, strict=True)):
        if not torch.allclose(one, other, 1e-4, 1e-5):
            wrong.append(f"result {place}: {(one - other).abs().max()}")
    kinds = {one.kind for one in recorder.timeline().spans} & {*FUSED, "expert"}
    return kinds, chunks_of(recorder), wrong


def saved_bytes(rank: int, world: int) -> int:
    """Return the extra bytes alive after a layer's forward, with buffers for the most rows it can receive."""
    topology = Topology.from_sizes(ep=world, timeout_s=60)
    schedule = fusedmoe.Schedule("fused", degrees=(1, 1), row_factor=float(world))
    torch.manual_seed(5)
    gate, experts = fusedmoe.gates.TopK(2 * world, k=2), fusedmoe.experts.SwiGLU(128)
    layer = fusedmoe.MoELayer(256, gate, experts, topology=topology, schedule=schedule)
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    layer(x)  # allocates buffers
    gc.collect()
    with PeakMemory() as memory:
        before, y = memory.now, layer(x)
        gc.collect()
        saved = memory.now - before
    layer.check()
    assert y.requires_grad
    return saved
