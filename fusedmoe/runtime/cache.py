"""Files that jobs keep for the next ones, in `$FUSEDMOE_CACHE` or else in ~/.cache/fusedmoe: profiles and plans.

    costs-….json     a profile, for each machine, layout of ranks and versions
    steps-….json     what the parts of a model's steps take, for its shapes as well
    plan-….json      a plan of a whole model, for each policy, costs and version
    choice-….json    what was measured to be the fastest while a job trained, for each machine and step

Rank 0 reads and writes, and all ranks have what it read. A damaged file, or one of something else, is made again; where
a file cannot be written a warning says so, and the job goes on. Numbers of captured graphs lie there, too
(`fusedmoe.graph`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
import torch.distributed as dist

from fusedmoe import schedule
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, warn
from fusedmoe.files import CACHE, cache_dir, parse_json, read_kept, read_text, write_kept
from fusedmoe.runtime.profiler import BUDGET_S, Profile, line_names, profile
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.schedule.candidates import PlanCandidate, predicted_s
from fusedmoe.schedule.cost import Observed
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies import POLICIES, PlanSearch, own_plans
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts

_FORMAT, _CHOICE = "fusedmoe-plan", "fusedmoe-choice"
_VERSION = 1
# Of what steps take: before, tasks had taken what they take beside each other.
_OBSERVED_VERSION = 2


def fingerprint(facts: dict[str, Any]) -> str:
    """Returns 16 hexadecimal digits of all that a file depends on, in plain types."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def own_version() -> str:
    """Returns the version of this library; none where it is run from its source."""
    with suppress(PackageNotFoundError):
        return version("fusedmoe")
    return ""


def _of_rank_0(topology: Topology, path: Path, operation: str, again: bool = False) -> str | None:
    """Returns the text of rank 0's file, on all ranks: their disks may differ. None where it is to be made again."""
    text = read_kept(path) if topology.is_first and not again else None
    return all_gather_object(topology.world, text, operation)[0]


def write(path: Path, text: str, what: str) -> None:
    """`write_kept`, but a file that cannot be written is a warning. `what`: for it, "what was measured"."""
    try:
        write_kept(path, text)
    except OSError as error:
        warn(
            f"{what} could not be kept ({error}); the next job has to do it again. Set {CACHE} to a folder that can be "
            "written",
            stacklevel=3,
        )


def cached_profile(
    topology: Topology,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    budget_s: float = BUDGET_S,
    again: bool = False,
) -> tuple[Profile, Path]:
    """Returns the profile of this machine and its path; measured where none is kept. Collective over all ranks.

    While it is measured, rank 0 shows a bar. Lines that are far from what was measured are a warning on rank 0.

    Args:
        again: measure in any case.
    Raises: what `profile` does.
    """
    facts = machine_facts(topology, device, dtype)
    path = cache_dir() / f"costs-{fingerprint(facts)}.json"
    text = _of_rank_0(topology, path, "reading the profile", again)
    measured = None if text is None else _valid_profile(text, topology, device)
    if measured is None:
        with WorkBar("measuring this machine") as bar:
            show = bar.show if topology.is_first else None
            machine = describe(facts)
            measured = profile(topology, device, dtype=dtype, budget_s=budget_s, machine=machine, show=show)
        if topology.is_first:
            write(path, measured.to_json(), "what was measured")
    if measured.poor and topology.is_first:
        lines = ", ".join(f"{name} (r² {r2:.2f})" for name, r2 in measured.poor.items())
        warn(
            f"{path}: times of {lines} were uneven, and no line comes near them; schedules made by it may be slow. "
            "Measure again while nothing else runs on these machines, and for longer, on the same ranks: "
            "fusedmoe profile --again --budget 60",
            stacklevel=2,
        )
    return measured, path


def cached_observed(
    topology: Topology, facts: dict[str, Any], measure: Callable[[], Observed], again: bool = False
) -> Observed:
    """Returns what the parts of steps take; measured where it is not kept. Collective over all ranks.

    Args:
        facts: all that it depends on, in plain types, the same on every rank: those of the machine (`machine_facts`),
            and the model's shapes.
        measure: collective, too; returns the same on every rank.
        again: measure in any case.
    """
    observed = None if again else kept_observed(topology, facts)
    if observed is None:
        observed = measure()
        if topology.is_first:
            write(_observed_path(facts), json.dumps(observed.as_dict()), "what was measured")
    return observed


def kept_observed(topology: Topology, facts: dict[str, Any]) -> Observed | None:
    """Returns what the parts of steps take; None where it is not kept, or the file is of something else."""
    text = _of_rank_0(topology, _observed_path(facts), "reading what steps take")
    if text is not None:
        with suppress(ConfigError):
            return Observed.from_dict(parse_json(text, "what steps take"))
    return None


def _observed_path(facts: dict[str, Any]) -> Path:
    return cache_dir() / f"steps-{fingerprint({'format': _OBSERVED_VERSION, **facts})}.json"


def machine_facts(topology: Topology, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns all that times depend on, in plain types, the same on every rank. Collective over all ranks."""
    own = {
        "host": socket.gethostname(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "networks": _networks(),
    }
    ranks: list[dict[str, Any]] = all_gather_object(topology.world, own, "comparing machines")
    # Hosts by number: another job on machines of the same kind, with other names, finds the same profile.
    hosts = list(dict.fromkeys(rank["host"] for rank in ranks))
    sizes = {axis: getattr(topology, axis).size for axis in ("ep", "esp", "mp", "dp")}
    return {
        "ranks": [rank | {"host": hosts.index(rank["host"])} for rank in ranks],
        **sizes,
        "ranks_per_node": topology.ranks_per_node,
        "backend": "none" if topology.world.handle is None else dist.get_backend(topology.world.handle),
        "duplex": any(group.downward is not None for group in (topology.ep, topology.esp, topology.dp)),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "nccl": list(torch.cuda.nccl.version()) if device.type == "cuda" else [],
        "fusedmoe": own_version(),
    }


def describe(facts: dict[str, Any]) -> str:
    """Returns the machine in one line."""
    ranks = facts["ranks"]
    hosts = len({rank["host"] for rank in ranks})
    devices = sorted({rank["processor"] if rank["device"] == "cpu" else rank["device"] for rank in ranks})
    sizes = ", ".join(f"{axis} {facts[axis]}" for axis in ("ep", "esp", "mp", "dp"))
    threads = f", {ranks[0]['threads']} threads each" if ranks[0]["device"] == "cpu" else ""
    where = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    software = f"{facts['backend']}, {facts['dtype']} products, torch {facts['torch']}"
    return f"{where} ({' and '.join(devices)}{threads}), {sizes}, {software}"


def _valid_profile(text: str, topology: Topology, device: torch.device) -> Profile | None:
    with suppress(ConfigError):
        kept = Profile.from_json(text)
        if kept.costs.lines.keys() == set(line_names(topology)) and kept.costs.tiled == (device.type == "cpu"):
            return kept
    return None


def _processor() -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} CPUs"


def _networks() -> Sequence[str]:
    """Returns network cards with their speeds, and which of them torch.distributed was told to use."""
    cards = []
    for card in sorted(Path("/sys/class/net").glob("*")):
        if (card / "device").exists():  # a real one; the names of virtual ones are often random
            cards.append(f"{card.name} {_speed(card / 'speed')} Mb/s")
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        cards.append(f"{port.parent.parent.name}/{port.name} {_speed(port / 'rate')}")
    told = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")
    return [*cards, *(f"{name}={os.environ[name]}" for name in told if name in os.environ)]


def _speed(path: Path) -> str:
    with suppress(ConfigError):  # a card that is off cannot be read
        return read_text(path).strip()
    return "?"


def cached_plans(
    policies: Iterable[str],
    topology: Topology,
    costs: StepCosts,
    *,
    limit: int = MAX_DEGREE,
    samples: int | None = None,
    again: bool = False,
    show: Callable[[int, int], None] | None = None,
) -> dict[str, Plan]:
    """Returns the plans of a step by these policies; searched where they are not kept. Collective over all ranks.

    Args:
        policies: names of policies of whole layers.
        costs: the same on every rank.
        limit, samples: the most chunks, and the samples of a batch (`PlanSearch`).
        again: search in any case.
        show: told on rank 0 how many parts are done, of how many; None: it shows a bar.
    Raises:
        ConfigError: layers that cannot be split.
    """
    # The name of a file holds all that its plan depends on.
    paths = {name: plan_path(name, costs, limit, samples) for name in policies}
    first = topology.is_first
    # The library cannot tell whether a user's function is still the one that made a file.
    keeps = [name for name in paths if name not in POLICIES or not POLICIES[name].own]
    texts = {name: read_kept(paths[name]) if first and not again and name in keeps else None for name in paths}
    # Rank 0's files count, so that all ranks follow one plan even where their disks differ.
    texts = all_gather_object(topology.world, texts, "reading plans")[0]
    kept = {name: _valid_plan(texts[name], costs) for name in paths}
    if all(kept.values()):
        return {name: plan for name, plan in kept.items() if plan is not None}
    with WorkBar("planning") as bar:
        # All ranks search for themselves: the same numbers give the same plan.
        search = PlanSearch(costs, limit, samples, (show or bar.show) if first else lambda done, total: None)
        plans = {name: kept[name] or search.plan(name) for name in paths}
    for name in keeps:
        if first and kept[name] is None:
            head = {"format": _FORMAT, "version": _VERSION, "policy": name, "step_s": makespan(plans[name], costs)}
            write(paths[name], json.dumps({**head, **_as_dict(plans[name])}), "what was planned")
    return plans


def plan_path(policy: str, costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Path:
    """Returns the file of the plan by this policy: another one for all that it depends on."""
    facts = {
        "policy": policy,
        "costs": asdict(costs),
        "limit": limit,
        "samples": samples,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "fusedmoe": own_version(),
        "source": _source(),
    }
    if policy == "joint" and (own := own_plans(costs, limit)):
        facts["own"] = own
    return cache_dir() / f"plan-{fingerprint(facts)}.json"


def _source() -> str:
    """Returns a digest of the modules that plan: between two versions they change, too."""
    digest = hashlib.sha256()
    for folder in sorted(schedule.__path__):
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _as_dict(plan: Plan) -> dict[str, Any]:
    return {"fingerprint": plan.fingerprint, "plan": str(plan).splitlines()}


def _from_dict(data: Any) -> Plan:
    """Reads what `_as_dict` gave. Raises `ConfigError` for a plan that was cut or edited."""
    plan = Plan.parse("\n".join(data["plan"]))
    if plan.fingerprint != data["fingerprint"]:
        raise ConfigError("a plan is not as it was written")
    return plan


def _valid_plan(text: str | None, costs: StepCosts) -> Plan | None:
    if text is None:
        return None
    with suppress(KeyError, TypeError, ConfigError):
        data = json.loads(text)
        if (data["format"], data["version"]) != (_FORMAT, _VERSION):
            return None
        plan = _from_dict(data)
        # A plan of other layers takes another time.
        if makespan(plan, costs) == data["step_s"]:
            return plan
    return None


def choice_path(topology: Topology, device: torch.device, dtype: torch.dtype, facts: dict[str, Any]) -> Path:
    """Returns the file of the fastest plan of a step with these facts, in plain types. Collective over all ranks."""
    machine = machine_facts(topology, device, dtype)
    return cache_dir() / f"choice-{fingerprint({'machine': machine, 'source': _source(), **facts})}.json"


def choice_text(chooser: PlanChooser) -> str:
    """Return the text of a choice's file, for `read_choice`: the chosen plan, its seconds, and the runner-up to compare
    it with. A line and a table are for people."""
    best = chooser.best
    ranked = sorted((entry for entry in chooser.trials.entries if entry.seconds), key=lambda entry: entry.median_s)
    kept = [best.candidate, *[entry.candidate for entry in ranked if entry is not best][:1]]
    plans = [{"family": each.family, "whole": each.whole, **_as_dict(each.plan)} for each in kept]
    head = {"format": _CHOICE, "version": _VERSION, "line": chooser.line(), "seconds": best.median_s}
    return json.dumps({**head, "table": [row._asdict() for row in chooser.table()], "plans": plans})


def read_choice(
    topology: Topology, costs_of: Callable[[bool], StepCosts], path: Path
) -> tuple[float, list[PlanCandidate]] | None:
    """Returns the seconds of a kept choice, and its plans; None where none is kept. Collective over all ranks.

    A damaged file is a warning, and so is one whose plans are not of these layers.

    `costs_of`: returns a step, by whether micro-batches go through whole layers.
    """
    text = _of_rank_0(topology, path, "reading what was measured")
    if text is None:
        return None
    try:
        data = json.loads(text)
        if (data["format"], data["version"]) != (_CHOICE, _VERSION) or not 0 < float(data["seconds"]) < math.inf:
            raise ConfigError("it is of something else")
        candidates = []
        for kept in data["plans"]:
            plan, whole = _from_dict(kept), bool(kept["whole"])
            candidates.append(PlanCandidate(str(kept["family"]), plan, whole, predicted_s(plan, costs_of(whole))))
        if not candidates:
            raise ConfigError("it has no plan")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        if topology.is_first:
            warn(f"{path}: {error}. It is ignored, and plans are measured again", stacklevel=2)
        return None
    return float(data["seconds"]), candidates
