"""Names and split dimensions of parameters, as read by checkpoints and gradient synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fusedmoe import experts, gates
from fusedmoe.errors import ConfigError
from fusedmoe.experts.sharding import parameter_shardings
from fusedmoe.layers.moe import MoELayer


class _Split(nn.Module):
    def __init__(self, **shardings: dict[str, int]) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.zeros(2, 3)), nn.Linear(3, 3)
        self.register_parameter("bias", None)
        self.register_buffer("state", torch.zeros(2))
        self.shardings = shardings


def test_shardings_use_names_of_whole_model() -> None:
    model = nn.Module()
    model.a = _Split(weight={"ep": 0, "esp": 1}, bias={"mp": 0}, state={"ep": 0})
    model.a.shardings["inner.weight"] = {"ep": -1}
    model.b = nn.ModuleList([_Split(weight={"mp": 1}), nn.Linear(3, 3)])
    model.tied = nn.Module()
    model.tied.weight, model.again = model.b[0].weight, model.a
    assert parameter_shardings(model) == {
        "a.weight": {"ep": 0, "esp": 1},
        "a.state": {"ep": 0},
        "a.inner.weight": {"ep": -1},
        "again.weight": {"ep": 0, "esp": 1},
        "again.state": {"ep": 0},
        "again.inner.weight": {"ep": -1},
        "b.0.weight": {"mp": 1},
        "tied.weight": {"mp": 1},
    }
    assert parameter_shardings(model.a)["weight"] == {"ep": 0, "esp": 1}
    assert parameter_shardings(nn.Linear(2, 2)) == {}


def test_layer_shards_expert_weights_over_ep_and_esp() -> None:
    layer = MoELayer(4, gates.TopK(experts=2, k=1), experts.SwiGLU(hidden=6))
    found = parameter_shardings(layer)
    assert found.keys() == {"experts.w1", "experts.w2"}
    assert all(axes.keys() == {"ep", "esp"} for axes in found.values())


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        ({"wieght": {"ep": 0}}, "no parameter or buffer is named 'm.wieght'"),
        ({"inner.wieght": {"ep": 0}}, "no parameter or buffer is named 'm.inner.wieght'"),
        ({"outer.weight": {"ep": 0}}, "no parameter or buffer is named 'm.outer.weight'"),
        ({"weight": {"tp": 0}}, "m.weight is split over an unknown axis 'tp'"),
        ({"weight": {"ep": 2}}, r"m.weight of shape \[2, 3\] has no dimension 2"),
        ({"weight": {"mp": 0, "ep": 1}}, "m.weight .* not both"),
    ],
)
def test_invalid_shardings_are_rejected(shardings: dict[str, dict[str, int]], message: str) -> None:
    model = nn.Module()
    model.m = _Split(**shardings)
    with pytest.raises(ConfigError, match=message):
        parameter_shardings(model)


def test_conflicting_shardings_of_tied_tensor_are_rejected() -> None:
    model = nn.ModuleList([_Split(weight={"ep": 0}), _Split(weight={"ep": 1})])
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.weight are one tensor, but split as"):
        parameter_shardings(model)


class LowRank(nn.Module):
    """Adapters of each expert's weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(*weight.shape[:2], 2))
        self.B = nn.Parameter(torch.zeros(weight.shape[0], 2, weight.shape[2]))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.A @ self.B


def test_parametrized_experts_error_names_fix() -> None:
    """The refusal states a fix, and the fix works."""
    layer = MoELayer(8, gates.TopK(4, k=1), experts.FeedForward(8))
    own = layer.experts
    axes = own.shardings["w1"]
    parametrize.register_parametrization(own, "w1", LowRank(own.w1))
    with pytest.raises(ConfigError, match=r"experts.w1 is parametrised") as caught:
        parameter_shardings(layer)
    cure = "shardings['parametrizations.w1.original'] = shardings.pop('w1')"
    assert cure in str(caught.value) and "shardings['parametrizations.w1.0.A'] = {'ep': 0}" in str(caught.value)
    exec(cure, {"shardings": own.shardings})
    for name in "AB":
        own.shardings[f"parametrizations.w1.0.{name}"] = {"ep": 0}
    found = parameter_shardings(layer)
    assert found["experts.parametrizations.w1.original"] == axes
    assert found["experts.parametrizations.w1.0.A"] == {"ep": 0} and "experts.w1" not in found
