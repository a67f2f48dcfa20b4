"""Expert placements on two nodes, with a router whose load is skewed and drifts.

Layers of attention and experts, both timed waits of the modelled length. Rows, parameters and gradients of experts are
really sent, and optimizer state with experts that change owners. Every policy routes the same tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fusedmoe
from bench.cluster.layer import Wait
from bench.cluster.setting import Setting
from bench.cluster.step import START_S
from bench.cluster.turns import in_turns, row, tell
from bench.placement.baselines import replicate, shadow, swap
from bench.placement.made_loads import make_loads
from fusedmoe.cli.load_trace import LoadTrace
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import Place, RowExperts
from fusedmoe.gates.base import Gate, Routing
from fusedmoe.placement.hecate import WINDOW
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.placement.traffic import PlacementCosts, placement_load
from fusedmoe.training import ShardedExperts

#: Attention forward time per layer; backward takes twice as long.
_ATTENTION_S = 0.06
_MEMORY = 2
# Warm-up steps: five for the first prediction and for t, one with it, one more.
_WARM = WINDOW + 2
#: Steps per round: five rounds exceed two of SmartMoE's periods of 25 steps.
_STEPS = 12
# Compared policies, as arguments of `ShardedExperts`; the last is Hecate's memory-saving mode.
_RUNS: dict[str, dict[str, Any]] = {
    "hecate": {},
    "exact": {"balance": "exact"},
    "auto": {"balance": "auto"},
    "algorithm1": {"policy": "algorithm1"},
    "ep": {"policy": "ep"},
    "fastermoe": {"policy": "ep", "calibrates": shadow},
    "smartmoe": {"policy": swap},
    "flexmoe": {"policy": partial(replicate, m=_MEMORY), "reshard": False},
    "hecate, re-materialising": {"rematerialises": True},
}
# Routers, as arguments of `make_loads`, for Hecate and its corrections after the gate: experts popular for one step,
# for several steps, or permanently.
_ROUTERS: dict[str, dict[str, float]] = {
    "changes every step": {"jitter": 1.5},
    "drifts slowly": {"drift": 0.02, "jitter": 0.05},
    "even": {"skew": 0.0, "spread": 0.0, "drift": 0.0, "jitter": 0.0, "difference": 0.0},
}
_ROUTED = ("ep", "hecate", "exact", "auto")
_ROUTED_STEPS = 6  # per round


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time a step under every policy; report bytes sent and peak memory of experts. Collective."""
    found = _measured(setting, topology, list(_RUNS), _STEPS * rounds, {})
    return found | {"attention_s": _ATTENTION_S, "memory": _MEMORY}


def measure_routers(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time a step under Hecate, its corrections after the gate, and expert parallelism, by router. Collective."""
    found = {}
    for name, loads in _ROUTERS.items():
        tell(topology, name)
        found[name] = _measured(setting, topology, _ROUTED, _ROUTED_STEPS * rounds, loads)
    return {"routers": found, "attention_s": _ATTENTION_S, "memory": _MEMORY}


def _measured(
    setting: Setting, topology: Topology, names: Sequence[str], steps: int, loads: dict[str, float]
) -> dict[str, Any]:
    """Return rows by policy, interleaved, for a router with these load parameters."""
    trace = make_loads(_WARM + 1 + steps, setting.layers, setting.ranks, setting.E, tokens=setting.S, seed=1, **loads)
    tell(topology, "warming up")
    runs = {name: _Run(setting, topology, trace, name) for name in names}
    for run in runs.values():
        for _ in range(_WARM):
            run.step()
        run.sharded_before = run.sent
    tell(topology, "policies")
    seconds = in_turns(topology, {name: run.step for name, run in runs.items()}, steps)
    ep_s, hecate_s = (statistics.median(seconds[name]) for name in ("ep", "hecate"))
    rows = {}
    for name, run in runs.items():
        found = all_gather_object(topology.world, run.found())
        of = seconds[name]
        rows[name] = {
            **row(of),
            "mean_s": statistics.mean(of),
            "over_ep": ep_s / statistics.median(of),
            "over_hecate": hecate_s / statistics.median(of),
            "overlap": found[0]["overlap"],
            "straggler": float(np.mean(_over_mean([one["work"] for one in found]))),
            "ingress_bytes": float(np.mean(found[0]["ingress"])),
            "sent_bytes": sum(one["sent"] for one in found) / (steps + 1),
            "memory_bytes": max(one["memory"] for one in found),
            "peak_bytes": max(one["peak"] for one in found),
        }
        run.close()
    return {"rows": rows, "router": trace.source, "steps": steps}


def _over_mean(work: list[list[int]]) -> Any:
    work_WN = np.array(work, dtype=np.float64)
    return work_WN.max(axis=0) / work_WN.mean(axis=0)


class _Run:
    """A policy's model and its steps."""

    def __init__(self, setting: Setting, topology: Topology, trace: LoadTrace, name: str) -> None:
        torch.manual_seed(0)
        self._setting, self._trace, self._step, self.sharded_before = setting, trace, 0, 0
        self._even = Placement.even(setting.ranks, setting.E)
        self._nodes = NodeLayout(setting.ranks, setting.ranks_per_node)
        gates = [_Given(setting.E, trace.tokens_ILWE[:, layer, topology.rank]) for layer in range(setting.layers)]
        self._model = _Model(setting, topology, gates, placement="ep" if name == "ep" else "fssdp")
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._sharded: ShardedExperts | None = None
        if name != "ep":
            self._sharded = ShardedExperts(
                self._model,
                self._optimizer,
                topology,
                memory=_MEMORY,
                costs=_costs(setting),
                **_RUNS[name],
            )
        self._x_SM = torch.randn(setting.S, setting.M)
        self._peak = 0
        self._parameters: dict[nn.Module, nn.Parameter] = {of.experts: of.experts.w for of in self._model.layers}
        self._made: dict[nn.Module, int] = {}
        for layer in self._model.layers:
            layer.experts.watch = self._watch
        self._work: list[int] = []
        self._ingress: list[int] = []

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._made.clear()
        for layer in self._model.layers:
            layer.gate.step, layer.experts.rows = self._step, 0
        x_SM = self._x_SM.detach().requires_grad_()
        self._model(x_SM).sum().backward()
        self._watch()
        if self._step >= _WARM:
            for number, layer in enumerate(self._model.layers):
                self._work.append(layer.experts.rows)
                tokens_WE, placed = self._trace.tokens_ILWE[self._step, number], layer.placed
                share_rows = None if placed is None else placed.settings.share_rows
                if placed is not None and share_rows is not None:
                    found = share_rows(placed.table.current, tokens_WE, False).load
                else:
                    found = placement_load(
                        tokens_WE, self._even if placed is None else placed.table.current, self._nodes
                    )
                self._ingress.append(4 * self._setting.M * int(found.inter_node_received_W.max()))
        self._optimizer.step()
        self._watch()
        self._step += 1

    @property
    def sent(self) -> int:
        return 0 if self._sharded is None else self._sharded.sent_bytes + self._sharded.moved_bytes

    def _watch(self, experts: nn.Module | None = None, gradient_bytes: int = 0) -> None:
        """Update the peak memory; `gradient_bytes`: of the layer's current gradient, until it reaches the owners."""
        if experts is not None:
            self._made[experts] = gradient_bytes
        self._peak = max(self._peak, self._held())

    def _held(self) -> int:
        held = sum(v.nbytes for of in self._optimizer.state.values() for v in of.values() if isinstance(v, Tensor))
        for experts, parameter in self._parameters.items():  # a computing layer has replaced its parameters
            held += parameter.data.untyped_storage().nbytes()
            gradient = parameter.grad
            held += self._made.get(experts, 0) if gradient is None else gradient.untyped_storage().nbytes()
        return held

    def found(self) -> dict[str, Any]:
        return {
            "work": self._work,
            "ingress": self._ingress,
            "sent": self.sent - self.sharded_before,
            "overlap": None if self._sharded is None else self._sharded.overlap,
            "memory": self._held(),
            "peak": self._peak,
        }

    def close(self) -> None:
        if self._sharded is not None:
            self._sharded.close()


class _Model(nn.Module):
    def __init__(self, setting: Setting, topology: Topology, gates: list[_Given], placement: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            fusedmoe.MoELayer(
                setting.M, gate, _Waiting(setting), topology=topology, mp_input="split", placement=placement
            )
            for gate in gates
        )

    def forward(self, x_SM: Tensor) -> Tensor:
        for layer in self.layers:
            x_SM = x_SM + layer(Wait.apply(x_SM, None, _ATTENTION_S))
        return x_SM


class _Given(Gate):
    """Gate that routes each expert's tokens as in a trace, one expert per token."""

    rank_specific = ("tokens_IE", "_tokens_IE")

    def __init__(self, experts: int, tokens_IE: np.ndarray) -> None:
        super().__init__(experts)
        self._tokens_IE, self.step = tokens_IE, 0

    def route(self, x_SM: Tensor) -> Routing:
        expert_S = np.repeat(np.arange(self.experts), self._tokens_IE[self.step])
        np.random.default_rng(self.step).shuffle(expert_S)
        weight_SK = x_SM.new_ones(len(expert_S), 1)
        return Routing(torch.from_numpy(expert_S)[:, None], weight_SK, None, None, x_SM.new_zeros(()), None)


class _Waiting(RowExperts):
    """Experts with transferable parameters that return their rows after the time of an accelerator."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        assert setting.emulated_flops is not None
        self._setting, self.rows = setting, 0
        self.watch: Callable[[nn.Module | None, int], None] = lambda experts, gradient_bytes: None
        self.row_s = _row_flop(setting) / setting.emulated_flops

    def make(self, model_dim: int, place: Place, seed: int, **_: Any) -> None:
        self.w = nn.Parameter(torch.zeros(place.local, 2 * self._setting.M * self._setting.H))
        self.shardings["w"] = {"ep": 0}

    def compute(self, rows_NM: Tensor, counts: list[int]) -> Tensor:
        self.rows += len(rows_NM)
        gradient_bytes = self.w.nbytes  # of all experts on the rank
        self.watch(None, 0)
        out_NM: Tensor = Wait.apply(rows_NM, self.w, START_S + len(rows_NM) * self.row_s)
        if out_NM.requires_grad:
            out_NM.register_hook(lambda _: self.watch(self, gradient_bytes))
        return out_NM


def _row_flop(setting: Setting) -> float:
    return 2 * 2 * setting.M * setting.H


def _costs(setting: Setting) -> PlacementCosts:
    """Return the costs used by policies: the setting's nominal numbers."""
    assert setting.emulated_flops is not None
    expert_bytes = 4 * 2 * setting.M * setting.H
    return PlacementCosts(
        token_s=3 * _row_flop(setting) / setting.emulated_flops,
        token_bytes=4 * setting.M,
        expert_bytes=expert_bytes,
        state_bytes=expert_bytes,
        inter_bytes_s=setting.inter_mbit * 1e6 / 8,
        intra_bytes_s=setting.intra_mbit * 1e6 / 8,
    )
