"""`make bench-report`: GPU results as Markdown tables and a roofline plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.kernels import KERNELS, fastest_of_forms
from bench.gpu.ours import NAME
from bench.gpu.results import RESULTS, SCHEMA
from bench.gpu.spread import PARTS
from bench.gpu.with_router import KIND
from bench.provenance import age

#: Measured code, for provenance.
MEASURED = ("fusedmoe/kernels", "fusedmoe/autograd", "bench/gpu")

Results = dict[str, Any]


class Published(NamedTuple):
    """Published throughputs of other implementations for the same layers, by shape: (forward, backward).

    In TFLOP/s of useful FLOP. They come from other GPUs or other software, so they are a reference and not a
    measurement under equal conditions. An H100 has an H200's tensor cores and two thirds of its memory bandwidth.
    """

    gpu: str
    source: str
    tflops: dict[str, tuple[float, float]]


PUBLISHED = {
    "SonicMoE": Published(
        "H100",
        "Guo et al., SonicMoE (arXiv 2512.14080), its benchmark of MoE layers",
        {
            "1.4B-H256": (338, 366),
            "7B-H256": (364, 405),
            "7B-H1024": (467, 467),
            "30B-H256": (428, 460),
            "30B-H1024": (552, 554),
            "120B-H512": (518, 527),
            "30B-H768": (554, 615),
        },
    ),
    "ScatterMoE": Published(
        "H100",
        "the same table",
        {
            "1.4B-H256": (182, 205),
            "7B-H256": (205, 212),
            "7B-H1024": (265, 280),
            "30B-H256": (261, 238),
            "30B-H1024": (368, 340),
            "120B-H512": (336, 315),
        },
    ),
    "Liger CuTe": Published(
        "H200",
        "Liger-Kernel's CuTe kernels, made for expert parallelism, on one GPU (second-hand)",
        {"Qwen3-30B": (345, 194), "Mixtral": (613, 452)},
    ),
}

_WITHOUT_PRODUCTS = ("order", "gather-and-sum", "dX sum", *PARTS)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    file = options.file or newest(RESULTS)
    if file is None:
        print(f"no GPU results in {RESULTS}; run make bench-gpu first", file=sys.stderr)
        return 1
    results = json.loads(file.read_text())
    if results.get("schema") != SCHEMA:
        print(f"{file} has schema {results.get('schema')}, expected {SCHEMA}", file=sys.stderr)
        return 1
    print(table(results))
    print(f"picture: {picture(results, options.picture or file.with_suffix('.png'))}", file=sys.stderr)
    return 0


def newest(folder: Path) -> Path | None:
    """Return the results of the latest run, by file name: a checkout gives all files the same modification time."""
    return max(folder.glob("gpu_*.json"), key=lambda path: path.stem.rpartition("_")[2], default=None)


def table(results: Results) -> str:
    sections = (_head, _passes, _others, _with_router, _conditions, _kernels, _memory, _notes)
    parts = [section(results) for section in sections]
    return "\n\n".join(part for part in parts if part)


def picture(results: Results, path: Path) -> Path:
    """Plot every kernel and pass under the GPU's roofline, and the fraction of the limit each reaches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    flops, moved = results["limit"]["flops_per_s"], results["limit"]["bytes_per_s"]
    figure, (roof, bars) = pyplot.subplots(1, 2, figsize=(16, 7), width_ratios=(3, 2))
    shapes = [shape["name"] for shape in results["shapes"]]
    markers = dict(zip(shapes, "os^vD*PX<", strict=False))
    rows = [row for row in results["rows"] if row["kind"] == "kernel" and row["flops"] > 0]
    kernels = [kernel for kernel in KERNELS if any(row["name"] == kernel for row in rows)]
    for color, kernel in enumerate(kernels):
        for row in (row for row in rows if row["name"] == kernel):
            roof.plot(row["flops"] / row["parts"][0][1], row["tflops"], markers[row["shape"]], color=f"C{color}")
    reach = [row["flops"] / row["parts"][0][1] for row in rows] or [1.0]
    at = [min(*reach, flops / moved) / 2, flops / moved, max(*reach, flops / moved) * 2]
    roof.plot(at, [min(flops, moved * x) / 1e12 for x in at], color="black")
    roof.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=_gpu_name(results))
    looks = [("s", f"C{color}") for color in range(len(kernels))] + [(marker, "grey") for marker in markers.values()]
    handles = [pyplot.Line2D([], [], linestyle="", marker=marker, color=color) for marker, color in looks]
    roof.legend(handles, [*kernels, *markers], fontsize="small", ncols=2)

    passes = [row for row in results["rows"] if row["kind"] == "pass" and row["name"] != "both"]
    variants = list(dict.fromkeys((row["variant"], row["name"]) for row in passes))
    height = 0.8 / max(len(variants), 1)
    for place, (variant, name) in enumerate(variants):
        found = {row["shape"]: row["fraction"] for row in passes if (row["variant"], row["name"]) == (variant, name)}
        y = [shapes.index(shape) + place * height for shape in found]
        bars.barh(y, list(found.values()), height, label=f"{variant} {name}")
    bars.set(xlim=(0, 1), xlabel="limit / measured", title="passes")
    bars.set_yticks([place + 0.4 for place in range(len(shapes))], shapes)
    bars.invert_yaxis()
    if variants:
        bars.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _head(results: Results) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in results["versions"].items() if found)
    limit = results["limit"]
    lines = [
        f"# Kernels on {_gpu_name(results)}, {results['when']}",
        "",
        f"{versions}; commit {_commit(results)}." + (f" {old}." if (old := age(results, MEASURED)) else ""),
        f"Measured in this run: P = {limit['flops_per_s'] / 1e12:.0f} TFLOP/s (8192³ in bfloat16, random data), "
        f"B = {limit['bytes_per_s'] / 1e12:.2f} TB/s (a large copy, read and written). "
        "limit = Σ max(FLOP / P, bytes / B); fraction = limit / measured. Medians; caches flushed before each run.",
    ]
    if ceilings := results["ceilings"]:
        lines += ["", "How the GPU held:", ""]
        lines += _markdown(
            ["when", "P, TFLOP/s", "B, TB/s", "SM MHz", "memory MHz", "W", "°C"],
            (
                [
                    ceiling["when"],
                    f"{ceiling['flops_per_s'] / 1e12:.0f}",
                    f"{ceiling['bytes_per_s'] / 1e12:.2f}",
                    *(_number(ceiling.get(key)) for key in ("sm_clock_mhz", "memory_clock_mhz", "power_w")),
                    _number(ceiling.get("temperature_c")),
                ]
                for ceiling in ceilings
            ),
        )
    return "\n".join(lines)


def _passes(results: Results) -> str:
    rows = [row for row in results["rows"] if row["kind"] == "pass" and row["variant"] == NAME]
    if not rows:
        return ""
    body = (
        [
            _shape(results, row["shape"]),
            row["name"],
            f"{row['limit_ms']:.3f}",
            f"{row['measured_ms']:.3f}",
            f"{row['low_ms']:.3f}–{row['high_ms']:.3f}",
            f"{row['fraction']:.0%}",
            f"{row['tflops']:.0f}",
        ]
        for row in rows
    )
    head = ["layer", "pass", "limit ms", "measured ms", "10%–90%", "fraction", "TFLOP/s"]
    return "\n".join(["## Passes (order, experts; routing given)", "", *_markdown(head, body)])


def _others(results: Results) -> str:
    """Tabulate TFLOP/s of all variants, forward and backward."""
    rows = [row for row in results["rows"] if row["kind"] == "pass"]
    if not rows:
        return ""
    variants, cell = _variants(rows)
    body = (
        [_shape(results, shape["name"]), *(cell(shape["name"], variant) for variant in variants)]
        for shape in results["shapes"]
    )
    head = ["layer", *variants]
    return "\n".join(["## Other libraries in this run, TFLOP/s forward/backward", "", *_markdown(head, body)])


def _with_router(results: Results) -> str:
    """Tabulate TFLOP/s by SonicMoE's method next to published figures."""
    rows = [row for row in results["rows"] if row["kind"] == KIND]
    if not rows:
        return ""
    variants, cell = _variants(rows)
    rates = {(row["shape"], row["variant"], row["name"]): row["tflops"] for row in rows}

    def published(shape: str, name: str) -> str:
        found = PUBLISHED[name].tflops.get(shape)
        if found is None:
            return "–"
        ours = [rates.get((shape, NAME, part)) for part in ("forward", "backward")]
        ratio = "/".join(
            "–" if rate is None else f"{rate / theirs:.2f}" for rate, theirs in zip(ours, found, strict=True)
        )
        return f"{found[0]:.0f}/{found[1]:.0f} (×{ratio})"

    body = (
        [
            _shape(results, shape["name"]),
            *(cell(shape["name"], variant) for variant in variants),
            *(published(shape["name"], name) for name in PUBLISHED),
        ]
        for shape in results["shapes"]
    )
    head = ["layer", *variants, *(f"{name}, {by.gpu}, published" for name, by in PUBLISHED.items())]
    sources = "; ".join(f"{name}: {by.source}" for name, by in PUBLISHED.items())
    note = (
        "Router, top-k, sorting and experts; mean of half a second of repeats after half a second of rest; backward = "
        f"both - forward. × is this run's {NAME} over the published number. Published: {sources}."
    )
    title = f"## With the router, by SonicMoE's method, TFLOP/s forward/backward on {_gpu_name(results)}"
    return "\n".join([title, "", *_markdown(head, body), "", note])


def _variants(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], Callable[[str, str], str]]:
    """Return the variants of these rows, and a function of shape and variant: "forward/backward" in TFLOP/s."""
    rates = {(row["shape"], row["variant"], row["name"]): row["tflops"] for row in rows}

    def cell(shape: str, variant: str) -> str:
        both = (shape, variant, "forward"), (shape, variant, "backward")
        return "/".join(f"{rates[key]:.0f}" for key in both) if all(key in rates for key in both) else "–"

    return list(dict.fromkeys(row["variant"] for row in rows)), cell


def _conditions(results: Results) -> str:
    """Tabulate the GPU's clocks and power during the measurements of each layer; older results have none."""
    body = []
    for shape in results["shapes"]:
        for kind in ("kernel", "pass", KIND):
            rows = [row for row in results["rows"] if (row["shape"], row["kind"]) == (shape["name"], kind)]
            states = [row for row in rows if "sm_clock_mhz" in row]
            if states:
                clocks = [clock for row in states for clock in row["sm_clock_mhz"]]
                reasons = sorted({reason for row in states for reason in row["throttled_by"]})
                power = sum(row["power_w"] for row in states) / len(states)
                temperature = max(row["temperature_c"] for row in states)
                shown = [
                    f"{min(clocks)}–{max(clocks)}",
                    f"{power:.0f}",
                    f"{temperature:.0f}",
                    ", ".join(reasons) or "–",
                ]
                body.append([shape["name"], kind, *shown])
    if not body:
        return ""
    head = ["layer", "measured", "SM MHz", "W", "°C", "lower clocks due to"]
    return "\n".join(["## State of the GPU during the measurements", "", *_markdown(head, body)])


def _kernels(results: Results) -> str:
    rows = {(row["shape"], row["name"]): row for row in results["rows"] if row["kind"] == "kernel"}
    if not rows:
        return ""

    def part(title: str, kernels: Sequence[str], show: Callable[[dict[str, Any]], str]) -> str:
        body = []
        for shape in results["shapes"]:
            found = [rows.get((shape["name"], kernel)) for kernel in kernels]
            body.append([shape["name"], *("–" if row is None else show(row) for row in found)])
        return "\n".join([f"## Kernels, {title}", "", *_markdown(["layer", *kernels], body)])

    parts = (
        part("fraction of their limit", KERNELS, lambda row: f"{row['fraction']:.0%}"),
        part("measured ms (limit)", KERNELS, lambda row: f"{row['measured_ms']:.3f} ({row['limit_ms']:.3f})"),
        part("TFLOP/s", [k for k in KERNELS if k not in _WITHOUT_PRODUCTS], lambda row: f"{row['tflops']:.0f}"),
    )
    return "\n\n".join([*parts, *_forms(rows)])


def _forms(rows: Mapping[tuple[str, str], Any]) -> list[str]:
    """For each tuned product, tabulate the fastest Triton form and the fastest Gluon form."""
    body = []
    for (shape, kernel), row in rows.items():
        if times := row.get("microseconds"):
            best = fastest_of_forms(times)
            gain = f"{1 - best[1] / best[0]:.0%}" if best[0] and best[1] else "–"
            shown = ("–" if time is None else f"{time:.0f}" for time in best)
            body.append([shape, kernel, *shown, gain, row["config"]])
    if not body:
        return []
    head = ["layer", "kernel", "Triton µs", "Gluon µs", "less", "chosen"]
    return ["\n".join(["## Triton beside Gluon, alone on the GPU", "", *_markdown(head, body)])]


def _memory(results: Results) -> str:
    rows = [row for row in results["rows"] if row["kind"] == "pass" and row["name"] == "both"]
    if not rows:
        return ""
    body = (
        [
            row["shape"],
            row["variant"],
            f"{row['saved_bytes'] / 2**20:.0f}",
            "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.0f}",
            "–" if row.get("energy_j") is None else f"{row['energy_j']:.3g}",  # missing in older results
            f"{max(row['errors'].values()):.1e}",
        ]
        for row in rows
    )
    head = ["layer", "variant", "saved MiB", "peak MiB", "energy J", "largest error"]
    note = (
        "Saved: what autograd keeps, with the tokens, without parameters. Peak: above what was there before. Energy: "
        "of the whole GPU during a forward and backward, by its own counter."
    )
    return "\n".join(["## Memory, energy and errors", "", *_markdown(head, body), "", note])


def _notes(results: Results) -> str:
    lines = [f"- {check['name']}: {check['result']} ({check['word']})" for check in results["checks"]]
    words: dict[tuple[str, str], list[str]] = {}
    for skipped in results["skipped"]:
        words.setdefault((skipped["name"], skipped["word"]), []).append(skipped["shape"])
    for (name, word), shapes in words.items():
        where = "everywhere" if len(shapes) == len(results["shapes"]) else ", ".join(shapes)
        lines.append(f"- left out: {name} ({word}): {where}")
    return "\n".join(["## Checks, and what was left out", "", *lines]) if lines else ""


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]


def _shape(results: Results, name: str) -> str:
    shape = next(shape for shape in results["shapes"] if shape["name"] == name)
    return f"{name} ({', '.join(str(shape[key]) for key in 'SMHEK')})"


def _gpu_name(results: Results) -> str:
    return results["gpu"]["name"] if results["gpu"] else "no GPU"


def _commit(results: Results) -> str:
    if results["commit"] is None:
        return "unknown"
    changed = f" and {results['changed_files']} changed files" if results["changed_files"] else ""
    return results["commit"][:10] + changed


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-report ARGS=…",
        description="Show results of make bench-gpu: Markdown tables on standard output, and a roofline plot. Tables: "
        "GPU state, passes against their limit, other libraries and published numbers, every kernel, memory.",
        epilog="Layers are labelled with their sizes (S tokens, M model dim, H expert hidden dim, E experts, top K).",
    )
    parser.add_argument("file", nargs="?", type=Path, help="results file (default: the latest in bench/results/)")
    parser.add_argument("--picture", type=Path, help="file of the plot (default: the results file with suffix .png)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
