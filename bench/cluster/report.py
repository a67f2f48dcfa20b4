"""Tables of cluster results with their conditions; results older than their code are marked.

A table contains rows of one part of a setting, measured interleaved in one run. Statements about several settings use
only results of one commit and machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.cluster.predicted import tables
from bench.provenance import age, conditions, difference

#: Measured code, for provenance.
MEASURED = (
    *(f"fusedmoe/{room}" for room in ("autograd", "blocks", "comm", "engine", "graph", "kernels", "layers", "models")),
    *(f"fusedmoe/{room}" for room in ("placement", "runtime", "schedule", "training")),
    "fusedmoe/cli/trainer.py",
    *(f"fusedmoe/{door}" for door in ("hf", "titan.py", "megatron.py")),
    "bench/cluster",
    *(f":(exclude)fusedmoe/kernels/{room}" for room in ("triton", "gluon")),  # GPU kernels
)

_TITLES = {
    "layer": "MoELayer, forward and backward",
    "shared": "MoELayer with a shared expert, forward and backward",
    "model": "a step of a model of the library's layers, which waits in place of computing",
    "job": "fusedmoe train, a whole step with its optimizer",
    "captured": "a step of a model in plain PyTorch, captured by torch.compile",
    "tokens": "MoELayer, tokens that travel once beside a row for each pair",
    "doors": "both passes of another framework's model, whose experts are over the ranks by fusedmoe's door",
    "tuning": "the same, whose steps try plans",
    "steps": "a step of the benchmark's own stack of layers",
}


class Goal(NamedTuple):
    """Goal of a part: target, result, and whether it was reached."""

    target: str
    text: str
    met: bool


def show(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print all results; `results`: by setting and part."""
    for name, parts in results.items():
        for part, found in parts.items():
            console.print()
            _show_part(name, part, found, console)
            console.print(conditions(found["run"], MEASURED), highlight=False, markup=False)
            own = goals(part, found)
            if own:
                console.print("the library's own goals:", highlight=False)
            for goal in own:
                console.print(f"{'met   ' if goal.met else 'MISSED'}  {goal.target}: {goal.text}", highlight=False)
    _show_all(results, console)


def goals(part: str, found: Mapping[str, Any]) -> list[Goal]:
    """Return the goals of a part; none if it is older than its code."""
    return [] if age(found["run"], MEASURED) else list(_goals(part, found))


def _goals(part: str, found: Mapping[str, Any]) -> Iterator[Goal]:
    if part in ("sweep", "buckets"):
        what = "chosen degrees" if part == "sweep" else "S_p after 8 samples"
        yield Goal(f"{what} within 5% of the best", f"{found['regret']:+.1%}", found["regret"] <= 0.05)
        return
    if part == "placement":
        return
    if part == "routers":
        for router, wanted in (("changes every step", 1.25), ("drifts slowly", 1.0)):
            ratio = found["routers"][router]["rows"]["auto"]["over_hecate"]
            yield Goal(f"{router}: auto at least {wanted} times as fast as hecate", f"{ratio:.2f}", ratio >= wanted)
        longer = 1 / found["routers"]["even"]["rows"]["auto"]["over_ep"] - 1
        yield Goal("even loads: auto at most 2% behind ep", f"{longer:+.1%}", longer <= 0.02)
        return
    rows = found["rows"]
    for which, what in (("error", "predicted"), ("refit_error", "predicted by refitted costs")):
        errors = {name: abs(row[which]) for name, row in rows.items() if which in row}
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            yield Goal(f"{what} within 5%", f"at worst {errors[worst]:.1%} ({worst})", errors[worst] <= 0.05)
    chooser = "auto" if "auto" in rows else "joint" if "joint" in rows else None
    if chooser is not None:
        # Blocks in micro-batches are a different call, which no layer schedule can choose.
        fastest = min(rows.keys() - {"blocks"}, key=lambda name: rows[name]["median_s"])
        behind = rows[chooser]["median_s"] / rows[fastest]["median_s"] - 1.0
        yield Goal(
            f"{chooser} the fastest, or within 3% of it", f"{behind:+.1%} ({fastest} is the fastest)", behind <= 0.03
        )
    if part == "layer":
        best = max(rows, key=lambda name: rows[name]["over_sequential"])
        faster = rows[best]["over_sequential"]
        yield Goal("at least 1.8 times as fast as sequential", f"{faster:.2f} ({best})", faster >= 1.8)
    if part == "tokens":
        setting = found["setting"]
        least = {(8, 50): (1.8, 1.5), (8, 100): (1.45, 1.1)}.get((setting["k"], setting["inter_mbit"]), (1.05, 0.98))
        for schedule, wanted in zip(("off", "auto"), least, strict=True):
            ratio = found["ratios"][schedule]
            yield Goal(f"{schedule}: at least {wanted} times as fast as with pairs", f"{ratio:.2f}", ratio >= wanted)
    if part == "shared":
        for size, hidden in found["hidden"].items():
            yield Goal(f"shared expert, {size}: at least 80% hidden", f"{hidden:.0%}", hidden >= 0.8)
    if part == "doors":
        faster = rows["auto"]["over_off"]
        yield Goal("auto: at least 1.3 times as fast as off", f"{faster:.2f}", faster >= 1.3)
        if "hidden" in found:
            yield Goal("at least 75% of what can be hidden", f"{found['hidden']:.0%}", found["hidden"] >= 0.75)
    if "auto" in found:
        share = found["auto"]["share_of_500_steps"]
        yield Goal("trying plans costs at most 2% of 500 steps", f"{share:.2%}", share <= 0.02)


def _show_all(results: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print one line per part with "auto", if their runs are comparable."""
    found = {
        (name, part): of
        for name, parts in results.items()
        for part, of in parts.items()
        if "auto" in of.get("rows", {}) and part != "placement"  # there it is a balance
    }
    if len(found) < 2:
        return
    console.print()
    mixed = difference(of["run"] for of in found.values())
    if mixed is not None:
        console.print(f"settings are not compared: {mixed}", highlight=False)
        return
    table = Table(title="auto in all settings", title_justify="left")
    for column in ("setting", "part", "auto", "the fastest", "behind", "over sequential", "over off", "predicted"):
        table.add_column(column, justify="left" if column in ("setting", "part") else "right", no_wrap=True)
    for (name, part), of in found.items():
        auto, fastest = of["rows"]["auto"], min(of["rows"], key=lambda one: of["rows"][one]["median_s"])
        behind = auto["median_s"] / of["rows"][fastest]["median_s"] - 1.0
        error = f"{auto['error']:+.1%}" if "error" in auto else ""
        ratios = (f"{auto[over]:.2f}" if over in auto else "" for over in ("over_sequential", "over_off"))
        table.add_row(name, part, _ms(auto["median_s"]), fastest, f"{behind:+.1%}", *ratios, error)
    console.print(table)


def _show_part(name: str, part: str, found: Mapping[str, Any], console: Console) -> None:
    setting = found["setting"]
    if part == "placement":
        _show_placed(found, console)
        return
    if part == "routers":
        for router, of in found["routers"].items():
            console.print(f"a router that {router}" if router != "even" else "a router of even loads", highlight=False)
            _show_placed(of | {"setting": setting}, console)
        return
    if part == "price":
        _show_price(found, console)
        return
    where = f"{name}, {setting['ranks']} ranks on two nodes, {setting['inter_mbit']} Mbit/s between them"
    if part in ("sweep", "buckets"):
        _show_sizes(part, where, found, console)
        return
    console.print(_rows(f"{_TITLES[part]}; {where}", found))
    console.print(
        f"{found.get('layers', setting['layers'])} layers; computation: {setting['computation']}", highlight=False
    )
    if setting.get("computation_s") is not None:
        console.print(f"a step's computation by itself took {_ms(setting['computation_s'])}", highlight=False)
    if part == "tokens":
        sent = found["bytes"]
        faster = ", ".join(f"{schedule} {ratio:.2f}" for schedule, ratio in found["ratios"].items())
        console.print(
            f"times as fast with tokens: {faster}; bytes sent: {sent['pairs'] / sent['tokens']:.2f} times fewer"
        )
        if "levels" in found:
            levels = ", ".join(f"{name} {ratio:.2f}" for name, ratio in found["levels"]["ratios"].items())
            console.print(f"experts over all ranks, times as fast as direct: {levels}", highlight=False)
    if part == "doors":
        console.print(f"speed-up over the integration's earlier form: {found['over_before']:.2f}", highlight=False)
    if "hidden_by_blocks" in found:
        console.print(f"blocks in micro-batches hide {found['hidden_by_blocks']:.0%} of what can be hidden")
    if any("parts" in row for row in found["rows"].values()):
        console.print(_parts(found))
    if "hideable_s" in found:
        console.print(f"{_ms(found['hideable_s'])} can be hidden: the minimum of communication and computation")
    if "auto" in found:
        auto = found["auto"]
        console.print(
            f"auto: {auto['chosen']}; {auto['steps_tried']} steps tried, {auto['extra_s']:.1f} s more than with it, "
            f"{auto['share_of_500_steps']:.2%} of 500 steps; steps differ by {auto['noise']:.1%} by chance",
            highlight=False,
        )
    if "bound_s" in found:
        console.print(f"no schedule can take less than {_ms(found['bound_s'])}", highlight=False)
        for table in tables(name, found):
            console.print(table)


def _rows(title: str, found: Mapping[str, Any]) -> Table:
    rows = found["rows"]
    table = Table(title=title, title_justify="left")
    ratios = [over for over in ("over_sequential", "over_off") if any(over in row for row in rows.values())]
    exposed = any("exposed_s" in row for row in rows.values())
    columns = [
        "schedule",
        "measured",
        "spread",
        *(over.replace("_", " ") for over in ratios),
        "predicted",
        "error",
        "refitted",
        "error",
        "degrees",
    ]
    for column in [*columns, *["exposed, predicted"] * exposed]:
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    for name, row in rows.items():
        cells = [_ms(row["median_s"]), _spread(row), *(f"{row[over]:.2f}" if over in row else "" for over in ratios)]
        known = "predicted_s" in row
        cells += [_ms(row["predicted_s"]), f"{row['error']:+.1%}"] if known else ["", ""]
        cells += [_ms(row["refit_s"]), f"{row['refit_error']:+.1%}"] if "refit_s" in row else ["", ""]
        cells.append(_pair(row["degrees"]) if "degrees" in row else "")
        if exposed:
            cells.append(f"{_ms(row['exposed_s'])}, {_ms(row['predicted_exposed_s'])}" if "exposed_s" in row else "")
        table.add_row(f"{name} (as {row['same_as']})" if "same_as" in row else name, *cells)
    return table


def _parts(found: Mapping[str, Any]) -> Table:
    """Tabulate, by part and schedule, how much longer a step should take than a recorded one."""
    rows = {name: row for name, row in found["rows"].items() if "parts" in row and "same_as" not in row}
    table = Table(title="predicted less measured in one step, of measured, by part", title_justify="left")
    for column in ("part", *rows):
        table.add_column(column, justify="left" if column == "part" else "right", no_wrap=True)
    by_part = {name: {part: both for part, *both in row["parts"]} for name, row in rows.items()}
    for part in dict.fromkeys(part for parts in by_part.values() for part in parts):
        cells = []
        for parts in by_part.values():
            should_s, took_s = parts.get(part, (None, None))
            known = should_s is not None and took_s is not None
            cells.append(
                f"{1e3 * (should_s - took_s):+.0f} of {1e3 * took_s:.0f}" if known else _ms(should_s or took_s or 0.0)
            )
        table.add_row(part, *cells)
    return table


def _show_sizes(part: str, where: str, found: Mapping[str, Any], console: Console) -> None:
    key, title = ("degrees", "degrees") if part == "sweep" else ("bytes", "bytes of gradient buckets")
    table = Table(title=f"{title}; {where}", title_justify="left")
    for column in (title, "measured", "spread", "predicted", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in found["rows"]:
        size = row[key]
        remarks = ", ".join(word for word in ("best", "chosen") if found[word] == size)
        text = _pair(size) if part == "sweep" else str(size)
        table.add_row(text, _ms(row["median_s"]), _spread(row), _ms(row["predicted_s"]), remarks)
    console.print(table)


def _show_placed(found: Mapping[str, Any], console: Console) -> None:
    setting = found["setting"]
    title = f"{setting['ranks']} ranks on two nodes, {setting['layers']} layers of {setting['E']} experts, a whole step"
    table = Table(title=title, title_justify="left")
    for column in [
        "placement",
        "median",
        "mean",
        "spread",
        "over-ep",
        "over-hecate",
        "t",
        "straggler",
        "ingress",
        "sent",
        "peak",
    ]:
        table.add_column(column, justify="left" if column == "placement" else "right", no_wrap=True)
    for policy, row in found["rows"].items():
        table.add_row(
            policy,
            _ms(row["median_s"]),
            _ms(row["mean_s"]),
            _spread(row),
            f"{row['over_ep']:.2f}",
            f"{row['over_hecate']:.2f}" if "over_hecate" in row else "",  # missing in earlier results
            str(row["overlap"]) if row["overlap"] is not None else "",
            f"{row['straggler']:.2f}",
            *(
                f"{row[name] / 2**10:.0f} KiB" if name in row else ""
                for name in ("ingress_bytes", "sent_bytes", "peak_bytes")
            ),
        )
    console.print(table)
    console.print(
        f"router: {found['router']}; {found['steps']} steps; computation: {setting['computation']}. straggler: the "
        "busiest rank's rows over the mean; ingress: what the rank with most gets from the other node in one "
        "all-to-all; sent: by all ranks in a step, experts' parameters, gradients and state; peak: the most that these "
        "took on a rank, looked at where experts compute and where gradients are",
        highlight=False,
    )


def _show_price(found: Mapping[str, Any], console: Console) -> None:
    setting = found["setting"]
    title = f"placement='fssdp' at even loads, {setting['ranks']} ranks, {setting['inter_mbit']} Mbit/s between them"
    table = Table(title=title, title_justify="left")
    for column in ("placement, schedule", "median", "spread", "price", "t", "copies"):
        table.add_column(column, justify="left" if column.startswith("placement") else "right", no_wrap=True)
    for name, row in found["rows"].items():
        more = [f"{row['price']:+.1%}", str(row["overlap"]), str(row["copies"])] if "copies" in row else [""] * 3
        table.add_row(name, _ms(row["median_s"]), _spread(row), *more)
    console.print(table)
    console.print(
        f"the main job, {found['layers']} layers, a random gate. price: the median of a step's time over that of "
        "expert parallelism in the same turn, less one",
        highlight=False,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _spread(row: Mapping[str, Any]) -> str:
    return f"{row['min_s'] * 1e3:.0f}–{row['max_s'] * 1e3:.0f}"


def _pair(degrees: Any) -> str:
    return f"{degrees[0]}, {degrees[1]}"
