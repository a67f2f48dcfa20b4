"""Layers in PyTorch's profiler, and `fusedmoe.trace`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fusedmoe
from fusedmoe import ConfigError, MoELayer, Schedule, Topology, experts, gates
from fusedmoe.runtime.recorder import Recorder, span
from tests.cluster import Cluster

M = 4


def make(topology: Topology | None = None, **more: Any) -> MoELayer:
    return MoELayer(M, gates.TopK(4, 2), experts.FeedForward(3), topology=topology, **more)


def range_names(names: Any) -> set[str]:
    return {name.removeprefix("fusedmoe: ") for name in names if name.startswith("fusedmoe: ")}


def test_profiler_shows_layer_parts() -> None:
    model = nn.Sequential(make(), make())
    for number, layer in enumerate(model):
        layer.number = number
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(torch.randn(3, M)).sum().backward()
    parts = [f"{part}, layer {n}, forward" for n in (0, 1) for part in ("gate", "permute", "experts", "unpermute")]
    backward = {f"experts, layer {n}, backward" for n in (0, 1)}
    assert range_names(event.key for event in found.key_averages()) == {*parts, *backward}
    assert span(None, "gate", kind="gate") is span(None, "combine", kind="combine")  # no profiler: a no-op


def test_recorder_spans_are_equal_under_profiler() -> None:
    layer, recorder = make(), Recorder()
    layer.number, layer.recorder = 5, recorder
    seen = []
    for profiled in (False, True):
        recorder.clear()
        with profile(activities=[ProfilerActivity.CPU]) if profiled else torch.enable_grad():
            layer(torch.randn(3, M)).sum().backward()
        seen.append([(one.name, one.layer, one.phase) for one in recorder.timeline().spans])
    assert seen[0] == seen[1] and {layer for _, layer, _ in seen[0]} == {5}


def trace_ranges(rank: int, world: int, folder: str) -> set[str]:
    topology = Topology.from_sizes(world)
    model = nn.Sequential(*(make(topology, schedule=Schedule("fsmoe", (2, 1))) for _ in range(2)))
    with fusedmoe.trace(f"{folder}/step.json.gz", model) as path:
        model(torch.randn(5, M)).sum().backward()
    assert path == Path(folder) / f"step.rank{rank}.json.gz"
    return range_names(event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def test_trace_includes_link_threads_on_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """The trace includes the link threads."""
    for found in cluster.run(2, trace_ranges, str(tmp_path)):
        for n in (0, 1):
            rest = {f"{part}, layer {n}, forward" for part in ("gate", "permute", "unpermute", "exchange of counts")}
            assert rest <= found
            for part in ("dispatch", "expert", "combine"):
                chunks = [
                    f"layer {n}, chunk 0, forward",
                    f"layer {n}, chunk 1, forward",
                    f"layer {n}, chunk 0, backward",
                ]
                assert {f"{part}, {chunk}" for chunk in chunks} <= found


def test_trace_error_names_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder .* does not exist"), fusedmoe.trace(tmp_path / "none" / "step.json"):
        pass
    twice = profile(activities=[ProfilerActivity.CPU])
    with twice, pytest.raises(ConfigError, match="another profiler is active"), fusedmoe.trace(tmp_path / "step.json"):
        pass
    with pytest.raises(KeyError), fusedmoe.trace(tmp_path / "step.json"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with fusedmoe.trace(tmp_path / "step.json") as path:
        make()(torch.randn(3, M))
    assert path == tmp_path / "step.json" and "traceEvents" in json.loads(path.read_text())
