"""Predictions of published steps: figures as printed, ranges, and models that match calculations by hand."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.reproduce import systems
from bench.reproduce.published import CASES, Range, prediction
from bench.reproduce.systems import MODELS, balanced, deduplication, forwarding, megatron_s, sonic_ms, titan_s
from fusedmoe.schedule.machines import MACHINES, slowest_rank_factor
from fusedmoe.schedule.workload import uniform_share
from tests.marks import slowly

PRINTED = {
    "titan-tokens": 7670,
    "titan-speedup": 1.27,
    "megatron-step": 69.9,
    "megatron-speedup": 1.135,
    "deepspeed-deduplication": 1.29,
    "deepspeed-deepep": 2.08,
    "sonic-pairs": 2.30,
    "sonic-tokens": 1.10,
    "sonic-speedup": 2.09,
    "ultraep-imbalance": "1.01–1.04",
    "ultraep-fraction": 0.943,
    "ultraep-speedup": 1.49,
}
RATES = {"flops": (6e14, 8e14), "network": (0.7, 0.95), "nvlink": (0.7, 0.95)}


def draw_rates() -> dict[str, float]:
    return {name: random.uniform(*ends) for name, ends in RATES.items()}


def test_published_figures_are_as_printed():
    assert {name: case.published for name, case in CASES.items()} == PRINTED
    # The ratios follow from further printed figures.
    ratios = {"titan-speedup": 9775 / 7670, "megatron-speedup": 69.906047 / 61.575051}
    ratios |= {"deepspeed-deepep": 99.72 / 48.02, "sonic-speedup": 2.30 / 1.10}
    for name, ratio in ratios.items():
        assert CASES[name].published == pytest.approx(ratio, rel=0.005)


LONGER = [name for name in CASES if name.startswith(("ultraep", "megatron"))]


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in LONGER), *slowly(*LONGER)])
def test_predictions_are_deterministic_and_ranges_contain_middle(name):
    first = prediction(name)
    balanced.cache_clear()
    deduplication.cache_clear()
    assert prediction(name) == first
    assert first.low <= first.middle <= first.high
    for condition in CASES[name].unknown.values():
        assert isinstance(condition, Range) and condition.low <= condition.middle <= condition.high


def test_unknown_case_is_rejected():
    with pytest.raises(ValueError, match="no case 'titan'; expected one of titan-tokens"):
        prediction("titan")


def test_ranges_of_rates_are_those_of_the_machine():
    machine = MACHINES["dgx-h100"]
    known = {"flops": machine.flops, "overlapped": machine.computes_beside}
    known |= {"network": machine.inter.reached, "nvlink": machine.intra.reached}
    for case in CASES.values():
        for name in known.keys() & case.unknown.keys():
            assert case.unknown[name] == Range.of(known[name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("DeepSeek-V3 16B", 15.7),
        ("Qwen3-30B-A3B", 30.5),
        ("GLM-4.5-Air", 106),
        ("Qwen3-235B-A22B", 235),
        ("DeepSeek-V3", 671),
    ],
)
def test_models_have_their_published_size(name, billions):
    """All weights but those of embeddings and of layers without experts, which are at most 4%."""
    model = MODELS[name]
    mlp = 3 * model.model_dim * (model.experts * model.hidden + model.shared_hidden)
    assert 0.96 * billions < model.layers * (model.attention + mlp) / 1e9 < billions


def test_one_chunk_takes_the_sum_of_its_parts():
    """Products at the machine's rate, two copies each way of all rows, and four all-to-alls in each of 26 layers."""
    rates, tokens = draw_rates(), 4096 * 4
    slow, rows = slowest_rank_factor(32, 0.02), 6 * tokens
    attention = 2 * tokens * (2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048)
    attention += tokens * 4096 * 16 * (192 + 128)
    mlps = 6 * 2048 * (1408 * rows + 2816 * tokens)
    flop = 3 * (26 * (attention + mlps) + attention + 6 * tokens * 2048 * 10944 + 2 * tokens * 2048 * 102400)
    copied = 26 * 2 * 2 * 2 * rows * 2048 * 2
    sent = 26 * 4 * rows * 2048 * 2
    expected_s = flop * slow / rates["flops"] + copied * slow / (3.03e12 / 2)
    expected_s += sent * 24 / 32 / (50e9 * rates["network"])
    for whole in (0.0, 1.0):
        step_s = tokens * titan_s(1, samples=4, whole=whole, overlapped=random.uniform(0.5, 1), **rates)
        assert step_s == pytest.approx(expected_s, rel=0.03)  # without start-up times
        assert step_s > expected_s


def test_full_recomputation_runs_two_forward_passes():
    rates = draw_rates()
    tokens = 16384
    seq_len = random.randrange(1024, 16384)
    rows = 8 * tokens
    attention = 2 * tokens * 2 * 128 * 2048 * (32 + 4) + tokens * seq_len * 32 * 256
    flop = 48 * 4 * (attention + 6 * 2048 * 768 * rows) + 3 * 2 * tokens * 2048 * 151936
    sent = 48 * 6 * rows * uniform_share(128, 8, 8) * 2048 * 2
    copied = 48 * 3 * 2 * rows * 2048 * 2
    slow = slowest_rank_factor(16, 0.02)
    expected_s = flop * slow / rates["flops"] + copied * slow / (3.03e12 / 2)
    expected_s += sent * 7 / 8 / (450e9 * rates["nvlink"])
    step_s = megatron_s(1, seq_len=seq_len, imbalance=1.0, overlapped=0.6, **rates)
    assert step_s == pytest.approx(16 * expected_s, rel=0.03)


def test_gain_shrinks_as_computation_slows_down_alongside_communication():
    rates = draw_rates()
    for step_s in (
        lambda degree, overlapped: titan_s(degree, samples=4, whole=1.0, overlapped=overlapped, **rates),
        lambda degree, overlapped: megatron_s(degree, seq_len=4096, imbalance=1.5, overlapped=overlapped, **rates),
    ):
        gains = [step_s(1, overlapped) / step_s(2, overlapped) for overlapped in (1.0, 0.8, 0.5)]
        assert gains[0] >= gains[1] >= gains[2]
        assert gains[0] > max(1.0, gains[2])


def test_dispatch_time_equals_hand_computation():
    nvlink, share = random.uniform(0.5, 1), random.uniform(0.1, 1)
    sent_bytes = share * 16384 * 8 * 4096 * 2 * 3 / 4
    started_ms = sonic_ms(0.0, nvlink=nvlink)
    assert 0 < started_ms < 0.02
    assert sonic_ms(share, nvlink=nvlink) - started_ms == pytest.approx(1e3 * sent_bytes / (450e9 * nvlink))


def test_forwarding_sends_rows_once_per_node():
    """E = 128, k = 8, two nodes of eight: pairs cross 4.0 times per token, tokens once; 5.77 are sent inside nodes."""
    rates = draw_rates()
    rates.pop("flops")
    network, nvlink = 50e9 * rates["network"], 450e9 * rates["nvlink"]
    across, inside = 1.00 / network, 5.77 / nvlink
    for pipelined in (0.0, 0.5, 1.0):
        expected = 4.0 / network / (across + inside - pipelined * min(across, inside))
        assert forwarding(experts=128, k=8, pipelined=pipelined, **rates) == pytest.approx(expected, rel=0.02)


def test_uniform_choices_are_duplicated_as_in_a_sample():
    tokens, experts, k = 20_000, random.choice([64, 128, 256]), random.randrange(2, 9)
    host_SK = np.random.default_rng().random((tokens, experts)).argsort(axis=1)[:, :k] // (experts // 16)
    sent = sum(len(np.unique(row)) for row in host_SK)
    assert deduplication(experts, k, 1.0) == pytest.approx(tokens * k / sent, rel=0.02)


def test_skewed_choices_are_duplicated_more_often():
    skews = sorted(random.uniform(1.6, 4.0) for _ in range(2))
    ratios = [deduplication(128, 8, skew) for skew in (1.0, *skews)]
    assert ratios == sorted(ratios) and ratios[0] < ratios[1]


@pytest.mark.parametrize("imbalance", [1.3, 2.7])
def test_loads_have_the_requested_imbalance(imbalance):
    loads = systems.uneven_loads(128, 8 * 1024, imbalance)
    work_LW = loads.sum(axis=1).reshape(len(loads), 64, -1).sum(axis=2)
    assert (work_LW.max(axis=1) / work_LW.mean(axis=1)).mean() == pytest.approx(imbalance, rel=0.05)
    assert (loads.sum(axis=2) == 8 * 1024).all()


def test_balanced_layer_lies_between_even_and_uneven():
    imbalance = random.uniform(1.5, 4.0)
    layer = balanced("Qwen3-235B-A22B", 4096, imbalance, 2)
    assert layer.forced_s < layer.balanced_s < layer.uneven_s
    assert 1.0 <= layer.imbalance < imbalance
    # Attention takes the same time on all ranks, so a layer gains less than its busiest rank.
    assert layer.uneven_s / layer.forced_s < 1.06 * imbalance
