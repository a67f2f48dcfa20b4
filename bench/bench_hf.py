"""`make bench`: experts of Hugging Face models on one CPU thread, fusedmoe and transformers interleaved."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install 'fusedmoe[hf]' to compare with transformers")

OURS = "fusedmoe"


@dataclass(frozen=True)
class Shape:
    """T tokens, model dim H, expert hidden dim I, E experts, top K."""

    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int


#: At the first shape, eager is expected to be far slower.
TRAINING = (Shape(512, 1024, 512, 32, 4), Shape(2048, 512, 256, 16, 2), Shape(256, 768, 768, 64, 8))
DECODING = (
    Shape(1, 1024, 512, 32, 4),
    Shape(4, 1024, 512, 32, 4),
    Shape(32, 1024, 512, 32, 4),
    Shape(1, 512, 1024, 8, 2),
)


def make(shape: Shape, family: str = "mixtral") -> Any:
    """Create Mixtral's experts, or gpt-oss's: with biases, transposed weights and its activation."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    of_config, of_experts = {
        "mixtral": (MixtralConfig, MixtralExperts),
        "gpt-oss": (GptOssConfig, GptOssExperts),
    }[family]
    config = of_config(
        hidden_size=shape.H,
        intermediate_size=shape.I,
        num_local_experts=shape.E,
        num_experts_per_tok=shape.K,
        experts_implementation="eager",
    )
    experts = of_experts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return experts


def implementations(experts: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return copies of the experts that share parameters, one per implementation."""
    import fusedmoe.hf  # noqa: F401  registers fusedmoe's implementation

    found = {}
    for name in names:
        one = copy.copy(experts)
        one.config = copy.copy(experts.config)
        one.config._experts_implementation = name
        found[name] = one
    return found


def train(experts: Any, x_TM: torch.Tensor, dy_TM: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
    for parameter in experts.parameters():
        parameter.grad = None
    x_TM.grad = None
    y_TM = experts(x_TM, *routed)
    y_TM.backward(dy_TM)
    return y_TM.detach()


@torch.no_grad()
def decode(experts: Any, x_TM: torch.Tensor, dy_TM: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
    return experts(x_TM, *routed)


def median_times(
    step: Callable[..., torch.Tensor], of: dict[str, Any], shape: Shape, rounds: int, repeat: int
) -> dict[str, float]:
    """Return the median time of a call in seconds; each round runs every implementation `repeat` times.

    Raises:
        AssertionError: results differ.
    """
    torch.manual_seed(0)
    x_TM, dy_TM = torch.randn(shape.T, shape.H).requires_grad_(), torch.randn(shape.T, shape.H)
    weight_TK, number_TK = torch.rand(shape.T, shape.E).softmax(1).topk(shape.K)
    calls = {name: partial(step, one, x_TM, dy_TM, number_TK, weight_TK) for name, one in of.items()}
    wanted = calls[OURS]()
    for call in calls.values():
        torch.testing.assert_close(call(), wanted, rtol=1e-3, atol=1e-4)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls) if turn % 2 else reversed(calls):
            if repeat > 1:
                calls[name]()  # warm-up: caches contain the previous implementation's data
            start = time.perf_counter()
            for _ in range(repeat):
                calls[name]()
            times[name].append((time.perf_counter() - start) / repeat)
    return {name: statistics.median(of) for name, of in times.items()}


def run(
    benchmark: Any,
    step: Callable[..., torch.Tensor],
    shape: Shape,
    names: tuple[str, ...],
    *counts: int,
    family: str = "mixtral",
) -> None:
    torch.set_num_threads(1)
    of = implementations(make(shape, family), (OURS, *names))
    seconds = median_times(step, of, shape, *counts)
    ratios = {name: seconds[name] / seconds[OURS] for name in names}
    benchmark.extra_info.update(
        family=family,
        shape=asdict(shape),
        threads=1,
        seconds=seconds,
        ratios=ratios,
        transformers=transformers.__version__,
    )
    x_TM, dy_TM = torch.randn(shape.T, shape.H).requires_grad_(), torch.randn(shape.T, shape.H)
    weight_TK, number_TK = torch.rand(shape.T, shape.E).softmax(1).topk(shape.K)
    benchmark.pedantic(step, args=(of[OURS], x_TM, dy_TM, number_TK, weight_TK), rounds=3, warmup_rounds=1)
    told = ", ".join(f"{name} takes {ratio:.2f} times as long" for name, ratio in ratios.items())
    print(f"\n{family}, {shape}: {seconds[OURS] * 1e3:.2f} ms; {told}")


def _name(shape: Shape) -> str:
    return f"T{shape.T}-H{shape.H}-I{shape.I}-E{shape.E}-K{shape.K}"


def _rounds(shape: Shape) -> tuple[int, int]:
    return (61, 10) if shape.T == 1 else (15, 5)


@pytest.mark.parametrize("shape", TRAINING, ids=_name)
def test_training_beside_transformers(benchmark, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    run(benchmark, train, shape, ("grouped_mm", "eager"), 9, 1)


@pytest.mark.parametrize("shape", DECODING, ids=_name)
def test_decoding_beside_transformers(benchmark, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    run(benchmark, decode, shape, ("batched_mm", "grouped_mm", "eager"), *_rounds(shape))


@pytest.mark.parametrize("shape", TRAINING, ids=_name)
def test_training_of_gpt_oss(benchmark, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    run(benchmark, train, shape, ("grouped_mm",), 9, 1, family="gpt-oss")


@pytest.mark.parametrize("shape", DECODING, ids=_name)
def test_decoding_of_gpt_oss(benchmark, shape: Shape) -> None:  # type: ignore[no-untyped-def]
    run(benchmark, decode, shape, ("batched_mm", "grouped_mm", "eager"), *_rounds(shape), family="gpt-oss")
