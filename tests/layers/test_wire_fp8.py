"""`WireFp8` rounds only the sent rows, in one process and between ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedmoe
from fusedmoe.comm.topology import Topology
from fusedmoe.experts.networks import SwiGLU
from fusedmoe.hooks import HookContext, Hooks, WireFp8
from fusedmoe.kernels.wire import define_pack_fp8, define_unpack_fp8
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster

M = 24


class OnWire(Hooks):
    """Inspect the tensors sent by the hooks before it; the list holds (dtype, width, direction)."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.dtype, int, str]] = []

    def before_dispatch(self, rows: Tensor, context: HookContext) -> None:
        self.seen.append((rows.dtype, rows.shape[1], context.direction))

    before_combine = before_dispatch


class Rounded(Hooks):
    """WireFp8's effect on values, by definition."""

    def before_dispatch(self, rows: Tensor, context: HookContext) -> Tensor:
        return define_unpack_fp8(define_pack_fp8(rows), rows.dtype)

    before_combine = before_dispatch


def run(hooks: list[Hooks], topology: Topology | None, dtype: torch.dtype, tokens: int) -> tuple[Tensor, ...]:
    """Return y and the gradients of x and of the router."""
    torch.manual_seed(1)
    gate = fusedmoe.gates.TopK(experts=4, k=2)
    layer = MoELayer(M, gate, SwiGLU(16), topology=topology, hooks=hooks, dtype=dtype)
    torch.manual_seed(2 if topology is None else 2 + topology.rank)
    x_SM = torch.randn(tokens, M).to(dtype).requires_grad_()
    y_SM = layer(x_SM)
    parameters = [p for p in gate.parameters()]
    return y_SM, *torch.autograd.grad(y_SM, [x_SM, *parameters], torch.randn(y_SM.shape).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 33])
def test_wire_fp8_rounds_sent_rows_only(dtype: torch.dtype, tokens: int) -> None:
    wire = OnWire()
    got = run([WireFp8(), wire], None, dtype, tokens)
    assert wire.seen == [(torch.uint8, M + 4, direction) for direction in ("forward",) * 2 + ("backward",) * 2]
    for value, expected in zip(got, run([Rounded()], None, dtype, tokens), strict=True):
        assert value.dtype == expected.dtype and torch.equal(value, expected)


def check_between_ranks(rank: int, world: int) -> None:
    topology = Topology.from_sizes(2)
    tokens = 30 + 5 * rank
    got, exact = (run(hooks, topology, torch.float32, tokens) for hooks in ([WireFp8()], []))
    for value, expected in zip(got, exact, strict=True):
        error = float((value - expected).norm() / expected.norm())
        assert 0.005 < error < 0.1, error


def test_wire_fp8_between_ranks_is_close_to_exact(cluster: Cluster) -> None:
    cluster.run(2, check_between_ranks)
