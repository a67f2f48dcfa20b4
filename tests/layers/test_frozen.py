"""Fully or partly frozen experts: remaining gradients have the same bits as without freezing.

Nothing is saved or computed for frozen parts.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedmoe
from fusedmoe import autograd
from fusedmoe.autograd.experts import WeightParts, experts_in_parts
from fusedmoe.comm.exchange import RowExchange
from fusedmoe.comm.topology import Topology
from fusedmoe.experts import add_adapters
from fusedmoe.kernels.experts import Weights
from fusedmoe.schedule.policies.flowmoe_plans import StepSplit, micro_schedule
from tests.cluster import Cluster
from tests.layers.test_memory import saved_elements
from tests.layers.test_pipeline import Attention, without_overlap
from tests.layers.test_pipeline_parts import make
from tests.layers.test_pipeline_plans import costs_of, halves
from tests.marks import slowly

M, H, E, K = 10, 12, 4, 2
#: Frozen parts of the experts.
FROZEN = ("w1 w2 b1 b2", "w1", "w2 b2", "b1 b2", "w1 b1 b2")


def make_layer(frozen: str, topology: Topology | None = None, schedule: Any = None) -> fusedmoe.MoELayer:
    torch.manual_seed(3)
    gate, experts = fusedmoe.gates.TopK(E, K), fusedmoe.experts.SwiGLU(H, bias=True)
    more = {} if topology is None else {"topology": topology}
    layer = fusedmoe.MoELayer(M, gate, experts, dtype=torch.float64, schedule=schedule, **more)
    for name in frozen.split():
        getattr(layer.experts, name).requires_grad_(False)
    return layer


def gradients(layer: nn.Module, rank: int = 0, learns: bool = True) -> dict[str, Tensor | None]:
    torch.manual_seed(50 + rank)
    x_SM = torch.randn(17 + 5 * rank, M, dtype=torch.float64).requires_grad_(learns)
    y_SM = layer(x_SM)
    (y_SM * torch.randn_like(y_SM)).sum().backward()
    return {"y": y_SM.detach(), "x": x_SM.grad} | {name: one.grad for name, one in layer.named_parameters()}


def assert_same_gradients(found: dict[str, Tensor | None], whole: dict[str, Tensor | None], frozen: str) -> None:
    assert found.keys() == whole.keys()
    for name, right in whole.items():
        got = found[name]
        if name.removeprefix("experts.") in frozen.split():
            assert got is None and right is not None, name
        else:
            assert got is not None and right is not None and torch.equal(got, right), name


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights_keep_other_gradients(frozen: str) -> None:
    whole = gradients(make_layer(""))
    assert_same_gradients(gradients(make_layer(frozen)), whole, frozen)
    without_x = gradients(make_layer(frozen), learns=False)
    assert without_x.pop("x") is None
    assert_same_gradients(without_x, {name: one for name, one in whole.items() if name != "x"}, frozen)
    assert_same_gradients(
        gradients(make_layer(frozen, schedule=fusedmoe.Schedule("fsmoe", degrees=(1, 1)))), whole, frozen
    )


@pytest.mark.parametrize("frozen", ["w1 b1 b2", *slowly(*(one for one in FROZEN if one != "w1 b1 b2"))])
def test_frozen_weights_in_compiled_layer(frozen: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(make_layer(frozen), backend="aot_eager", fullgraph=True)
    found = {name.removeprefix("_orig_mod."): one for name, one in gradients(compiled).items()}
    assert_same_gradients(found, gradients(make_layer("")), frozen)


def test_tensors_of_frozen_weights_are_not_saved() -> None:
    # The router saves x too, so only the operation alone shows the saving: x, and pre-activations of 2·H per row.
    layout = autograd.order(torch.stack([torch.randperm(E)[:K] for _ in range(17)]), E)
    x_SM, weight_N = torch.randn(17, M, requires_grad=True), torch.rand(layout.rows, requires_grad=True)
    shapes = {"w1": (E, 2, H, M), "w2": (E, M, H), "b1": (E, 2, H), "b2": (E, M)}
    rows = 17 * M, layout.rows * 2 * H
    for learns, tokens, expected in (
        ("w1 w2 b1 b2", True, sum(rows)), ("w2 b1 b2", True, rows[1]), ("", True, rows[1]),
        ("w1", False, sum(rows)), ("w2", False, rows[1]), ("b2", False, 0),
    ):  # fmt: skip
        # Cast copies of parameters, as autocast makes them, are saved if backward reads them.
        leaves = {name: torch.randn(shape).requires_grad_(name in learns.split()) for name, shape in shapes.items()}
        weights = Weights(*leaves.values())
        x, weight = (x_SM, weight_N) if tokens else (x_SM.detach(), weight_N.detach())
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y_SM = autograd.experts(x, layout, weight, weights, "swiglu")
        given = {t.untyped_storage().data_ptr() for t in (*leaves.values(), weight, *layout.tensors) if t is not None}
        own = {place: size for place, size in kept.items() if place not in given and size > 1}
        assert sum(own.values()) == expected, learns
        assert (leaves["w1"].untyped_storage().data_ptr() in kept) == tokens, learns
        assert (leaves["w2"].untyped_storage().data_ptr() in kept) == (tokens or learns in ("w1", "b1")), learns
        y_SM.sum().backward()


def compare_on_ranks(rank: int, world: int, frozen: str, degrees: tuple[int, int] | None) -> None:
    topology = Topology.from_sizes(ep=world, timeout_s=30)
    schedule = None if degrees is None else fusedmoe.Schedule("fsmoe", degrees=degrees)
    layers = [make_layer(names, topology, schedule) for names in ("", frozen)]
    found = [gradients(layer, rank) for layer in layers]
    assert_same_gradients(found[1], found[0], frozen)
    x_SM = torch.randn(20, M, dtype=torch.float64, requires_grad=True)
    kept = [saved_elements(layer, x_SM)[torch.float64] for layer in layers]
    # Received rows are saved only for the gradient of w1.
    assert (kept[1] < kept[0]) == ("w1" in frozen.split())


@pytest.mark.parametrize(
    ("frozen", "degrees"),
    [
        pytest.param(frozen, degrees, marks=() if place == number else pytest.mark.slow)
        for place, frozen in enumerate(FROZEN[:3])
        for number, degrees in enumerate([None, (2, 2), (3, 2)])
    ],
    ids=str,
)
def test_frozen_weights_on_two_ranks(cluster: Cluster, frozen: str, degrees: tuple[int, int] | None) -> None:
    cluster.run(2, compare_on_ranks, frozen, degrees)


class Plain(nn.Module):
    """Expert differentiated by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(M, M, dtype=torch.float64))

    def forward(self, x_NM: Tensor) -> Tensor:
        return (x_NM @ self.weight).tanh()


def make_first_layer(kind: str, topology: Topology, schedule: Any) -> fusedmoe.MoELayer:
    """Build a layer with trainable experts, or with trainable adapters on frozen experts."""
    if kind == "custom":
        torch.manual_seed(3)
        gate, experts = fusedmoe.gates.TopK(E, K), fusedmoe.experts.Custom(lambda *_: Plain())
        return fusedmoe.MoELayer(M, gate, experts, dtype=torch.float64, topology=topology, schedule=schedule or "off")
    layer = make_layer("", topology, schedule)
    if kind == "adapters":
        add_adapters(layer.experts, rank=3, alpha=2)
        for parameter in layer.experts.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter)
    return layer


def check_backward_traffic(rank: int, world: int, kind: str, degrees: tuple[int, int] | None) -> None:
    """Count rows and weights sent in backward, if all, one or no ranks' tokens need gradients.

    Also with a trainable router.
    """
    topology, sent = Topology.from_sizes(ep=world, timeout_s=30), Counter[int]()
    layer = make_first_layer(kind, topology, None if degrees is None else fusedmoe.Schedule("fsmoe", degrees=degrees))
    combine = RowExchange.combine

    def counted(part: RowExchange, rows: Tensor) -> Tensor:
        sent[rows.shape[1]] += len(rows)
        return combine(part, rows)

    both, found = 0, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowExchange, "combine", counted)
        for learns in (True, False, rank == 0):
            for router in (True, False):
                layer.gate.requires_grad_(router)
                layer.zero_grad(set_to_none=True)
                sent.clear()
                grads = gradients(layer, rank, learns)
                both = both or sent[M]
                anybody = learns or len(found) >= 4
                # Results return in the forward pass and token gradients in backward, both M wide; gradients of weights
                # are 1 wide.
                assert sent[M] == (both if anybody else both / 2), (dict(sent), learns, router)
                assert bool(sent[1]) == (router or anybody), (dict(sent), learns, router)
                found[len(found), learns] = grads
    whole = next(iter(found.values()))
    for (_, learns), grads in found.items():
        for name, right in whole.items():
            got = grads[name]
            if (name == "x" and not learns) or (name.startswith("gate") and got is None):
                continue
            assert right is None if got is None else right is not None and torch.equal(got, right), name


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        *(("experts", None), ("adapters", (2, 2)), ("custom", (2, 2))),
        *slowly(("experts", (2, 2)), ("adapters", None), ("custom", None)),
    ],
    ids=str,
)
def test_tokens_without_gradient_send_nothing_in_backward(
    cluster: Cluster, kind: str, degrees: tuple[int, int] | None
) -> None:
    cluster.run(2, check_backward_traffic, kind, degrees)


def check_frozen_blocks(rank: int, world: int, degrees: tuple[int, int]) -> None:
    """Fully frozen blocks: if some ranks' inputs need gradients, all ranks run backward; if none do, no rank does."""
    blocks = make(Topology.from_sizes(ep=world, timeout_s=30), Attention)
    modules = nn.ModuleList([module for block in blocks for module in block]).requires_grad_(False)
    run = fusedmoe.pipeline(blocks, degrees)
    torch.manual_seed(20 + rank)
    x, dz = torch.randn(2, 3 + rank, 5, blocks[0].experts.model_dim, dtype=torch.float64)
    found = []
    for learns in (True, rank == 1, False):
        torch.manual_seed(30 + rank)  # for the gates' noise
        leaf = x.clone().requires_grad_(learns)
        z = run(leaf)
        aux = torch.stack([block.experts.aux_loss for block in blocks]).sum()
        assert z.requires_grad == aux.requires_grad == (len(found) < 2)
        if z.requires_grad:
            ((z * dz).sum() + aux).backward()
        assert (leaf.grad is not None) == learns
        found.append((z.detach(), aux.detach(), *([leaf.grad] if learns else [])))
    for other in found[1:]:
        for one, right in zip(other, found[0], strict=False):
            assert torch.equal(one, right)
    torch.manual_seed(30 + rank)
    leaf = x.clone().requires_grad_()
    z = without_overlap(blocks)(leaf)
    ((z * dz).sum() + torch.stack([block.experts.aux_loss for block in blocks]).sum()).backward()
    for got, want in zip(found[0][::2], (z.detach(), leaf.grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert all(parameter.grad is None for parameter in modules.parameters())


def check_shared_tokens(rank: int, world: int, sizes: dict[str, int], frozen: bool) -> None:
    """MP ranks share tokens, and only one rank needs their gradient: all ranks assemble it together."""
    found = []
    for in_blocks in (False, True):
        for learns in (True, rank == 1):
            blocks = make(Topology.from_sizes(**sizes, timeout_s=30), Attention, mp_input="replicated")
            nn.ModuleList([module for block in blocks for module in block]).requires_grad_(not frozen)
            torch.manual_seed(20)
            x, dz = torch.randn(2, 4, 5, blocks[0].experts.model_dim, dtype=torch.float64)
            run = fusedmoe.pipeline(blocks, (2, 1)) if in_blocks else without_overlap(blocks)
            torch.manual_seed(30)  # for the gates' noise
            leaf = x.clone().requires_grad_(learns)
            (run(leaf) * dz).sum().backward()
            assert (leaf.grad is not None) == learns
            found.append(leaf.grad)
    assert found[0] is not None
    torch.testing.assert_close(found[2], found[0], rtol=1e-10, atol=1e-10)
    for some, everywhere in ((found[1], found[0]), (found[3], found[2])):
        assert some is None or torch.equal(some, everywhere)


@pytest.mark.parametrize(
    ("sizes", "frozen"),
    [({"mp": 2}, True), *slowly(({"mp": 2}, False), ({"mp": 2, "ep": 2}, True), ({"mp": 2, "esp": 2}, False))],
    ids=str,
)
def test_gradient_of_shared_tokens_needed_on_one_mp_rank(cluster: Cluster, sizes: dict[str, int], frozen: bool) -> None:
    cluster.run(2, check_shared_tokens, sizes, frozen)


@pytest.mark.parametrize("degrees", [(2, 1), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str)
def test_fully_frozen_blocks_in_backward(cluster: Cluster, degrees: tuple[int, int]) -> None:
    cluster.run(2, check_frozen_blocks, degrees)


@pytest.mark.parametrize(
    ("frozen", "degrees"),
    [
        pytest.param(frozen, degrees, marks=() if place == number else pytest.mark.slow)
        for place, frozen in enumerate(FROZEN[:3])
        for number, degrees in enumerate([(3, 3), (2, 3)])
    ],
    ids=str,
)
def test_frozen_blocks_with_weight_gradient_tasks(frozen: str, degrees: tuple[int, int]) -> None:
    found = []
    for names in ("", frozen):
        blocks = make(Topology(), Attention)
        for block in blocks:
            for name in names.split():
                if (parameter := getattr(block.experts.experts, name)) is not None:
                    parameter.requires_grad_(False)
        run = fusedmoe.pipeline(blocks, degrees)
        costs = costs_of(Topology(), len(blocks), blocks[0].experts.parts, run.routes_first[0])
        # A plan from before freezing may still contain the experts' gradient tasks; these are then no-ops.
        run.set_plan(halves(micro_schedule(costs, StepSplit(*degrees, weights=True)).plan()))
        torch.manual_seed(9)
        x = torch.randn(6, 5, blocks[0].experts.model_dim, dtype=torch.float64, requires_grad=True)
        z = run(x)
        (z * torch.randn_like(z)).sum().backward()
        found.append({"x": x.grad})
        for i, block in enumerate(blocks):
            found[-1] |= {f"{i}.{name}": one.grad for name, one in block.experts.named_parameters()}
    for name, right in found[0].items():
        if name.split(".")[-1] in frozen.split():
            assert found[1][name] is None
        else:
            assert found[1][name] is not None and torch.equal(found[1][name], right), name


@pytest.mark.parametrize("frozen", ["", "0", "1", "2", "0 2", "1 2", "0 1 2"])
def test_frozen_parts_of_split_weights(frozen: str) -> None:
    """The parts are both halves of w1, and w2."""
    torch.manual_seed(1)
    layout = autograd.order(torch.stack([torch.randperm(E)[:K] for _ in range(17)]), E)
    shapes = ((17, M), (layout.rows,), (E, H, M), (E, M, H), (E, H, M))
    values = [torch.randn(shape) for shape in shapes]
    asked: list[tuple[bool, ...]] = []

    def split(dw1: Tensor, dw2: Tensor) -> tuple[Tensor, ...]:
        asked.append((dw1.untyped_storage().nbytes() > 8, dw2.untyped_storage().nbytes() > 8))
        return dw1.unbind(1)[0], dw2, dw1.unbind(1)[1]

    how = WeightParts(lambda parts: (torch.stack((parts[0], parts[2]), 1), parts[1].contiguous()), split)
    found = []
    for names in ([], frozen.split()):
        leaves = [value.double().requires_grad_() for value in values]
        for name in names:
            leaves[2 + int(name)].requires_grad_(False)
        x, weight, *parts = leaves
        asked.clear()
        experts_in_parts(x, layout, weight, parts, how, "swiglu").square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for number, (right, got) in enumerate(zip(*found, strict=True)):
        if str(number - 2) in frozen.split():
            assert got is None
        else:
            assert got is not None and torch.equal(got, right)
    made = not {"0", "2"} <= set(frozen.split()), "1" not in frozen.split()
    assert asked[-1:] == ([made] if any(made) else [])
