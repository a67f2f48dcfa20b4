"""The dispatcher as clients call it, compared with Tutel's kernels token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.tutel import moe
from fusedmoe.tutel.impls.fast_dispatch import GatingDecoder, GatingEncoder
from fusedmoe.tutel.jit_kernels import sparse
from tests.tutel.cases import draw

T, E, D, C = 11, 4, 6, 3
Choices = list[Tensor]


def encode_reference(data: Tensor, index: Choices, location: Choices, gate: Choices, C: int = C) -> Tensor:
    """rows[place] += gate · token: tokens with the same place add up."""
    rows = torch.zeros(E * C, data.shape[1], dtype=torch.float64)
    for i, p, g in zip(index, location, gate, strict=True):
        for t in range(len(data)):
            if i[t] >= 0 and p[t] < C:
                rows[int(i[t]) * C + int(p[t])] += g[t].double() * data[t].double()
    return rows


def decode_reference(rows: Tensor, index: Choices, location: Choices, gate: Choices, C: int = C) -> Tensor:
    """token = Σ gate · rows[place]."""
    data = torch.zeros(len(index[0]), rows.shape[1], dtype=torch.float64)
    for i, p, g in zip(index, location, gate, strict=True):
        for t in range(len(data)):
            if i[t] >= 0 and p[t] < C:
                data[t] += g[t].double() * rows[int(i[t]) * C + int(p[t])].double()
    return data


def choices(seed: int) -> tuple[Choices, Choices, Choices]:
    """Two choices per token; some have no expert (index -1), no slot, or a slot that another token uses."""
    g = torch.Generator().manual_seed(seed)
    index = [torch.randint(-1, E, (T,), generator=g) for _ in range(2)]
    location = [torch.randint(0, C + 2, (T,), generator=g) for _ in range(2)]
    return index, location, [torch.rand(T, generator=g, dtype=torch.float64) for _ in range(2)]


def as_column(choice: Choices) -> Choices:
    return [t[:, None] for t in choice]


def as_strided(choice: Choices) -> Choices:
    return list(torch.stack(choice, 1).unbind(1))


FORMS: dict[str, Callable[[Choices], Any]] = {
    "flat": list,
    "column": as_column,
    "strided": as_strided,
    "tuple": tuple,
    "stacked": torch.stack,
    "one of each": lambda choice: [choice[0], choice[1][:, None]],
    "int32": lambda choice: [t if t.is_floating_point() else t.int() for t in choice],
    "int16": lambda choice: [t if t.is_floating_point() else t.short() for t in choice],
}


@pytest.mark.parametrize("postscore", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_dispatcher_accepts_all_layouts_of_choices(form: str, postscore: bool) -> None:
    index, location, gate = choices(len(form))
    data, rows = draw((T, D), 4).requires_grad_(), draw((E * C, D), 5).requires_grad_()
    gate = [g.requires_grad_() for g in gate]
    dispatcher = moe.fast_dispatcher(E, C, D, torch.float64)
    dispatcher.update(*(FORMS[form](choice) for choice in (index, location, gate)), capacity=C, is_postscore=postscore)
    one = [torch.ones(T)] * 2
    expected = (
        encode_reference(data, index, location, one if postscore else gate),
        decode_reference(rows, index, location, gate if postscore else one),
    )
    found = (dispatcher.encode(data), dispatcher.decode(rows))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    leaves = [data, rows, *gate]
    grads = [torch.autograd.grad((a.square().sum() + b.square().sum()), leaves) for a, b in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capacity", [0, None, torch.tensor(0), 5, torch.tensor(5), np.int64(5)])
def test_capacity_accepts_ints_and_tensors(capacity: Any) -> None:
    index, location, gate = choices(1)
    dispatcher = moe.fast_dispatcher(torch.tensor(E), torch.tensor(C), D, torch.float64)
    dispatcher.update(index, location, gate, capacity=capacity)
    expected = C if not capacity else 5
    assert dispatcher.capacity == expected and type(dispatcher.capacity) is int
    data = draw((T, D), 4)
    torch.testing.assert_close(
        dispatcher.encode(data), encode_reference(data, index, location, [torch.ones(T)] * 2, expected)
    )


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("own", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_results_have_dispatcher_dtype(own: torch.dtype, given: torch.dtype) -> None:
    index, location, gate = choices(2)
    data, rows = draw((T, D), 4).to(given), draw((E * C, D), 5).to(given)
    gate = [g.float() for g in gate]  # the router's dtype, for any data dtype
    eps = max(torch.finfo(dtype).eps for dtype in (own, given, torch.float32))
    for postscore in (True, False):
        dispatcher = moe.fast_dispatcher(E, C, D, own)
        dispatcher.update(index, location, gate, C, postscore)
        one = [torch.ones(T)] * 2
        expected = (
            encode_reference(data, index, location, one if postscore else gate),
            decode_reference(rows, index, location, gate if postscore else one),
        )
        found = (dispatcher.encode(data), dispatcher.decode(rows))
        assert [t.dtype for t in found] == [own, own]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=8 * eps, atol=8 * eps)
        # The functions below it keep the data's dtype, as Tutel's do, and leave the dispatcher unchanged.
        for gates in ((), gate):
            assert GatingEncoder.apply(dispatcher, data, *gates).dtype == given
            assert GatingDecoder.apply(dispatcher, rows, *gates).dtype == given
        assert torch.equal(dispatcher.encode(data), found[0]) and torch.equal(dispatcher.decode(rows), found[1])


def test_encode_and_decode_accept_leading_dimensions() -> None:
    scores = draw((12, E), 3).softmax(1)
    critical, _ = moe.extract_critical(scores, np.int64(2))
    data = draw((12, D), 4)
    rows = moe.fast_encode(data, critical)
    assert torch.equal(moe.fast_encode(data.view(3, 4, D), critical), rows)
    assert torch.equal(moe.fast_decode(rows.view(2, 2, -1, D), critical), moe.fast_decode(rows, critical))
    assert torch.equal(moe.fast_decode(rows.flatten(0, 1), critical), moe.fast_decode(rows, critical))


def test_top1_client_with_dropped_tokens() -> None:
    """A client whose gate computes in float32 for a bfloat16 model, marks dropped tokens by -1, and counts with
    tensors.
    """
    data, dispatcher = draw((T, D), 4).bfloat16(), None
    for step, factor in enumerate((0.5, 1.0)):  # as in evaluation, C grows
        gates = draw((T, E), 8 + step).float().softmax(1)
        capacity = torch.ceil(torch.tensor(T / E) * torch.tensor(factor)).to(torch.int64)
        index = gates.argmax(1)
        mask = F.one_hot(index, E)
        mask = mask * (mask.cumsum(0) - 1 < capacity)
        index = torch.min(index, mask.sum(1) * E - 1)
        assert (index == -1).any()
        location = (moe.fast_cumsum_sub_one(mask) * mask).sum(1)
        gate = (gates * mask).sum(1)
        if dispatcher is None:
            dispatcher = moe.fast_dispatcher(E, capacity, D, dispatch_dtype=data.dtype)
        dispatcher.update([index], [location], [gate], capacity=capacity)
        rows = dispatcher.encode(data)
        C = int(capacity)
        assert torch.equal(rows.double(), encode_reference(data, [index], [location], [torch.ones(T)], C))
        y = dispatcher.decode(rows.view(E, -1, D).view(E * capacity, D))
        assert y.dtype == data.dtype
        torch.testing.assert_close(y.double(), data.double() * gate[:, None].double(), rtol=1e-2, atol=0)


def test_top2_client_with_padding() -> None:
    """A client that keeps a dimension (`argmax(keepdim=True)`), and masks padding tokens without changing the indices.

    A padding token then has its expert's place 0, which another token also has, and weight zero.
    """
    data, gates = draw((T, D), 4), draw((T, E), 8).softmax(1)
    real = (torch.arange(T) < T - 3)[:, None]
    index1 = gates.argmax(1, keepdim=True)
    mask1 = F.one_hot(index1[:, 0], E)
    index2 = gates.masked_fill(mask1.bool(), -torch.inf).argmax(1, keepdim=True)
    mask2 = F.one_hot(index2[:, 0], E)
    mask1, mask2 = mask1 * real, mask2 * real
    location1, location2 = mask1.cumsum(0) - 1, mask2.cumsum(0) - 1 + mask1.sum(0, keepdim=True)
    location = [(location1 * mask1).sum(1), (location2 * mask2).sum(1)]
    gate = [(gates * mask1).sum(1), (gates * mask2).sum(1)]
    C = 2 * -(-T // E)
    dispatcher = moe.fast_dispatcher(E, C, D, dispatch_dtype=data.dtype)
    dispatcher.update([index1, index2], location, gate, capacity=C)
    rows = dispatcher.encode(data)
    flat = [index1[:, 0], index2[:, 0]]
    expected = encode_reference(data, flat, location, [torch.ones(T)] * 2, C)
    torch.testing.assert_close(rows, expected)
    first = int(index1[-1])
    own = [t for t in range(T) if real[t] and first in (int(index1[t]), int(index2[t]))]
    assert not any(torch.equal(rows[first * C], data[t]) for t in own)  # it holds more than one
    torch.testing.assert_close(dispatcher.decode(rows), decode_reference(expected, flat, location, gate, C))


def test_many_tokens_in_one_slot_sum_without_rounding() -> None:
    """Padding of a batch: sequential sums in bfloat16 would stop at 256."""
    index, location = torch.zeros(600, dtype=torch.long), torch.zeros(600, dtype=torch.long)
    dispatcher = moe.fast_dispatcher(E, C, D, torch.bfloat16)
    dispatcher.update([index], [location], [torch.zeros(600)], capacity=C)
    rows = dispatcher.encode(torch.ones(600, D, dtype=torch.bfloat16))
    assert bool((rows[0] == 600).all()) and not rows[1:].any()


def test_dispatcher_rejects_inconsistent_choices() -> None:
    index, location, gate = choices(1)
    dispatcher = moe.fast_dispatcher(E, C, D, torch.float64)
    dispatcher.update(index, location, gate)
    before = dispatcher.encode(draw((T, D), 4))
    for wrong in (
        (index, location[:1], gate),
        (index, location, gate[:1]),
        (index, location, [gate[0], gate[1][1:]]),
        ([torch.stack(index, 1)], location[:1], gate[:1]),
        ([], [], []),
    ):
        with pytest.raises(ConfigError, match="one tensor of each for every choice"):
            dispatcher.update(*wrong, capacity=2 * C, is_postscore=False)
    with pytest.raises(ConfigError, match=f"expert {E}, and there are {E}"):
        dispatcher.update([torch.full((T,), E)], [torch.zeros(T)], gate[:1])
    assert torch.equal(dispatcher.encode(draw((T, D), 4)), before)  # as it was
    for rows in (T - 1, T + 1):
        with pytest.raises(ConfigError, match=rf"encode got {rows} rows.*one for each of {T} tokens"):
            dispatcher.encode(draw((rows, D), 4))
    with pytest.raises(ConfigError, match=rf"decode got {T} rows.*one for each of {E * C} slots"):
        dispatcher.decode(draw((T, D), 4))


@pytest.mark.parametrize("top_k", [-2, 0, torch.tensor(-1)])
def test_extract_critical_rejects_invalid_top_k_and_shape(top_k: Any) -> None:
    with pytest.raises(ConfigError, match="choose a number from 1 on"):
        moe.extract_critical(draw((T, E), 3).softmax(1), top_k)
    with pytest.raises(ConfigError, match="flatten the tokens"):
        moe.extract_critical(draw((2, T, E), 3).softmax(2), 2)


def test_tensor_and_numpy_scalars_route_equally() -> None:
    scores = draw((T, E), 3).softmax(1)
    plain, loss = moe.extract_critical(scores, 2, capacity_factor=1.25)
    for k in (torch.tensor(2), np.int32(2)):
        other, other_loss = moe.extract_critical(scores.t().contiguous().t(), k, capacity_factor=torch.tensor(1.25))
        assert other.capacity == plain.capacity and torch.equal(loss, other_loss)
        assert all(map(torch.equal, other.indices + other.gates, plain.indices + plain.gates))
    assert moe.get_topk_selection(plain)[0].dtype == torch.int64
    assert moe.get_reversed_sample_ids(plain).dtype == torch.int32


def test_sparse_kernels_accept_columns_and_leading_dimensions() -> None:
    """Indices and locations as [T, 1] and [T], equal gates twice, tokens in leading dimensions."""
    index, location, gate = (choice[0] for choice in choices(3))
    data, rows = draw((T, D), 4), draw((E * C, D), 5)
    extra = [T, D, C]
    found = torch.zeros(E, C, D, dtype=torch.float64)
    double = gate[:, None].repeat(1, 2)
    sparse.create_forward(data.dtype, is_cuda=False)(double, index[:, None], location, data[None], found, extra=extra)
    torch.testing.assert_close(found.view(E * C, D), encode_reference(data, [index], [location], [gate]))
    tokens = torch.full((1, T, D), torch.nan, dtype=torch.float64)
    sparse.create_backward_data(data.dtype, is_cuda=False)(double, index, location[:, None], tokens, rows, extra=extra)
    torch.testing.assert_close(tokens[0], decode_reference(rows, [index], [location], [gate]))
    dgate = torch.full((T, 1), torch.nan, dtype=torch.float64)
    sparse.create_backward_gate(data.dtype, is_cuda=False)(dgate, index[:, None], location, data, rows, extra=extra)
    one = decode_reference(rows, [index], [location], [torch.ones(T)])
    torch.testing.assert_close(dgate[:, 0], (one * data).sum(1))
