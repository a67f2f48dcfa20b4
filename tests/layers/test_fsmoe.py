"""The FSMoE paper's Listings 1 and 2, as printed except for the package's name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fusedmoe import CallbackBase, ConfigError, ExpertBase, LinearGate, MOELayer, SimpleOrder, Topology
from fusedmoe.comm.collectives import all_gather_rows
from fusedmoe.experts.networks import Place
from fusedmoe.layers.fsmoe import ExpertArgs, HookArgs
from tests.cluster import Cluster

M, H = 12, 20

LISTING_1 = """
from fusedmoe import ExpertBase, CallbackBase

class CustomizedExpert(ExpertBase):
    def do_experts(self, args):
        pass

class CustomizedCallBack(CallbackBase):
    def before_moe_start_hook(self, args):
        pass
"""

LISTING_2 = """
from fusedmoe import LinearGate, SimpleOrder, \\
    MOELayer

gate_impl = LinearGate()
order_impl = SimpleOrder()
moe_module = MOELayer(gate_impl, order_impl, **
kwargs)
"""


def run_listing(listings: str, **kwargs: object) -> dict[str, object]:
    names: dict[str, object] = {"kwargs": kwargs}
    exec(listings, names)
    return names


def test_paper_listing_2_runs() -> None:
    module = run_listing(LISTING_2, model_dim=M)["moe_module"]
    assert isinstance(module, nn.Module)
    x = torch.randn(3, 7, M, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in module.parameters())


def test_paper_listing_1_runs() -> None:
    names = run_listing(LISTING_1)
    assert issubclass(names["CustomizedExpert"], ExpertBase)  # type: ignore[arg-type]
    callback = names["CustomizedCallBack"]()  # type: ignore[operator]
    x = torch.randn(7, M)
    torch.manual_seed(0)
    one = run_listing(LISTING_2, model_dim=M, callbacks=[callback])["moe_module"]
    torch.manual_seed(0)
    other = run_listing(LISTING_2, model_dim=M)["moe_module"]
    torch.testing.assert_close(one(x), other(x))  # type: ignore[operator]


def test_experts_returning_none_raise() -> None:
    names = run_listing(LISTING_1)
    module = run_listing(LISTING_2, model_dim=M, experts=names["CustomizedExpert"]())["moe_module"]  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"CustomizedExpert was given rows of shape \[.*, 12\] and returned None"):
        module(torch.randn(7, M))  # type: ignore[operator]


class Tanh(ExpertBase):
    """tanh(x·A_e)·B_e, expert by expert."""

    def make_parameters(self, model_dim: int, place: Place) -> None:
        self.a = nn.Parameter(torch.randn(place.local, model_dim, H))
        self.b = nn.Parameter(torch.randn(place.local, H, model_dim))
        self.shardings = {"a": {"ep": 0}, "b": {"ep": 0}}

    def do_experts(self, args: ExpertArgs) -> Tensor:
        parts = args.rows_NM.split(args.counts)
        return torch.cat([torch.tanh(rows @ a) @ b for rows, a, b in zip(parts, self.a, self.b, strict=True)])


class Count(CallbackBase):
    """Count the calls and the elements at each of the paper's six hooks."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def note(self, name: str, args: HookArgs) -> None:
        assert args.tensor.shape[-1] == M
        self.calls.append((name, args.context.direction))

    def before_moe_start_hook(self, args: HookArgs) -> None:
        self.note("before_moe_start", args)

    def before_dispatch_hook(self, args: HookArgs) -> None:
        self.note("before_dispatch", args)

    def after_dispatch_hook(self, args: HookArgs) -> None:
        self.note("after_dispatch", args)

    def before_combine_hook(self, args: HookArgs) -> None:
        self.note("before_combine", args)

    def after_combine_hook(self, args: HookArgs) -> None:
        self.note("after_combine", args)

    def before_moe_end_hook(self, args: HookArgs) -> None:
        self.note("before_moe_end", args)


SEAMS = ["before_moe_start", "before_dispatch", "after_dispatch", "before_combine", "after_combine", "before_moe_end"]


def test_custom_experts_and_callbacks() -> None:
    count = Count()
    gate = LinearGate(experts=4, capacity_factor=None)
    module = MOELayer(gate, SimpleOrder(), model_dim=M, experts=Tanh(), callbacks=[count], dtype=torch.float64)
    x = torch.randn(2, 5, M, dtype=torch.float64, requires_grad=True)
    y = module(x)
    assert count.calls == [(seam, "forward") for seam in SEAMS]
    dy = torch.randn_like(y)
    y.backward(dy)
    assert count.calls[6:] == [(seam, "backward") for seam in SEAMS]
    ours = [y, x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    a, b = module.experts.a, module.experts.b
    x2 = x.detach().clone().requires_grad_()
    routing = gate(x2.view(-1, M))
    each = torch.stack([torch.tanh(x2.view(-1, M) @ a_e) @ b_e for a_e, b_e in zip(a, b, strict=True)], 1)
    chosen = each[torch.arange(10)[:, None], routing.expert_SK]
    expected = (chosen * routing.weight_SK[..., None]).sum(1).view(2, 5, M)
    expected.backward(dy)
    for one, other in zip(ours, [expected, x2.grad, *(p.grad for p in module.parameters())], strict=True):
        torch.testing.assert_close(one, other)


class Replace(CallbackBase):
    def before_moe_start_hook(self, args: HookArgs) -> None:
        if args.context.direction == "forward":
            args.tensor = 2 * args.tensor


def test_callback_may_replace_tensor() -> None:
    modules = []
    for callbacks in ([Replace()], []):
        torch.manual_seed(0)
        modules.append(MOELayer(LinearGate(), SimpleOrder(), model_dim=M, callbacks=callbacks))
    x = torch.randn(7, M)
    torch.testing.assert_close(modules[0](x), modules[1](2 * x))


def check_over_ranks(rank: int, world: int) -> None:
    topology = Topology.from_sizes(world)
    module = MOELayer(LinearGate(), SimpleOrder(), model_dim=M, experts=Tanh(), topology=topology)
    x = torch.randn(5, M, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and module.experts.a.shape == (8 // world, M, H)
    every = all_gather_rows(topology.world, module.experts.a.detach(), [8 // world] * world)
    assert len({float(a.sum()) for a in every}) == 8  # no expert is initialized as a copy of another rank's

    class Unsaid(Tanh):
        def make_parameters(self, model_dim: int, place: Place) -> None:
            super().make_parameters(model_dim, place)
            del self.shardings["b"]

    with pytest.raises(ConfigError, match=r"Unsaid does not say how b is split over ep and esp"):
        MOELayer(LinearGate(), SimpleOrder(), model_dim=M, experts=Unsaid(), topology=topology)


def test_custom_experts_over_ranks(cluster: Cluster) -> None:
    cluster.run(2, check_over_ranks)
