"""The balance loss of each packed sequence, compared with the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusedmoe
from fusedmoe import ConfigError, RankError, Schedule
from fusedmoe.comm.topology import Topology
from fusedmoe.gates import DeepSeekV3, TopK
from fusedmoe.layers.moe import MoELayer
from tests.cluster import Cluster

M, H, E, K = 6, 5, 8, 2


def build(gate: Any = None, **options: Any) -> MoELayer:
    torch.manual_seed(3)
    gate = DeepSeekV3(E, K, aux={"balance": 0.5}) if gate is None else gate
    return MoELayer(M, gate, fusedmoe.experts.SwiGLU(H), dtype=torch.float64, **options)


def tokens(*shape: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, M, generator=generator, dtype=torch.float64)


def ends_of(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def reference(layer: MoELayer, sequences: list[Tensor]) -> Tensor:
    """DeepSeek-V3, eq. 17–20, for each sequence with tokens; returns the mean."""
    losses = []
    for x_TM in sequences:
        if len(x_TM):
            score_TE = (x_TM @ layer.gate.weight_EM.t()).sigmoid()
            chosen_TK = (score_TE + layer.gate.bias_E).topk(K).indices
            f_E = torch.nn.functional.one_hot(chosen_TK, E).sum((0, 1)).double() * (E / (K * len(x_TM)))
            losses.append((f_E * (score_TE / score_TE.sum(1, keepdim=True)).mean(0)).sum())
    return 0.5 * torch.stack(losses).mean()


def grads_of(layer: MoELayer, loss: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return (loss.detach(), *torch.autograd.grad(loss, [x, layer.gate.weight_EM]))


@pytest.mark.parametrize("lengths", [(3, 1, 7), (11,), (0, 4, 0, 0, 6, 1, 0), (1,) * 11], ids=str)
def test_packed_balance_loss_and_gradients_equal_definition(lengths: tuple[int, ...]) -> None:
    layer = build()
    with torch.no_grad():
        layer.gate.weight_EM.mul_(30)
        layer.gate.bias_E.uniform_(-0.2, 0.2)
    x = tokens(11).requires_grad_()
    for dtype in (torch.int32, torch.int64):
        layer(x, cu_seqlens=ends_of(*lengths, dtype=dtype))
        found = grads_of(layer, layer.aux_loss, x)
        wanted = grads_of(layer, reference(layer, list(x.split(lengths))), x)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_equal_packed_lengths_equal_fixed_length() -> None:
    fixed, packed = build(DeepSeekV3(E, K, sequence=4, aux={"balance": 0.5, "z": 0.1})), build()
    packed.gate.aux["z"] = 0.1
    x = tokens(3, 4).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y, wanted = fixed(x), fixed.aux_loss
    z, found = packed(x, cu_seqlens=ends_of(4, 4, 4)), packed.aux_loss
    assert torch.equal(y, z)
    torch.testing.assert_close(grads_of(packed, found, x), grads_of(fixed, wanted, x), rtol=1e-12, atol=1e-13)


def test_mask_excludes_padding_from_packed_sequences() -> None:
    layer, x = build(), tokens(2, 6).requires_grad_()
    mask = torch.tensor([[True, True, False, True, True, True], [True, False, False, False, True, False]])
    # Two sequences are all padding.
    lengths = (3, 4, 1, 2, 2)
    layer(x, mask, cu_seqlens=ends_of(*lengths))
    found = grads_of(layer, layer.aux_loss, x)
    split = zip(x.flatten(0, 1).split(lengths), mask.flatten().split(lengths), strict=True)
    parts = [part[real] for part, real in split]
    assert [len(part) for part in parts] == [2, 4, 0, 0, 1]
    torch.testing.assert_close(found, grads_of(layer, reference(layer, parts), x), rtol=1e-12, atol=1e-13)


def test_packed_loss_of_zero_tokens_is_zero() -> None:
    layer, x = build(), tokens(0).requires_grad_()
    for ends in (ends_of(), ends_of(0), ends_of(0, 0)):
        layer(x, cu_seqlens=ends)
        assert layer.aux_loss == 0 and layer.aux_loss.requires_grad
        layer.aux_loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_recomputes_equal_packed_loss(use_reentrant: bool) -> None:
    """The recomputed loss is equal even if another micro-batch's forward runs in between."""
    layer, x, ends = build(), tokens(11).requires_grad_(), ends_of(3, 1, 7)

    def run(x: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x, cu_seqlens=ends), layer.aux_loss

    def recompute(x: Tensor, ends: Tensor) -> Any:
        return checkpoint(run, x, ends, use_reentrant=use_reentrant)

    found = []
    for call in (run, recompute):
        y, aux = call(x, ends)
        layer(tokens(4), cu_seqlens=ends_of(2, 2))
        layer.zero_grad()
        x.grad = None
        (y.square().sum() + aux).backward()
        assert x.grad is not None
        found.append([aux.detach(), x.grad.clone(), layer.gate.weight_EM.grad.clone()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)


def test_packed_sequences_in_compiled_layer() -> None:
    layer, x = build(), tokens(11).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ((3, 1, 7), (0, 10, 1)):
        compiled(x, cu_seqlens=ends_of(*lengths))
        found = grads_of(layer, layer.aux_loss, x)
        torch.testing.assert_close(found, grads_of(layer, reference(layer, list(x.split(lengths))), x))
    with pytest.raises(RuntimeError, match="cu_seqlens must ascend"):
        compiled(x, cu_seqlens=ends_of(3, 1, 6))


def test_replay_with_packed_sequences() -> None:
    layer, x, ends = build(), tokens(11), ends_of(3, 8)
    with fusedmoe.routing.record(layer) as recorded:
        layer(x, cu_seqlens=ends)
    wanted = layer.aux_loss
    with fusedmoe.routing.replay(layer, recorded):
        layer(x, cu_seqlens=ends)
    torch.testing.assert_close(layer.aux_loss, wanted)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (ends_of(3, 7), r"from 0 to the number of tokens, 11; got \[0, 3, 10\] that ends with 10"),
        (ends_of(3, 9), "ends with 12"),
        (torch.tensor([1, 11]), r"got \[1, 11\]"),
        (torch.tensor([0, 5, 4, 11]), r"got \[0, 5, 4, 11\]"),
        (torch.tensor([0, 11], dtype=torch.int16), "torch.int16"),
        (torch.tensor([0.0, 11.0]), "torch.float32"),
        (torch.tensor([[0, 11]]), r"\[1, 2\]$"),
        (torch.tensor([], dtype=torch.int64), r"int64 \[0\]"),
        (torch.tensor([0, 11], device="meta"), "on meta"),
        ([0, 11], "got list"),
    ],
)
def test_invalid_cu_seqlens_are_rejected(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build()(tokens(11), cu_seqlens=given)


def test_gates_without_sequence_loss_are_rejected() -> None:
    class Own(DeepSeekV3):
        def choose(self, *scores: Tensor) -> Any:
            return super().choose(*scores)

    for gate, text in (
        (TopK(E, K), "TopK gate has no loss per sequence"),
        (Own(E, K), "Own gate has no loss per sequence"),
        (DeepSeekV3(E, K, sequence=11, aux={"balance": 1.0}), "per 11 tokens; create the gate without"),
    ):
        with pytest.raises(ConfigError, match=text):
            build(gate)(tokens(11), cu_seqlens=ends_of(4, 7))
    # Without the loss, sequence boundaries have no effect.
    layer = build(DeepSeekV3(E, K))
    layer(tokens(11), cu_seqlens=ends_of(4, 7))
    assert layer.aux_loss == 0


LENGTHS = ((3, 1, 7), (), (0, 2), (5,))


def _compare_over_ranks(rank: int, topology: Topology, options: dict[str, Any]) -> None:
    layer = build(topology=topology, **options)
    lengths = LENGTHS[rank]
    x = tokens(sum(lengths), seed=rank).requires_grad_()
    y = layer(x, cu_seqlens=ends_of(*lengths))
    (y.sum() * 0 + layer.aux_loss).backward()
    found = (layer.aux_loss.detach(), x.grad, layer.gate.weight_EM.grad)
    if len(x):
        wanted = grads_of(layer, reference(layer, list(x.split(lengths))), x)
        if options.get("mp_input") == "split":  # summands of the mean over the MP group
            wanted = tuple(value / topology.mp.size for value in wanted)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    else:
        assert found[0] == 0


def _experts_over_ranks(rank: int, world: int, schedule: Any) -> None:
    _compare_over_ranks(rank, Topology.from_sizes(world), {"schedule": schedule})


@pytest.mark.parametrize("schedule", ["off", Schedule("fsmoe", (2, 3))], ids=str)
def test_packed_loss_with_expert_parallelism(cluster: Cluster, schedule: Any) -> None:
    cluster.run(2, _experts_over_ranks, schedule)


def _split_over_mp(rank: int, world: int) -> None:
    _compare_over_ranks(rank, Topology.from_sizes(mp=world), {"mp_input": "split"})


def test_packed_loss_with_split_mp_input(cluster: Cluster) -> None:
    cluster.run(2, _split_over_mp)


def _check_invalid_on_one_rank(rank: int, world: int) -> None:
    layer = build(topology=Topology.from_sizes(world))
    with pytest.raises(RankError, match=r"rank 1.* MoELayer: cu_seqlens must ascend .* got \[0, 4\]"):
        layer(tokens(5), cu_seqlens=ends_of(5 - rank))
    for mp_input in ("replicated", "partial"):
        layer = build(topology=Topology.from_sizes(mp=world), mp_input=mp_input)
        with pytest.raises(RankError, match="MP ranks route slices of the same tokens"):
            layer(tokens(6), cu_seqlens=ends_of(3, 3))


def test_invalid_cu_seqlens_on_one_rank_raise_on_all(cluster: Cluster) -> None:
    cluster.run(2, _check_invalid_on_one_rank)


def _check_compiled_over_ranks(rank: int, world: int) -> None:
    torch._dynamo.reset()
    layer = build(topology=Topology.from_sizes(world))
    compiled, ends = torch.compile(layer, backend="eager"), ends_of(2, 3)
    x = tokens(5, seed=rank).requires_grad_()
    (compiled(x, cu_seqlens=ends).sum() * 0 + layer.aux_loss).backward()
    found = (layer.aux_loss.detach(), x.grad, layer.gate.weight_EM.grad)
    torch.testing.assert_close(found, grads_of(layer, reference(layer, list(x.split((2, 3)))), x))
    with pytest.raises(RankError, match="cu_seqlens must ascend"):
        compiled(x, cu_seqlens=ends[: 3 - rank])


def test_compiled_packed_layer_over_ranks_runs_eagerly(cluster: Cluster) -> None:
    cluster.run(2, _check_compiled_over_ranks)
