"""Routing, dispatch and kernels as functions that clients call directly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.tutel import moe, net
from fusedmoe.tutel.impls.fast_dispatch import GatingDecoder, GatingEncoder, get_dispatch_count
from fusedmoe.tutel.impls.jit_compiler import JitCompiler
from fusedmoe.tutel.impls.overlap import a2a_ffn_overlap_forward
from fusedmoe.tutel.jit import create_cuda_kernel
from fusedmoe.tutel.jit_kernels import sparse
from tests.cluster import Cluster
from tests.tutel.cases import draw

T, E, D = 10, 4, 6


def routed(capacity_factor: float = 0.5) -> tuple:
    return moe.extract_critical(draw((T, E), 3).softmax(1), 2, capacity_factor=capacity_factor)[0]


def encode_reference(critical: tuple, data: Tensor, weighted: bool) -> Tensor:
    """The definition of the encoder, row by row."""
    rows = torch.zeros(E, critical[4], data.shape[1], dtype=data.dtype)
    for index, location, gate in zip(*critical[1:4], strict=True):
        for t in range(T):
            if location[t] < critical[4]:
                rows[index[t], location[t]] = data[t] * (gate[t] if weighted else 1)
    return rows


@pytest.mark.parametrize("factor", [0.5, 2.0])  # tokens without a slot, slots without a token
def test_routing_accessors_equal_definition(factor: float) -> None:
    critical = routed(factor)
    chosen, counts = moe.get_topk_selection(critical)
    assert torch.equal(chosen, torch.stack(critical[1], 1).long()) and counts is get_dispatch_count(critical)
    assert torch.equal(counts.long(), torch.bincount(chosen.flatten().long(), minlength=E))
    tokens, choices = (moe.get_reversed_sample_ids(critical, kind) for kind in ("sample_id", "top_id"))
    assert tokens.shape == choices.shape == (E, critical[4]) and bool((tokens < 0).any()) == (factor > 1)
    for e in range(E):
        for place in range(critical[4]):
            t, k = int(tokens[e, place]), int(choices[e, place])
            assert t == k == -1 or (int(critical[1][k][t]), int(critical[2][k][t])) == (e, place)
    assert int((tokens >= 0).sum()) == sum(int((location < critical[4]).sum()) for location in critical[2])
    with pytest.raises(ConfigError, match="choose sample_id or top_id"):
        moe.get_reversed_sample_ids(critical, "rank")


def test_encoder_and_decoder_equal_definition() -> None:
    critical, data = routed(), draw((T, D), 4)
    dispatcher = moe.fast_dispatcher(E, 0, D, data.dtype)
    dispatcher.update(*critical[1:4], capacity=critical[4])
    plain, weighted = encode_reference(critical, data, False), encode_reference(critical, data, True)
    torch.testing.assert_close(GatingEncoder.apply(dispatcher, data).view(plain.shape), plain)
    torch.testing.assert_close(GatingEncoder.apply(dispatcher, data, *critical[3]).view(plain.shape), weighted)
    rows = draw((E * critical[4], D), 5)
    # Decoding is the adjoint of encoding.
    for gates in ((), critical[3]):
        there = GatingEncoder.apply(dispatcher, data, *gates)
        back = GatingDecoder.apply(dispatcher, rows, *gates)
        torch.testing.assert_close((there * rows).sum(), (back * data).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sparse_kernels_equal_definition(dtype: torch.dtype) -> None:
    critical, data = routed(), draw((T, D), 4).to(dtype)
    C = critical[4]
    index, location, gate = critical[1][0].clone(), critical[2][0], critical[3][0].to(dtype)
    index[3] = -1
    expected = torch.zeros(E, C, D, dtype=dtype)
    kept = [t for t in range(T) if index[t] >= 0 and location[t] < C]
    assert 0 < len(kept) < T - 1
    for t in kept:
        expected[index[t], location[t]] = gate[t] * data[t]
    rows = torch.zeros(E * C, D, dtype=dtype)
    forward = sparse.create_forward(dtype, is_cuda=False)
    for times in (1, 2):  # the second choice adds to the remainder of the first
        forward(gate, index, location, data, rows, extra=[T, D, C])
        torch.testing.assert_close(rows.view(E, C, D), times * expected)
    rows = draw((E * C, D), 5).to(dtype)
    tokens, dgate = torch.full((T, D), torch.nan, dtype=dtype), torch.full((T,), torch.nan, dtype=dtype)
    sparse.create_backward_data(dtype, is_cuda=False)(gate, index, location, tokens, rows, extra=[T, D, C])
    sparse.create_backward_gate(dtype, is_cuda=False)(dgate, index, location, data, rows, extra=[T, D, C])
    for t in range(T):
        row = rows[int(index[t]) * C + int(location[t])] if t in kept else torch.zeros(D, dtype=dtype)
        torch.testing.assert_close(tokens[t], gate[t] * row)
        torch.testing.assert_close(dgate[t], data[t] @ row)


def test_fast_cumsum_sub_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.tensor([[1, 0], [1, 1], [0, 1]])
    for kind in ("0", "1"):
        monkeypatch.setenv("FAST_CUMSUM", kind)
        assert moe.fast_cumsum_sub_one(ones).tolist() == [[0, -1], [1, 0], [1, 1]]
    for wrong in (lambda: moe.fast_cumsum_sub_one(ones, 1), lambda: moe.fast_cumsum_sub_one(ones[0])):
        with pytest.raises(ConfigError, match="along dimension 0"):
            wrong()


SOURCE = """
extern "C" __global__ HEAD(float* x, int n) {
  // [thread_extent] blockIdx.x = 3
  // [thread_extent] threadIdx.x = @N@
}
"""


HEADS = ["void scale", "__launch_bounds__(@N@) void scale", "void __launch_bounds__(@N@, 2)\n scale ", "static void a"]


@pytest.mark.parametrize("head", HEADS)
def test_cuda_kernel_from_source(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, name = SOURCE.replace("HEAD", head), head.split()[-1]
    with pytest.raises(ConfigError, match="no `__global__ void name"):
        JitCompiler.create_raw("int main() {}")
    kernel = create_cuda_kernel(source, {"N": 64})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"{name} is CUDA source and needs a CUDA GPU"):
        kernel(torch.ones(3), extra=[3])
    made, calls = [], []

    def compile_kernel(source: str, name: str) -> Callable[..., None]:
        made.append((source, name))
        return lambda **more: calls.append(more)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fusedmoe.tutel.impls.jit_compiler.compile_cuda", compile_kernel)
    x = torch.ones(3)
    for _ in range(2):
        kernel(x, extra=[3])
    assert made == [(source.replace("@N@", "64"), name)]  # compiled once
    assert calls == [{"grid": (3, 1, 1), "block": (64, 1, 1), "args": [x, 3]}] * 2


def check_overlap_by_degree(rank: int, world: int) -> None:
    x = draw((E, 6, D), 3 + rank).requires_grad_()
    results = []
    for degree, use_2dh in ((1, False), (3, False), (2, True)):
        x.grad = None
        y = a2a_ffn_overlap_forward(x, lambda rows: F.relu(rows) * (rank + 1), degree, use_2dh, None)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    owner = torch.arange(1, world + 1).repeat_interleave(E // world)[:, None, None]
    expected = F.relu(x.detach()) * owner
    for y, dx in results:
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(dx, 2 * expected * owner)
    with pytest.raises(ConfigError, match="4 equal chunks"):
        a2a_ffn_overlap_forward(x, F.relu, 4, False, None)
    net.barrier()


def test_manual_all_to_all_ffn_overlap(cluster: Cluster) -> None:
    cluster.run(2, check_overlap_by_degree)
