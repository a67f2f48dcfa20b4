"""The costs of `fusedmoe plan` and `fusedmoe trace`: read from files, and of a model's step."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from fusedmoe.cli.layout import Launch, Sizes
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.trainer import along, make_model, step_workload
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.layers.stage import must_wait
from fusedmoe.models.block import make_gate, make_order
from fusedmoe.runtime.execute import Here, runnable_kinds
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.training.gradient_buckets import bucketed_bytes


def file_to_write(text: str) -> Path:
    """A path in a folder that is there."""
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
    return path


def picture_to_write(text: str) -> Path:
    """The same, with an ending that says which kind of picture."""
    path = file_to_write(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path.name} ends in none of .png, .svg and .pdf")
    return path


def read_costs(path: Path) -> CostModel:
    """The costs in a file of `fusedmoe profile`, or of `CostModel.to_json`.

    Raises:
        ConfigError: no such file, or none of these.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--costs {path} cannot be read ({error}); fusedmoe profile --json FILE writes such a file"
        ) from error
    return CostModel.from_json(text)


def step_costs(
    settings: Settings, launch: Launch, sizes: Sizes, costs: CostModel, *, whole: bool = False
) -> StackCosts:
    """What the model's layers with experts cost in a step, as training has it (`Trainer.follow`), without the ranks.

    `whole`: micro-batches can go through all of a layer.

    Raises:
        ConfigError: costs that lack what the layout needs.
    """
    workload = step_workload(settings, sizes.ep, sizes.esp, sizes.mp)
    model = settings.model
    if model.layers < model.moe_every:
        raise ConfigError(f"--layers {model.layers} with --moe-every {model.moe_every}: no experts")
    cut = along(settings, sizes.mp)
    made = make_model(settings, model, Topology(), torch.device("meta"))
    dense = made.in_micro_batches(cut).dense_parameters if whole else None
    reduced = bucketed_bytes(made, launch.ranks, sizes.mp, dense)
    kinds = runnable_kinds(Here(sizes.ep, sizes.esp), "blocks" if whole else "step")
    waits = whole and must_wait(make_gate(model), make_order(model), cut == "positions")
    return workload.step_costs(costs, reduced, kinds, whole=whole, waits=waits)
