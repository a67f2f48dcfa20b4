"""Plot a layer's step without and with a schedule from `bench/results/cluster.json`, for the README.

python -m bench.cluster.picture
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fusedmoe.schedule.timeline import Timeline

ROOT = Path(__file__).parents[2]
RESULTS, PICTURE = ROOT / "bench/results/cluster.json", ROOT / "docs/images/step.svg"
SETTING = "layer"

COMPUTE, TRAVEL, EDGE = "#f79a1c", "#2b5fae", "white"
_ROW_HEIGHT = 0.8


def main() -> None:
    argparse.ArgumentParser(prog="bench.cluster.picture", description=__doc__.split("\n\n")[0]).parse_args()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULTS.read_text())["settings"][SETTING]["layer"]
    picture(found).savefig(PICTURE, metadata={"Date": None})
    print(f"{PICTURE.relative_to(ROOT)} drawn from {RESULTS.relative_to(ROOT)}")


def picture(found: dict[str, Any]) -> Figure:
    """Plot part "layer": the timelines of "off" and of the fastest policy, in this order."""
    timelines = {name: Timeline.from_dict(of) for name, of in found["timelines"].items()}
    result = Figure(figsize=(9.5, 3.1), facecolor="white")
    result.subplots_adjust(left=0.15, right=0.985, top=0.85, bottom=0.14, hspace=0.75)
    axes = result.subplots(len(timelines), 1, sharex=True)
    longest_ms = 1e3 * max(line.duration_s for line in timelines.values())
    for place, (name, line) in zip(axes, timelines.items(), strict=True):
        _draw(place, line)
        row = found["rows"][name]
        said = "auto" if found["rows"]["auto"].get("same_as", "auto") == name else name
        title = 'schedule="off"' if name == "off" else f'schedule="{said}": {row["over_off"]:.2f} times as fast'
        place.set_title(f"{title} ({1e3 * row['median_s']:.0f} ms, median)", loc="left", fontsize=10, weight="bold")
        place.set_xlim(0, longest_ms)
    axes[-1].set_xlabel("ms", loc="right", fontsize=9)
    entries = [Patch(color=COMPUTE, label="computation"), Patch(color=TRAVEL, label="communication")]
    result.legend(handles=entries, loc="upper right", ncols=2, frameon=False, fontsize=9)
    return result


def _draw(place: Any, line: Timeline) -> None:
    for span in line.spans:
        computes = span.resource == "compute"
        start_ms, length_ms = 1e3 * (span.start_s - line.start_s), 1e3 * span.duration_s
        place.broken_barh(
            [(start_ms, length_ms)],
            (0.1 if computes else 1.1, _ROW_HEIGHT),
            facecolor=COMPUTE if computes else TRAVEL,
            edgecolor=EDGE,
            linewidth=0.5,
        )
    backward_s = min(span.start_s for span in line.spans if span.phase == "backward")
    place.axvline(1e3 * (backward_s - line.start_s), color="#5c5c5c", linewidth=0.8, linestyle=":")
    place.set_ylim(2.05, 0)
    place.set_yticks([0.5, 1.5], ["computation", "communication"], fontsize=9)
    place.tick_params(axis="x", labelsize=8)
    place.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        place.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
