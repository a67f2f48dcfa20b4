"""`--policy MODULE:FUNCTION`: a policy of one's own in the simulation of published layers and on the testbed."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from fusedmoe import register_policy
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.policies import PolicyFunction

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


def register_own(policy: str, whole: bool) -> str:
    """Import and register a policy. Returns its name, that of the function.

    Raises:
        ConfigError: it cannot be imported, or is no policy.
    """
    module, colon, name = policy.partition(":")
    if not (module and colon and name.isidentifier()):
        raise ConfigError(f"--policy {policy}: expected MODULE:FUNCTION, such as {EXAMPLE}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function: PolicyFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--policy {policy}: {error}") from error
    register_policy(name, function, whole=whole)
    return name
