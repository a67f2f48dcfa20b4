"""Check `--policy` before measuring: selected parts compare it, and it returns complete plans for sample costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.cluster import job
from bench.cluster.predicted import machine_of
from bench.cluster.setting import LIMIT, SETTINGS, Setting
from bench.cluster.step import START_S
from bench.own_policy import check_own
from fusedmoe.errors import ConfigError
from fusedmoe.schedule.cost import Line
from fusedmoe.schedule.step_costs import MAX_DEGREE, StepCosts
from fusedmoe.schedule.workload import Workload

# Typical values of settings with real computation: FLOP/s of one thread, and the rate of the inter-node link.
_FLOPS, _INTER_MBIT = 5e10, 40


def compares(setting: Setting, part: str, whole: bool) -> bool:
    """Return whether a part has a row for your own policy. `whole`: a policy of whole layers."""
    if part == "job" or (part == "model" and setting.blocks):
        return True
    return not whole and (part in ("layer", "model") or (part == "steps" and not setting.blocks))


def check(name: str, whole: bool, wanted: Sequence[tuple[Setting, Sequence[str]]]) -> None:
    """Call a registered policy with sample costs of all selected parts that compare it.

    Raises:
        ConfigError: no selected part compares it, or it returns no complete plan.
    """
    if not parts_text(wanted, whole):
        every = parts_text([(setting, setting.parts) for setting in SETTINGS.values()], whole)
        kind = "--whole" if whole else "without --whole"
        raise ConfigError(f"--policy {name} {kind}: no selected part compares it; choose from --settings {every}")
    for setting, part in _comparing(wanted, whole):
        try:
            check_own(name, sample_costs(setting, part), LIMIT if part == "steps" else MAX_DEGREE)
        except ConfigError as error:
            raise ConfigError(f"{setting.name}:{part}: {error}") from error


def parts_text(wanted: Sequence[tuple[Setting, Sequence[str]]], whole: bool) -> str:
    """List the parts that compare a policy, as in `--settings`."""
    return " ".join(f"{setting.name}:{part}" for setting, part in _comparing(wanted, whole))


def sample_costs(setting: Setting, part: str) -> StepCosts:
    """Return costs of the part's layers from the setting's nominal rates, or typical ones if it has none."""
    machine = machine_of({**vars(setting), "inter_mbit": setting.inter_mbit or _INTER_MBIT})
    costs = machine.costs(setting.ranks, ep=setting.ep, esp=setting.esp, mp=setting.esp)
    gemm = Line(START_S, 1 / (setting.emulated_flops or _FLOPS))
    layers = {"layer": 1, "job": job.LAYERS}.get(part, setting.layers)
    work = Workload(1, setting.S * setting.esp, setting.M, setting.H, setting.E, k=1, ep=setting.ep, esp=setting.esp)
    gradient_bytes = 0 if part == "layer" else setting.gradient_bytes or work.gradient_bytes()
    model = replace(costs, lines={**costs.lines, "gemm": gemm})
    return work.step_costs(model, [gradient_bytes] * layers, work.volumes(), whole=True)


def _comparing(wanted: Sequence[tuple[Setting, Sequence[str]]], whole: bool) -> Iterator[tuple[Setting, str]]:
    return ((setting, part) for setting, parts in wanted for part in parts if compares(setting, part, whole))
