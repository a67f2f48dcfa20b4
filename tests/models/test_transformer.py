"""Model outputs compared with plain formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.models.transformer import IGNORE, Transformer
from fusedmoe.runtime.recorder import Recorder

SMALL = ModelConfig(layers=2, model_dim=16, heads=4, hidden=8, experts=4, k=2, capacity_factor=None, seq_len=7, batch=2)


def test_loss_is_mean_over_non_ignored_targets() -> None:
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
def test_causal_logits_ignore_future_tokens(positions: str) -> None:
    model = Transformer(replace(SMALL, positions=positions), dtype=torch.float64)
    tokens = torch.randint(256, (2, 7))
    changed = tokens.clone()
    changed[:, 4:] = torch.randint(256, (2, 3))
    before, after = (model.logits(t) for t in (tokens, changed))
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-10, atol=1e-10)
    assert (before[:, 4:] - after[:, 4:]).abs().max() > 1e-3


def test_sequence_longer_than_learned_positions_raises() -> None:
    model = Transformer(replace(SMALL, positions="learned"))
    with pytest.raises(ConfigError, match="7 learned positions"):
        model.logits(torch.zeros(1, 8, dtype=torch.long))


def test_hash_gate_routes_by_byte() -> None:
    model = Transformer(replace(SMALL, gate="hash", k=1))
    tokens = torch.full((2, 7), 65)
    model.logits(tokens)
    for layer in model.moe_layers():
        assert sorted(layer.load_E.tolist()) == [0, 0, 0, 14]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_depend_only_on_seed(dtype: torch.dtype) -> None:
    made = []
    for kind in (dtype, torch.float32):
        torch.manual_seed(3)
        made.append(Transformer(SMALL, dtype=kind))
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=0)


def test_autocast_loss_is_close_to_float32() -> None:
    model = Transformer(SMALL)
    tokens, targets = torch.randint(256, (2, 2, 7))
    expected = model(tokens, targets).nats
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(tokens, targets).nats
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0)
    actual.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_recording_shows_both_passes_and_preserves_loss() -> None:
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
