"""`python -m bench.finetune`: fine-tuning and decoding on one CPU thread, interleaved with transformers' own experts.

Each section is measured separately and written with its provenance to bench/results/finetune.json, which keeps its
other sections. Ratios are medians of per-round ratios, so that drift of the machine's speed cancels. `memory` of
adapters is our peak divided by the peer's.

    python -m bench.finetune                    all sections
    python -m bench.finetune --only decoding    one section
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from bench.bench_hf import DECODING, OURS, Shape, implementations, make
from bench.meter import peak_bytes
from bench.provenance import provenance
from fusedmoe.hf import module_experts

RESULTS = Path(__file__).parent / "results" / "finetune.json"
#: Measured code, for provenance.
MEASURED = ("fusedmoe/kernels", "fusedmoe/autograd", "fusedmoe/hf", "bench/finetune.py")

#: Shapes of the frozen-expert section.
FROZEN = (Shape(2048, 512, 1024, 16, 4), Shape(2048, 256, 1024, 8, 2), Shape(1024, 512, 256, 64, 4))
_MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

# Runs the measured operation and returns its time in seconds.
Timed = Callable[[], float]


def run_interleaved(calls: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Return the time of each call in each round, in seconds, after one warm-up round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            seconds = calls[name]()
            if turn:
                times[name].append(seconds)
    return times


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def routed(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weight_TK, number_TK = torch.rand(shape.T, shape.E).softmax(1).topk(shape.K)
    return torch.randn(shape.T, shape.H), number_TK, weight_TK


def backward_s(experts: Any, x_TM: Tensor, number_TK: Tensor, weight_TK: Tensor) -> float:
    """Return the time in seconds of one backward for tokens, router weights and trainable expert parameters."""
    x_TM, weight_TK = x_TM.detach().requires_grad_(), weight_TK.detach().requires_grad_()
    experts.zero_grad(set_to_none=True)
    y_TM, dy_TM = experts(x_TM, number_TK, weight_TK), torch.ones_like(x_TM)
    start = time.perf_counter()
    y_TM.backward(dy_TM)
    return time.perf_counter() - start


def frozen_row(shape: Shape, rounds: int) -> dict[str, Any]:
    """Time the backward of frozen experts, of trainable experts, and of transformers' `grouped_mm`."""
    whole = make(shape)
    frozen = implementations(copy.deepcopy(whole).requires_grad_(False), (OURS, "grouped_mm"))
    of = {"frozen": frozen[OURS], "trained": implementations(whole, (OURS,))[OURS], "grouped_mm": frozen["grouped_mm"]}
    given = routed(shape)
    times = run_interleaved({name: partial(backward_s, experts, *given) for name, experts in of.items()}, rounds)
    return {
        "shape": asdict(shape),
        "backward_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "of_trained": ratio(times, "frozen", "trained"),
        "of_grouped_mm": ratio(times, "frozen", "grouped_mm"),
    }


def decoding_s(experts: Any, mode: str, repeat: int, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the mean time in seconds of calls without gradients."""
    with _MODES[mode]():
        experts(*given)  # warm-up: caches contain the previous implementation's data
        start = time.perf_counter()
        for _ in range(repeat):
            experts(*given)
        return (time.perf_counter() - start) / repeat


def decoding_row(shape: Shape, family: str, mode: str, rounds: int) -> dict[str, Any]:
    """Time calls of T tokens against all implementations of transformers; a ratio above 1 means ours is faster."""
    own = ("grouped_mm", "eager", "batched_mm")
    of, given = implementations(make(shape, family), (OURS, *own)), routed(shape)
    with torch.no_grad():
        for experts in of.values():
            torch.testing.assert_close(experts(*given), of[OURS](*given), rtol=1e-3, atol=1e-4)
    repeat = 10 if shape.T == 1 else 4
    times = run_interleaved({name: partial(decoding_s, one, mode, repeat, given) for name, one in of.items()}, rounds)
    return {
        "family": family,
        "mode": mode,
        "shape": asdict(shape),
        "seconds": {name: statistics.median(seconds) for name, seconds in times.items()},
        "ratios": {name: ratio(times, name, OURS) for name in own},
    }


#: Adapters: M 512, H 256, 64 experts, top 4.
ADAPTED = (Shape(1024, 512, 256, 64, 4), Shape(4096, 512, 256, 64, 4))
_RANK = 16


class Adapted(torch.nn.Module):
    """Model of experts only, with parameter names for peft."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_TM: Tensor, number_TK: Tensor, weight_TK: Tensor) -> Tensor:
        y_TM: Tensor = self.experts(x_TM, number_TK, weight_TK)
        return y_TM


def adapted(shape: Shape, implementation: str) -> Any:
    torch.manual_seed(0)
    model = Adapted(implementations(make(shape), (implementation,))[implementation])
    names = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=_RANK, target_parameters=names, init_lora_weights=False))


def step_s(model: Any, ways: Sequence[Any], x_TM: Tensor, number_TK: Tensor, weight_TK: Tensor) -> float:
    """Return the seconds of forward and backward for tokens, router weights and adapters, under these patches."""
    x_TM, weight_TK = x_TM.detach().requires_grad_(), weight_TK.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way())
        start = time.perf_counter()
        y_TM = model(x_TM, number_TK, weight_TK)
        y_TM.backward(torch.ones_like(y_TM))
        return time.perf_counter() - start


def adapted_row(shape: Shape, rounds: int) -> dict[str, Any]:
    """Time adapters computed as separate products, and peft's method of adding them to the parameter.

    peft's method runs with transformers' `grouped_mm` and with our products ("folded").
    """
    original = getattr(ParamWrapper._activate_lora, "original", ParamWrapper._activate_lora)
    peft_way = partial(patch.object, ParamWrapper, "_activate_lora", original)
    ours = adapted(shape, OURS)
    whole = partial(patch.object, module_experts, "read_matrix", lambda experts, name: (getattr(experts, name), None))
    of = {
        "ours": (ours, ()),
        "folded": (ours, (peft_way, whole)),
        "grouped_mm": (adapted(shape, "grouped_mm"), (peft_way,)),
    }
    given = routed(shape)
    steps = {name: partial(step_s, model, ways, *given) for name, (model, ways) in of.items()}
    times = run_interleaved(steps, rounds)
    # Peak of one warm step, including gradients, above the memory in use before it.
    peaks = {name: peak_bytes(step, torch.device("cpu")) for name, step in steps.items()}
    return {
        "shape": asdict(shape),
        "rank": _RANK,
        "step_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "ratios": {name: ratio(times, name, "ours") for name in ("grouped_mm", "folded")},
        "peak_bytes": peaks,
        "memory": {name: share(peaks["ours"], peaks[name]) for name in ("grouped_mm", "folded")},
    }


def share(one: int | None, other: int | None) -> float | None:
    return one / other if one is not None and other else None


def adapters(rounds: int) -> list[dict[str, Any]]:
    return [adapted_row(shape, rounds) for shape in ADAPTED]


def frozen(rounds: int) -> list[dict[str, Any]]:
    return [frozen_row(shape, rounds) for shape in FROZEN]


def decoding(rounds: int) -> list[dict[str, Any]]:
    return [
        decoding_row(shape, family, mode, rounds)
        for family in ("mixtral", "gpt-oss")
        for shape in DECODING
        for mode in _MODES
    ]


#: Functions that measure a section, called with the number of rounds.
SECTIONS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "frozen": frozen,
    "adapters": adapters,
    "decoding": decoding,
}


def write(path: Path, name: str, rows: list[dict[str, Any]], run: Mapping[str, Any]) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {"run": {**run, "threads": 1, "transformers": transformers.__version__}, "rows": rows}
    path.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=[*SECTIONS], default=[*SECTIONS], help="sections to measure (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=21, help="rounds per row (default: 21)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="results file (default: bench/results/finetune.json)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.only:
        run = provenance(MEASURED)
        rows = SECTIONS[name](arguments.rounds)
        for row in rows:
            print(name, json.dumps(row), flush=True)
        write(arguments.out, name, rows, run)


if __name__ == "__main__":
    main()
