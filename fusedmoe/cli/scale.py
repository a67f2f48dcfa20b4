"""A model on more and more ranks of a machine of the table: the worth of its schedule there, by simulation.

At each number of ranks every data-parallel replica has the model's batch, so the work of a rank stays about the same.
Gradients of experts that several ranks hold are reduced after the step, whatever the schedule: nothing hides them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fusedmoe.cli.job import Launch, Sizes, choose_sizes
from fusedmoe.cli.settings import Settings, describe
from fusedmoe.cli.step_plans import expert_bytes, plans_of, policy_followed
from fusedmoe.errors import ConfigError
from fusedmoe.plans import PHASES, CostModel, Machine, ms, scale_of, simulate, slowest_of

# Lines of a picture with their colours.
_POLICY, _SEQUENTIAL, _THIRD = "#f79a1c", "#0a2f66", "#1f7350"


def machine_job(machine: Machine, settings: Settings, ranks: int) -> tuple[Sizes, CostModel]:
    """Returns the layout of a job on a machine of the table, and its costs.

    Raises:
        ConfigError: ranks or sizes that do not fit the machine, experts that do not divide among their ranks, or
            another dtype than the machine's.
    """
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


@dataclass(frozen=True)
class Point:
    """A step on so many ranks, in seconds.

    Attributes:
        sequential_s, step_s: without a schedule, and by the policy; with `experts_s`.
        sequential_exposed_s, exposed_s: of them links at work beside no computation; with `experts_s`.
        communication_s: links at work, each by itself.
        experts_s: to reduce the gradients of experts.
        slowest: how much longer the slowest rank computes than the mean, as a factor.
        chunks: of each layer, by phase.
    """

    ranks: int
    sizes: Sizes
    sequential_s: float
    step_s: float
    sequential_exposed_s: float
    exposed_s: float
    communication_s: float
    experts_s: float
    slowest: float
    chunks: dict[str, list[int]]

    @classmethod
    def simulated(
        cls,
        settings: Settings,
        machine: Machine,
        ranks: int,
        *,
        again: bool = False,
        show: Callable[[int, int], None] | None = None,
    ) -> Point:
        """Simulates a step on so many ranks. Raises `ConfigError` for a layout that the machine cannot have."""
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
        return cls(
            ranks,
            sizes,
            none.end_s + experts_s,
            timeline.end_s + experts_s,
            none.exposed_s() + experts_s,
            timeline.exposed_s() + experts_s,
            sum(timeline.busy_s(link) for link in ("intra", "inter")) + experts_s,
            experts_s,
            slowest_of(ranks, machine.spread.value),
            {phase: [plan.degrees.get((phase, layer), 1) for layer in range(layers)] for phase in PHASES},
        )

    @property
    def speed_up(self) -> float:
        """Returns how many times faster a step is than without a schedule."""
        return self.sequential_s / self.step_s

    def as_dict(self) -> dict[str, Any]:
        """Returns everything in plain types."""
        own = {name: value for name, value in vars(self).items() if name != "sizes"}
        layout = {**vars(self.sizes), "dp": self.ranks // self.sizes.mp}
        return {"ranks": self.ranks, **layout, **own, "speed_up": self.speed_up}


@dataclass(frozen=True)
class Scale:
    """A model on more and more ranks of a machine."""

    settings: Settings
    machine: Machine
    name: str
    points: tuple[Point, ...]

    @classmethod
    def simulated(
        cls,
        settings: Settings,
        machine: Machine,
        name: str,
        *,
        again: bool = False,
        show: Callable[[int, int], None] = lambda done, total: None,
    ) -> Scale:
        """Simulates 8 to 4,096 ranks, beginning with as many as the sizes that were asked for need.

        `show` is told how much is done, of how much.

        Raises:
            ConfigError: sizes that no number of ranks fits, experts that move, and what `Point.simulated` refuses.
        """
        if settings.placement != "ep":
            raise ConfigError(f"--placement {settings.placement}: --scale is for experts that stay where they are")
        least = max((settings.ep or 1) * (settings.esp or 1), settings.mp or 1)
        # Sizes that were asked for need that many ranks; fewer would be refused.
        numbers = [ranks for ranks in scale_of(machine) if ranks >= least]
        if not numbers:
            raise ConfigError(f"ep · esp or mp = {least} is more than the 4,096 ranks that --scale goes to")
        # Each number of ranks is one part of the bar, whatever its planning takes.
        parts, points = 1000, []
        for done, ranks in enumerate(numbers):

            def within(part: int, of: int, before: int = done) -> None:
                show(before * parts + parts * part // max(of, 1), parts * len(numbers))

            within(0, 1)
            points.append(Point.simulated(settings, machine, ranks, again=again, show=within))
        return cls(settings, machine, name, tuple(points))

    @property
    def policy(self) -> str:
        return "joint" if self.settings.schedule == "auto" else self.settings.schedule

    def as_dict(self) -> dict[str, Any]:
        """Returns everything in plain types, times in seconds."""
        model = vars(self.settings.model) | {"gate_options": dict(self.settings.model.gate_options)}
        return {
            "model": model,
            "machine": self.name,
            "figures": figures_dict(self.machine),
            "policy": self.policy,
            "points": [point.as_dict() for point in self.points],
        }

    def print(self, console: Console) -> None:
        """Prints the table of the points, and the figures that it rests on."""
        console.print(describe(self.settings.model), markup=False)
        title = f"{self.policy} on {self.machine.words}: simulated, not measured"
        table = Table(title=title, title_justify="left")
        names = ("ranks", "ep", "esp", "mp", "no schedule", "a step", "speed-up", "exposed", "experts' gradients")
        for column in (*names, "chunks there", "back", "slowest rank"):
            table.add_column(column, justify="right")
        for point in self.points:
            chunks = [sorted({*point.chunks[phase]}) for phase in PHASES]
            table.add_row(
                *map(str, (point.ranks, point.sizes.ep, point.sizes.esp, point.sizes.mp)),
                ms(point.sequential_s),
                ms(point.step_s),
                f"{point.speed_up:.2f} ×",
                f"{point.exposed_s / point.step_s:.0%}",
                f"{point.experts_s / point.step_s:.0%}",
                *("–".join(map(str, dict.fromkeys((numbers[0], numbers[-1])))) for numbers in chunks),
                f"+{point.slowest - 1:.1%}",
            )
        console.print(table)
        console.print(
            "exposed: links at work beside no computation; experts' gradients are reduced after the step, and are part "
            "of that; slowest rank: how much longer than the mean it computes",
            soft_wrap=True,
        )
        console.print(figures_table(self.machine))

    def draw(self, path: Path) -> None:
        """Draws speed-up, exposed communication and chunks over ranks; the path's ending chooses the format."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        ranks = [point.ranks for point in self.points]
        figure = Figure(figsize=(8.0, 9.0), dpi=130, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        rows = figure.subplots(3, 1, sharex=True)
        estimates = sum(known.estimate for _, known in self.machine.figures())
        title = f"{self.settings.model.name}, {self.policy}, on {self.machine.words}"
        figure.suptitle(f"{title}\nsimulated; {estimates} of the machine's figures are estimates", size=11)
        rows[0].plot(ranks, [point.speed_up for point in self.points], "o-", color=_POLICY)
        rows[0].set_ylabel("speed-up over no schedule")
        rows[0].axhline(1.0, color="#a09c98", linewidth=0.8)
        for label, marks, colour, values in (
            ("no schedule", "s--", _SEQUENTIAL, [p.sequential_exposed_s / p.sequential_s for p in self.points]),
            (self.policy, "o-", _POLICY, [p.exposed_s / p.step_s for p in self.points]),
            ("of it experts' gradients", "^:", _THIRD, [p.experts_s / p.step_s for p in self.points]),
        ):
            rows[1].plot(ranks, [100 * value for value in values], marks, color=colour, label=label)
        rows[1].set_ylabel("exposed communication, % of a step")
        rows[1].set_ylim(0, 100)
        for phase, marks, colour in zip(PHASES, ("s--", "o-"), (_SEQUENTIAL, _POLICY), strict=True):
            mean = [sum(point.chunks[phase]) / len(point.chunks[phase]) for point in self.points]
            rows[2].plot(ranks, mean, marks, color=colour, label=phase)
        rows[2].set_ylabel("chunks of a layer, mean")
        rows[2].set_ylim(bottom=0)
        rows[2].set_xlabel("ranks")
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
    table = Table(title=f"{machine.words}, nodes of {machine.ranks_per_node}", title_justify="left")
    for column in ("figure", "value", "", "source"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for name, known in machine.figures():
        table.add_row(name, f"{known.value:.3g}", "estimate" if known.estimate else "", known.source)
    return table
