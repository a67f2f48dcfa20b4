"""The cache of profiles and plans on disk: one measurement per machine, broken files, several hosts."""

from __future__ import annotations

import json
import os
import pwd
import socket
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.files import write_kept
from fusedmoe.runtime import cache as module
from fusedmoe.runtime.cache import (
    CACHE,
    cache_dir,
    cached_plans,
    cached_profile,
    describe,
    fingerprint,
    machine_facts,
    plan_path,
)
from fusedmoe.runtime.profiler import Profile, line_names
from fusedmoe.schedule.cost import Contention, CostModel, Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, PlanSearch, whole_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload
from tests.cluster import Cluster

CPU = torch.device("cpu")


class Profiler:
    """Counts how often something is measured; each time something else comes out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.r2 = 0.99
        patch.setattr(module, "profile", self)

    def __call__(self, topology: Topology, device: torch.device, **asked: Any) -> Profile:
        self.asked.append(asked)
        line = Line(1e-6 * len(self.asked), 1e-12, self.r2)
        costs = CostModel(
            dict.fromkeys(line_names(topology), line), Contention.between_links(0.5), asked["machine"], tiled=True
        )
        return Profile(costs, {name: ((1.0, 2.0), (3.0, 4.0)) for name in costs.lines}, 1.5)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "not" / "there yet"))
    return tmp_path / "not" / "there yet"


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> Profiler:
    return Profiler(monkeypatch)


def test_a_machine_is_measured_once(folder: Path, profiler: Profiler) -> None:
    first, path = cached_profile(Topology(), CPU, budget_s=3.0)
    assert path.parent == folder and [path] == list(folder.iterdir())
    assert cached_profile(Topology(), CPU) == (first, path)
    assert len(profiler.asked) == 1 and profiler.asked[0]["budget_s"] == 3.0
    assert "1 rank on 1 host" in first.costs.machine and "float32 products" in first.costs.machine
    again, _ = cached_profile(Topology(), CPU, again=True)
    assert len(profiler.asked) == 2 and again != first
    assert cached_profile(Topology(), CPU)[0] == again and len(profiler.asked) == 2
    assert Profile.from_json(path.read_text()) == again


def test_lines_that_fit_poorly_are_a_warning_with_the_cure(folder: Path, profiler: Profiler) -> None:
    """When they are measured, and each time that they are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_profile(Topology(), CPU)
    profiler.r2 = 0.58
    for again in (True, False):
        with pytest.warns(UserWarning, match=r"gemm \(r² 0.58\), copy \(r² 0.58\).*profile --again --budget 60"):
            cached_profile(Topology(), CPU, again=again)
    assert len(profiler.asked) == 2


def test_products_of_another_dtype_are_another_file(folder: Path, profiler: Profiler) -> None:
    paths = {cached_profile(Topology(), CPU, dtype=dtype)[1] for dtype in (torch.float32, torch.float64)}
    assert len(paths) == len(list(folder.iterdir())) == 2


def line(**changes: Any) -> Callable[[str], str]:
    """Another line of matrix products."""

    def change(text: str) -> str:
        data = json.loads(text)
        data["lines"]["gemm"] |= changes
        return json.dumps(data)

    return change


BROKEN: dict[str, Callable[[str], str]] = {
    "nothing": lambda text: "",
    "half of it": lambda text: text[: len(text) // 2],
    "another JSON": lambda text: "[1, 2]",
    "no text": lambda text: "\udcff",
    "costs without points": lambda text: CostModel.from_json(text).to_json(),
    "a line less": lambda text: text.replace('"gemm"', '"all-reduce/dp"'),
    "a processor of another kind": lambda text: text.replace('"tiled": true', '"tiled": false'),
    "a time below zero": line(alpha_s=-1.0),
    "a time of text": line(beta_s="fast"),
    "no number": line(alpha_s=float("nan")),
    "no end": line(beta_s=float("inf")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_measured_again(folder: Path, profiler: Profiler, what: str) -> None:
    _, path = cached_profile(Topology(), CPU)
    text = BROKEN[what](path.read_text())
    path.write_text(text, errors="surrogateescape")
    with pytest.warns(UserWarning, match=f"{path} .*It is ignored, and written anew"):
        found, _ = cached_profile(Topology(), CPU)
    assert len(profiler.asked) == 2
    assert cached_profile(Topology(), CPU)[0] == found and len(profiler.asked) == 2
    if text.startswith("{") and text.endswith("}"):  # of something else, whole
        write_kept(path, text)
        assert cached_profile(Topology(), CPU)[0] != found and len(profiler.asked) == 3


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler: Profiler
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    for times in (1, 2):
        with pytest.warns(UserWarning, match=f"could not be kept.*Set {CACHE} to a folder"):
            found, _ = cached_profile(Topology(), CPU)
        assert len(profiler.asked) == times and set(found.costs.lines) == {"gemm", "copy"}


def test_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(CACHE, "~/kept")
    assert cache_dir() == Path("/home/somebody/kept")
    for unset in ("", None):
        monkeypatch.setenv(CACHE, "") if unset == "" else monkeypatch.delenv(CACHE)
        assert cache_dir() == Path("/home/somebody/.cache/fusedmoe")


@pytest.mark.parametrize("named", [None, "~/kept"])
def test_a_user_without_a_home_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, profiler: Profiler, named: str | None
) -> None:
    """As a container has it that runs with a number of a user that it does not know."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv(CACHE) if named is None else monkeypatch.setenv(CACHE, named)
    for times in (1, 2):
        with pytest.warns(UserWarning, match=f"could not be kept.*no home folder.*Set {CACHE} to a folder"):
            cached_profile(Topology(), CPU)
        assert len(profiler.asked) == times


def test_names_of_hosts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints() -> str:
        return fingerprint(machine_facts(Topology(), CPU, torch.float32))

    before = prints()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert prints() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    assert prints() != before


# Ranks


def on_ranks(rank: int, world: int, folder: str, ep: int, esp: int) -> tuple[Profile, str, list[str], int]:
    """Every rank has a folder of its own in mind; only rank 0's counts."""
    topology = Topology.from_sizes(ep, esp, ranks_per_node=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, f"{folder}/{rank}")
        profiler = Profiler(patch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found, path = cached_profile(topology, CPU)
            same, _ = cached_profile(topology, CPU)
        assert same == found
        kept = os.listdir(f"{folder}/{rank}") if os.path.isdir(f"{folder}/{rank}") else []
        return found, path.name, kept, len(profiler.asked)


def test_rank_0_reads_and_writes_for_all(cluster: Cluster, tmp_path: Path) -> None:
    names = []
    for ep, esp in ((2, 2), (2, 1)):
        every = cluster.run(4, on_ranks, str(tmp_path), ep, esp)
        assert all(found == every[0][0] for found, *_ in every)
        assert [asked for *_, asked in every] == [1] * 4
        assert [bool(kept) for _, _, kept, _ in every] == [True, False, False, False]
        assert every[0][1] in every[0][2]
        names.append(every[0][1])
        again = cluster.run(4, on_ranks, str(tmp_path), ep, esp)
        assert [asked for *_, asked in again] == [0] * 4 and again[0][0] == every[0][0]
    assert len(set(names)) == 2  # another layout, another file


def different_hosts(rank: int, world: int) -> tuple[str, str, str]:
    topology = Topology.from_sizes(2, 1)
    together = machine_facts(topology, CPU, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{rank}")
        apart = machine_facts(topology, CPU, torch.float32)
    return fingerprint(together), fingerprint(apart), describe(apart)


def test_two_hosts_are_another_machine(cluster: Cluster) -> None:
    found = cluster.run(2, different_hosts)
    assert found[0] == found[1]
    together, apart, text = found[0]
    assert together != apart and "2 ranks on 2 hosts" in text and "gloo" in text


LIMIT = 4


def stack(layers: int = 2) -> StepCosts:
    model = TESTBEDS["B"].costs
    layer = Workload(4, 256, 1024, 2048, experts=8, ep=8, esp=4).layer_costs(model)
    return StepCosts((layer,) * layers, model.line("all-reduce/dp"))


COSTS = stack()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies that were asked for a plan, without those that a search itself asks."""
    names: list[str] = []
    asked: list[str] = []

    class Counted(PlanSearch):
        def plan(self, name: str) -> Plan:
            if name in whole_policies() and not asked:
                names.append(name)
            asked.append(name)
            try:
                return super().plan(name)
            finally:
                asked.pop()

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
        plan_path("joint", replace(COSTS, contention=Contention.between_links(0.5)), LIMIT),
        plan_path("joint", replace(COSTS, loss_s=1e-3), LIMIT),
    ]
    assert len(set(others)) == len(others) and plan_path("joint", stack(), LIMIT) == others[0]
    monkeypatch.setattr(module, "own_version", lambda: "another")
    assert plan_path("joint", COSTS, LIMIT) not in others


BROKEN_PLANS: dict[str, Callable[[str], str]] = {
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


@pytest.mark.parametrize("what", BROKEN_PLANS)
def test_a_broken_file_is_searched_again(folder: Path, searched: list[str], what: str) -> None:
    found = plans_of("flowmoe")
    (path,) = folder.iterdir()
    whole = path.read_text()
    text = BROKEN_PLANS[what](whole)
    path.write_text(text, errors="surrogateescape")
    assert path.read_bytes() != whole.encode()
    with pytest.warns(UserWarning, match=f"{path} .*It is ignored, and written anew"):
        assert plans_of("flowmoe") == found and len(searched) == 2
    assert path.read_text() == whole and plans_of("flowmoe") == found and len(searched) == 2
    if text.startswith("{") and text.rstrip().endswith("}"):  # of something else, whole
        write_kept(path, text)
        assert plans_of("flowmoe") == found and len(searched) == 3


def test_plans_that_cannot_be_written_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
