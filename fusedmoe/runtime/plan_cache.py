"""Plans of whole models on disk: one file for each policy, costs and version, so that they are searched once.

The files lie in the folder of `cache`. Rank 0 reads and writes; all ranks have what it read, and search for themselves
what it did not find: the same numbers give the same plan. A file that cannot be read, or whose plan is not for these
costs, is searched again and replaced; one that cannot be written is a warning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import scipy

from fusedmoe import schedule
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError
from fusedmoe.runtime.cache import cache_dir, fingerprint, own_version, read, write
from fusedmoe.runtime.progress import WorkBar
from fusedmoe.schedule.degree import MAX_DEGREE
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.simulate import makespan
from fusedmoe.schedule.stack_costs import StackCosts
from fusedmoe.schedule.whole_policies import WholeModel

_FORMAT = "fusedmoe-plan"
_VERSION = 1


def cached_plans(
    policies: Iterable[str],
    topology: Topology,
    costs: StackCosts,
    *,
    limit: int = MAX_DEGREE,
    samples: int | None = None,
    again: bool = False,
) -> dict[str, Plan]:
    """The plans of a step by these policies; searched where they are not kept. Collective over all ranks.

    While they are searched, rank 0 shows a bar.

    Args:
        policies: names of `fusedmoe.schedule.whole_policies.WHOLE_POLICIES`.
        costs: the same on every rank.
        limit, samples: the most chunks, and the samples of a batch (`WholeModel`).
        again: search in any case.
    Raises:
        ConfigError: layers that cannot be split.
    """
    paths = {name: plan_path(name, costs, limit, samples) for name in policies}
    first = topology.rank == 0
    texts = {name: read(path) if first and not again else None for name, path in paths.items()}
    texts = all_gather_object(topology.world, texts, "reading plans")[0]
    found = {name: _valid(texts[name], costs) for name in paths}
    plans = {name: plan for name, plan in found.items() if plan is not None}
    if len(plans) < len(paths):
        with WorkBar("planning") as bar:
            model = WholeModel(costs, limit, samples, bar.show if first else lambda done, total: None)
            plans = {name: plans.get(name) or model.plan(name) for name in paths}
    for name in paths:
        if first and found[name] is None:
            write(paths[name], _text(name, plans[name], costs), "what was planned")
    return plans


def plan_path(policy: str, costs: StackCosts, limit: int = MAX_DEGREE, samples: int | None = None) -> Path:
    """The file of the plan by this policy: another one for all that it depends on."""
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
    return cache_dir() / f"plan-{fingerprint(facts)}.json"


def _source() -> str:
    """A digest of the modules that plan: between two versions they change, too."""
    digest = hashlib.sha256()
    for folder in sorted(schedule.__path__):
        for path in sorted(Path(folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _text(policy: str, plan: Plan, costs: StackCosts) -> str:
    head = {"format": _FORMAT, "version": _VERSION, "policy": policy, "step_s": makespan(plan, costs)}
    return json.dumps({**head, "fingerprint": plan.fingerprint, "plan": str(plan).splitlines()}, indent=2) + "\n"


def _valid(text: str | None, costs: StackCosts) -> Plan | None:
    if text is None:
        return None
    try:
        data = json.loads(text)
        if (data["format"], data["version"]) != (_FORMAT, _VERSION):
            return None
        plan = Plan.parse("\n".join(data["plan"]))
        sound = plan.fingerprint == data["fingerprint"] and makespan(plan, costs) == data["step_s"]
    except (json.JSONDecodeError, KeyError, TypeError, ConfigError):
        return None
    return plan if sound else None
