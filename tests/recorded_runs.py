"""Digests of a fixed set of runs: whether a change that should not touch any number did.

    python -m tests.recorded_runs before.json                    # here, before the change
    python -m tests.recorded_runs after.json --against before.json

Each run is a training step with fixed seeds; every output, gradient and count of every rank has a digest of its bits.
The runs use public names only, so that they outlast a change of the rooms behind them. Bits depend on the machine and
on its libraries: compare records of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import experts, gates, orders
from fusedmoe.tutel import moe
from tests.cluster import Cluster

E, M, H = 8, 6, 8
TOKENS = (23, 0, 41, 1)  # by rank; an empty rank and a rank with one token among them


def _shard_of_an_expert(dim: int, shard: int = 0, shards: int = 1) -> nn.Module:
    """The results of all shards are summed."""
    return nn.Sequential(nn.Linear(dim, H // shards), nn.Tanh(), nn.Linear(H // shards, dim))


GATES: dict[str, Callable[[], Any]] = {
    "topk": lambda: gates.TopK(experts=E, k=2, capacity_factor=0.8, aux={"balance": 0.5, "z": 0.1}),
    "topk3": lambda: gates.TopK(experts=E, k=3),
    "switch": lambda: gates.Switch(experts=E, capacity_factor=1.0),
    "gshard": lambda: gates.GShard(experts=E, k=2, capacity_factor=1.25),
    "sigmoid": lambda: gates.Sigmoid(experts=E, k=2, capacity_factor=1.0),
    "xmoe": lambda: gates.XMoE(experts=E, k=2, capacity_factor=1.5),
    "softmoe": lambda: gates.SoftMoE(experts=E, slots=2),
    "expert_choice": lambda: gates.ExpertChoice(experts=E, k=2, capacity_factor=1.0),
    "batch_prioritised": lambda: gates.BatchPrioritised(experts=E, k=2, capacity_factor=0.7),
    "hash": lambda: gates.Hash(experts=E, k=2, capacity_factor=1.0),
    "random": lambda: gates.Random(experts=E, k=2, capacity_factor=1.0),
    "deepseek_v3": lambda: gates.DeepSeekV3(experts=E, k=2, groups=4, groups_kept=2),
}
ORDERS: dict[str, Callable[[], Any]] = {"sparse": orders.Sparse, "dropless": orders.Dropless, "einsum": orders.Einsum}
EXPERTS: dict[str, Callable[[], Any]] = {
    "swiglu": lambda: experts.SwiGLU(H),
    "feed_forward": lambda: experts.FeedForward(H, "gelu", bias=True),
    "custom": lambda: experts.Custom(_shard_of_an_expert),
}
# Every gate, every order, every network, but not every combination of them.
FEW = [(gate, order, list(EXPERTS)[(i + j) % 3]) for i, gate in enumerate(GATES) for j, order in enumerate(ORDERS)]

# (ranks, sizes, dispatch, degrees of a schedule or None)
LAYOUTS: list[tuple[int, dict[str, int], str, tuple[int, int] | None]] = [
    (2, {"ep": 2}, "direct", None),
    (2, {"ep": 2}, "direct", (2, 2)),
    (2, {"ep": 2}, "direct", (1, 4)),
    (2, {"esp": 2}, "direct", None),
    (2, {"mp": 2}, "direct", None),
    (4, {"ep": 2, "esp": 2}, "direct", (2, 1)),
    (4, {"ep": 4}, "1dh", None),
    (4, {"ep": 4}, "2dh", (3, 2)),
]

_SEEDED = torch.float32


def digests(named: dict[str, Tensor | None]) -> dict[str, str]:
    """A digest of the bits of each tensor, of its shape and dtype."""
    found = {}
    for name, tensor in named.items():
        if tensor is None:
            found[name] = "none"
            continue
        plain = tensor.detach().contiguous()
        words = f"{plain.dtype}{list(plain.shape)}".encode() + plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = hashlib.sha256(words).hexdigest()[:16]
    return found


def step(module: nn.Module, shape: tuple[int, ...], rank: int, aux: Callable[[Any], Tensor]) -> dict[str, str]:
    """Digests of a step's output, of the gradients of its input and of all parameters."""
    torch.manual_seed(100 + rank)
    x = torch.randn(shape, dtype=_SEEDED).requires_grad_()
    y = module(x)
    ((y * torch.randn(y.shape, dtype=y.dtype)).sum() + 0.3 * aux(module)).backward()
    named: dict[str, Tensor | None] = {"y": y, "dx": x.grad}
    return digests(named | {f"gradient of {name}": one.grad for name, one in module.named_parameters()})


def _aux(layer: fusedmoe.MoELayer) -> Tensor:
    return layer.aux_loss


def _aux_of_layers(model: nn.Module) -> Tensor:
    return torch.stack([one.aux_loss for one in model.modules() if isinstance(one, fusedmoe.MoELayer)]).sum()


def layer_of(case: tuple[str, str, str], topology: fusedmoe.Topology, **options: Any) -> fusedmoe.MoELayer:
    """A layer with weights from a seed, and a router whose weights are not small."""
    gate, order, network = case
    torch.manual_seed(7)
    layer = fusedmoe.MoELayer(
        M, GATES[gate](), EXPERTS[network](), order=ORDERS[order](), topology=topology, dtype=_SEEDED, **options
    )
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def layers(
    rank: int,
    world: int,
    cases: list[tuple[str, str, str]],
    sizes: dict[str, int],
    dispatch: str,
    degrees: tuple[int, int] | None,
) -> dict[str, str]:
    """A step of each case's layer, without experts of their own kind where degrees differ, which take equal ones."""
    topology = fusedmoe.Topology.from_sizes(**sizes, ranks_per_node=2) if world > 1 else fusedmoe.Topology()
    found = {}
    for case in cases:
        if degrees is not None and "einsum" in case or case[2] == "custom" and degrees not in (None, (2, 2)):
            continue
        schedule = "off" if degrees is None else fusedmoe.Schedule("fsmoe", degrees)
        options = {"mp_input": "split"} if sizes.get("mp") else {}
        layer = layer_of(case, topology, dispatch=dispatch, schedule=schedule, **options)
        results = step(layer, (TOKENS[rank], M), rank, _aux)
        results |= digests({"load": layer.load_E, "aux": layer.aux_loss, "dropped": torch.tensor(layer.dropped)})
        found |= {f"{'-'.join(case)}: {name}": digest for name, digest in results.items()}
    topology.close()
    return found


class _Dense(nn.Module):
    """A block's dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(M, M)

    def forward(self, x_BLM: Tensor) -> tuple[Tensor, Tensor]:
        return x_BLM, self.product(x_BLM).tanh()


def others(rank: int, world: int) -> dict[str, str]:
    """Blocks, hooks, moving experts, compiled layers and Tutel's, over two ranks."""
    topology = fusedmoe.Topology.from_sizes(ep=world, ranks_per_node=1)
    found: dict[str, str] = {}

    def note(name: str, results: dict[str, str]) -> None:
        found.update({f"{name}: {one}": digest for one, digest in results.items()})

    case = ("topk", "sparse", "swiglu")
    for degrees in ((1, 1), (2, 2), (3, 2)):
        torch.manual_seed(5)
        blocks = [(_Dense(), layer_of(("topk3", "dropless", "swiglu"), topology)) for _ in range(2)]
        piped = fusedmoe.pipeline(blocks, degrees)
        note(f"blocks {degrees}", step(piped, (5, 3, M), rank, _aux_of_layers))
    for hook in (fusedmoe.hooks.WireCast(torch.bfloat16), fusedmoe.hooks.WireFp8()):
        hooked = layer_of(case, topology, hooks=[hook])
        note(type(hook).__name__, step(hooked, (TOKENS[rank], M), rank, _aux))
    moving = layer_of(case, topology, placement="fssdp")
    note("fssdp", step(moving, (TOKENS[rank], M), rank, _aux))
    plain = layer_of(case, topology)
    compiled = torch.compile(plain, backend="aot_eager")
    note("compiled", step(compiled, (31 + rank, M), rank, lambda _: plain.aux_loss))
    with torch.autocast("cpu", torch.bfloat16):
        note("autocast", step(plain, (TOKENS[rank], M), rank, lambda _: plain.aux_loss))
    for kind, degree in itertools.product(("ffn", "llama_ffn"), (1, 2)):
        torch.manual_seed(3)
        network = {"type": kind, "num_experts_per_device": 2, "hidden_size_per_expert": H}
        tutel = moe.moe_layer(
            {"type": "top", "k": 2}, M, network, seeds=(1, rank + 1, 1), a2a_ffn_overlap_degree=degree
        )
        note(f"tutel {kind} {degree}", step(tutel, (24, M), rank, lambda model: model.l_aux))
    topology.close()
    return found


def record(ranks: Cluster) -> Iterator[tuple[str, dict[str, str]]]:
    """Each group of runs, with the digests of all its ranks."""
    every = list(itertools.product(GATES, ORDERS, EXPERTS))
    yield "one rank", layers(0, 1, every, {}, "direct", None)
    for world, sizes, dispatch, degrees in LAYOUTS:
        name = f"{sizes} {dispatch} {degrees or 'off'}"
        cases = FEW if world == 2 else FEW[::3]
        for rank, found in enumerate(ranks.run(world, layers, cases, sizes, dispatch, degrees)):
            yield f"{name}, rank {rank}", found
    for rank, found in enumerate(ranks.run(2, others)):
        yield f"others, rank {rank}", found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.recorded_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="where to write the record")
    parser.add_argument("--against", type=Path, metavar="FILE", help="an earlier record: what differs is named")
    options = parser.parse_args()
    ranks = Cluster()
    found = {}
    for group, digest_of in record(ranks):
        print(f"{group}: {len(digest_of)} digests", flush=True)
        found |= {f"{group}: {name}": digest for name, digest in digest_of.items()}
    ranks.close()
    options.file.write_text(json.dumps(found, indent=0) + "\n")
    if options.against is None:
        print(f"{len(found)} digests in {options.file}")
        return 0
    earlier = json.loads(options.against.read_text())
    differing = sorted(name for name in found.keys() | earlier.keys() if found.get(name) != earlier.get(name))
    for name in differing:
        print(f"differs: {name}: {earlier.get(name, 'not there')} -> {found.get(name, 'not there')}")
    print(f"{len(found)} digests, {len(differing)} differ from {options.against}")
    return int(bool(differing))


if __name__ == "__main__":
    raise SystemExit(main())
