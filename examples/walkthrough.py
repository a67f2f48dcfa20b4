"""A walk through fusedmoe in one process, with pictures. Its cells (# %%) open in Jupyter, VS Code and PyCharm.

python examples/walkthrough.py                  # writes walkthrough/*.png
python examples/walkthrough.py FOLDER
"""

# %% A layer in place of a dense feed-forward network: any shape [..., 64] in, the same shape out.
from __future__ import annotations

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import fusedmoe
from fusedmoe.schedule import LINES, POLICIES, CostModel, Line, Workload, draw, simulate

folder = Path(sys.argv[1] if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else "walkthrough")
folder.mkdir(exist_ok=True)
torch.manual_seed(0)

layer = fusedmoe.MoELayer(
    model_dim=64,
    gate=fusedmoe.gates.TopK(experts=8, k=2, capacity_factor=1.25),
    experts=fusedmoe.experts.SwiGLU(hidden=128),
)
x_BLM = torch.randn(4, 32, 64)
y_BLM = layer(x_BLM)
print(layer, y_BLM.shape, sep="\n")

# %% Train it: the auxiliary loss balances the experts. Record the load of each expert.
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
centre_EM = 2 * torch.randn(8, 64)
share_8 = torch.tensor([8.0, 4, 2, 1, 1, 1, 1, 1]).div(19)  # some kinds of tokens are frequent
loads = []
for _ in range(60):
    kind_S = torch.multinomial(share_8, 256, replacement=True)
    x_SM = centre_EM[kind_S] + torch.randn(256, 64)
    loss = (layer(x_SM) - x_SM.flip(1)).square().mean() + 0.05 * layer.aux_loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loads.append(layer.load_E.float() / layer.load_E.float().mean())  # 1: balanced
print(f"loss {loss.item():.3f}, dropped {layer.dropped} of 512 (token, expert) pairs")

# %% Picture 1: load of each expert over the steps.
figure = Figure(figsize=(7, 3), layout="constrained")
axes = figure.subplots()
axes.plot(torch.stack(loads))
axes.set(xlabel="step", ylabel="load / mean load", title="Load of 8 experts")
figure.savefig(folder / "loads.png")

# %% Where the time of a step goes on a cluster of 8 nodes of 4 GPUs: start-up times of 50 µs, 6 GB/s inside a node and
# 12 GB/s between nodes for each rank, 12 TFLOP/s. `fusedmoe profile` measures the costs of your own machine.
rates = {"gemm": 12e12, "all-gather/esp": 6e9, "reduce-scatter/esp": 6e9}
machine = CostModel({name: Line(5e-5, 1 / rates.get(name, 12e9)) for name in LINES})
workload = Workload(batch=2, seq_len=1024, model_dim=2048, hidden=4096, experts=8, k=2, expert="swiglu", ep=8, esp=4)
parts = ("dispatch", "all-gather", "expert", "reduce-scatter", "combine")
costs = workload.step_costs(machine, [workload.gradient_bytes()] * 2, parts)
step_ms = {
    name: 1e3 * simulate(POLICIES[name].plan(costs), costs).duration_s
    for name in ("sequential", "tutel", "fsmoe", "joint")
}
print({name: f"{ms:.1f} ms" for name, ms in step_ms.items()})

# %% Pictures 2 and 3: the same step without a schedule and with the best plan. Rows are resources, boxes are tasks.
for name in ("sequential", "joint"):
    timeline = simulate(POLICIES[name].plan(costs), costs)
    draw(timeline, folder / f"{name}.png", title=f"{name}: {step_ms[name]:.1f} ms per step, predicted")

# %% Picture 4: policies compared.
figure = Figure(figsize=(6, 2.5), layout="constrained")
axes = figure.subplots()
axes.barh(list(step_ms), list(step_ms.values()))
axes.set(xlabel="ms per step, predicted", title="Two layers on 8 nodes of 4 GPUs")
figure.savefig(folder / "policies.png")
print(f"pictures: {', '.join(sorted(str(path) for path in folder.glob('*.png')))}")

# %% A schedule never changes results, only the order of the work. On several ranks (torchrun), add these arguments:
#
#     topology = fusedmoe.Topology.from_sizes(ep=world)
#     layer = fusedmoe.MoELayer(..., topology=topology, schedule="auto")
#
# docs/tutorial.md goes on from here.
