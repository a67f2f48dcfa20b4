"""`python -m bench.finetune`: fine-tuning and decoding on one CPU thread, beside transformers' own experts, by turns.

Each section is measured by itself and written into bench/results/finetune.json under its name, with where its numbers
come from; other sections of the file stay as they are. Ratios are medians of those of each round, so that a change in
the machine's speed hits both sides. `memory` of adapters is our peak as a share of the other's.

    python -m bench.finetune                    all sections
    python -m bench.finetune --only decoding    one of them
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
from fusedmoe.hf import module_experts, owner, peft_adapters

#: Where results are written.
RESULTS = Path(__file__).parent / "results" / "finetune.json"
#: The code that the numbers are of.
MEASURED = ("fusedmoe/kernels", "fusedmoe/autograd", "fusedmoe/hf", "bench/finetune.py")

#: Of frozen experts.
FROZEN = (Shape(2048, 512, 1024, 16, 4), Shape(2048, 256, 1024, 8, 2), Shape(1024, 512, 256, 64, 4))
_MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

# A call that returns the seconds of what is measured of it.
Timed = Callable[[], float]


def by_turns(calls: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            seconds = calls[name]()
            if turn:
                times[name].append(seconds)
    return times


def ratio(times: Mapping[str, list[float]], one: str, other: str) -> float:
    """Returns how many times as long as the other one takes, in the median of the rounds."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def routed(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Makes tokens, chosen experts and their weights."""
    torch.manual_seed(0)
    weight_TK, number_TK = torch.rand(shape.T, shape.E).softmax(1).topk(shape.K)
    return torch.randn(shape.T, shape.H), number_TK, weight_TK


def backward_s(experts: Any, x_TH: Tensor, number_TK: Tensor, weight_TK: Tensor) -> float:
    """Returns the seconds of one backward, of tokens, router weights and what learns of the experts."""
    x_TH, weight_TK = x_TH.detach().requires_grad_(), weight_TK.detach().requires_grad_()
    experts.zero_grad(set_to_none=True)
    y_TH, dy_TH = experts(x_TH, number_TK, weight_TK), torch.ones_like(x_TH)
    start = time.perf_counter()
    y_TH.backward(dy_TH)
    return time.perf_counter() - start


def frozen_row(shape: Shape, rounds: int) -> dict[str, Any]:
    """Measures the backward of frozen experts beside that of experts that learn, and transformers' `grouped_mm`."""
    whole = make(shape)
    frozen = implementations(copy.deepcopy(whole).requires_grad_(False), (OURS, "grouped_mm"))
    of = {"frozen": frozen[OURS], "trained": implementations(whole, (OURS,))[OURS], "grouped_mm": frozen["grouped_mm"]}
    given = routed(shape)
    times = by_turns({name: partial(backward_s, experts, *given) for name, experts in of.items()}, rounds)
    return {
        "shape": asdict(shape),
        "backward_s": {name: statistics.median(seconds) for name, seconds in times.items()},
        "of_trained": ratio(times, "frozen", "trained"),
        "of_grouped_mm": ratio(times, "frozen", "grouped_mm"),
    }


def decoding_s(experts: Any, mode: str, repeat: int, given: tuple[Tensor, Tensor, Tensor]) -> float:
    """Returns the seconds of one of some calls without gradients."""
    with _MODES[mode]():
        experts(*given)  # what the one before left in the caches is not this one's
        start = time.perf_counter()
        for _ in range(repeat):
            experts(*given)
        return (time.perf_counter() - start) / repeat


def decoding_row(shape: Shape, family: str, mode: str, rounds: int) -> dict[str, Any]:
    """Measures T tokens a call beside all of transformers' own implementations: above 1 ours is faster."""
    own = ("grouped_mm", "eager", "batched_mm")
    of, given = implementations(make(shape, family), (OURS, *own)), routed(shape)
    with torch.no_grad():
        for experts in of.values():
            torch.testing.assert_close(experts(*given), of[OURS](*given), rtol=1e-3, atol=1e-4)
    repeat = 10 if shape.T == 1 else 4
    times = by_turns({name: partial(decoding_s, one, mode, repeat, given) for name, one in of.items()}, rounds)
    return {
        "family": family,
        "mode": mode,
        "shape": asdict(shape),
        "seconds": {name: statistics.median(seconds) for name, seconds in times.items()},
        "ratios": {name: ratio(times, name, OURS) for name in own},
    }


#: Of adapters: M 512, H 256, 64 experts, 4 of them chosen.
ADAPTED = (Shape(1024, 512, 256, 64, 4), Shape(4096, 512, 256, 64, 4))
_RANK = 16


class Adapted(torch.nn.Module):
    """A model of experts alone, whose parameters have names for peft."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x_TH: Tensor, number_TK: Tensor, weight_TK: Tensor) -> Tensor:
        y_TH: Tensor = self.experts(x_TH, number_TK, weight_TK)
        return y_TH


def adapted(shape: Shape, implementation: str) -> Any:
    """Makes experts with adapters of peft on both of their parameters."""
    torch.manual_seed(0)
    model = Adapted(implementations(make(shape), (implementation,))[implementation])
    names = ["experts.gate_up_proj", "experts.down_proj"]
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=_RANK, target_parameters=names, init_lora_weights=False))


def step_s(model: Any, ways: Sequence[Any], x_TH: Tensor, number_TK: Tensor, weight_TK: Tensor) -> float:
    """Returns the seconds of a forward and a backward, of tokens, router weights and adapters, in these patches."""
    x_TH, weight_TK = x_TH.detach().requires_grad_(), weight_TK.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(way())
        start = time.perf_counter()
        y_TH = model(x_TH, number_TK, weight_TK)
        y_TH.backward(torch.ones_like(y_TH))
        return time.perf_counter() - start


def adapted_row(shape: Shape, rounds: int) -> dict[str, Any]:
    """Measures adapters as products beside the frozen ones, beside peft's way: added to the parameter, over
    transformers' `grouped_mm` and over our own products ("folded")."""
    original = getattr(ParamWrapper._activate_lora, "original", ParamWrapper._activate_lora)
    peft_way = partial(patch.object, ParamWrapper, "_activate_lora", original)
    ours = adapted(shape, OURS)
    peft_adapters.replace_activation(owner.computes)
    whole = partial(patch.object, module_experts, "matrix", lambda experts, name: (getattr(experts, name), None))
    of = {
        "ours": (ours, ()),
        "folded": (ours, (peft_way, whole)),
        "grouped_mm": (adapted(shape, "grouped_mm"), (peft_way,)),
    }
    given = routed(shape)
    steps = {name: partial(step_s, model, ways, *given) for name, (model, ways) in of.items()}
    times = by_turns(steps, rounds)
    # Of one step each, gradients included, above what was there before; steps have run, so that code is loaded.
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
    """Returns one peak of memory as a share of the other; None where the system does not tell."""
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


#: What makes the rows of each section, by the number of rounds.
SECTIONS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "frozen": frozen,
    "adapters": adapters,
    "decoding": decoding,
}


def write(path: Path, name: str, rows: list[dict[str, Any]], run: Mapping[str, Any]) -> None:
    """Puts a section into a file of results, in which others stay as they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {"run": {**run, "threads": 1, "transformers": transformers.__version__}, "rows": rows}
    path.write_text(json.dumps(known, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[*SECTIONS], default=[*SECTIONS], help="sections to measure")
    parser.add_argument("--rounds", type=int, default=21, help="of each row (21)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
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
