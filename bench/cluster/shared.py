"""A layer's shared expert within its plan, compared with one after the combine."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

import fusedmoe
from bench.cluster.layer import make_layer, run
from bench.cluster.setting import Setting
from bench.cluster.turns import in_turns, row
from fusedmoe.comm.topology import Topology
from fusedmoe.engine.shared_expert_task import single_expert_layout
from fusedmoe.layers.schedule import Schedule

# FLOP of the shared expert relative to those of the routed experts: DeepSeek-V3's and Qwen2-MoE's.
_SHARES = {"an eighth of the experts": 1 / 8, "as much as the experts": 1.0}


def measure(setting: Setting, topology: Topology, rounds: int) -> dict[str, Any]:
    """Time both passes of a layer without a shared expert, with one after the plan, and with one within it. Collective.

    `hidden`: fraction of the shared expert's time (the difference of the first two) that the plan hides.
    """
    tokens = setting.S // setting.k
    x_SM, dy_SM = torch.randn(tokens, setting.M).requires_grad_(), torch.randn(tokens, setting.M)
    model = make_layer(setting, topology, None).measured_costs(tokens)
    auto = replace(Schedule("joint"), costs=model)
    runs = {"auto, no shared expert": partial(run, make_layer(setting, topology, auto), x_SM, dy_SM)}
    for size, share in _SHARES.items():
        hidden_dim = round(share * setting.k * setting.H)
        for way in ("after the combine", "in the plan"):
            shared = fusedmoe.experts.FeedForward(hidden_dim)
            layer = make_layer(setting, topology, auto, shared)
            if way == "after the combine":  # hooks run in a call of the module, after the plan
                shared.register_forward_hook(lambda *_: None)
            runs[f"auto, {size}, {way}"] = partial(run, layer, x_SM, dy_SM)
        runs[f"shared expert alone, {size}"] = partial(_run_alone, shared, x_SM, dy_SM)
    rows = {name: row(seconds) for name, seconds in in_turns(topology, runs, rounds).items()}
    without_s = rows["auto, no shared expert"]["median_s"]
    hidden = {}
    for size in _SHARES:
        after_s, planned_s = (rows[f"auto, {size}, {way}"]["median_s"] for way in ("after the combine", "in the plan"))
        hidden[size] = (after_s - planned_s) / (after_s - without_s)
    return {"rows": rows, "hidden": hidden, "layers": 1}


def _run_alone(shared: fusedmoe.experts.FeedForward, x_SM: torch.Tensor, dy_SM: torch.Tensor) -> None:
    x_SM.grad = None
    shared.zero_grad(set_to_none=True)
    shared(x_SM, single_expert_layout(x_SM), None).backward(dy_SM)
