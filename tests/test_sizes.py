"""Absurd sizes are refused where a part is constructed: one line with the name, the value and the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedmoe
from fusedmoe.cli.main import main
from fusedmoe.errors import ConfigError
from fusedmoe.models.config import ModelConfig
from fusedmoe.sizes import MAX_SIZE
from fusedmoe.tutel import moe
from tests.marks import slowly

HUGE = 10**12
GATES: dict[str, Callable[..., Any]] = {
    "topk": fusedmoe.gates.TopK,
    "switch": lambda experts, k=1, capacity_factor=None: fusedmoe.gates.Switch(experts, capacity_factor),
    "deepseek": fusedmoe.gates.DeepSeekV3,
    "choice": fusedmoe.gates.ExpertChoice,
    "hash": fusedmoe.gates.Hash,
}


def make_layer(model_dim: int = 8, experts: int = 4, k: int = 2, factor: float | None = None, hidden: int = 8) -> Any:
    gate = fusedmoe.gates.TopK(experts, k, factor)
    return fusedmoe.MoELayer(model_dim, gate, fusedmoe.experts.SwiGLU(hidden))


@pytest.mark.parametrize("name", GATES)
def test_gate_size_beyond_bound_raises(name: str) -> None:
    make = GATES[name]
    with pytest.raises(ConfigError, match=f"experts = {HUGE} is out of bounds; the largest is {MAX_SIZE}"):
        make(HUGE)
    for factor in (1e300, float("inf"), float("nan"), MAX_SIZE + 1.0):
        with pytest.raises(ConfigError, match=f"capacity_factor must be positive and at most {MAX_SIZE}"):
            make(8, capacity_factor=factor)
    if name != "switch":
        with pytest.raises(ConfigError, match=f"k = {HUGE} is out of bounds"):
            make(8, HUGE)


def test_largest_capacity_factor_equals_dropless() -> None:
    x = torch.randn(7, 8)
    torch.manual_seed(0)
    dropless = make_layer()
    torch.manual_seed(0)
    torch.testing.assert_close(make_layer(factor=float(MAX_SIZE))(x), dropless(x))


@pytest.mark.parametrize("size", [{"model_dim": HUGE}, {"hidden": HUGE}, {"experts": HUGE}, {"k": HUGE}])
def test_layer_size_beyond_bound_raises(size: dict[str, int]) -> None:
    (name,) = size
    with pytest.raises(ConfigError, match=f"{name} = {HUGE} is out of bounds; the largest is {MAX_SIZE}"):
        make_layer(**size)


def test_parameter_elements_beyond_bound_raise() -> None:
    with pytest.raises(ConfigError, match=r"SwiGLU: w1 of shape .* would have \d+ elements on this rank; the bound is"):
        make_layer(model_dim=2**22, hidden=2**22)
    with pytest.raises(ConfigError, match=r"would have \d+ elements on this rank"):
        make_layer(model_dim=2**20, experts=MAX_SIZE)


TUTEL: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_device": HUGE}, "num_experts_per_device"),
    ({"num_experts_per_device": float("inf")}, "num_experts_per_device"),
    ({"hidden_size_per_expert": HUGE}, "hidden_size_per_expert"),
    ({"output_dim": HUGE}, "output_dim"),
]


@pytest.mark.parametrize(("experts", "name"), TUTEL)
def test_tutel_expert_size_beyond_bound_raises(experts: dict[str, Any], name: str) -> None:
    description = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8, **experts}
    with pytest.raises(ConfigError, match=f"{name} = .* is out of bounds; the largest is {MAX_SIZE}"):
        moe.moe_layer({"type": "top", "k": 2}, 8, description)


def test_tutel_capacity_factor_beyond_bound_raises() -> None:
    description = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8}
    for factor in (1e300, -1e300, float("nan")):
        with pytest.raises(ConfigError, match="capacity_factor = .* is out of bounds"):
            moe.moe_layer({"type": "top", "k": 2, "capacity_factor": factor}, 8, description)
        with pytest.raises(ConfigError, match="capacity_factor = .* is out of bounds"):
            moe.moe_layer({"type": "top", "k": 2}, 8, description)(torch.randn(4, 8), capacity_factor=factor)
    with pytest.raises(ConfigError, match="model_dim = .* is out of bounds"):
        moe.moe_layer({"type": "top", "k": 2}, HUGE, description)
    with pytest.raises(ConfigError, match=f"a2a_ffn_overlap_degree = {HUGE}; give a number of chunks"):
        moe.moe_layer({"type": "top", "k": 2}, 8, description, a2a_ffn_overlap_degree=HUGE)
    assert moe.moe_layer({"type": "top", "k": HUGE}, 8, description)(torch.randn(4, 8)).shape == (4, 8)  # all experts


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--capacity-factor", "1e300"),
        ("--experts", str(HUGE)),
        *slowly(("--hidden", str(HUGE)), ("--model-dim", str(HUGE))),
    ],
)
def test_train_flag_beyond_bound_exits_with_error(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--device", "cpu", "--steps", "1", flag, value]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "out of bounds; the largest is" in said and flag[2:].replace("-", "_") in said


def test_model_config_size_beyond_bound_raises() -> None:
    for name in ("experts", "k", "hidden", "model_dim", "capacity_factor", "layers"):
        with pytest.raises(ConfigError, match=f"{name} = .* is out of bounds"):
            ModelConfig(**{name: HUGE})
