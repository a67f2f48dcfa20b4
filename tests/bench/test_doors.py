"""Integration models of the cluster benchmark, small and on loopback: interleaved steps with invented costs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest

from bench.cluster import doors
from bench.cluster.setting import DOORS, SETTINGS
from fusedmoe.comm.topology import Topology
from fusedmoe.layers.scheduled_exchange import exchanges_in
from fusedmoe.schedule.cost import LINES, CostModel, Line
from tests.cluster import Cluster

NEEDS = {"hf": "transformers", "titan": "torchtitan", "megatron": "megatron"}


def measure_steps(rank: int, world: int, name: str, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    setting = replace(SETTINGS[name], inter_mbit=20, layers=2, S=512, M=16, H=32, sequence=64, computation_s=0.01)
    costs = CostModel({line: Line(1e-5, 1e-11 if line == "gemm" else 1e-8) for line in LINES})
    topology = Topology.from_sizes(ep=world, timeout_s=60, duplex=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDMOE_CACHE", folder)
        patch.setattr("fusedmoe.layers.measure.measured_costs", lambda *_: costs)
        with doors._one_direction():
            before = doors.make(setting)
        assert all(one.topology.ep.downward is None for one in exchanges_in(before.model))
        assert all(one.topology.ep.downward is not None for one in exchanges_in(doors.make(setting).model))
        try:
            off, rates = doors.make(setting), []
            setting = doors.balanced(setting, topology, off, rates.append)
            assert len(rates) == 2 and setting.inter_mbit == rates[-1].inter_mbit
            return doors.measure(setting, topology, off, 1), doors.measure_tuning(setting, topology, off)
        finally:
            # This process also runs further tests.
            mock.patch.stopall()
            if setting.door == "megatron":
                importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CPU Autocast", "ignore:In CPU autocast")
@pytest.mark.parametrize("setting", DOORS, ids=lambda setting: str(setting.name))
def test_integration_steps_are_measured_interleaved(cluster: Cluster, tmp_path: Any, setting: Any) -> None:
    if find_spec(NEEDS[setting.door]) is None:
        pytest.skip(f"{NEEDS[setting.door]} is not installed")
    found, tuned = cluster.run(2, measure_steps, setting.name, str(tmp_path))[0]
    blocks = {"blocks"} if setting.door == "hf" else set()
    assert found["rows"].keys() == {"before", "off", "auto"} | blocks and "degrees" in found["rows"]["auto"]
    off_s, auto_s = (found["rows"][name]["median_s"] for name in ("off", "auto"))
    assert found["hidden"] == pytest.approx((off_s - auto_s) / found["hideable_s"])
    assert ("hidden_by_blocks" in found) == bool(blocks)
    assert (
        tuned["auto"]["steps_tried"] > 0 <= tuned["auto"]["share_of_500_steps"]
        and tuned["auto"]["chosen"] in tuned["rows"]
    )
    # A token has two of four experts on two ranks: five sixths of the tokens cross, for half of each pair.
    assert doors.sent_bytes(setting) == round(setting.layers * 4 * 5 / 6 * setting.row_bytes / 2)
