"""Which kinds of tasks can run here: the one answer that plans, trainers and layers go by.

What can run follows from how experts are split, what computes them, what rows meet on their way, their dtype and
device, and whether ranks can write to each other's memory. Over how many nodes ranks stand, and MP and DP, change how
long tasks take and not which there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

import torch

from fusedmoe.errors import ConfigError
from fusedmoe.kernels.backend import triton_serves
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.task import FUSED, PIPELINE, WEIGHT_GRADIENTS
from fusedmoe.schedule.text import name

#: What plans a layer follows: those of its own schedule, that of a training step (`fusedmoe.training.plan_step`), or
#: that of blocks in micro-batches (`fusedmoe.pipeline`).
Follows = Literal["itself", "step", "blocks"]


@dataclass(frozen=True)
class Here:
    """What decides which kinds of tasks a layer can run.

    Attributes:
        ep, esp: ranks that share the experts, and the shards of each.
        grouped: the experts are the library's own products; else modules.
        direct: nothing but kernels sees rows between the gate's choice and the experts' results: no hooks, no order by
            products, no experts that move.
        dtype, device: of the rows.
        heap: whether all of the ranks have memory that kernels of the others address. Asked last, and only where all
            else allows it: it may be collective.
    """

    ep: int = 1
    esp: int = 1
    grouped: bool = True
    direct: bool = True
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    heap: Callable[[], bool] = lambda: False


def runnable_kinds(here: Here, follows: Follows) -> tuple[str, ...]:
    """The kinds of tasks that plans may have.

    Dispatch and combine without peers are among them: hooks may act there. Fused operations do all of a layer that
    follows its own schedule and whose experts are split over one axis; in a step's plan nothing runs them.
    """
    parts = PIPELINE if here.esp > 1 else PIPELINE[::2]
    if follows == "step":
        return ("attention", *parts, "gradient-all-reduce")
    if follows == "blocks":
        return ("attention", "order", *parts, *WEIGHT_GRADIENTS.values(), "gradient-all-reduce")
    one_axis = (here.ep > 1) != (here.esp > 1)
    served = triton_serves(here.device) and here.dtype != torch.float64
    if not (one_axis and here.grouped and here.direct and served and here.heap()):
        return parts
    over_experts, over_shards = FUSED
    return (*parts, over_experts if here.ep > 1 else over_shards)


def require_runnable(plan: Plan, kinds: Collection[str], whose: str) -> None:
    """Raises `ConfigError`, naming the task and what can run, for a plan with a task of another kind."""
    strange = next((task for task in plan.sequence if task.kind not in kinds), None)
    if strange is not None:
        raise ConfigError(
            f"{whose} has {name(strange)} ({strange.kind}), which cannot run here; what can: {', '.join(kinds)}"
        )
