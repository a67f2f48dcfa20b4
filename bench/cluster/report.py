"""The results of the cluster as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from bench.cluster.predicted import tables


def show(results: dict[str, Any], console: Console) -> None:
    for name, found in results.items():
        setting = found["setting"]
        console.print()
        if setting.get("placed"):
            _show_placed(found, console)
            continue
        title = f"{setting['ranks']} ranks on two nodes, {setting['layers']} layers, a whole step; {name}"
        console.print(_steps(title, found))
        console.print(f"computation: {setting['computation']}; no schedule can take less than {_ms(found['bound_s'])}")
        if setting.get("computation_s") is not None:
            alone = f"a step's computation by itself took {_ms(setting['computation_s'])}"
            console.print(f"{setting['inter_mbit']} Mbit/s between the nodes: {alone}")
        if setting.get("blocks"):
            _show_blocks(name, found, console)
        else:
            _show_layers(name, found, console)
        for table in tables(name, found):
            console.print(table)
        for target, text, met in targets(name, found):
            console.print(f"{'met   ' if met else 'MISSED'}  {target}: {text}")


def _show_placed(found: dict[str, Any], console: Console) -> None:
    setting = found["setting"]
    title = f"{setting['ranks']} ranks on two nodes, {setting['layers']} layers of {setting['E']} experts, a whole step"
    table = Table(title=title, title_justify="left")
    columns = "placement median mean spread speed-up t straggler ingress sent memory"
    for column in columns.split():
        table.add_column(column, justify="left" if column == "placement" else "right", no_wrap=True)
    for policy, row in found["policies"].items():
        table.add_row(
            policy,
            _ms(row["median_s"]),
            _ms(row["mean_s"]),
            _spread(row),
            f"{row['speed_up']:.2f}",
            str(row["overlap"]) if policy.startswith("hecate") else "",
            f"{row['straggler']:.2f}",
            *(f"{row[name] / 2**10:.0f} KiB" for name in ("ingress_bytes", "sent_bytes", "memory_bytes")),
        )
    console.print(table)
    console.print(
        f"router: {setting['router']}; computation: {setting['computation']}. straggler: the busiest rank's rows over "
        "the mean; ingress: what the rank with most gets from the other node in one all-to-all; sent: by all ranks in "
        "a step, experts' parameters, gradients and state; memory: of the rank with most, all of these"
    )


def _show_layers(name: str, found: dict[str, Any], console: Console) -> None:
    sweep = found["sweep"]
    console.print(
        f"degrees of a measured sweep: best {_pair(sweep['best'])}, chosen {_pair(sweep['chosen'])}: "
        f"{sweep['regret']:+.1%}"
    )
    console.print()
    console.print(_layers(f"MoELayer, forward and backward; {name}", found["layer"]))
    if found["job"] is not None:
        console.print(_layers(f"fusedmoe train, a whole step with its optimizer; {name}", found["job"]))


def targets(name: str, found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """What a setting should show, what it shows, and whether that is enough."""
    steps = found["steps"]
    worst = max((abs(row["error"]), policy) for policy, row in steps.items())
    predicted = ("steps predicted within 10%", f"at worst {worst[0]:.1%} ({worst[1]})", worst[0] <= 0.1)
    if found["setting"].get("blocks"):
        fastest = min(steps, key=lambda policy: steps[policy]["median_s"])
        behind = steps["joint"]["median_s"] / steps[fastest]["median_s"] - 1.0
        regret = found["buckets"]["regret"]
        return [
            ("joint the fastest, or within 3% of it", f"{behind:+.1%} ({fastest} is the fastest)", behind <= 0.03),
            predicted,
            ("S_p after 8 samples within 5% of the best", f"{regret:+.1%}", regret <= 0.05),
        ]
    sweep = found["sweep"]
    speed_up = steps["fsmoe"]["speed_up"]
    result = [("FSMoE at least 1.5 times as fast as sequential", f"{speed_up:.2f}", speed_up >= 1.5)]
    if name == "emulated":
        ratio = steps["pipemoe"]["median_s"] / steps["fsmoe"]["median_s"]
        result.append(("FSMoE at least 1.1 times as fast as PipeMoE", f"{ratio:.2f}", ratio >= 1.1))
    result.append(("chosen degrees within 5% of the best", f"{sweep['regret']:+.1%}", sweep["regret"] <= 0.05))
    return [*result, predicted]


def _show_blocks(name: str, found: dict[str, Any], console: Console) -> None:
    console.print("exposed: seconds in which a link works and nothing is computed, measured and predicted")
    buckets = found["buckets"]
    console.print()
    table = Table(title=f"gradients in buckets, degrees {_pair(buckets['degrees'])}; {name}", title_justify="left")
    for column in ("KiB of a bucket", "measured", "spread", "predicted", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in buckets["rows"]:
        chosen = f"chosen after {len(buckets['tried'])} samples"
        remarks = [text for key, text in (("best", "best"), ("chosen", chosen)) if buckets[key] == row["bytes"]]
        table.add_row(
            f"{row['bytes'] / 1024:.1f}",
            _ms(row["median_s"]),
            _spread(row),
            _ms(row["predicted_s"]),
            ", ".join(remarks),
        )
    console.print(table)


def _steps(title: str, found: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ["policy", "measured", "spread", "speed-up", "predicted", "error", "degrees", "busiest", "above bound"]
    exposed = "exposed_s" in found["steps"]["sequential"]
    for column in [*columns, *["exposed"] * exposed]:
        table.add_column(column, justify="left" if column in ("policy", "busiest") else "right", no_wrap=True)
    for policy, row in found["steps"].items():
        table.add_row(
            policy,
            _ms(row["median_s"]),
            _spread(row),
            f"{row['speed_up']:.2f}",
            _ms(row["predicted_s"]),
            f"{row['error']:+.1%}",
            _pair(row["degrees"]),
            f"{row['resource']} {_ms(row['resource_s'])}",
            f"{row['median_s'] / found['bound_s'] - 1:+.0%}",
            *([f"{row['exposed_s'] * 1e3:.0f}, {row['predicted_exposed_s'] * 1e3:.0f} ms"] if exposed else []),
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
            _spread(row),
            f"{row['speed_up']:.2f}",
            _ms(row["predicted_s"]) if "predicted_s" in row else "",
            _pair(row["degrees"]) if "degrees" in row else "",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _spread(row: dict[str, Any]) -> str:
    return f"{row['min_s'] * 1e3:.0f}–{row['max_s'] * 1e3:.0f}"


def _pair(degrees: Any) -> str:
    return f"{degrees[0]}, {degrees[1]}"
