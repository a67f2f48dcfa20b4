"""Programs of single `MoELayer`s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import experts, gates, orders, routing, training

from .record import Record, public

E, M, H = 8, 16, 12
TOKENS = (23, 0, 41, 1)  # by rank; includes a rank without tokens and one with a single token
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

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
    "deepseek_v3": lambda: gates.DeepSeekV3(experts=E, k=2, groups=4, groups_kept=2, aux={"balance": 0.1}),
}
ORDERS: dict[str, Callable[[], Any]] = {"sparse": orders.Sparse, "dropless": orders.Dropless, "einsum": orders.Einsum}


def shard_of_expert(dim: int, shard: int = 0, shards: int = 1) -> nn.Module:
    """Create one shard of an expert; the results of all shards are summed."""
    return nn.Sequential(nn.Linear(dim, H // shards), nn.Tanh(), nn.Linear(H // shards, dim))


EXPERTS: dict[str, Callable[[], Any]] = {
    "swiglu": lambda: experts.SwiGLU(H),
    "feed_forward": lambda: experts.FeedForward(H, "gelu", bias=True),
    "custom": lambda: experts.Custom(shard_of_expert),
}
# Covers every gate, order and kind of experts.
CASES = [(gate, list(ORDERS)[i % 3], list(EXPERTS)[(i + i // 3) % 3]) for i, gate in enumerate(GATES)]


def topology_of(sizes: dict[str, int], ranks_per_node: int = 2) -> fusedmoe.Topology:
    if not sizes:
        return fusedmoe.Topology()
    return fusedmoe.Topology.from_sizes(**sizes, ranks_per_node=ranks_per_node, timeout_s=200.0)


def costs() -> Any:
    """Return a cost model in which communication takes about as long as computation."""
    lines = {name: public("Line")(1e-6, 1e-12 if name == "gemm" else 4e-9) for name in public("LINES")}
    return public("CostModel")(lines, contention=public("Contention").between_links(0.8))


def make_layer(
    case: tuple[str, str, str],
    topology: fusedmoe.Topology | None = None,
    dtype: torch.dtype = torch.float32,
    **more: Any,
) -> fusedmoe.MoELayer:
    """Create a layer from a seed, with router weights of substantial size."""
    gate, order, network = case
    torch.manual_seed(7)
    layer = fusedmoe.MoELayer(
        M, GATES[gate](), EXPERTS[network](), order=ORDERS[order](), topology=topology, dtype=dtype, **more
    )
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return layer


def batch(rank: int, tokens: int | Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 100) -> Tensor:
    torch.manual_seed(seed + rank)
    shape = (tokens,) if isinstance(tokens, int) else tokens
    return torch.randn((*shape, M), dtype=torch.float64).to(dtype)


def auxiliary_loss(module: nn.Module) -> Any:
    return sum(one.aux_loss for one in module.modules() if isinstance(one, fusedmoe.MoELayer))


def step(record: Record, name: str, module: nn.Module, x: Tensor, call: Any = None, **more: Any) -> None:
    """Record a forward and a backward: output, gradients of input and parameters, loads and drops of layers."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = (call or module)(x, **more)
    aux = auxiliary_loss(module)
    ((y.float() if y.dtype is torch.bfloat16 else y) * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().add(
        0.3 * aux
    ).backward()
    record.note(f"{name}: y", y)
    record.note(f"{name}: dx", x.grad)
    record.note(f"{name}: aux", aux)
    record.gradients(module, f"{name}: ")
    for number, layer in enumerate(one for one in module.modules() if isinstance(one, fusedmoe.MoELayer)):
        record.note(f"{name}: load {number}", layer.load_E)
        record.note(f"{name}: dropped {number}", layer.dropped)


def gate(record: Record, rank: int, world: int, scratch: Path, name: str) -> None:
    for order in ORDERS:
        for network in EXPERTS:
            layer = make_layer((name, order, network))
            step(record, f"{order} {network}", layer, batch(rank, 23))
    layer = make_layer((name, "sparse", "swiglu")).eval()
    with torch.no_grad():
        record.note("evaluation", layer(batch(rank, (3, 5))))
        record.note("one token", layer(batch(rank, 1)))


def precision(record: Record, rank: int, world: int, scratch: Path, dtype: str) -> None:
    for case in CASES:
        layer = make_layer(case, dtype=DTYPES[dtype])
        step(record, "-".join(case), layer, batch(rank, 31, DTYPES[dtype]))


def autocast(record: Record, rank: int, world: int, scratch: Path) -> None:
    for case in CASES[:6]:
        with torch.autocast("cpu", torch.bfloat16):
            step(record, "-".join(case), make_layer(case), batch(rank, 31))


def shared_and_masked(record: Record, rank: int, world: int, scratch: Path) -> None:
    mask = torch.arange(10) < torch.tensor([10, 7, 3, 0])[:, None]
    for case in (("topk", "sparse", "swiglu"), ("deepseek_v3", "dropless", "feed_forward")):
        layer = make_layer(case, shared=experts.SwiGLU(2 * H))
        step(record, f"shared {case[0]}", layer, batch(rank, (4, 10)))
        step(record, f"masked {case[0]}", layer, batch(rank, (4, 10)), mask=mask)
    cu_seqlens = torch.tensor([0, 5, 6, 32, 32], dtype=torch.int32)
    step(record, "packed", layer, batch(rank, 32), cu_seqlens=cu_seqlens)


def capacities(record: Record, rank: int, world: int, scratch: Path) -> None:
    for kind in (gates.TopK, gates.BatchPrioritised, gates.GShard):
        for factor in (0.3, 1.0, 4.0, None):
            torch.manual_seed(7)
            layer = fusedmoe.MoELayer(M, kind(experts=E, k=2, capacity_factor=factor), experts.SwiGLU(H))
            step(record, f"{kind.__name__} {factor}", layer, batch(rank, 57))


def frozen(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int] | None = None) -> None:
    with topology_of(sizes or {}) as topology:
        schedules = ("off", fusedmoe.Schedule("fsmoe", (2, 2))) if sizes else ("off",)
        for schedule in schedules:
            for names in (("w1",), ("w2",), ("w1", "w2", "b1", "b2"), ("b1", "b2")):
                layer = make_layer(("topk", "sparse", "feed_forward"), topology, schedule=schedule)
                for name in names:
                    getattr(layer.experts, name).requires_grad_(False)
                step(record, f"{schedule} without {names}", layer, batch(rank, TOKENS[rank]))


def made_on_meta(record: Record, rank: int, world: int, scratch: Path) -> None:
    with torch.device("meta"):
        layer = fusedmoe.MoELayer(M, gates.TopK(experts=E, k=2), experts.FeedForward(H, "gelu", bias=True))
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    record.parameters(layer)
    step(record, "step", layer, batch(rank, 31))


def over_ranks(
    record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int], dispatch: str, dtype: str
) -> None:
    with topology_of(sizes) as topology:
        for case in CASES:
            layer = make_layer(case, topology, DTYPES[dtype], dispatch=dispatch)
            step(record, "-".join(case), layer, batch(rank, TOKENS[rank], DTYPES[dtype]))


def model_parallel(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int], mp_input: str) -> None:
    with topology_of(sizes) as topology:
        source = topology.dp.index if mp_input == "replicated" else rank
        tokens = TOKENS[rank] if mp_input == "split" else 22
        for case in CASES:
            layer = make_layer(case, topology, torch.float64, mp_input=mp_input)
            step(record, "-".join(case), layer, batch(source, tokens, torch.float64))


def scheduled(
    record: Record,
    rank: int,
    world: int,
    scratch: Path,
    sizes: dict[str, int],
    dispatch: str,
    degrees: tuple[int, int],
) -> None:
    with topology_of(sizes) as topology:
        for case in CASES:
            if "custom" in case and degrees[0] != degrees[1]:
                continue
            schedule = fusedmoe.Schedule("fsmoe", degrees)
            layer = make_layer(case, topology, torch.float64, dispatch=dispatch, schedule=schedule)
            step(record, "-".join(case), layer, batch(rank, TOKENS[rank], torch.float64))


def policies(record: Record, rank: int, world: int, scratch: Path) -> None:
    with topology_of({"ep": 2}) as topology:
        for policy in ("sequential", "tutel", "pipemoe", "lina", "fsmoe", "joint"):
            schedule = fusedmoe.Schedule(policy, costs=costs())
            layer = make_layer(("topk3", "dropless", "swiglu"), topology, torch.float64, schedule=schedule)
            for tokens in (200, 31):
                step(record, f"{policy} {tokens}", layer, batch(rank, tokens + rank, torch.float64))


def wire(record: Record, rank: int, world: int, scratch: Path) -> None:
    with topology_of({"ep": 2}) as topology:
        for schedule in ("off", fusedmoe.Schedule("fsmoe", (2, 3))):
            hook = fusedmoe.hooks.WireCast(torch.bfloat16)
            layer = make_layer(("topk", "sparse", "swiglu"), topology, hooks=[hook], schedule=schedule)
            step(record, f"WireCast {schedule}", layer, batch(rank, TOKENS[rank]))


def checkpoints(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int] | None = None) -> None:
    with topology_of(sizes or {}) as topology:
        for schedule in ("off", fusedmoe.Schedule("fsmoe", (2, 3))) if sizes else ("off",):
            layer = make_layer(("topk", "sparse", "swiglu"), topology, torch.float64, schedule=schedule)

            def reentrant(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return checkpoint(
                    lambda x: torch.stack((y := layer(x), y * 0 + layer.aux_loss)), x, use_reentrant=True
                )[0]

            def whole(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return checkpoint(layer, x, use_reentrant=False)

            def selective(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return checkpoint(layer, x, use_reentrant=False, context_fn=training.save_communication)

            for call in (whole, selective):
                step(record, f"{schedule} {call.__name__}", layer, batch(rank, TOKENS[rank], torch.float64), call)
            x = batch(rank, TOKENS[rank], torch.float64).requires_grad_()
            layer.zero_grad()
            reentrant(x).square().sum().backward()
            record.note(f"{schedule} reentrant: dx", x.grad)
            record.gradients(layer, f"{schedule} reentrant: ")


def compiled(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int] | None = None) -> None:
    with topology_of(sizes or {}) as topology:
        for schedule in ("off", fusedmoe.Schedule("fsmoe", (2, 3))) if sizes else ("off",):
            torch._dynamo.reset()
            layer = make_layer(("topk", "sparse", "swiglu"), topology, schedule=schedule)
            model = nn.Sequential(nn.Linear(M, M), layer, nn.Tanh())
            call = torch.compile(model, backend="aot_eager", fullgraph=True)
            for tokens in (31, 44):
                step(record, f"{schedule} {tokens}", model, batch(rank, tokens + rank), call)


def adapters(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int] | None = None) -> None:
    with topology_of(sizes or {}) as topology:
        for schedule in ("off", fusedmoe.Schedule("fsmoe", (2, 2))) if sizes else ("off",):
            for network in ("swiglu", "feed_forward"):
                layer = make_layer(("topk3", "dropless", network), topology, torch.float64, schedule=schedule)
                experts.add_adapters(layer.experts, 2, alpha=3.0)
                for name, parameter in layer.experts.named_parameters():
                    if name.endswith(".b"):
                        nn.init.normal_(parameter)
                step(record, f"{schedule} {network}", layer, batch(rank, TOKENS[rank], torch.float64))
                experts.merge_adapters(layer.experts)
                with torch.no_grad():
                    record.note(f"{schedule} {network}: merged", layer(batch(rank, 9, torch.float64)))


def replayed(record: Record, rank: int, world: int, scratch: Path, sizes: dict[str, int] | None = None) -> None:
    with topology_of(sizes or {}) as topology:
        for name in ("topk", "deepseek_v3", "gshard"):
            acting, trained = (make_layer((name, "sparse", "swiglu"), topology) for _ in range(2))
            with torch.no_grad():
                for parameter in trained.gate.parameters():
                    parameter.add_(0.3 * torch.randn(parameter.shape))
            x = batch(rank, 17 + rank)
            with torch.no_grad(), routing.record(acting) as choices:
                acting(x)
            record.note(f"{name}: choices", dict(choices))
            with routing.replay(trained, choices), nullcontext():
                step(record, name, trained, x)
