"""Shared experts of Hugging Face's blocks as tasks of plans: results and gradients equal those without a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fusedmoe.hf
from fusedmoe import Schedule
from tests.cluster import Cluster
from tests.integrations.models import VOCABULARY, make
from tests.integrations.plans_run import tasks_run
from tests.integrations.test_hf_schedule import CASES, load
from tests.marks import slowly

SCHEDULE = Schedule("fsmoe", degrees=(2, 3))


def shared_of(model: nn.Module) -> list[nn.Module]:
    return [one for name, one in model.named_modules() if name.endswith((".shared_experts", ".shared_expert"))]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def compare(
    rank: int, world: int, folder: str, cases: Sequence[str], change: Callable[[Any], None] | None, in_plan: bool
) -> None:
    model = load(rank, world, folder, {"fsdp_size": 2, "ep_size": 2, "tp_size": 1}).train()
    if change is not None:
        change(model)
    tokens = [torch.randint(0, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n + rank))
              for n in (9 + 4 * rank, 6)]  # fmt: skip
    names = list(model.state_dict())
    for name in cases:
        values = []
        for schedule in ("off", SCHEDULE):
            fusedmoe.hf.apply(model, schedule=schedule)
            with tasks_run() as ran:
                values.append(CASES[name](model, tokens))
            planned = schedule is SCHEDULE and in_plan and name != "checkpoints"
            wanted = {"forward"} if name == "evaluation" else {"forward", "backward"}
            assert {*ran} == (wanted if planned else set()), (name, schedule)
        assert values[0].keys() == values[1].keys()
        for key, value in values[0].items():
            if name == "autocast":
                assert float((values[1][key] - value).norm()) < 1e-2 * max(float(value.norm()), 1e-3), (name, key)
            else:
                torch.testing.assert_close(values[1][key], value, rtol=1e-10, atol=1e-10, msg=lambda m, k=key: f"{k} {m}")
    assert list(model.state_dict()) == names
    assert not any("forward" in vars(one) for one in shared_of(model))


@pytest.mark.parametrize("cases", [("accumulated",), *slowly((tuple(CASES),))])
def test_shared_experts_of_deepseek_are_tasks_of_the_plan(
    cluster: Cluster, tmp_path: Path, cases: Sequence[str]
) -> None:
    make("deepseek", "eager", torch.float64).save_pretrained(tmp_path)
    cluster.run(2, compare, str(tmp_path), cases, None, True)
