"""The results of the cluster as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(results: dict[str, Any], console: Console) -> None:
    for name, found in results.items():
        setting = found["setting"]
        console.print()
        title = f"{setting['ranks']} ranks on two nodes, {setting['layers']} layers, a whole step; {name}"
        console.print(_steps(title, found))
        console.print(f"computation: {setting['computation']}; no schedule can take less than {_ms(found['bound_s'])}")
        sweep = found["sweep"]
        console.print(
            f"degrees of a measured sweep: best {_pair(sweep['best'])}, chosen {_pair(sweep['chosen'])}: "
            f"{sweep['regret']:+.1%}"
        )
        console.print()
        console.print(_layers(f"MoELayer, forward and backward; {name}", found["layer"]))
        if found["job"] is not None:
            console.print(_layers(f"fusedmoe train, a whole step with its optimizer; {name}", found["job"]))
        for target, text, met in targets(name, found):
            console.print(f"{'met   ' if met else 'MISSED'}  {target}: {text}")


def targets(name: str, found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """What a setting should show, what it shows, and whether that is enough."""
    steps, sweep = found["steps"], found["sweep"]
    speed_up = steps["fsmoe"]["speed_up"]
    result = [("FSMoE at least 1.5 times as fast as sequential", f"{speed_up:.2f}", speed_up >= 1.5)]
    if name == "emulated":
        ratio = steps["pipemoe"]["median_s"] / steps["fsmoe"]["median_s"]
        result.append(("FSMoE at least 1.1 times as fast as PipeMoE", f"{ratio:.2f}", ratio >= 1.1))
    result.append(("chosen degrees within 5% of the best", f"{sweep['regret']:+.1%}", sweep["regret"] <= 0.05))
    worst = max((abs(row["error"]), policy) for policy, row in steps.items())
    result.append(("steps predicted within 10%", f"at worst {worst[0]:.1%} ({worst[1]})", worst[0] <= 0.1))
    return result


def _steps(title: str, found: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (
        "policy",
        "measured",
        "spread",
        "speed-up",
        "predicted",
        "error",
        "degrees",
        "busiest",
        "above bound",
    ):
        table.add_column(column, justify="left" if column in ("policy", "busiest") else "right", no_wrap=True)
    for policy, row in found["steps"].items():
        table.add_row(
            policy,
            _ms(row["median_s"]),
            f"{row['min_s'] * 1e3:.0f}–{row['max_s'] * 1e3:.0f}",
            f"{row['speed_up']:.2f}",
            _ms(row["predicted_s"]),
            f"{row['error']:+.1%}",
            _pair(row["degrees"]),
            f"{row['resource']} {_ms(row['resource_s'])}",
            f"{row['median_s'] / found['bound_s'] - 1:+.0%}",
        )
    return table


def _layers(title: str, rows: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("schedule", "measured", "spread", "speed-up", "predicted", "degrees"):
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    for policy, row in rows.items():
        table.add_row(
            policy,
            _ms(row["median_s"]),
            f"{row['min_s'] * 1e3:.0f}–{row['max_s'] * 1e3:.0f}",
            f"{row['speed_up']:.2f}",
            _ms(row["predicted_s"]) if "predicted_s" in row else "",
            _pair(row["degrees"]) if "degrees" in row else "",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _pair(degrees: Any) -> str:
    return f"{degrees[0]}, {degrees[1]}"
