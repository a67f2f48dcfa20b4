"""What a model computes, against plain formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.models.attention import Attention
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.feedforward import DenseFeedForward
from fusedmoe.models.rotary import rotary_angles, rotate
from fusedmoe.models.sequence import TokenSplit
from fusedmoe.models.transformer import IGNORE, Transformer
from fusedmoe.runtime.recorder import Recorder

SMALL = ModelConfig(layers=2, model_dim=16, heads=4, hidden=8, experts=4, k=2, capacity_factor=None, seq_len=7, batch=2)


def whole(length: int) -> TokenSplit:
    return TokenSplit.of(length, Topology())


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_the_formula(objective: str, kv_heads: int) -> None:
    config = replace(SMALL, objective=objective, kv_heads=kv_heads, positions="learned", bias=True)
    attention = Attention(config, Topology(), 0, dtype=torch.float64)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x_BLM = torch.randn(3, 5, 16, dtype=torch.float64)
    actual = attention(x_BLM, whole(5))

    assert attention.qkv_bias is not None and attention.out_bias is not None
    sharing, head = 4 // kv_heads, 4
    weight = attention.qkv_weight.view(kv_heads, sharing + 2, head, 16)
    bias = attention.qkv_bias.view(kv_heads, sharing + 2, head)
    expected = attention.out_bias.expand(3, 5, 16).clone()
    for h in range(4):
        group, own = divmod(h, sharing)
        q, k, v = (x_BLM @ weight[group, i].T + bias[group, i] for i in (own, sharing, sharing + 1))
        score = q @ k.transpose(1, 2) / head**0.5
        if objective == "causal":
            score = score.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        expected += score.softmax(-1) @ v @ attention.out_weight[:, h * head : (h + 1) * head].T
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_rotation_depends_on_the_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    angles = rotary_angles(20, 8, torch.device("cpu"), torch.float64)
    scores = rotate(q.expand(1, 1, 20, 8), *angles)[0, 0] @ rotate(k.expand(1, 1, 20, 8), *angles)[0, 0].T
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert (scores[0] - scores[0, 0]).abs().max() > 1e-3


@pytest.mark.parametrize(("expert", "activation"), [("ffn", "gelu"), ("ffn", "geglu"), ("swiglu", "gelu")])
def test_dense_feed_forward_is_the_formula(expert: str, activation: str) -> None:
    config = replace(SMALL, expert=expert, activation=activation, bias=True)
    dense = DenseFeedForward(config, Topology(), dtype=torch.float64)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x_SM = torch.randn(6, 16, dtype=torch.float64)
    assert dense.up_bias is not None and dense.down_bias is not None
    if activation == "gelu" and expert == "ffn":
        mid = F.gelu(x_SM @ dense.up_weight.T + dense.up_bias)
    else:
        gate, up = (x_SM @ dense.up_weight[i].T + dense.up_bias[i] for i in (0, 1))
        mid = (F.silu if expert == "swiglu" else F.gelu)(gate) * up
    expected = mid @ dense.down_weight.T + dense.down_bias
    actual = dense(x_SM.view(2, 3, 16), whole(3)).flatten(0, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_loss_is_the_mean_over_the_targets_that_count() -> None:
    model = Transformer(replace(SMALL, objective="masked"), dtype=torch.float64)
    tokens, targets = torch.randint(256, (2, 2, 7))
    targets[torch.rand(2, 7) < 0.4] = IGNORE
    targets[0, 0] = 3
    loss = model(tokens, targets)
    kept = targets != IGNORE
    expected = F.cross_entropy(model.logits(tokens)[kept], targets[kept])
    torch.testing.assert_close(loss.nats, expected, rtol=1e-12, atol=0)
    assert loss.targets == int(kept.sum())
    torch.testing.assert_close(loss.aux, torch.stack([layer.aux_loss for layer in model.moe_layers()]).sum())


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_causal_model_does_not_see_the_future(positions: str) -> None:
    model = Transformer(replace(SMALL, positions=positions), dtype=torch.float64)
    tokens = torch.randint(256, (2, 7))
    changed = tokens.clone()
    changed[:, 4:] = torch.randint(256, (2, 3))
    before, after = (model.logits(t) for t in (tokens, changed))
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-10, atol=1e-10)
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-3


def test_learned_positions_end() -> None:
    model = Transformer(replace(SMALL, positions="learned"))
    with pytest.raises(ConfigError, match="7 positions"):
        model.logits(torch.zeros(1, 8, dtype=torch.long))


def test_hash_layers_route_by_the_byte() -> None:
    model = Transformer(replace(SMALL, gate="hash", k=1))
    tokens = torch.full((2, 7), 65)
    model.logits(tokens)
    for layer in model.moe_layers():
        assert sorted(layer.load_E.tolist()) == [0, 0, 0, 14]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_depend_on_the_seed_alone(dtype: torch.dtype) -> None:
    made = []
    for kind in (dtype, torch.float32):
        torch.manual_seed(3)
        made.append(Transformer(SMALL, dtype=kind))
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=0)


def test_autocast_stays_near_float32() -> None:
    model = Transformer(SMALL)
    tokens, targets = torch.randint(256, (2, 2, 7))
    expected = model(tokens, targets).nats
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(tokens, targets).nats
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0)
    actual.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_a_recorded_step_shows_both_passes_and_changes_nothing() -> None:
    model = Transformer(SMALL, dtype=torch.float64)
    tokens, targets = torch.randint(256, (2, 2, 7))
    losses: list[Tensor] = []
    recorder = Recorder()
    for each in (None, recorder):
        model.record(each)
        loss = model(tokens, targets).nats
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=0)
    spans = recorder.timeline().spans
    for phase in ("forward", "backward"):
        found = [span.layer for span in spans if span.kind == "attention" and span.phase == phase]
        assert found == ([0, 1] if phase == "forward" else [1, 0])
        assert sum(span.kind == "loss" and span.phase == phase for span in spans) == 1
    recorded = len(spans)
    model.record(None)
    model(tokens, targets).nats.backward()
    assert len(recorder.timeline().spans) == recorded
