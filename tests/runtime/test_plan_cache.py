from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.runtime import plan_cache as module
from fusedmoe.runtime.cache import CACHE
from fusedmoe.runtime.plan_cache import cached_plans, plan_path
from fusedmoe.schedule.grid import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, WHOLE_POLICIES, PlanSearch
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload
from tests.cluster import Cluster

LIMIT = 4


def stack(layers: int = 2) -> StepCosts:
    model = TESTBEDS["B"].costs
    layer = Workload(4, 256, 1024, 2048, experts=8, ep=8, esp=4).layer_costs(model)
    return StepCosts((layer,) * layers, model.line("all-reduce/dp"))


COSTS = stack()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "not" / "there yet"))
    return tmp_path / "not" / "there yet"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies that were asked for a plan."""
    names: list[str] = []

    class Counted(PlanSearch):
        def plan(self, name: str) -> Plan:
            if name in WHOLE_POLICIES:
                names.append(name)
            return super().plan(name)

    monkeypatch.setattr(module, "PlanSearch", Counted)
    return names


def plans_of(*policies: str, costs: StepCosts = COSTS, again: bool = False) -> dict[str, Plan]:
    return cached_plans(policies, Topology(), costs, limit=LIMIT, again=again)


def test_a_plan_is_searched_once(folder: Path, searched: list[str]) -> None:
    first = plans_of("flowmoe", "joint")
    assert first == {name: POLICIES[name].plan(COSTS, LIMIT) for name in ("flowmoe", "joint")}
    assert searched == ["flowmoe", "joint"] and len(list(folder.iterdir())) == 2
    assert plans_of("flowmoe", "joint") == first and len(searched) == 2
    assert plans_of("joint", "lancet").keys() == {"joint", "lancet"} and searched[2:] == ["lancet"]
    assert plans_of("joint", again=True)["joint"] == first["joint"] and searched[3:] == ["joint"]
    kept = json.loads(plan_path("joint", COSTS, LIMIT).read_text())
    assert kept["step_s"] == makespan(first["joint"], COSTS) and kept["fingerprint"] == first["joint"].fingerprint


def test_what_a_plan_depends_on_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        plan_path("joint", COSTS, LIMIT),
        plan_path("lancet", COSTS, LIMIT),
        plan_path("joint", COSTS, LIMIT + 1),
        plan_path("joint", COSTS, LIMIT, 4),
        plan_path("joint", stack(3), LIMIT),
        plan_path("joint", replace(COSTS, contention=0.5), LIMIT),
        plan_path("joint", replace(COSTS, loss_s=1e-3), LIMIT),
    ]
    assert len(set(others)) == len(others) and plan_path("joint", stack(), LIMIT) == others[0]
    monkeypatch.setattr(module, "own_version", lambda: "another")
    assert plan_path("joint", COSTS, LIMIT) not in others


BROKEN: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: "",
    "half of it": lambda text: text[: len(text) // 2],
    "another JSON": lambda text: "[1, 2]",
    "no text": lambda text: "\udcff",
    "another version": lambda text: text.replace('"version": 1', '"version": 0'),
    "a task less": lambda text: text.replace("compute: f0.A0 ", "compute: ").replace("compute: f0.A ", "compute: "),
    "no plan": lambda text: text.replace("inter: ", "network: "),
    "another plan": lambda text: json.dumps(json.loads(text) | {"plan": ["compute: E0"]}),
    "a plan of more layers": lambda text: json.dumps(
        json.loads(text)
        | {"plan": (plan := str(POLICIES["flowmoe"].plan(stack(3), LIMIT))).splitlines()}
        | {"fingerprint": Plan.parse(plan).fingerprint}
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_searched_again(folder: Path, searched: list[str], what: str) -> None:
    found = plans_of("flowmoe")
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(BROKEN[what](whole), errors="surrogateescape")
    assert path.read_bytes() != whole.encode()
    assert plans_of("flowmoe") == found and len(searched) == 2
    assert path.read_text() == whole and plans_of("flowmoe") == found and len(searched) == 2


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=f"what was planned could not be kept.*Set {CACHE} to a folder"):
        assert plans_of("flowmoe")["flowmoe"] == POLICIES["flowmoe"].plan(COSTS, LIMIT)


def test_layers_that_cannot_be_split_are_refused(folder: Path) -> None:
    bare = replace(COSTS, layers=tuple(replace(layer, micro=None) for layer in COSTS.layers))
    with pytest.raises(ConfigError, match="cannot be split"):
        plans_of("flowmoe", costs=bare)
    assert not folder.exists()


def test_ranks_have_what_rank_0_read(cluster: Cluster, tmp_path: Path) -> None:
    """Each rank has a folder of its own here, and only the first one's is used."""
    for _ in range(2):
        found = cluster.run(2, on_a_rank, str(tmp_path))
        assert found[0] == found[1] == POLICIES["flowmoe"].plan(COSTS, LIMIT).fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["0"] and len(list((tmp_path / "0").iterdir())) == 1


def on_a_rank(rank: int, world: int, folder: str) -> str:
    topology = Topology.from_sizes(ep=world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, f"{folder}/{rank}")
        return cached_plans(["flowmoe"], topology, COSTS, limit=LIMIT)["flowmoe"].fingerprint
