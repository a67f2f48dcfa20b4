"""The cache of profiles and plans on disk: one measurement per machine, broken files, several hosts."""

from __future__ import annotations

import json
import os
import pwd
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fusedmoe.cli.commands import PRODUCTS
from fusedmoe.cli.main import make_parser
from fusedmoe.comm.group import device_backend
from fusedmoe.comm.topology import Topology
from fusedmoe.compat.torch import default_store
from fusedmoe.errors import ConfigError
from fusedmoe.files import write_cache_file
from fusedmoe.layers.scheduled_exchange import shared_topology
from fusedmoe.runtime import cache as module
from fusedmoe.runtime.cache import (
    CACHE,
    PRODUCT_DTYPES,
    cache_dir,
    cached_plans,
    cached_profile,
    describe_machine,
    fingerprint,
    machine_facts,
    plan_path,
    profile_command,
)
from fusedmoe.runtime.profiler import Profile, line_names
from fusedmoe.schedule.cost import Contention, CostModel, Line
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES, PlanSearch, micro_batch_policies
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import StepCosts
from fusedmoe.schedule.workload import Workload
from fusedmoe.tutel.impls.communicate import topology_of
from tests.cli import on_ranks
from tests.cluster import Cluster

CPU = torch.device("cpu")


class Profiler:
    """Count measurements; each one returns another result."""

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


def test_profile_is_measured_once_per_machine(folder: Path, profiler: Profiler) -> None:
    first, path = cached_profile(Topology(), CPU, budget_s=3.0)
    assert path.parent == folder and [path] == list(folder.iterdir())
    assert cached_profile(Topology(), CPU) == (first, path)
    assert len(profiler.asked) == 1 and profiler.asked[0]["budget_s"] == 3.0
    assert "1 rank on 1 host" in first.costs.machine and "float32 products" in first.costs.machine
    again, _ = cached_profile(Topology(), CPU, again=True)
    assert len(profiler.asked) == 2 and again != first
    assert cached_profile(Topology(), CPU)[0] == again and len(profiler.asked) == 2
    assert Profile.from_json(path.read_text()) == again


def test_poor_fit_warns_with_remedy(folder: Path, profiler: Profiler) -> None:
    """Warn after measuring, and each time that the lines are read."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_profile(Topology(), CPU)
    profiler.r2 = 0.58
    for again in (True, False):
        with pytest.warns(UserWarning, match=r"gemm \(r² 0.58\), copy \(r² 0.58\).*profile --again --budget 60"):
            cached_profile(Topology(), CPU, again=again)
    assert len(profiler.asked) == 2


def test_end_of_a_measurement_is_printed_once(
    folder: Path, profiler: Profiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def measure(topology: Topology, device: torch.device, *, show: Callable[[int, int], None], **rest: Any) -> Profile:
        for now[0], done in ((3.0, 1), (17.0, 2)):
            show(done, 3)
        return profiler(topology, device, **rest)

    monkeypatch.setattr(module, "profile", measure)
    _, path = cached_profile(Topology(), CPU)
    cached_profile(Topology(), CPU)
    out, error = capsys.readouterr()
    assert not out and error.splitlines()[-1] == f"fusedmoe: measured in 17 s, cached in {path}"
    assert error.count("measured in") == 1


def command_of_four_ranks(rank: int, world: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, "/a folder")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        topology = Topology.from_sizes(ep=2, esp=2, ranks_per_node=2)
        return profile_command(machine_facts(topology, CPU, torch.float16), CPU)


def test_advice_on_poor_fits_is_a_whole_command(cluster: Cluster) -> None:
    """The layout, the dtype, the network and the threads are part of the key under which the profile is cached."""
    command = cluster.run(4, command_of_four_ranks)[0]
    launch, _, flags = command.partition(" -m fusedmoe ")
    environment = f"{CACHE}='/a folder' GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1"
    assert launch == f"{environment} torchrun --nproc-per-node 4 --standalone"
    parsed = vars(make_parser().parse_args(flags.split()))
    assert {name: parsed[name] for name in ("ranks_per_node", "ep", "esp", "mp")} == dict(
        ranks_per_node=2, ep=2, esp=2, mp=1
    )
    assert parsed["again"] and parsed["budget"] == 60 and parsed["device"] == "cpu" and not parsed["duplex"]
    assert PRODUCT_DTYPES[parsed["products"]] == torch.float16 and tuple(PRODUCT_DTYPES) == PRODUCTS


TOPOLOGIES: dict[str, Callable[[], Topology]] = {
    "README": lambda: Topology.from_sizes(ep=2),
    "duplex": lambda: Topology.from_sizes(ep=2, duplex=True),
    "Hugging Face": lambda: shared_topology(dist.group.WORLD),
    "Tutel": lambda: topology_of(None),
}


def warning_of_program(rank: int, world: int, folder: str, kind: str, backend: str | None) -> str:
    """Return the warning about poor fits in a program that initialises torch.distributed with this backend."""
    store = dist.PrefixStore(f"again with {backend}", default_store())
    dist.destroy_process_group()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setenv(CACHE, folder)
        Profiler(patch).r2 = 0.5
        warnings.simplefilter("always")
        cached_profile(TOPOLOGIES[kind](), CPU)
        return "".join(str(one.message) for one in caught)


def run_printed_command(rank: int, world: int, folder: str, *flags: str) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, folder)
        Profiler(patch)
        return on_ranks.command(rank, world, folder, *flags)


@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_printed_command_replaces_the_file_of_each_program(cluster: Cluster, tmp_path: Path, kind: str) -> None:
    """For `init_process_group()` and for a named backend: both use Gloo on CPUs."""
    texts = [cluster.run(2, warning_of_program, str(tmp_path), kind, backend)[0] for backend in (None, "gloo")]
    assert texts[0] == texts[1] and "are noisy" in texts[0]
    (path,) = tmp_path.iterdir()
    assert texts[0].startswith(f"{path}: ")
    flags = texts[0].partition(" -m fusedmoe ")[2].split()
    code, out, error = cluster.run(2, run_printed_command, str(tmp_path), *flags)[0]
    assert code == 0 and list(tmp_path.iterdir()) == [path], error
    profile = Profile.from_json(path.read_text())
    assert profile.costs.line("gemm").r2 == 0.99 and ("gloo duplex," in profile.costs.machine) == (kind != "README")


def test_backend_of_the_device_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, name in (("cpu:gloo,cuda:nccl", "undefined"), ("cuda:nccl", "nccl"), ("cpu:gloo,cuda:gloo", "gloo")):
        monkeypatch.setattr(dist, "get_backend_config", lambda handle, config=config: config)
        monkeypatch.setattr(dist, "get_backend", lambda handle, name=name: name)
        on_gpu = "nccl" if "nccl" in config else "gloo"
        handle: Any = object()
        assert device_backend(handle, "cuda") == on_gpu
        assert device_backend(handle, "cpu") == ("gloo" if "gloo" in config else "nccl")


def test_each_dtype_has_its_own_cache_file(folder: Path, profiler: Profiler) -> None:
    paths = {cached_profile(Topology(), CPU, dtype=dtype)[1] for dtype in (torch.float32, torch.float64)}
    assert len(paths) == len(list(folder.iterdir())) == 2


def with_gemm_line(**changes: Any) -> Callable[[str], str]:
    """Another line of matrix products."""

    def change(text: str) -> str:
        data = json.loads(text)
        data["lines"]["gemm"] |= changes
        return json.dumps(data)

    return change


BROKEN: dict[str, Callable[[str], str]] = {
    "empty file": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "other JSON": lambda text: "[1, 2]",
    "invalid UTF-8": lambda text: "\udcff",
    "costs without points": lambda text: CostModel.from_json(text).to_json(),
    "missing line": lambda text: text.replace('"gemm"', '"all-reduce/dp"'),
    "other kernel tiling": lambda text: text.replace('"tiled": true', '"tiled": false'),
    "negative time": with_gemm_line(alpha_s=-1.0),
    "text as time": with_gemm_line(beta_s="fast"),
    "NaN time": with_gemm_line(alpha_s=float("nan")),
    "infinite time": with_gemm_line(beta_s=float("inf")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_corrupt_profile_is_measured_again(folder: Path, profiler: Profiler, what: str) -> None:
    _, path = cached_profile(Topology(), CPU)
    text = BROKEN[what](path.read_text())
    path.write_text(text, errors="surrogateescape")
    with pytest.warns(UserWarning, match=f"{path} .*The file is ignored and written again"):
        found, _ = cached_profile(Topology(), CPU)
    assert len(profiler.asked) == 2
    assert cached_profile(Topology(), CPU)[0] == found and len(profiler.asked) == 2
    if text.startswith("{") and text.endswith("}"):  # a valid file of something else
        write_cache_file(path, text)
        assert cached_profile(Topology(), CPU)[0] != found and len(profiler.asked) == 3


def test_unwritable_folder_warns_and_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler: Profiler
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    for times in (1, 2):
        with pytest.warns(UserWarning, match=f"could not be cached.*Set {CACHE} to a writable folder"):
            found, _ = cached_profile(Topology(), CPU)
        assert len(profiler.asked) == times and set(found.costs.lines) == {"gemm", "copy"}


def test_cache_dir_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv(CACHE, "~/kept")
    assert cache_dir() == Path("/home/somebody/kept")
    for unset in ("", None):
        monkeypatch.setenv(CACHE, "") if unset == "" else monkeypatch.delenv(CACHE)
        assert cache_dir() == Path("/home/somebody/.cache/fusedmoe")


@pytest.mark.parametrize("named", [None, "~/kept"])
def test_user_without_home_warns_and_caches_nothing(
    monkeypatch: pytest.MonkeyPatch, profiler: Profiler, named: str | None
) -> None:
    """As in a container whose user id has no entry."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv(CACHE) if named is None else monkeypatch.setenv(CACHE, named)
    for times in (1, 2):
        with pytest.warns(UserWarning, match=f"could not be cached.*no home folder.*Set {CACHE} to a writable folder"):
            cached_profile(Topology(), CPU)
        assert len(profiler.asked) == times


def test_fingerprint_ignores_host_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def prints() -> str:
        return fingerprint(machine_facts(Topology(), CPU, torch.float32))

    before = prints()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert prints() == before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    assert prints() != before


# Ranks


def profile_on_rank(rank: int, world: int, folder: str, ep: int, esp: int) -> tuple[Profile, str, list[str], int]:
    """Each rank has its own cache folder; only rank 0's is used."""
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


def test_only_rank_0_reads_and_writes_profiles(cluster: Cluster, tmp_path: Path) -> None:
    names = []
    for ep, esp in ((2, 2), (2, 1)):
        every = cluster.run(4, profile_on_rank, str(tmp_path), ep, esp)
        assert all(found == every[0][0] for found, *_ in every)
        assert [asked for *_, asked in every] == [1] * 4
        assert [bool(kept) for _, _, kept, _ in every] == [True, False, False, False]
        assert every[0][1] in every[0][2]
        names.append(every[0][1])
        again = cluster.run(4, profile_on_rank, str(tmp_path), ep, esp)
        assert [asked for *_, asked in again] == [0] * 4 and again[0][0] == every[0][0]
    assert len(set(names)) == 2  # another layout, another file


def fingerprints_on_one_and_two_hosts(rank: int, world: int) -> tuple[str, str, str]:
    topology = Topology.from_sizes(2, 1)
    together = machine_facts(topology, CPU, torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{rank}")
        apart = machine_facts(topology, CPU, torch.float32)
    return fingerprint(together), fingerprint(apart), describe_machine(apart)


def test_fingerprint_depends_on_number_of_hosts(cluster: Cluster) -> None:
    found = cluster.run(2, fingerprints_on_one_and_two_hosts)
    assert found[0] == found[1]
    together, apart, text = found[0]
    assert together != apart and "2 ranks on 2 hosts" in text and "gloo" in text


LIMIT = 4


def make_step_costs(layers: int = 2) -> StepCosts:
    model = TESTBEDS["B"].costs
    layer = Workload(4, 256, 1024, 2048, experts=8, ep=8, esp=4).layer_costs(model)
    return StepCosts((layer,) * layers, model.line("all-reduce/dp"))


COSTS = make_step_costs()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The policies whose plans were requested, without a search's internal requests."""
    names: list[str] = []
    asked: list[str] = []

    class Counted(PlanSearch):
        def plan(self, name: str) -> Plan:
            if name in micro_batch_policies() and not asked:
                names.append(name)
            asked.append(name)
            try:
                return super().plan(name)
            finally:
                asked.pop()

    monkeypatch.setattr(module, "PlanSearch", Counted)
    return names


def plans_by_policy(*policies: str, costs: StepCosts = COSTS, again: bool = False) -> dict[str, Plan]:
    return cached_plans(policies, Topology(), costs, limit=LIMIT, again=again)


def test_plan_is_searched_once(folder: Path, searched: list[str]) -> None:
    first = plans_by_policy("flowmoe", "joint")
    assert first == {name: POLICIES[name].plan(COSTS, LIMIT) for name in ("flowmoe", "joint")}
    assert searched == ["flowmoe", "joint"] and len(list(folder.iterdir())) == 2
    assert plans_by_policy("flowmoe", "joint") == first and len(searched) == 2
    assert plans_by_policy("joint", "lancet").keys() == {"joint", "lancet"} and searched[2:] == ["lancet"]
    assert plans_by_policy("joint", again=True)["joint"] == first["joint"] and searched[3:] == ["joint"]
    kept = json.loads(plan_path("joint", COSTS, LIMIT).read_text())
    assert kept["step_s"] == makespan(first["joint"], COSTS) and kept["fingerprint"] == first["joint"].fingerprint


def test_plan_path_depends_on_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        plan_path("joint", COSTS, LIMIT),
        plan_path("lancet", COSTS, LIMIT),
        plan_path("joint", COSTS, LIMIT + 1),
        plan_path("joint", COSTS, LIMIT, 4),
        plan_path("joint", make_step_costs(3), LIMIT),
        plan_path("joint", replace(COSTS, contention=Contention.between_links(0.5)), LIMIT),
        plan_path("joint", replace(COSTS, loss_s=1e-3), LIMIT),
    ]
    assert len(set(others)) == len(others) and plan_path("joint", make_step_costs(), LIMIT) == others[0]
    monkeypatch.setattr(module, "library_version", lambda: "another")
    assert plan_path("joint", COSTS, LIMIT) not in others


BROKEN_PLANS: dict[str, Callable[[str], str]] = {
    "empty file": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "other JSON": lambda text: "[1, 2]",
    "invalid UTF-8": lambda text: "\udcff",
    "other version": lambda text: text.replace('"version": 1', '"version": 0'),
    "missing task": lambda text: text.replace("compute: f0.A0 ", "compute: ").replace("compute: f0.A ", "compute: "),
    "invalid plan text": lambda text: text.replace("inter: ", "network: "),
    "other plan": lambda text: json.dumps(json.loads(text) | {"plan": ["compute: E0"]}),
    "plan of more layers": lambda text: json.dumps(
        json.loads(text)
        | {"plan": (plan := str(POLICIES["flowmoe"].plan(make_step_costs(3), LIMIT))).splitlines()}
        | {"fingerprint": Plan.parse(plan).fingerprint}
    ),
}


@pytest.mark.parametrize("what", BROKEN_PLANS)
def test_corrupt_plan_is_searched_again(folder: Path, searched: list[str], what: str) -> None:
    found = plans_by_policy("flowmoe")
    (path,) = folder.iterdir()
    whole = path.read_text()
    text = BROKEN_PLANS[what](whole)
    path.write_text(text, errors="surrogateescape")
    assert path.read_bytes() != whole.encode()
    with pytest.warns(UserWarning, match=f"{path} .*The file is ignored and written again"):
        assert plans_by_policy("flowmoe") == found and len(searched) == 2
    assert path.read_text() == whole and plans_by_policy("flowmoe") == found and len(searched) == 2
    if text.startswith("{") and text.rstrip().endswith("}"):  # a valid file of something else
        write_cache_file(path, text)
        assert plans_by_policy("flowmoe") == found and len(searched) == 3


def test_unwritable_folder_warns_and_returns_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=f"what was planned could not be cached.*Set {CACHE} to a writable folder"):
        assert plans_by_policy("flowmoe")["flowmoe"] == POLICIES["flowmoe"].plan(COSTS, LIMIT)


def test_layers_without_split_costs_are_rejected(folder: Path) -> None:
    bare = replace(COSTS, layers=tuple(replace(layer, micro=None) for layer in COSTS.layers))
    with pytest.raises(ConfigError, match="cannot be split"):
        plans_by_policy("flowmoe", costs=bare)
    assert not folder.exists()


def test_all_ranks_receive_plan_of_rank_0(cluster: Cluster, tmp_path: Path) -> None:
    """Each rank has its own cache folder here, and only the first one's is used."""
    for _ in range(2):
        found = cluster.run(2, plan_fingerprint_on_rank, str(tmp_path))
        assert found[0] == found[1] == POLICIES["flowmoe"].plan(COSTS, LIMIT).fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["0"] and len(list((tmp_path / "0").iterdir())) == 1


def plan_fingerprint_on_rank(rank: int, world: int, folder: str) -> str:
    topology = Topology.from_sizes(ep=world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE, f"{folder}/{rank}")
        return cached_plans(["flowmoe"], topology, COSTS, limit=LIMIT)["flowmoe"].fingerprint
