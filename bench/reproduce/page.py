"""Markdown page of a reproduction, generated from the JSON file of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.reproduce import flowmoe, fsmoe, hecate, lancet, published
from bench.reproduce.table import HOW, PAPERS, Table, cells

_LEFT_OUT: Mapping[str, Mapping[str, str]] = {
    "FSMoE": fsmoe.LEFT_OUT,
    "Lancet": lancet.LEFT_OUT,
    "FlowMoE": flowmoe.LEFT_OUT,
    "Hecate": hecate.LEFT_OUT,
    "End-to-end": published.LEFT_OUT,
}
_CITED = {
    "FSMoE": "Pan et al., ASPLOS 2025",
    "Lancet": "Jiang et al., MLSys 2024",
    "FlowMoE": "Gao et al., NeurIPS 2025",
    "Hecate": "Qing et al., 2025",
    "End-to-end": "Results that other projects publish, predicted from their model and machine",
}

_HEAD = """\
# Reproduction

Tables and figures of the four papers that can be reproduced from the printed data, next to the values of this library.
`make reproduce` writes `bench/results/reproduce.json` and this page; `make reproduce ARGS=--help` lists the parts. The
tables below took {minutes} min in total. No GPU is needed. The speeds of the authors' clusters are not reproduced. The
last section predicts results that other projects publish.

- **paper**: the value printed in the paper or report, at the place given below the title. A dash: not printed.
- **ours** (all other columns): *computed* from definitions; *simulated* with plans and placements of this library under
  published costs or synthetic loads; or *measured* on the machine of the run. Each table states which.
- **why**: the reasons for a difference, numbered below the table.

One row is sent per (token, k) pair, as in the papers, unless a row states otherwise. The library's layers send one row
per token and rank; in the simulated layers, with one expert per rank, that is the same number.
"""


def page(data: Mapping[str, Any]) -> str:
    tables = data["tables"]
    seconds = sum(one["seconds"] for one in {one["part"]: one for one in tables.values()}.values())
    blocks = [_HEAD.format(minutes=max(1, round(seconds / 60))), _runs(tables.values())]
    for paper in PAPERS:
        blocks.append(f"## {paper}\n\n{_CITED[paper]}.")
        blocks += [_table(one) for one in tables.values() if one["paper"] == paper]
        left_out = "\n".join(f"- {what}: {why}" for what, why in _LEFT_OUT[paper].items())
        blocks.append(f"### {paper}: not reproduced\n\n{left_out}")
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _runs(tables: Iterable[Mapping[str, Any]]) -> str:
    runs: dict[str, list[str]] = {}
    for one in tables:
        runs.setdefault(_conditions(one["run"]), []).append(f"`{one['name']}`")
    if len(runs) == 1:
        return f"The run: {next(iter(runs))}."
    return "The runs:\n\n" + "\n".join(f"- {how}: {', '.join(names)}" for how, names in runs.items())


def _conditions(run: Mapping[str, Any]) -> str:
    machine = run["machine"]
    changed = f" and {run['changed_files']} changed files" if run.get("changed_files") else ""
    return (
        f"commit {(run.get('commit') or 'unknown')[:12]}{changed}, {run['date']}, {machine['cores']} cores, "
        f"load {run['load']:.1f} at its start, Python {machine['python']}, PyTorch {machine['torch']}"
    )


def _table(one: Mapping[str, Any]) -> str:
    table = Table.from_dict(one)
    lines = [f"### {table.title}", f"{table.paper}, {table.source}. Ours is {HOW[table.how]}. {table.text}"]
    if table.skipped is not None:
        return "\n\n".join([*lines, f"**No figures in this run**, {table.skipped}."])
    lines.append("\n".join(markdown(["", "paper", *table.columns, "why"], map(cells, table.rows))))
    lines += [
        "\n".join(f"{number}. {reason}" for number, reason in enumerate(table.reasons, start=1)),
        f'`make reproduce ARGS="--only {one["part"]}"`, {one["seconds"]:.0f} s.',
    ]
    return "\n\n".join(line for line in lines if line)


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 2), "---"]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]
