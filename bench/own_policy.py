"""`--policy MODULE:FUNCTION`: a policy of one's own in the simulation of published layers and on the testbed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import fusedmoe
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.policies import POLICIES, PolicyFunction
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts

EXAMPLE = "examples.own_policy:half_a_millisecond"
#: Passes `--policy` to processes of a benchmark, with ":whole" at the end for `--whole`.
VARIABLE = "FUSEDMOE_BENCH_POLICY"


def add_policy_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="MODULE:FUNCTION",
        help="also compare your own policy, a function (workload, costs) -> Plan as of fusedmoe.register_policy; the "
        f"module is imported from the current folder or PYTHONPATH: {EXAMPLE}",
    )
    parser.add_argument(
        "--whole", action="store_true", help="the plans of --policy run micro-batches through whole layers"
    )


def policy_environment(policy: str | None, whole: bool) -> dict[str, str]:
    """Return the variables of processes that call `register_from_environment`."""
    return {} if policy is None else {VARIABLE: policy + ":whole" * whole}


def register_from_environment() -> None:
    if given := os.environ.get(VARIABLE):
        register_own(given.removesuffix(":whole"), given.endswith(":whole"))


def import_function(policy: str, example: str = EXAMPLE) -> Any:
    """Import MODULE:FUNCTION, from the current folder too.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, colon, name = policy.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ConfigError(f"--policy {policy}: expected MODULE:FUNCTION, such as {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--policy {policy}: {error}") from error


def register_own(policy: str, whole: bool) -> str:
    """Import and register a policy. Returns its name, that of the function.

    Raises:
        ConfigError: it cannot be imported, or is no policy.
    """
    function: PolicyFunction = import_function(policy)
    name = policy.partition(":")[2]
    fusedmoe.register_policy(name, function, whole=whole)
    return name


def check_own(name: str, costs: StepCosts, limit: int = MAX_DEGREE) -> None:
    """Call a registered policy with sample costs, before anything is measured.

    Args:
        costs: of layers that can be split; a policy of single layers receives them without micro-batches.
    Raises:
        ConfigError: the policy raises an exception or returns no complete plan; the message is one line.
    """
    policy = POLICIES[name]
    try:
        policy.plan(costs if policy.uses_micro_batches else costs.by_layer(), limit)
    except ConfigError as error:
        if policy.uses_micro_batches:
            raise
        try:
            policy.plan(costs, limit)
        except Exception:
            raise error from None
        raise ConfigError(f"{error}; for micro-batches through whole layers, add --whole") from error
    except Exception as error:
        library = str(Path(fusedmoe.__file__).parent)
        frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(library)]
        where = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}"
        text = " ".join(str(error).split())
        raise ConfigError(f"policy {name}: {type(error).__name__}: {text} ({where})") from error
