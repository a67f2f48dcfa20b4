"""The forward that returns a plan's result once, and the blocks whose shared expert a plan may call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fusedmoe.layers.external_shared import CallingBlock, calling_block, can_offer, offer, set_result
from tests.cluster import Cluster

M = 4


class Experts(nn.Module):
    """Experts that look for their block, as an exchange does."""

    found: CallingBlock | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.found = calling_block(self)
        return 2 * x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shared_experts = Experts(), nn.Linear(M, M)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x)
        return y + self.shared_experts(x)


class SharedFirst(Block):
    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_experts(x)
        y: Tensor = self.experts(x) + shared
        return y


class Unshared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x)
        return y


def test_block_is_found_with_the_order_of_its_calls() -> None:
    for kind, is_first in ((Block, False), (SharedFirst, True)):
        block: Any = kind()
        nn.Sequential(block)(torch.randn(3, M))
        assert block.experts.found == CallingBlock(block, block.shared_experts, is_first)
    block = Unshared()
    block(torch.randn(3, M))
    assert block.experts.found is None
    block = Block()
    block.experts(torch.randn(3, M))  # not by the block
    assert block.experts.found is None
    block.forward = lambda x: Block.forward(block, x)  # another library's wrapper calls the block's own forward
    block(torch.randn(3, M))
    assert block.experts.found is not None


@pytest.mark.parametrize("original", [None, lambda x: 5 * x])
def test_result_is_returned_once_and_for_the_same_tokens(original: Callable[[Tensor], Tensor] | None) -> None:
    shared, x, y = nn.Linear(M, M), torch.randn(2, 3, M), torch.randn(6, M)
    if original is not None:
        shared.forward = original  # type: ignore[method-assign]
    block, own = CallingBlock(nn.Identity(), shared, False), shared(x)

    def called(given: Tensor, change: Callable[[], Any] = lambda: None) -> Tensor:
        set_result(block, x, y)
        change()
        result: Tensor = shared(given)
        assert vars(shared).get("forward") is original
        return result

    assert torch.equal(called(x), y.view(2, 3, M)) and torch.equal(shared(x), own)
    assert torch.equal(called(x.view(6, M)), y)
    assert torch.equal(called(x.clone()), own)
    assert torch.equal(called(x, lambda: x.mul_(1)), own)
    set_result(block, x, y)  # a block that does not call it
    offer(block, x)
    assert torch.equal(shared(x), own)
    set_result(block, x, None)
    assert torch.equal(shared(x), own)


def require_block_to_call(rank: int, world: int) -> None:
    x = torch.randn(3, M)
    assert can_offer(nn.Linear(M, M), x) and not can_offer(nn.Linear(M, M), x.t()[:M])
    hooked, replaced, viewed, split = (nn.Sequential(nn.Linear(M, M)) for _ in range(4))
    hooked[0].register_forward_hook(lambda *_: None)
    replaced[0].forward = lambda x: x
    weight = nn.Parameter(torch.zeros(M, M))
    del viewed[0].weight
    viewed[0].weight = weight.view(M, M)
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    split[0].weight = nn.Parameter(DTensor.from_local(torch.zeros(M, M), mesh, [Replicate()]))
    for module in (hooked, replaced, viewed, split):
        assert not can_offer(module, x)


def test_block_calls_wrapped_shared_experts(cluster: Cluster) -> None:
    cluster.run(2, require_block_to_call)
