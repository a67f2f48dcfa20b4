"""Every figure in docs/results.md equals the value in bench/results/, at the printed precision.

After a new measurement, this test lists the sentences to rewrite, with numbers blanked.
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
GPU, OLDER_GPU, LATER = (
    "gpu_nvidia-h200_20261126T211316",
    "gpu_nvidia-h100-80gb-hbm3_20261123T022338",
    "gpu_nvidia-h200_20261126T223257",
)

MEASURED = (("layer", "layer"), ("emulated", "layer"), ("emulated", "model"), ("blocks", "model"), ("computed", "job"))

DOORS = {
    "door-hf": "Hugging Face, Mixtral",
    "door-titan": "torchtitan",
    "door-megatron": "Megatron-core",
    "door-hf-qwen3": "Hugging Face, Qwen3's proportions",
}

# Numbers in these paragraphs that are conditions, not results: sizes, versions, time-outs.
CONDITIONS = (
    *(
        "time-outs of 2.5 s",
        "Tutel 0.4",
        "0.3's",
        '"0.3"',
        "capacity factor 1.25",
        "Triton 3.6.0",
        "PyTorch 2.11",
        "transformers 5.23",
    ),
    "at least 3.5 times less",  # asserted in tests/bench/test_placement_replay.py
)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def expected_figures() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield sentences and table lines with {} for each number, and the numbers."""
    settings = {name: of for file in ("cluster", "blocks", "placement") for name, of in load(file)["settings"].items()}

    def rows(setting: str, part: str) -> dict[str, Any]:
        found: dict[str, Any] = settings[setting][part]["rows"]
        return found

    for setting, part in MEASURED:
        for name, of in rows(setting, part).items():
            if "same_as" in of and name != "auto":
                continue
            error = f"{of['error']:+.1%}" if "error" in of else "–"
            cells = (f"{of['median_s']:.2f}", error, f"{of['over_sequential']:.2f}")
            yield f"| {setting}, {part} | `{name}` | {{}} s | {{}} | {{}} |", cells

    of = rows("blocks", "steps")
    for name, label in (("sequential", "no overlap"), ("experts", "chunks of experts only")):
        yield f"| {label} | {{}} s |", (f"{of[name]['median_s']:.2f}",)
    for name in ("lancet", "fsmoe", "flowmoe", "joint"):
        yield f"| `{name}` | {{}} s | {{}} s |", (f"{of[name]['median_s']:.2f}", f"{of[name]['exposed_s']:.2f}")
    yield "the lower bound of any order is {} s here", (f"{settings['blocks']['steps']['bound_s']:.2f}",)
    worst = max(abs(row["error"]) for row in of.values())
    yield "Each step is within {} of its prediction", (f"{-int(-100 * worst // 1)}%",)
    yield "bucket sizes are {} slower than the best", (f"{settings['blocks']['buckets']['regret']:.1%}",)

    of = rows("placement", "placement")
    for name, label in (
        ("ep", "expert parallelism"),
        ("smartmoe", "SmartMoE's swaps"),
        ("fastermoe", "FasterMoE's shadowing"),
        ("flexmoe", "FlexMoE's replication"),
        ("hecate, re-materialising", "Hecate, re-materialized replicas"),
        ("hecate", "Hecate"),
        ("exact", "Hecate, exact balance"),
        ("auto", 'Hecate, `balance="auto"`'),
    ):
        if name in of:  # records from before exact balance lack some policies
            yield f"| {label} | {{}} s |", (f"{of[name]['median_s']:.2f}",)

    routers = settings["placement"]["routers"]["routers"]
    changing = routers["changes every step"]["rows"]
    gain = changing["hecate"]["median_s"] / changing["auto"]["median_s"]
    yield "is {} times as fast as Hecate if loads change every step", (f"{gain:.2f}",)
    for router, of in routers.items():
        seconds = (f"{of['rows'][name]['median_s']:.2f} s" for name in ("ep", "hecate", "exact", "auto"))
        stragglers = ", ".join(f"{of['rows'][name]['straggler']:.2f}" for name in ("auto", "hecate"))
        # A literal line: the pattern has no cell with two decimal numbers.
        yield f"| {router} | {' | '.join(seconds)} | {stragglers} |", ()

    found = load("cluster")["settings"]["layer"]["shared"]
    of = {name: row["median_s"] for name, row in found["rows"].items()}
    yield "the layer takes {} s", (f"{of['auto, no shared expert']:.2f}",)
    for size, label in (("an eighth of the experts", "an eighth of"), ("as much as the experts", "as many as")):
        names = (f"shared expert alone, {size}", f"auto, {size}, after the combine", f"auto, {size}, in the plan")
        cells = (*(f"{of[name]:.2f} s" for name in names), f"{found['hidden'][size]:.0%}")
        yield (
            f"| {label} the experts' ({'DeepSeek-V3' if 'eighth' in size else 'Qwen2-MoE'}) | {' | '.join(cells)} |",
            (),
        )

    one = load("placement_simulated")
    yield "simulates {} iterations", (str(one["run"]["iterations"]),)
    of = one["simulations"]["m = 2, seed 0"]["policies"]
    for name, label in (
        ("ep", "expert parallelism"),
        ("smartmoe", "SmartMoE"),
        ("fastermoe", "FasterMoE"),
        ("flexmoe", "FlexMoE"),
        ("algorithm1", "Hecate, Algorithm 1 alone"),
        ("hecate", "Hecate, with fusedmoe's replica search"),
        ("exact", "Hecate, exact balance if profitable"),
        ("auto", 'Hecate, `balance="auto"`'),
        ("even", "Hecate, exact balance always"),
    ):
        if name in of:  # records from before exact balance lack some policies
            cells = (f"{of[name]['speedup']:.2f}", f"{of[name]['peak_bytes'] / 1e9:.2f}")
            setting = f", {of[name]['setting']} iterations" if of[name].get("setting") else ""
            yield f"| {label}{setting} | {{}} | {{}} GB |", cells

    for name, of in one["exact"].items():
        keys = [("no copies", "quick_s")] * ("quick_s" in of["no copies"])  # later than the other columns
        keys += [(case, key) for case in ("no copies", "copies") for key in ("balance_s", "cheapest_s")]
        cells = (f"{of[case][key] * 1e3:.1f}" for case, key in keys)
        yield f"| {name} | {' | '.join(cells)} |", ()
    gap = tuple(f"{one['gap'][share]:.1%}" for share in ("median", "mean", "most"))
    yield "takes {} longer than this optimum in the median, {} in the mean and {} at most", gap

    of = rows("computed", "price")
    prices = tuple(f"{of[f'fssdp, {name}']['price']:.1%}" for name in ("off", "fsmoe"))
    yield "takes {} longer without a schedule and {} longer with `fsmoe`", prices

    captured = load("captured")["settings"]["captured"]["captured"]
    for name, label in (
        ("off", "none"),
        ("captured", "`aot_eager`"),
        ("chunks=1", "`GraphBackend(chunks=1)`: weight gradients overlap all-to-alls"),
        ("own_places=False", "`GraphBackend(own_places=False)`"),
        ("own_places=True", "`GraphBackend(own_places=True)`"),
    ):
        one = captured["rows"][name]
        yield f"| {label} | {{}} s | {{}} |", (f"{one['median_s']:.2f}", f"{one['over_off']:.2f}")
    compute_s, off_s = captured["setting"]["computation_s"], captured["rows"]["off"]["median_s"]
    limit = off_s / (off_s - compute_s)
    yield (
        "Computation alone takes {} s, which limits the speed-up of any plan to {} times the",
        (f"{compute_s:.2f}", f"{limit:.2f}"),
    )
    worst = max(abs(one.get("error", 0.0)) for one in captured["rows"].values())
    yield "The predictions of captured graphs are up to {} off", (f"{worst:.0%}",)

    links = load("link_bytes")["cases"]
    wide, narrow = ([one for one in links if (one["row_bytes"] >= 1024) == is_wide] for is_wide in (True, False))
    most = {
        name: max(of[where][which] for of in some for where in ("links", "across")) - 1
        for name, some, which in (
            ("wide", wide, "over_rows"),
            ("narrow", narrow, "over_rows"),
            ("pairs", narrow, "over_rows_and_pairs"),
            ("headers", links, "overhead"),
        )
    }
    yield "rows of 1 KiB and 4 KiB are at most {} more than", (f"{most['wide']:.1%}",)
    yield "rows of 256 bytes need up to {} more, and {} more", (f"{most['narrow']:.1%}", f"{most['pairs']:.1%}")
    yield "acknowledgements add up to {} to this", (f"{most['headers']:.1%}",)

    chaos = load("chaos")
    yield "Of {} faults", (f"{chaos['cases']:,}",)
    delays = [chaos["seconds_to_error"][kind] for kind in ("kill", "raise")]
    median, longest = (max(one[which] for one in delays) for which in ("median", "max"))
    yield (
        "all other ranks raised an error after {} s in the median and {} s at most",
        (f"{median:.2f}", f"{longest:.1f}"),
    )
    stop = chaos["seconds_to_error"]["stop"]
    noticed = f"{stop['median']:.1f}", f"{stop['max']:.1f}"
    yield "detected after {} s in the median and {} s at most", noticed
    named = [sum(of) for of in zip(*chaos["rank_at_fault_named"].values(), strict=True)]
    yield "was named in {} of {} jobs", tuple(f"{count:,}" for count in named)
    same = tuple(f"{count:,}" for count in chaos["same_cause_on_all"])
    yield "all ranks reported the same cause in {} of {} jobs", same
    survive = load("survive")
    for fault, of in survive["faults"].items():
        seconds = of["seconds_to_go_on"]
        cells = str(of["faults"]), str(of["went_on"]), f"{seconds['median']:.1f}", f"{seconds['max']:.1f}"
        yield f"| {fault} | {{}} | {{}} | {{}} s | {{}} s |", cells
    price = survive["price"]
    sizes = f"{price['memory_mb_of_a_rank']:.0f}", f"{price['sent_mb_by_a_rank']:.0f}"
    yield "use {} MB of memory per rank and send {} MB per refresh", sizes
    yield "A refresh takes {} s and a step {} s there", (f"{price['refresh_s']:.2f}", f"{price['step_without_s']:.2f}")
    worst = max(of["worst_difference"] for of in survive["faults"].values())
    yield "losses differ by at most {} (relative)", (f"{worst:.0e}",)
    job = load("long_job")
    yield "make long-job`, {} steps with {} faults", (f"{job['steps']:,}", str(sum(job["faults"].values())))
    yield "of {} lines of losses", (f"{job['lines_compared']:,}",)

    for name, text in (
        ("tutel_cpu", "Tutel takes {} times as long as fusedmoe on one CPU thread and {} times as long on two"),
        ("layer_cpu", "take {} (one thread) and {} (two threads) times as long as `torch.matmul`"),
    ):
        of_threads = {
            one["extra_info"]["threads"]: one["extra_info"] for one in load(name)["benchmarks"] if one["params"]
        }
        yield text, tuple(f"{of_threads[threads]['ratio']:.2f}" for threads in (1, 2))
    yield "{} and {} times as long as products into", tuple(f"{of_threads[n]['bare_ratio']:.2f}" for n in (1, 2))
    yield "gate, order and combine are {} and {} of the time", tuple(f"{of_threads[n]['routing']:.1%}" for n in (1, 2))
    yield "step requests {} and {} fresh pages", tuple(str(of_threads[n]["page_faults"]) for n in (1, 2))
    alone = next(one for one in load("layer_cpu")["benchmarks"] if not one["params"])
    yield "costs nothing: {} times the step without", (f"{alone['extra_info']['ratio']:.3f}",)

    for one in load("hf_cpu")["benchmarks"]:
        of, kind = one["extra_info"], "training" if "training" in one["name"] else "decoding"
        ways = [way for way in ("grouped_mm", "eager", "batched_mm") if way in of["ratios"]]
        sizes = ", ".join(str(of["shape"][key]) for key in "THIEK")
        yield f"| {kind}, {sizes} |{' {} |' * len(ways)}", tuple(f"{of['ratios'][way]:.2f}" for way in ways)

    finetune = load("finetune")
    for name, ways in (("frozen", ("of_trained", "of_grouped_mm")), ("adapters", ("grouped_mm", "folded"))):
        for of in finetune[name]["rows"]:
            sizes, ratios = ", ".join(str(of["shape"][key]) for key in "THIEK"), of.get("ratios", of)
            found = [*(ratios[way] for way in ways), *of.get("memory", {}).values()]
            yield f"| {name}, {sizes} |{' {} |' * len(found)}", tuple(f"{one:.2f}" for one in found)
    for of in finetune["decoding"]["rows"]:
        if of["mode"] == "inference_mode":
            sizes = ", ".join(str(of["shape"][key]) for key in "THIEK")
            ratios = tuple(f"{of['ratios'][way]:.2f}" for way in ("grouped_mm", "eager", "batched_mm"))
            yield f"| {of['family']}, {sizes} | {{}} | {{}} | {{}} |", ratios

    for name, label in (("tokens-8", "8 of 16"), ("tokens-4", "4 of 16")):
        of = load("tokens")["settings"][name]["tokens"]
        levels, sent = of["levels"]["ratios"], of["bytes"]
        found = (of["ratios"]["off"], of["ratios"]["auto"], sent["pairs"] / sent["tokens"])
        found += tuple(levels[way] for way in ("2dh", "1dh", "auto"))
        yield f"| {label} |{' {} |' * 6}", tuple(f"{one:.2f}" for one in found)
    for k, label in ((8, "8 of 16"), (4, "4 of 16"), (2, "2 of 8")):
        settings = load("tokens")["settings"]
        of, fast = (settings.get(f"tokens-{k}-{how}", {}).get("tokens") for how in ("computed", "fast"))
        found = (
            *(f"{of['ratios'][one]:.2f}" for one in ("off", "auto")),
            f"{of['rows']['auto, tokens']['error']:+.1%}",
        )
        found += ("–", "–") if fast is None else tuple(f"{fast['ratios'][one]:.2f}" for one in ("off", "auto"))
        yield f"| {label}, computed |{' {} |' * 5}", found

    fast = (load("tokens")["settings"][f"tokens-{k}-fast"]["tokens"]["rows"] for k in (8, 2))
    found = tuple(f"{of['auto, tokens']['median_s'] / of['off, tokens']['median_s']:.2f}" for of in fast)
    yield "steps with `auto` took {} (8 of 16 experts) and {} (2 of 8) times as long as without", found

    doors = load("doors")["settings"]
    for name, label in DOORS.items():
        of = doors[name]["doors"]
        rows = of["rows"]
        blocks = f"{rows['blocks']['over_off']:.2f}" if "blocks" in rows else "–"
        found = f"{rows['auto']['over_off']:.2f}", f"{of['over_before']:.2f}", f"{of['hidden']:.0%}", blocks
        yield f"| {label} |{' {} |' * 4}", found

    gpu, older, later = load(GPU), load(OLDER_GPU), load(LATER)
    for of, text in ((gpu, "{} TFLOP/s and {} TB/s measured in the same run"), (older, "{} TFLOP/s and {} TB/s)")):
        yield text, (f"{of['limit']['flops_per_s'] / 1e12:.0f}", f"{of['limit']['bytes_per_s'] / 1e12:.2f}")
    passes, before, then = (
        {(row["shape"], row["variant"], row["name"]): row for row in of["rows"] if row["kind"] == "pass"}
        for of in (gpu, older, later)
    )
    for shape in gpu["shapes"]:
        both, other = (
            [passes[shape["name"], who, one] for one in ("forward", "backward")]
            for who in ("fusedmoe", "torch._grouped_mm")
        )
        sizes = ", ".join(str(shape[key]) for key in "SMHEK")
        cells = tuple(f"{row['tflops']:.0f} ({row['fraction']:.0%})" for row in both)
        cells += (", ".join(f"{row['tflops']:.0f}" for row in other),)
        if (shape["name"], "fusedmoe", "forward") in before:
            old = (before[shape["name"], "fusedmoe", one] for one in ("forward", "backward"))
            cells += (", ".join(f"{row['tflops']:.0f}" for row in old),)
        yield f"| {sizes} |{' {} |' * len(cells)}", cells
    for shape in ("Mixtral", "Qwen3-30B"):
        for ranks in (2, 4, 8):
            found = tuple(
                f"{passes[shape, f'{ranks} ranks, {how}', phase]['tflops']:.0f}"
                for phase in ("forward", "backward")
                for how in ("puts", "copies")
            )
            yield f"| {shape}, {ranks} |{' {} |' * len(found)}", found
    small = [shape["name"] for shape in gpu["shapes"] if shape["M"] <= 2048]
    fractions = {
        name: sorted(row["fraction"] for row in gpu["rows"] if row["name"] == name and row["shape"] in shapes)
        for name, shapes in (("dW1", [shape["name"] for shape in gpu["shapes"]]), ("dhidden", small))
    }
    for text, name in (("the gradients of W1 ({} to {} of it)", "dW1"), ("dhidden ({} to {})", "dhidden")):
        yield text, (f"{fractions[name][0]:.0%}", f"{fractions[name][-1]:.0%}")
    reached = (then[name, "fusedmoe", "forward"]["tflops"] for name in ("1.4B-H256", "7B-H256", "30B-H256"))
    yield "the passes forward reached {}, {} and {} TFLOP/s", tuple(f"{one:.0f}" for one in reached)

    for row in load("reproduce")["tables"]["published-steps"]["rows"]:
        paper, ours = row["paper"], row["ours"][0]
        if not isinstance(paper, str) and not row["form"].endswith(" ms"):
            value, space, unit = row["form"].partition(" ")
            cell = "{}" + space + unit
            figures = (value.format(paper), value.format(ours), f"{ours / paper - 1:+.0%}")
            yield f"| {row['what']} | {cell} | {cell} | {{}} |", figures


TEXT = re.sub(r"\s+", " ", (ROOT / "docs/results.md").read_text())


@pytest.mark.parametrize(("sentence", "numbers"), [pytest.param(*one, id=one[0][:40]) for one in expected_figures()])
def test_documented_figure_equals_results_file(sentence: str, numbers: tuple[str, ...]) -> None:
    pattern = re.escape(sentence).replace(r"\{\}", r"(\S+(?: \(\d+%\))?(?:, \d+)?)")
    said = re.search(pattern, TEXT)
    assert said is not None, f"docs/results.md does not say this any more, or in other words: {sentence}"
    assert said.groups() == numbers, f"{sentence}: docs/results.md says {said.groups()}, the results {numbers}"


def test_every_documented_figure_is_checked() -> None:
    """Paragraphs that name a results file: every decimal or percentage is checked."""
    for paragraph in (ROOT / "docs/results.md").read_text().split("\n\n"):
        if not re.search(r"bench/results/\w[\w-]*\.json", paragraph) or "```" in paragraph:
            continue
        left = re.sub(r"\s+", " ", paragraph)
        for condition in CONDITIONS:
            left = left.replace(condition, "")
        for sentence, numbers in expected_figures():
            left = left.replace(sentence.format(*numbers), "")
        found = re.findall(r"\d+(?:\.\d+)%?|\d+%", re.sub(r"`[^`]*`", "", left))
        assert not found, f"{found} of this paragraph are not looked up in the results: {left}"
