"""Simulated schedules of a model on 8 to 4,096 ranks of a machine model, with a constant batch per data-parallel rank.

Gradients of experts that several ranks hold, embedding and head are reduced after the step and not overlapped.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusedmoe.cli.job import Launch, resolve_sizes
from fusedmoe.cli.settings import Settings, describe
from fusedmoe.cli.step_plans import PlannedJob, followed_policy, machine_costs, make_meta_model, make_table
from fusedmoe.errors import ConfigError, printable
from fusedmoe.schedule import simulate
from fusedmoe.schedule.draw import format_ms
from fusedmoe.schedule.machines import Machine, scaling_ranks, slowest_rank_factor
from fusedmoe.schedule.task import PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POLICY_COLOUR, _SEQUENTIAL_COLOUR, _GRADIENTS_COLOUR = "#f79a1c", "#0a2f66", "#1f7350"


def simulate_point(
    settings: Settings, machine: Machine, num_ranks: int, *, again: bool, show: Callable[[int, int], None]
) -> dict[str, Any]:
    """Simulate one step on `num_ranks` ranks, without a schedule ("sequential") and with the policy of the settings.

    Exposed communication (`exposed_s`) is not overlapped with computation. Gradient all-reduces after the step are of
    experts (`experts_s`) and of parameters of no MoE layer (`dense_after_s`). `slowest`: compute time of the slowest
    rank relative to the mean.
    """
    sizes, settings = resolve_sizes(settings, Launch(0, num_ranks, 0, machine.node(num_ranks)))
    costs = machine_costs(machine, settings, sizes, num_ranks)
    job = PlannedJob(settings, num_ranks, sizes, costs, make_meta_model(settings), machine)
    policy = followed_policy(settings, sizes)
    plans = job.plans({"sequential", policy}, again=again, show=show)
    both = [plans[name] for name in ("sequential", policy)]
    timelines = [(simulate(*planned), job.recomputed_pass(planned)) for planned in both]
    sequential_s, step_s = map(job.step_s, both)
    after_s = sum(job.gradients_s.values())
    sequential_exposed_s, exposed_s = (sum(part.exposed_s() for part in parts) + after_s for parts in timelines)
    planned, repeated = (sum(part.busy_s(link) for link in ("intra", "inter")) for part in timelines[1])
    degrees = both[1].plan.degrees
    layers = range(settings.model.num_moe_layers)
    return {
        "ranks": num_ranks,
        **vars(sizes),
        "dp": num_ranks // sizes.mp,
        "sequential_s": sequential_s,
        "step_s": step_s,
        "speed_up": sequential_s / step_s,
        "tokens_per_s": job.tokens / step_s,
        "sequential_exposed_s": sequential_exposed_s,
        "exposed_s": exposed_s,
        "communication_s": planned + repeated + after_s,
        "dense_after_s": job.gradients_s["dense_s"],
        "experts_s": job.gradients_s["experts_s"],
        "slowest": slowest_rank_factor(num_ranks, machine.spread.value),
        "chunks": {phase: [degrees.get((phase, layer), 1) for layer in layers] for phase in PHASES},
    }


class Scale:
    """Simulated schedules on 8 to 4,096 ranks, from the smallest number that the settings allow."""

    def __init__(
        self, settings: Settings, machine: Machine, name: str, *, again: bool, show: Callable[[int, int], None]
    ) -> None:
        if settings.placement != "ep":
            raise ConfigError(f"--placement {settings.placement}: --scale supports --placement ep only")
        least = max((settings.ep or 1) * (settings.esp or 1), settings.mp or 1)
        numbers = [ranks for ranks in scaling_ranks(machine) if ranks >= least]
        if not numbers:
            raise ConfigError(f"ep · esp or mp = {least} exceeds the 4,096 ranks of --scale")
        self._model, self._machine = settings.model, machine
        self._policy = "joint" if settings.schedule == "auto" else settings.schedule
        parts, self._points = 1000, list[dict[str, Any]]()
        for ranks in numbers:

            def show_point_progress(part: int, of: int) -> None:
                show(len(self._points) * parts + parts * part // max(of, 1), parts * len(numbers))

            show_point_progress(0, 1)
            self._points.append(simulate_point(settings, machine, ranks, again=again, show=show_point_progress))
        self.facts: dict[str, Any] = {
            "model": vars(self._model) | {"gate_options": dict(self._model.gate_options)},
            "machine": name,
            "figures": figures_dict(machine),
            "policy": self._policy,
            "points": self._points,
        }

    def print(self, console: Console) -> None:
        console.print(describe(self._model), markup=False)
        columns = ["ranks", "ep", "esp", "mp", "dp", "no schedule", "step", "M tokens/s", "speed-up", "exposed"]
        columns += ["expert gradients", "chunks fwd, bwd", "slowest rank"]
        table = make_table(
            f"{self._policy} on {self._machine.description}: simulated, not measured", columns, right=columns
        )
        for point in self._points:
            chunks = [sorted({*point["chunks"][phase]}) for phase in PHASES]
            table.add_row(
                *(str(point[name]) for name in columns[:5]),
                format_ms(point["sequential_s"]),
                format_ms(point["step_s"]),
                f"{point['tokens_per_s'] / 1e6:.3g}",
                f"{point['speed_up']:.2f} ×",
                f"{point['exposed_s'] / point['step_s']:.0%}",
                f"{point['experts_s'] / point['step_s']:.0%}",
                ", ".join("–".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) for numbers in chunks),
                f"+{point['slowest'] - 1:.1%}",
            )
        console.print(table)
        console.print(
            "exposed: communication not overlapped with computation, including gradients reduced after the step "
            "(experts, embedding, head); slowest rank: its compute time relative to the mean",
            soft_wrap=True,
        )
        console.print(figures_table(self._machine))

    def figure(self) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        points = self._points
        ranks = [point["ranks"] for point in points]
        figure = Figure(figsize=(8.0, 9.0), dpi=130, layout="constrained")
        rows = figure.subplots(3, 1, sharex=True)
        estimates = sum(known.estimate for _, known in self._machine.figures())
        title = f"{self._model.label}, {self._policy}, on {self._machine.description}"
        figure.suptitle(f"{title}\nsimulated; {estimates} of the machine's figures are estimates", size=11)
        rows[0].plot(ranks, [point["speed_up"] for point in points], "o-", color=_POLICY_COLOUR)
        rows[0].axhline(1.0, color="#a09c98", linewidth=0.8)
        for label, marks, colour, exposed, whole in (
            ("no schedule", "s--", _SEQUENTIAL_COLOUR, "sequential_exposed_s", "sequential_s"),
            (self._policy, "o-", _POLICY_COLOUR, "exposed_s", "step_s"),
            ("of which expert gradients", "^:", _GRADIENTS_COLOUR, "experts_s", "step_s"),
        ):
            rows[1].plot(ranks, [100 * p[exposed] / p[whole] for p in points], marks, color=colour, label=label)
        for phase, marks, colour in zip(PHASES, ("s--", "o-"), (_SEQUENTIAL_COLOUR, _POLICY_COLOUR), strict=True):
            mean = [statistics.mean(point["chunks"][phase]) for point in points]
            rows[2].plot(ranks, mean, marks, color=colour, label=phase)
        rows[0].set_ylabel("speed-up over no schedule")
        rows[1].set(ylabel="exposed communication, % of step time", ylim=(0, 100))
        rows[2].set(ylabel="mean chunks per layer", ylim=(0, None), xlabel="ranks")
        rows[2].yaxis.set_major_locator(MaxNLocator(integer=True))
        rows[2].set_xscale("log", base=2)
        rows[2].set_xticks(ranks, [f"{number:,}" for number in ranks])
        for row in rows:
            row.grid(color="#d8d8d8", linewidth=0.6)
        for row in rows[1:]:
            row.legend(frameon=False, fontsize=8.5)
        return figure


def figures_dict(machine: Machine) -> dict[str, Any]:
    return {name: known._asdict() for name, known in machine.figures()}


def figures_table(machine: Machine) -> Table:
    title = f"{machine.description}, nodes of {machine.ranks_per_node}"
    table = make_table(title, ("figure", "value", "", "source"), right=("value",))
    for name, known in machine.figures():
        table.add_row(name, f"{known.value:.3g}", "estimate" if known.estimate else "", Text(printable(known.source)))
    return table
