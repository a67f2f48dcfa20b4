"""A small model with a skewed router, trained with expert parallelism and with placements of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedmoe.blocks.pipeline import pipeline
from fusedmoe.comm.one_sided.heaps import open_heap
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import FeedForward, SwiGLU
from fusedmoe.gates import TopK
from fusedmoe.layers.moe import MoELayer
from fusedmoe.placement.traffic import PlacementCosts
from fusedmoe.training import ShardedExperts, clip_grad_norm, distributed_data_parallel, sync_gradients
from fusedmoe.training.data_parallel import DataParallel
from tests.cluster import Cluster

DIM, EXPERTS = 6, 8

HECATE: dict[str, Any] = {"overlap": 4, "memory": 2}

#: Row costs that make one row less on the busiest rank worth a replica.
EXACT: dict[str, Any] = {"balance": "exact", "costs": PlacementCosts(1e-3, 8, 100, 200, 1e9, 1e9)}


#: Row costs that make the search for a balance worth its time.
AUTO: dict[str, Any] = {"balance": "auto", "costs": PlacementCosts(10.0, 8, 100, 200, 1e9, 1e9)}


class Between(nn.Module):
    """The part of a block before a layer of experts."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x_SM: Tensor) -> tuple[Tensor, Tensor]:
        return x_SM, torch.tanh(self.linear(x_SM)) + 0.5


class Model(nn.Module):
    """Two layers of experts, with a linear layer before each; the routers prefer low expert numbers."""

    def __init__(self, topology: Topology, placement: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        kinds = (FeedForward(6), SwiGLU(4))
        self.layers = nn.ModuleList(
            MoELayer(
                DIM,
                TopK(
                    options.get("experts", EXPERTS),
                    k=options.get("k", 2),
                    **{"capacity_factor": options.get("capacity_factor"), **options.get("gate", {})},
                ),
                experts,
                topology=topology,
                placement=placement,
                mp_input="split",
                dispatch=options.get("dispatch", "direct"),
                schedule=options.get("schedule", "off"),
                dtype=torch.float64,
            )
            for experts in kinds
        )
        self._recomputes = options.get("recomputes", False)
        self.between = nn.ModuleList(nn.Linear(DIM, DIM, dtype=torch.float64) for _ in kinds)
        self._pipeline: list[nn.Module] = []  # shares the layers' parameters
        if "degrees" in options:
            blocks = [(Between(linear), layer) for linear, layer in zip(self.between, self.layers, strict=True)]
            self._pipeline.append(pipeline(blocks, options["degrees"]))

    def forward(self, x_SM: Tensor) -> Tensor:
        if self._pipeline:
            return self._pipeline[0](x_SM)
        for linear, layer in zip(self.between, self.layers, strict=True):

            def block(x_SM: Tensor, linear: nn.Module = linear, layer: nn.Module = layer) -> Tensor:
                return x_SM + layer(torch.tanh(linear(x_SM)) + 0.5)

            x_SM = checkpoint(block, x_SM, use_reentrant=False) if self._recomputes else block(x_SM)
        return x_SM


def tokens(rank: int, step: int) -> Tensor:
    """Tokens of a rank in a step: rank 1 has none in some steps, and the preferred experts drift."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = 0 if rank == 1 and step % 3 == 2 else 5 + 7 * rank
    x_SM = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    return x_SM + torch.sin(torch.arange(DIM) + step / 4)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, topology: Topology, step: int, parts: int = 1
) -> Tensor:
    """Run one step over several parts with accumulated gradients; return this rank's loss of the last part."""
    optimizer.zero_grad()
    plain = model.module if isinstance(model, DataParallel) else model
    for part in range(parts):
        y_SM = model(tokens(topology.rank, step + 100 * part))
        loss = y_SM.square().sum() / 50 + sum(layer.aux_loss for layer in plain.layers)
        loss.backward()
    if plain is model:
        sync_gradients(model, topology)
    clip_grad_norm(plain, topology, 1.0)
    optimizer.step()
    return loss.detach()


def experts_of(model: Model) -> list[dict[str, Any]]:
    """For each layer, by name: {expert: (parameter, gradient)} of the experts that this rank owns."""
    found = []
    for layer in model.layers:
        place = layer.experts.place
        numbers = layer.experts.own_numbers
        numbers = place.numbers if numbers is None else numbers
        found.append(
            {
                name: {
                    number: (parameter.detach()[row].clone(), parameter.grad[row].clone())
                    for row, number in enumerate(numbers)
                    if parameter.grad is not None
                }
                for name, parameter in layer.experts.named_parameters()
            }
        )
    return found


def owners_of(model: Model) -> list[tuple[int, ...]]:
    return [layer.experts.own_numbers for layer in model.layers]


def run(rank: int, world: int, placement: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train; return the results of this rank."""
    options = dict(options)
    sizes = options.pop("sizes", {"ep": world})
    topology = Topology.from_sizes(**sizes, ranks_per_node=options.pop("ranks_per_node", 2), timeout_s=30.0)
    shape = {
        key: options.pop(key) for key in ("capacity_factor", "schedule", "recomputes", "degrees") if key in options
    }
    parts, wraps = options.pop("parts", 1), options.pop("wraps", False)
    model = Model(topology, placement, **shape)
    optimizer = optimizer_of(model)
    whole = distributed_data_parallel(model, topology) if wraps else model
    with ExitStack() as stack:
        if options.pop("heap", False):
            options["heap"] = stack.enter_context(open_heap(topology.ep, torch.device("cpu")))
        sharded = ShardedExperts(model, optimizer, topology, **options) if placement == "fssdp" else None
        return _run(model, whole, optimizer, sharded, topology, steps, parts)


def _run(
    model: Model,
    whole: nn.Module,
    optimizer: torch.optim.Optimizer,
    sharded: ShardedExperts | None,
    topology: Topology,
    steps: int,
    parts: int,
) -> dict[str, Any]:
    losses, states, owners, placements = [], [], [], []
    for step in range(steps):
        if sharded is not None:
            placements.append([str(one) for one in sharded.placements])
        losses.append(train_step(whole, optimizer, topology, step, parts))
        owners.append(owners_of(model))
    gradients = [
        {name: {n: pair[1] for n, pair in of.items()} for name, of in layer.items()} for layer in experts_of(model)
    ]
    states = [
        {name: {n: pair[0] for n, pair in of.items()} for name, of in layer.items()} for layer in experts_of(model)
    ]
    dense = {name: p.detach().clone() for name, p in model.named_parameters() if ".experts." not in name}
    kept = None if sharded is None else sharded.state_dict()
    sent = 0 if sharded is None else sharded.sent_bytes
    if sharded is not None:
        sharded.close()
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": states,
        "dense": dense,
        "owners": owners,
        "placements": placements,
        "state": kept,
        "sent": sent,
    }


# An operation on a model between steps; returns values that must be the same under a placement.
Use = Callable[["Model", torch.optim.Optimizer, Topology], Any]


def square(y: Tensor) -> Tensor:
    return y.square().sum() / 50


def _used(topology: Topology, placement: str, use: Use, recomputes: bool, options: dict[str, Any]) -> Any:
    model = Model(topology, placement, recomputes=recomputes)
    optimizer = optimizer_of(model)
    sharded = ShardedExperts(model, optimizer, topology, **options) if placement == "fssdp" else None
    with torch.inference_mode():
        before = model(tokens(topology.rank, 0)).clone()
    for step in range(2):
        train_step(model, optimizer, topology, step)
    model.zero_grad()
    sent = 0
    if sharded is not None:
        # Before the use: after it the loads may be even, and replicas not worth their cost.
        assert all("+" in str(one) for one in sharded.placements), "there are copies"
        sent = sharded.sent_bytes
    given = use(model, optimizer, topology)
    if sharded is not None:
        assert sharded.sent_bytes > sent, "copies have been fetched"
        sharded.close()
    return before, given, experts_of(model)


def _each(
    rank: int, world: int, placement: str, uses: Sequence[Use], recomputes: bool, options: dict[str, Any]
) -> list[Any]:
    topology = Topology.from_sizes(ep=world, ranks_per_node=1, timeout_s=20.0)
    return [_used(topology, placement, use, recomputes, options) for use in uses]


def results_of(
    cluster: Cluster, placement: str, uses: Sequence[Use], options: dict[str, Any], recomputes: bool = False
) -> dict[str, list[Any]]:
    """Run each use after two steps on two ranks, with fixed owners. Return by its name, for each rank, its results and
    the experts' gradients and parameters.
    """
    options = options | {"reshard": False}
    ranks = cluster.run(2, _each, placement, uses, recomputes, options)
    return {use.__name__: list(found) for use, *found in zip(uses, *ranks, strict=True)}


class Plain:
    """Results of expert parallelism: each use is computed when a test first requests it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._results: dict[str, list[Any]] = {}

    def results(self, uses: Sequence[Use]) -> dict[str, list[Any]]:
        if missing := [use for use in uses if use.__name__ not in self._results]:
            self._results |= results_of(self._cluster, "ep", missing, {})
        return self._results


def compare_results(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    for name, ranks in found.items():
        torch.testing.assert_close(
            ranks, wanted[name], rtol=1e-10, atol=1e-12, msg=lambda message, name=name: f"{name}: {message}"
        )
