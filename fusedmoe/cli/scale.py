"""A model on more and more ranks of a machine of the table: the worth of its schedule there, by simulation.

At each number of ranks every data-parallel replica has the model's batch, so the work of a rank stays about the same.
Gradients of experts that several ranks hold are reduced after the step, whatever the schedule: nothing hides them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedmoe.cli.job import Launch, Sizes, choose_sizes
from fusedmoe.cli.settings import Settings, describe
from fusedmoe.cli.step_plans import expert_bytes, make_table, plans_of, policy_followed
from fusedmoe.errors import ConfigError, printable
from fusedmoe.schedule import CostModel, simulate
from fusedmoe.schedule.draw import ms
from fusedmoe.schedule.machines import Machine, scale_of, slowest_of
from fusedmoe.schedule.task import PHASES

# Lines of a picture with their colours.
_POLICY, _SEQUENTIAL, _THIRD = "#f79a1c", "#0a2f66", "#1f7350"


def machine_job(machine: Machine, settings: Settings, ranks: int) -> tuple[Sizes, CostModel]:
    """Returns the layout of a job on a machine of the table, and its costs."""
    if settings.dtype != machine.dtype:
        raise ConfigError(f"--dtype {settings.dtype}: this machine's products are known in {machine.dtype} only")
    sizes = choose_sizes(settings, Launch(0, ranks, 0, machine.node(ranks)))
    experts = settings.model.with_experts(ranks, sizes.ep).experts
    assert experts is not None
    if sizes.ranks_per_node != machine.node(ranks):
        raise ConfigError(f"--ranks-per-node {sizes.ranks_per_node}: this machine's nodes have {machine.node(ranks)}")
    if experts % sizes.ep:
        raise ConfigError(
            f"{experts} experts do not divide among ep = {sizes.ep} ranks; choose --ep among the divisors of {experts}"
        )
    if settings.model.hidden % sizes.esp:
        raise ConfigError(f"esp = {sizes.esp} does not divide an expert's hidden dim {settings.model.hidden}")
    return sizes, machine.costs(ranks, sizes.ep, sizes.esp, sizes.mp)


def simulated_point(
    settings: Settings, machine: Machine, ranks: int, *, again: bool, show: Callable[[int, int], None]
) -> dict[str, Any]:
    """Simulates a step on so many ranks, without a schedule and by the policy.

    Returns:
        The layout, and in seconds: a step (`sequential_s`, `step_s`), links at work beside no computation in it
        (`sequential_exposed_s`, `exposed_s`), links at work, each by itself (`communication_s`), and of all of them
        the reduction of the experts' gradients (`experts_s`). `slowest` is the slowest rank's time to compute over the
        mean, `chunks` are each layer's by phase.
    """
    sizes, costs = machine_job(machine, settings, ranks)
    settings = settings.changed({"model": settings.model.with_experts(ranks, sizes.ep)})
    launch, policy = Launch(0, ranks, 0, sizes.ranks_per_node), policy_followed(settings, sizes)
    plans = plans_of(settings, launch, sizes, costs, policies={"sequential", policy}, again=again, show=show)
    plan = plans[policy].plan
    none, timeline = (simulate(*plans[name]) for name in ("sequential", policy))
    experts_s, copies = 0.0, ranks // (sizes.ep * sizes.esp)
    layers = len({task.layer for task in plan if task.layer is not None})
    if copies > 1:
        assert settings.model.experts is not None
        own_bytes = expert_bytes(settings, sizes) * settings.model.experts // sizes.ep
        # Gradients of copied experts are reduced after the step: no plan has room for them.
        experts_s = layers * machine.all_reduce(ranks, copies, sizes.ep * sizes.esp).seconds(own_bytes)
    sequential_s, step_s = none.end_s + experts_s, timeline.end_s + experts_s
    return {
        "ranks": ranks,
        **vars(sizes),
        "dp": ranks // sizes.mp,
        "sequential_s": sequential_s,
        "step_s": step_s,
        "speed_up": sequential_s / step_s,
        "sequential_exposed_s": none.exposed_s() + experts_s,
        "exposed_s": timeline.exposed_s() + experts_s,
        "communication_s": sum(timeline.busy_s(link) for link in ("intra", "inter")) + experts_s,
        "experts_s": experts_s,
        "slowest": slowest_of(ranks, machine.spread.value),
        "chunks": {phase: [plan.degrees.get((phase, layer), 1) for layer in range(layers)] for phase in PHASES},
    }


class Scale:
    """A model on more and more ranks of a machine: 8 to 4,096, from as many on as the sizes that were asked for need.

    Args:
        name: of the machine.   again: search for plans also where that was done before.
        show: is told how much is done, of how much.
    """

    def __init__(
        self, settings: Settings, machine: Machine, name: str, *, again: bool, show: Callable[[int, int], None]
    ) -> None:
        if settings.placement != "ep":
            raise ConfigError(f"--placement {settings.placement}: --scale is for experts that stay where they are")
        least = max((settings.ep or 1) * (settings.esp or 1), settings.mp or 1)
        # Sizes that were asked for need that many ranks; fewer would be refused.
        numbers = [ranks for ranks in scale_of(machine) if ranks >= least]
        if not numbers:
            raise ConfigError(f"ep · esp or mp = {least} is more than the 4,096 ranks that --scale goes to")
        self._model, self._machine = settings.model, machine
        self._policy = "joint" if settings.schedule == "auto" else settings.schedule
        # Each number of ranks is one part of the bar, whatever its planning takes.
        parts, self._points = 1000, list[dict[str, Any]]()
        for ranks in numbers:

            def within(part: int, of: int) -> None:
                show(len(self._points) * parts + parts * part // max(of, 1), parts * len(numbers))

            within(0, 1)
            self._points.append(simulated_point(settings, machine, ranks, again=again, show=within))
        self.facts: dict[str, Any] = {
            "model": vars(self._model) | {"gate_options": dict(self._model.gate_options)},
            "machine": name,
            "figures": figures_dict(machine),
            "policy": self._policy,
            "points": self._points,
        }

    def print(self, console: Console) -> None:
        """Prints the table of the points, and the figures that it rests on."""
        console.print(describe(self._model), markup=False)
        columns = ["ranks", "ep", "esp", "mp", "no schedule", "a step", "speed-up", "exposed", "experts' gradients"]
        columns += ["chunks there", "back", "slowest rank"]
        table = make_table(f"{self._policy} on {self._machine.words}: simulated, not measured", columns, right=columns)
        for point in self._points:
            chunks = [sorted({*point["chunks"][phase]}) for phase in PHASES]
            table.add_row(
                *(str(point[name]) for name in columns[:4]),
                ms(point["sequential_s"]),
                ms(point["step_s"]),
                f"{point['speed_up']:.2f} ×",
                f"{point['exposed_s'] / point['step_s']:.0%}",
                f"{point['experts_s'] / point['step_s']:.0%}",
                *("–".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) for numbers in chunks),
                f"+{point['slowest'] - 1:.1%}",
            )
        console.print(table)
        console.print(
            "exposed: links at work beside no computation; experts' gradients are reduced after the step, and are part "
            "of that; slowest rank: how much longer than the mean it computes",
            soft_wrap=True,
        )
        console.print(figures_table(self._machine))

    def draw(self, path: Path) -> None:
        """Draws speed-up, exposed communication and chunks over ranks; the path's ending chooses the format."""
        from matplotlib.figure import Figure

        points = self._points
        ranks = [point["ranks"] for point in points]
        figure = Figure(figsize=(8.0, 9.0), dpi=130, layout="constrained")
        rows = figure.subplots(3, 1, sharex=True)
        estimates = sum(known.estimate for _, known in self._machine.figures())
        title = f"{self._model.name}, {self._policy}, on {self._machine.words}"
        figure.suptitle(f"{title}\nsimulated; {estimates} of the machine's figures are estimates", size=11)
        rows[0].plot(ranks, [point["speed_up"] for point in points], "o-", color=_POLICY)
        rows[0].axhline(1.0, color="#a09c98", linewidth=0.8)
        for label, marks, colour, exposed, whole in (
            ("no schedule", "s--", _SEQUENTIAL, "sequential_exposed_s", "sequential_s"),
            (self._policy, "o-", _POLICY, "exposed_s", "step_s"),
            ("of it experts' gradients", "^:", _THIRD, "experts_s", "step_s"),
        ):
            rows[1].plot(ranks, [100 * p[exposed] / p[whole] for p in points], marks, color=colour, label=label)
        for phase, marks, colour in zip(PHASES, ("s--", "o-"), (_SEQUENTIAL, _POLICY), strict=True):
            mean = [statistics.mean(point["chunks"][phase]) for point in points]
            rows[2].plot(ranks, mean, marks, color=colour, label=phase)
        rows[0].set_ylabel("speed-up over no schedule")
        rows[1].set(ylabel="exposed communication, % of a step", ylim=(0, 100))
        rows[2].set(ylabel="chunks of a layer, mean", ylim=(0, None), xlabel="ranks")
        rows[2].set_xscale("log", base=2)
        rows[2].set_xticks(ranks, [f"{number:,}" for number in ranks])
        for row in rows:
            row.grid(color="#d8d8d8", linewidth=0.6)
        for row in rows[1:]:
            row.legend(frameon=False, fontsize=8.5)
        figure.savefig(path)


def figures_dict(machine: Machine) -> dict[str, Any]:
    """Returns the figures of a machine by name, in plain types."""
    return {name: known._asdict() for name, known in machine.figures()}


def figures_table(machine: Machine) -> Table:
    """Makes the table of a machine's figures with their sources."""
    title = f"{machine.words}, nodes of {machine.ranks_per_node}"
    table = make_table(title, ("figure", "value", "", "source"), right=("value",))
    for name, known in machine.figures():
        table.add_row(name, f"{known.value:.3g}", "estimate" if known.estimate else "", Text(printable(known.source)))
    return table
