"""The main job's training step in a setting: `fusedmoe train --schedule …`, a small language model, optimizer and all.

It computes in earnest, so only where ranks compute.
"""

from __future__ import annotations

import torch

from bench.cluster.setting import Setting
from fusedmoe.cli.data import random_corpus
from fusedmoe.cli.launch import StopRequest
from fusedmoe.cli.settings import Settings
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.topology import Topology
from fusedmoe.models.config import ModelConfig
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.plan import Plan

_LAYERS, _SEQ_LEN, _K = 2, 256, 2


def make_trainer(setting: Setting, topology: Topology, policy: str, costs: CostModel) -> tuple[Trainer, Plan | None]:
    """The trainer of a schedule, and the plan that it follows; as many rows leave a rank as in the setting's layers."""
    model = ModelConfig(
        layers=_LAYERS,
        model_dim=setting.M,
        seq_len=_SEQ_LEN,
        batch=setting.S // _K // _SEQ_LEN,
        expert="ffn",
        hidden=setting.H,
        experts=setting.E,
        k=_K,
        capacity_factor=1.0,
    )
    settings = Settings(model=model, schedule=policy, ep=2, esp=setting.esp, mp=setting.esp)
    trainer = Trainer(settings, topology, torch.device("cpu"), random_corpus(2**16), StopRequest())
    return trainer, None if policy == "off" else trainer.follow(costs)[0]
