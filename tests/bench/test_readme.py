"""Every figure that the README takes from bench/results/ is what the file there says, as it is rounded in the text.

After a new measurement this test says which sentences are to be written anew: it has them with the numbers left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
GPU = "gpu_nvidia-h100-80gb-hbm3_20261123T022338"

# Numbers in those paragraphs that are no results: sizes, versions, time-outs.
CONDITIONS = (
    *("time-outs of 2.5 s", "Tutel 0.4", "0.3's", '"0.3"', "capacity factor 1.25", "Triton 3.6.0", "PyTorch 2.11"),
    "at least 3.5 times less",  # which tests/placement/test_replay.py holds it to
)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def figures() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Sentences with {} for each number, and the numbers."""
    settings = {name: of for file in ("cluster", "blocks", "placement") for name, of in load(file)["settings"].items()}

    def rows(setting: str, part: str) -> dict[str, Any]:
        found: dict[str, Any] = settings[setting][part]["rows"]
        return found

    def ratio(setting: str, part: str, slow: str, fast: str) -> str:
        of = rows(setting, part)
        return f"{of[slow]['median_s'] / of[fast]['median_s']:.2f}"

    def worst(setting: str) -> str:
        percent = 100 * max(abs(row["error"]) for row in rows(setting, "steps").values())
        return f"{-int(-percent // 1)}%"  # "within": up

    yield "a step of three layers takes {} times as long", (ratio("emulated", "steps", "sequential", "fsmoe"),)
    yield "`pipemoe` {} times as long", (ratio("emulated", "steps", "pipemoe", "fsmoe"),)
    yield "every policy is within {} of its prediction. On two ranks", (worst("emulated"),)
    computed = settings["computed"]["steps"]
    above = f"{computed['rows']['fsmoe']['median_s'] / computed['bound_s'] - 1:.0%}"
    yield "a step of four layers takes {} times as long", (ratio("computed", "steps", "sequential", "fsmoe"),)
    yield "which is {} above what no order of the layers can beat", (above,)
    yield "every policy is within {} of its prediction (`bench/results/cluster.json`", (worst("computed"),)
    job = [ratio("computed", "job", "off", name) for name in ("fsmoe", "joint")]
    yield "takes {} times as long without a schedule as by `fsmoe`, and {} times as long as by `joint`", tuple(job)

    of, found = rows("blocks", "steps"), settings["blocks"]
    seconds = {name: f"{row['median_s']:.2f}" for name, row in of.items()}
    step = (seconds["sequential"], seconds["joint"], ratio("blocks", "steps", "sequential", "joint"))
    yield "a step takes {} s one thing after the other and {} s, {} times less, by `joint`", step
    others = ("flowmoe", "fsmoe", "lancet", "lancet, ranges", "lancet, weights", "experts")
    text = "{} s by `flowmoe`, {} s by `fsmoe`, {} s by `lancet` ({} s and {} s by its two passes alone), {} s with"
    yield text, tuple(seconds[name] for name in others)
    exposed = tuple(f"{of[name]['exposed_s']:.2f}" for name in ("sequential", "joint", "flowmoe", "lancet"))
    yield "Of {} s of exposed communication `joint` leaves {} s, `flowmoe` {} s, `lancet` {} s", exposed
    bound = f"{found['steps']['bound_s']:.2f}"
    yield "Every step is within {} of its prediction, and no order takes less than {} s", (worst("blocks"), bound)
    yield "S_p is {} off the best of a fine sweep", (f"{found['buckets']['regret']:.1%}",)

    of = rows("placement", "placement")
    seconds = {name: f"{row['median_s']:.2f}" for name, row in of.items()}
    yield "16 experts takes {} s by expert parallelism", (seconds["ep"],)
    yield (
        "and {} s by Hecate's placements, {} times less",
        (seconds["hecate"], ratio("placement", "placement", "ep", "hecate")),
    )
    again = seconds["hecate, re-materialising"]
    text = (
        "{} s where copies are given back, in as much memory as expert parallelism's; {} s by FlexMoE's replication, "
    )
    text += "{} s by FasterMoE's shadowing, {} s by SmartMoE's swaps"
    yield text, (again, *(seconds[name] for name in ("flexmoe", "fastermoe", "smartmoe")))

    one = load("placement_simulated")
    of = one["simulations"]["m = 2, seed 0"]["policies"]
    yield "Over {} iterations of a drifting router", (str(one["run"]["iterations"]),)
    names = ("hecate", "algorithm1", "flexmoe", "fastermoe", "smartmoe")
    text = "take {} times less than by expert parallelism by Hecate's placements, {} times by Algorithm 1 alone, "
    text += "{} times by FlexMoE's, {} times by FasterMoE's and {} times by SmartMoE's"
    yield text, tuple(f"{of[name]['speedup']:.2f}" for name in names)
    peaks = tuple(f"{of[name]['peak_bytes'] / 1e9:.2f}" for name in (*names, "ep"))
    yield "has {} GB of them at its height, {} GB, {} GB, {} GB and {} GB, by expert parallelism {} GB", peaks

    chaos = load("chaos")
    yield "Of {} such faults", (f"{chaos['cases']:,}",)
    delays = [chaos["seconds_to_error"][kind] for kind in ("kill", "raise")]
    median, longest = (max(one[which] for one in delays) for which in ("median", "max"))
    yield "it took {} s in the median and {} s at most", (f"{median:.2f}", f"{longest:.1f}")

    for name, text in (
        ("tutel_cpu", "take Tutel {} times as long on one thread of a CPU and {} times on two"),
        ("layer_cpu", "take {} (one thread) and {} (two threads) times as long as `torch.matmul`"),
    ):
        of_threads = {
            one["extra_info"]["threads"]: one["extra_info"] for one in load(name)["benchmarks"] if one["params"]
        }
        yield text, tuple(f"{of_threads[threads]['ratio']:.2f}" for threads in (1, 2))
    yield "gate, order and combine are {} and {} of it", tuple(f"{of_threads[n]['routing']:.1%}" for n in (1, 2))
    alone = next(one for one in load("layer_cpu")["benchmarks"] if not one["params"])
    yield "costs nothing: {} times the step without", (f"{alone['extra_info']['ratio']:.3f}",)

    gpu = load(GPU)
    limit = gpu["limit"]
    yield (
        "{} TFLOP/s and {} TB/s measured in the same run",
        (
            f"{limit['flops_per_s'] / 1e12:.0f}",
            f"{limit['bytes_per_s'] / 1e12:.2f}",
        ),
    )
    passes = {(row["shape"], row["variant"], row["name"]): row for row in gpu["rows"] if row["kind"] == "pass"}
    for shape in gpu["shapes"]:
        both = [passes.get((shape["name"], "fusedmoe", one)) for one in ("forward", "backward")]
        other = [passes.get((shape["name"], "torch._grouped_mm", one)) for one in ("forward", "backward")]
        if None not in both + other:
            sizes = ", ".join(str(shape[key]) for key in "SMHEK")
            cells = tuple(f"{row['tflops']:.0f} ({row['fraction']:.0%})" for row in both if row)
            cells += (", ".join(f"{row['tflops']:.0f}" for row in other if row),)
            yield f"| {sizes} | {{}} | {{}} | {{}} |", cells


TEXT = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())


@pytest.mark.parametrize(("sentence", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in figures()])
def test_a_figure_is_the_file_s(sentence: str, numbers: tuple[str, ...]) -> None:
    pattern = re.escape(sentence).replace(r"\{\}", r"(\S+(?: \(\d+%\))?(?:, \d+)?)")
    said = re.search(pattern, TEXT)
    assert said is not None, f"the README does not say this any more, or in other words: {sentence}"
    assert said.groups() == numbers, f"{sentence}: the README says {said.groups()}, the results {numbers}"


def test_no_figure_is_left_out() -> None:
    """In paragraphs that name a file of results, every number with a decimal point or a percent sign is looked up."""
    for paragraph in (ROOT / "README.md").read_text().split("\n\n"):
        if not re.search(r"bench/results/\w[\w-]*\.json", paragraph) or "```" in paragraph:
            continue
        left = re.sub(r"\s+", " ", paragraph)
        for condition in CONDITIONS:
            left = left.replace(condition, "")
        for sentence, numbers in figures():
            left = left.replace(sentence.format(*numbers), "")
        found = re.findall(r"\d+(?:\.\d+)%?|\d+%", re.sub(r"`[^`]*`", "", left))
        assert not found, f"{found} of this paragraph are not looked up in the results: {left}"
