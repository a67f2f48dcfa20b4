"""Values in checkpoints and nodes' memory: a load returns what a save accepts, and a save rejects anything else."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, RankError
from fusedmoe.training import load_checkpoint, save_checkpoint
from fusedmoe.training.survival import NodeMemory, Survival
from tests.cluster import Cluster

ALONE = Topology()


class WithState(nn.Linear):
    """A module whose extra state is the state of an average."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.average = nn.BatchNorm1d(2).state_dict()

    def get_extra_state(self) -> Any:
        return self.average

    def set_extra_state(self, state: Any) -> None:
        self.average = state


class Counting(torch.optim.SGD):
    """An optimizer that stores an OrderedDict for each parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"counts": OrderedDict(steps=1)}


def test_ordered_dicts_round_trip(tmp_path: Path) -> None:
    path, model, average = tmp_path / "checkpoint", WithState(), nn.BatchNorm1d(3)
    optimizer = Counting(model.parameters(), lr=0.1)
    optimizer.step()
    save_checkpoint(path, model, optimizer, ALONE, {"average": average.state_dict()})
    loaded = WithState()
    loaded.average = None
    other = Counting(loaded.parameters(), lr=0.1)
    extra = load_checkpoint(path, loaded, other, ALONE)
    found = extra["average"]
    assert type(found) is OrderedDict and found._metadata == average.state_dict()._metadata
    nn.BatchNorm1d(3).load_state_dict(found)
    assert all(torch.equal(value, found[key]) for key, value in average.state_dict().items())
    assert type(loaded.average) is OrderedDict and list(loaded.average) == list(model.average)
    assert other.state[loaded.weight]["counts"] == OrderedDict(steps=1)


def _refresh(rank: int, world: int, folder: Path) -> str:
    topology, model = Topology.from_sizes(ep=1), nn.Linear(2, 2)
    memory = NodeMemory(os.getppid(), folder)
    Survival(topology, memory).refresh(1, model, None, {"step": 1})
    survival = Survival(topology, memory)
    with pytest.raises(RankError) as caught:
        survival.refresh(2, model, None, {"step": 2, "mine": ALONE if rank else 3})
    found = Survival(topology, memory).restore(model, None)
    assert found == {"step": 1}
    return str(caught.value)


def test_a_refresh_rejects_on_every_rank_what_a_restore_cannot_read(cluster: Cluster, tmp_path: Path) -> None:
    texts = cluster.run(2, _refresh, tmp_path)
    assert len(set(texts)) == 1 and "failed on rank 1" in texts[0] and "is of class fusedmoe" in texts[0]


def test_a_rejected_value_leaves_the_checkpoint(tmp_path: Path) -> None:
    path, model = tmp_path / "checkpoint", nn.Linear(2, 2)
    save_checkpoint(path, model, None, ALONE, {"step": 1})
    with pytest.raises(ConfigError, match=r"extra\['mine'\] is of class .*\.Topology"):
        save_checkpoint(path, model, None, ALONE, {"step": 2, "mine": ALONE})
    assert load_checkpoint(path, model, None, ALONE) == {"step": 1}
