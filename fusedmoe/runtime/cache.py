"""Cache files in `$FUSEDMOE_CACHE` (default ~/.cache/fusedmoe): profiles and plans for later jobs.

    costs-….json     profile, by machine, parallel layout and versions
    steps-….json     measured task times of a model's steps, also by its shapes
    plan-….json      plan of a whole model, by policy, costs and version
    choice-….json    fastest plan measured while a job trained, by machine and step

Rank 0 reads and writes, and sends the contents to all ranks. Damaged files are created again. A file that cannot be
written causes a warning only. `fusedmoe.graph` also stores numbers of compiled graphs there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import scipy
import torch

from fusedmoe import schedule
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.group import device_backend
from fusedmoe.comm.topology import Topology
from fusedmoe.environment import launch_command
from fusedmoe.errors import ConfigError, warn
from fusedmoe.files import CACHE, cache_dir, parse_json, read_cache_file, read_text, write_cache_file
from fusedmoe.runtime.profiler import BUDGET_S, Profile, line_names, profile
from fusedmoe.runtime.progress import ProgressBar
from fusedmoe.schedule.candidates import OFF_FAMILY, PlanCandidate, predicted_s
from fusedmoe.schedule.cost import CostModel, Observed
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.plan_chooser import PlanChooser
from fusedmoe.schedule.policies import POLICIES, PlanSearch, user_plan_fingerprints
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts

_FORMAT, _CHOICE = "fusedmoe-plan", "fusedmoe-choice"
_VERSION = 1
# Version 1 of step measurements included contention, and version 1 of profiles had no small sizes.
_OBSERVED_VERSION = _PROFILE_VERSION = 2

#: Dtypes of measured matrix products, by value of `fusedmoe profile --dtype`.
PRODUCT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# Variables whose values are part of the machine's facts.
_NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")


def fingerprint(facts: dict[str, Any]) -> str:
    """Return a digest (16 hexadecimal digits) of `facts`, which are of plain types."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def library_version() -> str:
    with suppress(PackageNotFoundError):
        return version("fusedmoe")
    return ""


def _read_on_rank_0(topology: Topology, path: Path, operation: str, again: bool = False) -> str | None:
    """Return the text of rank 0's file on all ranks; None if it is missing, or with `again`. Collective."""
    text = read_cache_file(path) if topology.is_first and not again else None
    return all_gather_object(topology.world, text, operation)[0]


def write_or_warn(path: Path, text: str, what: str) -> bool:
    """Write a cache file, or warn about `what`. Return whether the file was written."""
    try:
        write_cache_file(path, text)
    except OSError as error:
        warn(
            f"{what} could not be cached ({error}); the next job has to repeat it. Set {CACHE} to a writable folder",
            stacklevel=3,
        )
        return False
    return True


def cached_profile(
    topology: Topology,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    budget_s: float = BUDGET_S,
    again: bool = False,
) -> tuple[Profile, Path]:
    """Return the cached profile of this machine and its path; measure if missing or `again`. Collective over all ranks.

    Rank 0 shows a progress bar while measuring, and warns about poorly fitted lines. Raises the errors of `profile`.
    """
    facts = machine_facts(topology, device, dtype)
    path = cache_dir() / f"costs-{fingerprint({'format': _PROFILE_VERSION, **facts})}.json"
    text = _read_on_rank_0(topology, path, "reading the profile", again)
    measured = None if text is None else _parse_valid_profile(text, topology, device)
    if measured is None:
        with ProgressBar("measuring this machine", budget_s) as bar:
            show = bar.show if topology.is_first else None
            machine = describe_machine(facts)
            measured = profile(topology, device, dtype=dtype, budget_s=budget_s, machine=machine, show=show)
            if topology.is_first:
                is_cached = write_or_warn(path, measured.to_json(), "what was measured")
                bar.finish("measured", f", cached in {path}" * is_cached)
    if measured.costs.poor_fits and topology.is_first:
        warn(
            f"{path}: measured times of {measured.costs.poor_fits} are noisy, so schedules may be slow. Measure again "
            f"on the idle machine for longer: {profile_command(facts, device)}",
            stacklevel=2,
        )
    return measured, path


def profile_command(facts: dict[str, Any], device: torch.device) -> str:
    """Return the command that measures a machine with these facts again, for longer, and replaces its cache file."""
    names = {str(dtype).removeprefix("torch."): name for name, dtype in PRODUCT_DTYPES.items()}
    flags = f"--again --budget 60 --device {device.type} --dtype {names.get(facts['dtype'], facts['dtype'])}"
    if (ranks := len(facts["ranks"])) > 1:
        flags += "".join(f" --{name.replace('_', '-')} {facts[name]}" for name in ("ranks_per_node", "ep", "esp", "mp"))
        flags += " --duplex" * facts["duplex"]
    variables = {name: os.environ[name] for name in (CACHE, *_NETWORK_VARIABLES) if name in os.environ}
    variables["OMP_NUM_THREADS"] = str(facts["ranks"][0]["threads"])
    environment = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"{environment} {launch_command(ranks, f'profile {flags}')}"


_costs_by_topology: WeakKeyDictionary[Topology, dict[tuple[str, torch.dtype], CostModel]] = WeakKeyDictionary()


def measured_costs(
    topology: Topology, device: torch.device, dtype: torch.dtype, again_s: float | None = None
) -> CostModel:
    """Return the costs of this machine: cached in this process, read from disk, or measured. Collective over all ranks.

    `again_s`: measure again for about this many seconds; the same on every rank.
    """
    known = _costs_by_topology.setdefault(topology, {})
    key = (device.type, dtype)
    if key not in known or again_s is not None:
        budget_s = BUDGET_S if again_s is None else again_s
        again = again_s is not None
        known[key] = cached_profile(topology, device, dtype=dtype, budget_s=budget_s, again=again)[0].costs
        # Link costs do not depend on the dtype of the products.
        links = {name: line for name, line in known[key].lines.items() if again and name not in ("gemm", "copy")}
        for other, costs in known.items():
            known[other] = replace(costs, lines={**costs.lines, **links})
    return known[key]


def cached_task_times(
    topology: Topology, facts: dict[str, Any], measure: Callable[[], Observed], again: bool = False
) -> Observed:
    """Return the cached task times of steps; measure if missing, or `again`. Collective over all ranks.

    `facts` are `machine_facts` and the model's shapes. `measure` is collective and returns equal results on all ranks.
    """
    observed = None if again else read_cached_tasks(topology, facts)
    if observed is None:
        observed = measure()
        if topology.is_first:
            write_or_warn(_observed_path(facts), json.dumps(observed.as_dict()), "what was measured")
    return observed


def read_cached_tasks(topology: Topology, facts: dict[str, Any]) -> Observed | None:
    """Return the cached task times of steps; None if missing or invalid. Collective over all ranks."""
    text = _read_on_rank_0(topology, _observed_path(facts), "reading what steps take")
    if text is not None:
        with suppress(ConfigError):
            return Observed.from_dict(parse_json(text, "what steps take"))
    return None


def _observed_path(facts: dict[str, Any]) -> Path:
    return cache_dir() / f"steps-{fingerprint({'format': _OBSERVED_VERSION, **facts})}.json"


def machine_facts(topology: Topology, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return all properties that affect measured times, as plain types. Collective over all ranks, same result."""
    own = {
        "host": socket.gethostname(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "networks": _networks(),
    }
    ranks: list[dict[str, Any]] = all_gather_object(topology.world, own, "comparing machines")
    # Hosts by index: jobs on identical machines with other names share the profile.
    hosts = list(dict.fromkeys(rank["host"] for rank in ranks))
    sizes = {axis: getattr(topology, axis).size for axis in ("ep", "esp", "mp", "dp")}
    handle = topology.world.handle
    backend = "none" if handle is None else device_backend(handle, device.type)
    has_downward = any(group.downward is not None for group in (topology.ep, topology.esp, topology.dp))
    return {
        "ranks": [rank | {"host": hosts.index(rank["host"])} for rank in ranks],
        **sizes,
        # The topology of a part of the ranks may be smaller than a node.
        "ranks_per_node": min(topology.ranks_per_node, topology.size),
        "backend": backend,
        # NCCL uses both directions of a link anyway.
        "duplex": has_downward and backend == "gloo",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "nccl": list(torch.cuda.nccl.version()) if device.type == "cuda" else [],
        "fusedmoe": library_version(),
    }


def describe_machine(facts: dict[str, Any]) -> str:
    ranks = facts["ranks"]
    hosts = len({rank["host"] for rank in ranks})
    devices = sorted({rank["processor"] if rank["device"] == "cpu" else rank["device"] for rank in ranks})
    sizes = ", ".join(f"{axis} {facts[axis]}" for axis in ("ep", "esp", "mp", "dp"))
    threads = f", {ranks[0]['threads']} threads each" if ranks[0]["device"] == "cpu" else ""
    where = f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {hosts} host{'s' * (hosts > 1)}"
    backend = f"{facts['backend']}{' duplex' * facts['duplex']}"
    software = f"{backend}, {facts['dtype']} products, torch {facts['torch']}"
    return f"{where} ({' and '.join(devices)}{threads}), {sizes}, {software}"


def _parse_valid_profile(text: str, topology: Topology, device: torch.device) -> Profile | None:
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
    cards = []
    for card in sorted(Path("/sys/class/net").glob("*")):
        if (card / "device").exists():  # not virtual
            cards.append(f"{card.name} {_speed(card / 'speed')} Mb/s")
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        cards.append(f"{port.parent.parent.name}/{port.name} {_speed(port / 'rate')}")
    return [*cards, *(f"{name}={os.environ[name]}" for name in _NETWORK_VARIABLES if name in os.environ)]


def _speed(path: Path) -> str:
    with suppress(ConfigError):  # the speed of an inactive card is unreadable
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
    """Return the plans of a step by these policies; search those that are not cached. Collective over all ranks.

    Args:
        policies: names of policies of whole layers.
        limit, samples: maximum number of chunks, and samples per batch (`PlanSearch`).
        again: search even if cached.
        show: called on rank 0 with completed and total parts; None: show a progress bar.
    Raises:
        ConfigError: layers that cannot be split.
    """
    paths = {name: plan_path(name, costs, limit, samples) for name in policies}
    first = topology.is_first
    # A user's function may have changed since a file was written.
    cacheable = [name for name in paths if name not in POLICIES or not POLICIES[name].is_user_defined]
    texts = {
        name: read_cache_file(paths[name]) if first and not again and name in cacheable else None for name in paths
    }
    texts = all_gather_object(topology.world, texts, "reading plans")[0]
    kept = {name: _parse_valid_plan(texts[name], costs) for name in paths}
    if all(kept.values()):
        return {name: plan for name, plan in kept.items() if plan is not None}
    with ProgressBar("planning") as bar:
        # Equal inputs give equal plans on all ranks.
        search = PlanSearch(costs, limit, samples, (show or bar.show) if first else lambda done, total: None)
        plans = {name: kept[name] or search.plan(name) for name in paths}
    for name in cacheable:
        if first and kept[name] is None:
            head = {"format": _FORMAT, "version": _VERSION, "policy": name, "step_s": makespan(plans[name], costs)}
            write_or_warn(paths[name], json.dumps({**head, **_plan_as_dict(plans[name])}), "what was planned")
    return plans


def plan_path(policy: str, costs: StepCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Path:
    """Return the cache file of a policy's plan. Its name depends on all inputs of the plan."""
    facts = {
        "policy": policy,
        "costs": asdict(costs),
        "limit": limit,
        "samples": samples,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "fusedmoe": library_version(),
        "source": _planning_source_digest(),
    }
    if policy == "joint" and (own := user_plan_fingerprints(costs, limit)):
        facts["own"] = own
    return cache_dir() / f"plan-{fingerprint(facts)}.json"


def _planning_source_digest() -> str:
    """Return a digest of the planning modules' source, which may change without a new version."""
    digest = hashlib.sha256()
    for folder in sorted(schedule.__path__):
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _plan_as_dict(plan: Plan) -> dict[str, Any]:
    return {"fingerprint": plan.fingerprint, "plan": str(plan).splitlines()}


def _plan_from_dict(data: Any) -> Plan:
    plan = Plan.parse("\n".join(data["plan"]))
    if plan.fingerprint != data["fingerprint"]:
        raise ConfigError("a plan is damaged (fingerprint mismatch)")
    return plan


def _parse_valid_plan(text: str | None, costs: StepCosts) -> Plan | None:
    if text is None:
        return None
    with suppress(KeyError, TypeError, ConfigError):
        data = json.loads(text)
        if (data["format"], data["version"]) != (_FORMAT, _VERSION):
            return None
        plan = _plan_from_dict(data)
        # The step time differs for other layers.
        if makespan(plan, costs) == data["step_s"]:
            return plan
    return None


def choice_path(topology: Topology, device: torch.device, dtype: torch.dtype, facts: dict[str, Any]) -> Path:
    """Return the path of a cached choice between plans. Collective over all ranks."""
    machine = machine_facts(topology, device, dtype)
    return (
        cache_dir() / f"choice-{fingerprint({'machine': machine, 'source': _planning_source_digest(), **facts})}.json"
    )


def choice_text(chooser: PlanChooser) -> str:
    """Return the contents of a choice file for `read_choice`. The line and the table are for readers."""
    best = chooser.best
    ranked = sorted((entry for entry in chooser.trials.entries if entry.step_times_s), key=lambda entry: entry.median_s)
    kept = [best.candidate, *[entry.candidate for entry in ranked if entry is not best][:1]]
    # A later job measures the gain over OFF_FAMILY, too.
    kept += [
        entry.candidate for entry in ranked if entry.candidate.family == OFF_FAMILY and entry.candidate not in kept
    ]
    plans = [{"family": each.family, "whole": each.uses_micro_batches, **_plan_as_dict(each.plan)} for each in kept]
    head = {"format": _CHOICE, "version": _VERSION, "line": chooser.describe_choice(), "seconds": best.median_s}
    return json.dumps({**head, "table": [row._asdict() for row in chooser.table()], "plans": plans})


def read_choice(
    topology: Topology, costs_of: Callable[[bool], StepCosts], path: Path
) -> tuple[float, list[PlanCandidate]] | None:
    """Return the seconds and plans of a cached choice; None if missing. Collective over all ranks.

    A damaged file, or a file with plans of other layers, is ignored with a warning. `costs_of(uses_micro_batches)`
    returns the costs of a step, with micro-batches through whole layers or with chunks of dispatch, experts and combine
    only.
    """
    text = _read_on_rank_0(topology, path, "reading what was measured")
    if text is None:
        return None
    try:
        data = json.loads(text)
        if (data["format"], data["version"]) != (_CHOICE, _VERSION) or not 0 < float(data["seconds"]) < math.inf:
            raise ConfigError("unexpected format")
        candidates = []
        for kept in data["plans"]:
            plan, uses_micro_batches = _plan_from_dict(kept), bool(kept["whole"])
            step_s = predicted_s(plan, costs_of(uses_micro_batches))
            candidates.append(PlanCandidate(str(kept["family"]), plan, uses_micro_batches, step_s))
        if not candidates:
            raise ConfigError("it contains no plan")
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        if topology.is_first:
            warn(f"{path}: {error}. The file is ignored, and plans are measured again", stacklevel=2)
        return None
    return float(data["seconds"]), candidates
