"""Published results of training systems, predicted from the model and the machine alone.

    prediction("titan-speedup")          # Prediction(middle=…, low=…, high=…)

No coefficient is fitted to the result that it predicts. Conditions that a source does not state are ranges, as are the
machine's rates and the slowdown of computation alongside communication (`SourcedValue.bounds`). `middle` is the
prediction with the middle of each range, `low` and `high` are the extremes over all combinations of their ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

from bench.reproduce.systems import Balanced, balanced, deduplication, forwarding, megatron_s, sonic_ms, titan_s
from bench.reproduce.table import Part, Progress, Row, Table
from fusedmoe.schedule.machines import MACHINES, SourcedValue
from fusedmoe.schedule.workload import uniform_share


class Range(NamedTuple):
    """Range of an unknown condition."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, datum: SourcedValue) -> Range:
        """Return the published bounds of a machine's figure."""
        assert datum.bounds is not None
        return cls(datum.bounds[0], datum.value, datum.bounds[1])


class Prediction(NamedTuple):
    """A prediction, and its extremes over the unknown conditions."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Case:
    """A published figure.

    Attributes:
        what: label.   published: as printed; text for a range.   form: format of the figures.
        unknown: ranges of unknown conditions, by argument of `predict`.
        why: reason for the difference, in one sentence.
    """

    what: str
    published: float | str
    form: str
    predict: Callable[..., float]
    unknown: Mapping[str, Range]
    why: str


def _gain(step_s: Callable[..., float], **conditions: float) -> float:
    return step_s(1, **conditions) / step_s(2, **conditions)


def _mean_over_models(figure: Callable[[Balanced], float], tokens: float, imbalance: float, slots: float) -> float:
    models = ("GLM-4.5-Air", "Qwen3-235B-A22B", "DeepSeek-V3")  # 106B, 235B and 671B
    return statistics.mean(figure(balanced(model, int(tokens), imbalance, int(slots))) for model in models)


_H100 = MACHINES["dgx-h100"]
_LINKS = {"network": Range.of(_H100.inter.reached), "nvlink": Range.of(_H100.intra.reached)}
_RATES = _LINKS | {"flops": Range.of(_H100.flops), "overlapped": Range.of(_H100.computes_beside)}
_TITAN = _RATES | {"samples": Range(2, 4, 8), "whole": Range(0, 1, 1)}
_MEGATRON = _RATES | {"seq_len": Range(4096, 8192, 16384), "imbalance": Range(1, 1, 4.01)}
_CHOICES = {"experts": Range(64, 128, 128), "k": Range(6, 8, 8)}
_SONIC, _TO_FOUR = {"nvlink": _LINKS["nvlink"]}, uniform_share(128, 8, 4)
_SONIC_WHY = (
    "The shape is the example of SonicMoE's request, its number of tokens is from its benchmark on Hopper; bytes and "
    "the rate of NVLink give the time of pairs, and tokens take longer because their kernel also finds the ranks of "
    "each token."
)
# The middle imbalance is the geometric mean of the published extremes.
_ULTRAEP = {
    "tokens": Range(4096, 8192, 16384),
    "imbalance": Range(1.30, (1.30 * 4.01) ** 0.5, 4.01),
    "slots": Range(1, 2, 4),
}

CASES: Mapping[str, Case] = {
    "titan-tokens": Case(
        "torchtitan, one chunk",
        7670,
        "{:,.0f} tokens/s",
        lambda **conditions: 1 / titan_s(1, **conditions),
        _TITAN,
        "Almost half of the published step is missing from the model, which has products, copies of rows and "
        "all-to-alls only: no norms, activations, router, recomputation, collectives of FSDP, optimizer or launches, "
        "and grouped products at the rate of large ones.",
    ),
    "titan-speedup": Case(
        "torchtitan, two chunks",
        1.27,
        "{:.2f}×",
        partial(_gain, titan_s),
        _TITAN,
        "Computation and communication both take longer in the published run, and nearly the same fraction of the "
        "step is hidden; the lowest value overlaps the pipeline alone, without the shared experts.",
    ),
    "megatron-step": Case(
        "Megatron-core, one chunk",
        69.9,
        "{:.1f} s",
        partial(megatron_s, 1),
        _MEGATRON,
        "The router is untrained and its imbalance not stated, nor are the lengths of the packed sequences: the middle "
        "has balanced experts, the highest value the largest imbalance that UltraEP reports, 4.01; memory-bound "
        "operations, launches, gradient reduction and the optimizer are missing.",
    ),
    "megatron-speedup": Case(
        "Megatron-core, two chunks",
        1.135,
        "{:.3f}×",
        partial(_gain, megatron_s),
        _MEGATRON,
        "Imbalance makes experts and all-to-alls, and so the gain, a larger part of the step: the middle has none.",
    ),
    "deepspeed-deduplication": Case(
        "DeepSpeed, all-to-all with each token once per rank",
        1.29,
        "{:.2f}×",
        deduplication,
        _CHOICES | {"skew": Range(1, 1, 3.01)},
        "The model and the recorded routing are not published, only its skew of 3.01: the middle has uniform choices, "
        "the highest value is the busiest rank's at this skew; the published times hardly depend on the skew.",
    ),
    "deepspeed-deepep": Case(
        "DeepSpeed, all-to-all by DeepEP",
        2.08,
        "{:.2f}×",
        forwarding,
        _CHOICES | _LINKS | {"pipelined": Range(0, 0, 1)},
        "DeepEP forwards tokens inside nodes while further tokens arrive, with 12 multiprocessors; the model has the "
        "rates of the links only, with both levels in sequence (middle) or fully overlapped (highest).",
    ),
    "sonic-pairs": Case(
        "SonicMoE, dispatch of pairs",
        2.30,
        "{:.2f} ms",
        partial(sonic_ms, 1.0),
        _SONIC,
        _SONIC_WHY,
    ),
    "sonic-tokens": Case(
        "SonicMoE, dispatch of tokens",
        1.10,
        "{:.2f} ms",
        partial(sonic_ms, _TO_FOUR),
        _SONIC,
        _SONIC_WHY,
    ),
    "sonic-speedup": Case(
        "SonicMoE, dispatch of tokens instead of pairs",
        2.09,
        "{:.2f}×",
        lambda nvlink: sonic_ms(1.0, nvlink=nvlink) / sonic_ms(_TO_FOUR, nvlink=nvlink),
        _SONIC,
        _SONIC_WHY,
    ),
    "ultraep-imbalance": Case(
        "UltraEP, imbalance after balancing",
        "1.01–1.04",
        "{:.2f}",
        partial(_mean_over_models, lambda layer: layer.imbalance),
        _ULTRAEP,
        "The loads are synthetic, equal on all ranks up to sampling, and this library's planner chooses the replicas.",
    ),
    "ultraep-fraction": Case(
        "UltraEP, of forced balance",
        0.943,
        "{:.1%}",
        partial(_mean_over_models, lambda layer: layer.forced_s / layer.balanced_s),
        _ULTRAEP,
        "Planning is free here, and the published average includes inference, where fewer products hide the transfers.",
    ),
    "ultraep-speedup": Case(
        "UltraEP, over no balance",
        1.49,
        "{:.2f}×",
        partial(_mean_over_models, lambda layer: layer.uneven_s / layer.balanced_s),
        _ULTRAEP,
        "Only the extremes of the imbalance are published, 1.30 and 4.01, not its average over models and layers; the "
        "middle is their geometric mean, and memory-bound work, which no imbalance lengthens, is missing.",
    ),
}


def prediction(name: str) -> Prediction:
    """Return the prediction of a case. Raises `ValueError` for an unknown name."""
    if name not in CASES:
        raise ValueError(f"published: no case {name!r}; expected one of {', '.join(CASES)}")
    case = CASES[name]
    ends = product(*((condition.low, condition.high) for condition in case.unknown.values()))
    middle = case.predict(**{name: condition.middle for name, condition in case.unknown.items()})
    values = [middle, *(case.predict(**dict(zip(case.unknown, end, strict=True))) for end in ends)]
    return Prediction(middle, min(values), max(values))


PUBLISHED = Table(
    "published-steps",
    "Steps and all-to-alls of training systems",
    "End-to-end",
    "reports of torchtitan (graph-based EP overlap), Megatron-core (ChunkedEP), DeepSpeed (DeepEP transport for "
    "AutoEP), SonicMoE (basic EP support) and UltraEP (arXiv 2606.04101)",
    "simulated",
    ("prediction", "lowest", "highest"),
    text="Predictions from the model and an H100 machine of the library (UltraEP: a GB200 rack), with no coefficient "
    "fitted to the result: with the middle of all conditions, and the lowest and highest values over their "
    "ranges. Ranges: the machine's rates (`bounds` in `fusedmoe/schedule/machines.py`), of "
    "computation alongside collectives (1.1 to 1.76 times as long), and of conditions that a source does not "
    "state. torchtitan: DeepSeek-V3 16B, 32 GPUs, EP 32, 2 to 8 sequences of 4,096 tokens per GPU, chunks of "
    "whole MoE blocks. Megatron-core: Qwen3-30B-A3B, 16 GPUs, EP 8, sequences of 4,096 to 16,384 tokens, full "
    "recomputation, tokens sent once per rank. DeepSpeed: 16 GPUs on two nodes, 64 or 128 experts, k = 6 or 8. "
    "SonicMoE: four GPUs. UltraEP: means over models of 106B, 235B and 671B, 64 GPUs of a rack, 4,096 to 16,384 "
    "tokens per GPU, one to four replicas per GPU.",
)


def published(progress: Progress) -> list[Table]:
    """Compare all cases."""
    rows, reasons = [], list(dict.fromkeys(case.why for case in CASES.values()))
    for number, (name, case) in enumerate(CASES.items(), start=1):
        rows.append(Row(case.what, case.published, prediction(name), case.form, (reasons.index(case.why) + 1,)))
        progress(number, len(CASES))
    return [replace(PUBLISHED, rows=tuple(rows), reasons=tuple(reasons))]


PARTS = (Part((PUBLISHED,), 8, published),)

#: Omitted figures, and reasons.
LEFT_OUT = {
    "FSMoE's Table 5 on testbeds A and B": "above, with the paper's coefficients.",
    "DeepSpeed's whole steps": "neither model nor number of tokens is stated.",
}
