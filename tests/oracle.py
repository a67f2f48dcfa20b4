"""The reference of a layer: one process, every token through its experts, no parallelism, no fused kernels, float64.

    whole, layer = make_layer(case), make_layer(case, topology, schedule=schedule)
    assert_equal_to_dense(layer, whole, x_W, dy_W)     # both passes, against plain differentiable torch

    wanted, found = run_passes(plain, x), run_passes(layer, x)
    assert_same_results(found, wanted, 1e-10)          # both passes of two modules

Routing is decided rank by rank, as the layer defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe.comm.collectives import all_reduce
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import NAMED, Custom, Experts, FeedForward, SwiGLU
from fusedmoe.gates import Gate
from fusedmoe.gates.base import SoftRouting
from fusedmoe.kernels.experts import Weights, define_experts
from fusedmoe.kernels.layout import define_layout
from fusedmoe.layers.moe import MoELayer
from fusedmoe.orders import Dropless, Einsum, Order, Sparse

E, M, H = 8, 6, 8

Case = tuple[str, str, str]  # gate, order, kind of experts
Results = dict[str, Tensor | None]


class ShardedExpert(nn.Module):
    """A user's expert that can be split: tanh(x·A)·B with the columns of A and the rows of B divided over shards."""

    def __init__(self, model_dim: int, shard: int = 0, shards: int = 1, hidden: int = 4) -> None:
        super().__init__()
        a, b = torch.randn(model_dim, hidden), torch.randn(hidden, model_dim)
        self.a = nn.Parameter(a.chunk(shards, 1)[shard].clone())
        self.b = nn.Parameter(b.chunk(shards, 0)[shard].clone())

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(rows @ self.a) @ self.b


def run_expert(experts: Experts, number: int, row_M: Tensor) -> Tensor:
    """One row through one expert of an unsharded set of all experts."""
    if isinstance(experts, Custom):
        result: Tensor = experts.experts[str(number)](row_M[None])[0]
        return result
    assert isinstance(experts, FeedForward)
    own = slice(number, number + 1)
    b1, b2 = (None if bias is None else bias[own] for bias in (experts.b1, experts.b2))
    one = Weights(experts.w1[own], experts.w2[own], b1, b2)
    layout = define_layout(torch.zeros(1, 1, dtype=torch.long), 1)
    return define_experts(row_M[None], layout, None, one, experts.activation)[0]


def dense_forward(layer: MoELayer, x_SM: Tensor, dropless: bool) -> tuple[Tensor, Tensor]:
    """y_SM and the auxiliary loss of one rank's tokens, from a layer that holds all experts."""
    routing = layer.gate(x_SM)
    experts = layer.gate.experts
    if isinstance(routing, SoftRouting):
        rows_NM = routing.dispatch_SN.t() @ x_SM
        out = [run_expert(layer.experts, n // routing.slots, row) for n, row in enumerate(rows_NM)]
        y_SM = routing.combine_SN @ torch.stack(out)
    else:
        capacity = None if dropless else routing.capacity
        kept_SK = define_layout(routing.expert_SK, experts, capacity, routing.priority_S).row_SK >= 0
        y = []
        for s in range(len(x_SM)):
            y_M = torch.zeros_like(x_SM[s])
            for k, number in enumerate(routing.expert_SK[s].tolist()):
                if kept_SK[s, k]:
                    y_M = y_M + routing.weight_SK[s, k] * run_expert(layer.experts, number, x_SM[s])
            y.append(y_M)
        y_SM = torch.stack(y) if y else x_SM.clone()
    if layer.shared is not None:
        shared = [run_expert(layer.shared, 0, row) for row in x_SM]
        y_SM = y_SM + torch.stack(shared) if shared else y_SM
    return y_SM, routing.aux_loss


GATES: dict[str, Callable[[], Gate]] = {
    "topk": lambda: fusedmoe.gates.TopK(experts=E, k=2, capacity_factor=0.8, aux={"balance": 0.5, "z": 0.1}),
    "topk3": lambda: fusedmoe.gates.TopK(experts=E, k=3),
    "switch": lambda: fusedmoe.gates.Switch(experts=E, capacity_factor=1.0),
    "gshard": lambda: fusedmoe.gates.GShard(experts=E, k=2, capacity_factor=1.25),
    "sigmoid": lambda: fusedmoe.gates.Sigmoid(experts=E, k=2, capacity_factor=1.0),
    "xmoe": lambda: fusedmoe.gates.XMoE(experts=E, k=2, capacity_factor=1.5),
    "softmoe": lambda: fusedmoe.gates.SoftMoE(experts=E, slots=2),
    "expert_choice": lambda: fusedmoe.gates.ExpertChoice(experts=E, k=2, capacity_factor=1.0),
    "batch_prioritised": lambda: fusedmoe.gates.BatchPrioritised(experts=E, k=2, capacity_factor=0.7),
    "hash": lambda: fusedmoe.gates.Hash(experts=E, k=2, capacity_factor=1.0),
    "random": lambda: fusedmoe.gates.Random(experts=E, k=2, capacity_factor=1.0),
    "deepseek_v3": lambda: fusedmoe.gates.DeepSeekV3(experts=E, k=2, groups=4, groups_kept=2),
}
ORDERS: dict[str, Callable[[], Order]] = {"sparse": Sparse, "dropless": Dropless, "einsum": Einsum}
EXPERTS: dict[str, Callable[[], Experts]] = {
    "swiglu": lambda: SwiGLU(H),
    "feed_forward": lambda: FeedForward(H, "gelu", bias=True),
    "custom": lambda: Custom(ShardedExpert),
}


def make_layer(case: Case, topology: Topology | None = None, **options: Any) -> MoELayer:
    """Make a float64 layer from a seed, the same on every topology."""
    gate, order, experts = case
    torch.manual_seed(7)
    layer = MoELayer(
        M,
        GATES[gate](),
        EXPERTS[experts](),
        order=ORDERS[order](),
        topology=topology,
        **{"dtype": torch.float64} | options,
    )
    randomise(layer.gate)
    return layer


@torch.no_grad()
def randomise(gate: nn.Module) -> None:
    """Draw a gate's parameters: its small initial values could hide errors in its gradient."""
    for parameter in gate.parameters():
        parameter.copy_(torch.randn(parameter.shape))


def run_passes(
    module: nn.Module,
    x: Tensor,
    *arguments: Any,
    call: Callable[..., Tensor] | None = None,
    dy: Tensor | Callable[[Tensor], Tensor] | None = None,
    aux: float = 0.3,
    seed: int | None = None,
) -> Results:
    """Return the output, all gradients, and the layers' reported losses and counts, of one forward and one backward.

    Args:
        arguments: positional arguments after x.
        call: called in place of `module`: a compiled form of it, or a checkpoint around it.
        dy: the gradient of the output, or a function of the output; None: numbers of both signs, no two equal.
        aux: the factor of the auxiliary losses in the loss.
        seed: seed of PyTorch's generator, set before the forward.
    """
    if seed is not None:
        torch.manual_seed(seed)
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()  # with its strides
    y = (module if call is None else call)(x, *arguments)
    layers = [layer for layer in module.modules() if isinstance(layer, MoELayer)]
    aux_L = torch.stack([layer.aux_loss for layer in layers])
    if dy is None:
        dy = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    ((y * (dy(y.detach()) if callable(dy) else dy)).sum() + aux * aux_L.sum()).backward()
    results: Results = {"y": y.detach(), "dx": x.grad, "aux": aux_L.detach()}
    results["load"] = torch.cat([layer.load_E for layer in layers])
    results["dropped"] = torch.tensor([layer.dropped for layer in layers])
    for name, parameter in module.named_parameters():
        results[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    return results


def assert_same_results(
    found: Mapping[str, Tensor | None],
    wanted: Mapping[str, Tensor | None],
    rtol: float = 0.0,
    atol: float | None = None,
    *,
    what: object = "",
    none_is_zero: bool = False,
) -> None:
    """Compare results of the same names: the same bits without a tolerance, and for integers.

    Args:
        atol: by default `rtol`.
        none_is_zero: a missing gradient equals zeros.
    """
    assert found.keys() == wanted.keys(), (what, found.keys() ^ wanted.keys())
    for name, right in wanted.items():
        got = found[name]
        if none_is_zero and (got is None) != (right is None):
            got = torch.zeros_like(right) if right is not None else got  # type: ignore[arg-type]
            right = torch.zeros_like(got) if right is None else right  # type: ignore[arg-type]
        if got is None or right is None:
            assert got is right, (what, name)
        elif rtol == 0.0 or not right.is_floating_point():
            assert got.dtype == right.dtype and torch.equal(got, right), (what, name)
        else:
            told = f"{what} {name}: "
            torch.testing.assert_close(
                got, right, rtol=rtol, atol=rtol if atol is None else atol, msg=lambda text, told=told: told + text
            )


def assert_close(what: str, got: Tensor, expected: Tensor) -> None:
    """Compare to 1e-10 of the expected numbers' norm. NaN is far from everything."""
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    error = (got - expected).norm() / expected.norm().clamp(min=1e-3)
    assert error <= 1e-10, (what, float(error))


def assert_equal_to_dense(
    layer: MoELayer, whole: MoELayer, x_W: Sequence[Tensor], dy_W: Sequence[Tensor], what: object = ""
) -> None:
    """Compare both passes of a layer over ranks with the dense computation of all ranks' tokens.

    The loss is Σ y·dy + 0.3·aux, where MP ranks with tokens in common count theirs once.

    Args:
        whole: a layer of one process with the same weights, which collects the dense gradients.
        x_W, dy_W: inputs and gradients of outputs of all ranks, the same on every rank.
    """
    topology = layer.topology
    rank = topology.rank
    expected = _dense(whole, x_W, dy_W, topology.mp.size, layer.mp_input, isinstance(layer.order, Dropless))[rank]
    x = x_W[rank].detach().requires_grad_()  # with its strides
    seed_noise(rank)
    y = layer(x)
    ((y * dy_W[rank]).sum() + 0.3 * layer.aux_loss).backward()
    assert_close(f"{what} y", y, expected["y"])
    assert_close(f"{what} aux", layer.aux_loss, expected["aux"])
    assert x.grad is not None
    assert_close(f"{what} dx", x.grad, expected["dx"])
    _assert_equal_gradients(layer, whole, what)


def seed_noise(rank: int) -> None:
    torch.manual_seed(100 + rank)


def _dense(
    whole: MoELayer, x_W: Sequence[Tensor], dy_W: Sequence[Tensor], mp: int, mp_input: str, dropless: bool
) -> list[dict[str, Tensor]]:
    """Return y, aux and dx of every rank; gradients of parameters are accumulated in `whole`."""
    ranks = range(len(x_W))
    # Ranks of an MP group with the same input give the same tensor, which collects the gradients of all of them.
    own = {id(one): one.detach().clone().requires_grad_() for one in x_W}
    x = [own[id(one)] for one in x_W]
    loss = torch.zeros((), dtype=torch.float64)
    y: list[Tensor] = []
    aux: list[Tensor] = []
    for rank in ranks:
        mine = x[rank]
        if mp_input != "split":
            group = range(rank // mp * mp, rank // mp * mp + mp)
            common = x[rank] if mp_input == "replicated" else sum((x[r] for r in group), torch.zeros_like(x[rank]))
            mine = common.split(chunk_sizes(len(common), mp))[rank % mp]
        seed_noise(rank)
        part, loss_of_gate = dense_forward(whole, mine, dropless)
        y.append(part)
        aux.append(loss_of_gate)
    results: list[dict[str, Tensor]] = []
    for rank in ranks:
        group = range(rank // mp * mp, rank // mp * mp + mp)
        share = torch.stack([aux[r] for r in group]).mean()
        if mp_input == "split":
            results.append({"y": y[rank], "aux": aux[rank] / mp})
            loss = loss + (y[rank] * dy_W[rank]).sum() + 0.3 * aux[rank] / mp
        else:
            results.append({"y": torch.cat([y[r] for r in group]), "aux": share})
            if rank % mp == 0:  # the loss of the group is counted once
                loss = loss + (results[rank]["y"] * dy_W[rank]).sum() + 0.3 * share
    loss.backward()
    for rank in ranks:
        grad = x[rank].grad
        results[rank]["dx"] = torch.zeros_like(x[rank]) if grad is None else grad
    return results


def chunk_sizes(rows: int, parts: int) -> list[int]:
    """Return the sizes of torch.chunk's parts, with empty parts at the end."""
    sizes = [len(part) for part in torch.arange(rows).chunk(parts)] if rows else []
    return sizes + [0] * (parts - len(sizes))


def _assert_equal_gradients(layer: MoELayer, whole: MoELayer, what: object) -> None:
    """Compare this rank's gradients, summed over the ranks that hold copies, with their part of the dense ones."""
    topology = layer.topology
    dense_grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.named_parameters()}
    for name, parameter in layer.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        owner, _, own = name.partition(".")
        shard = layer.experts.shardings.get(own) if owner == "experts" else None
        whole_on_each = topology.dp if layer.mp_input != "split" else topology.world
        all_reduce(whole_on_each if shard is None else topology.edp, grad)
        if shard is not None and NAMED in shard.values():
            split = own.endswith(".b")  # ShardedExpert divides A by columns and B by rows
            full = dense_grads[name.split("_shard")[0] + name[name.rindex(".") :] if "_shard" in name else name]
            expected = full.chunk(topology.esp.size, 0 if split else 1)[topology.esp.index]
        else:
            expected = dense_grads[name]
            for axis, dim in (shard or {}).items():
                group = getattr(topology, axis)
                expected = expected.split(chunk_sizes(expected.shape[dim], group.size), dim)[group.index]
        assert_close(f"{what} gradient of {name}", grad, expected)
