"""Plots of timelines: rows, colours, labels and legends."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import to_hex

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.draw import (
    _ROW_COLOUR,
    COLOURS,
    MAX_TIMELINES,
    Timelines,
    background_colour,
    bar_stripes,
    draw,
    figure,
    format_ms,
)
from fusedmoe.schedule.task import FUSED, KINDS, RESOURCES, resources_of
from fusedmoe.schedule.timeline import Span, Timeline, align_timelines, trace
from tests.schedule.test_timeline import check_format
from tests.schedule.timelines import training_step

LINKS = (
    "count-exchange",
    "dispatch",
    "all-gather",
    "reduce-scatter",
    "combine",
    "gradient-all-reduce",
    "sparse-all-gather",
    "sparse-reduce-scatter",
)

# Linear RGB to linear RGB as seen with full colour-vision deficiency. Machado, Oliveira, Fernandes: A
# Physiologically-based Model for Simulation of Color Vision Deficiency, 2009.
VISION = {
    "full": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def rgb(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])


def cielab(colour: str, vision: np.ndarray) -> np.ndarray:
    value = rgb(colour) / 255
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    )
    x, y, z = np.cbrt(to_xyz @ np.clip(vision @ linear, 0.009, 1) / np.array([0.95047, 1, 1.08883]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def pixels(timelines: Timeline | list[Timeline]) -> np.ndarray:
    picture = figure(timelines)
    picture.canvas.draw()
    return np.asarray(picture.canvas.buffer_rgba())[..., :3]


def texts(timelines: Timelines, **options: str) -> list[str]:
    return [text.get_text() for axes in figure(timelines, **options).axes for text in axes.texts]


@pytest.mark.parametrize("vision", VISION)
def test_colors_in_one_row_are_distinguishable(vision):
    assert tuple(COLOURS) == tuple(kind for kind in KINDS if kind not in FUSED)
    for row in (LINKS, tuple(kind for kind in COLOURS if kind not in LINKS)):
        for one, two in itertools.combinations(row, 2):
            apart = np.linalg.norm(cielab(COLOURS[one], VISION[vision]) - cielab(COLOURS[two], VISION[vision]))
            assert apart > 18, f"{one} and {two} are {apart:.1f} apart"  # about 2 is just visible


@pytest.mark.slow
def test_draw_writes_png_of_four_ranks(tmp_path):
    rng = random.Random()
    timelines = [training_step(rng, rank, layers=4, anchor_s=1.7e9 + rank * 1e-3) for rank in range(4)]
    draw(timelines, tmp_path / "step.png", title="Step 12")
    data = (tmp_path / "step.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert 1500 < width < 3000 and 700 < height < 1500


def test_figure_labels_ranks_resources_and_kinds():
    rng = random.Random()
    timelines = [training_step(rng, rank, layers=1, degree=2) for rank in range(2)]
    found = texts(timelines, title="Step $12$")
    assert found.count("Step $12$") == 1
    assert {"rank 0", "rank 1"} <= set(found)
    for resource in ("compute", "intra", "inter"):
        assert found.count(resource) == 2
    for kind in {span.kind for timeline in timelines for span in timeline.spans}:
        assert sum(text.endswith("  " + kind) for text in found) == 1
    assert "backward pass" in found and found.count("forward, layer 0") == 2
    assert not any(text.endswith("  other") for text in found)
    for timeline in timelines:
        attention = max((s for s in timeline.spans if s.kind == "attention"), key=lambda s: s.duration_s)
        ms = attention.duration_s * 1e3
        assert (f"{ms:.2f} ms" if ms < 9.995 else f"{ms:.1f} ms") in found


@pytest.mark.parametrize(("layers", "pattern"), [(1, r"(for|back)ward, layer \d"), (9, r"[fb]wd \d")])
def test_brackets_label_pass_and_layer_uniformly(layers, pattern):
    found = texts([training_step(random.Random(layers), rank, layers=layers, degree=2) for rank in range(2)])
    named = [text for text in found if re.match("forward|backward|[fb]wd", text) and text != "backward pass"]
    assert len(named) >= 4 and all(re.fullmatch(pattern, text) for text in named), named


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_backgrounds_of_neighbouring_layers_differ(phase):
    grounds = [background_colour(phase, layer) or _ROW_COLOUR for layer in range(4)]
    assert grounds[0] == grounds[2] and grounds[1] == grounds[3]
    for vision in VISION.values():
        one, two = (cielab(ground, vision) for ground in grounds[:2])
        assert np.linalg.norm(one - two) > 4  # about 2 is just visible
    picture = figure(training_step(random.Random(), layers=3, degree=2))
    drawn = {to_hex(patch.get_facecolor()) for patch in picture.axes[1].patches}
    assert {background_colour(phase, 1), background_colour("backward", 0)} <= drawn


def test_bars_have_color_and_position_of_their_span():
    timeline = training_step(random.Random(), layers=1, degree=2)
    picture = figure(timeline)
    picture.canvas.draw()
    image = np.asarray(picture.canvas.buffer_rgba())[..., :3]
    (aligned,) = align_timelines([timeline])
    chart = picture.axes[1]
    rows = {"compute": 0.37, "intra": 0.76, "inter": 1.15}  # inches from the top; near the middles of the rows
    checked = 0
    for span in aligned.spans:
        column, _ = chart.transData.transform((span.start_s * 1e3, 0))
        end, _ = chart.transData.transform((span.end_s * 1e3, 0))
        if end - column < 12:
            continue
        _, y = chart.transData.transform((0, rows[span.resource] - 0.15))  # above the label
        line = image[image.shape[0] - 1 - round(y)]
        assert (line[round(column) + 3] == rgb(COLOURS[span.kind])).all(), span
        assert (line[round(end) - 3] == rgb(COLOURS[span.kind])).all(), span
        checked += 1
    assert checked > 10


def test_labels_fit_inside_bars():
    rng = random.Random()
    picture = figure([training_step(rng, rank, layers=3) for rank in range(2)])
    picture.canvas.draw()
    chart = picture.axes[1]
    boxes = [path.get_extents(chart.transData) for bars in chart.collections for path in bars.get_paths()]
    renderer = picture.canvas.get_renderer()
    inside = [
        any(box.x0 <= label.x0 and label.x1 <= box.x1 and box.y0 <= label.y1 and label.y0 <= box.y1 for box in boxes)
        for label in (text.get_window_extent(renderer) for text in chart.texts if text.get_va() != "center")
    ]
    assert len(inside) > 20 and all(inside)


def test_subpixel_spans_are_visible():
    spans = (
        Span("start", "weight-gradient", "compute", 0.0, 1e-9),
        Span("expert", "gate", "compute", 0.4, 0.6),
        Span("end", "attention", "compute", 1.0, 1.0),
    )
    image = pixels(Timeline(0, spans)).astype(int)[110:]  # below the legend
    for span in spans:
        away = np.abs(image - rgb(COLOURS[span.kind])).sum(-1).min()
        assert away < 100, f"{span.name}: no pixel is nearer to its colour than {away}"


def test_overlapping_spans_increase_row_height():
    spans = tuple(Span("dispatch", "dispatch", "inter", i * 1e-3, 1.0, chunk=i) for i in range(8))
    high, low = figure(Timeline(0, spans)), figure(Timeline(0, spans[:1]))
    assert high.get_figheight() > low.get_figheight() + 0.5
    (bars,) = high.axes[1].collections
    boxes = sorted((path.get_extents() for path in bars.get_paths()), key=lambda box: box.y0)
    assert all(one.y1 <= two.y0 for one, two in itertools.pairwise(boxes))
    assert {f"dispatch {i}" for i in range(8)} == {
        " ".join(t.split()[:2]) for t in texts(Timeline(0, spans)) if "dispatch " in t and t[-2:] == "ms"
    }


def test_measured_and_predicted_timelines_are_labelled():
    rng = random.Random()
    both = [training_step(rng), training_step(rng, source="predicted", anchor_s=None)]
    assert {"rank 0\nmeasured", "rank 0\npredicted"} <= set(texts(both))
    assert "rank 0" in texts(both[:1])


def test_mapping_labels_timelines_of_equal_rank():
    rng = random.Random()
    of_policies = {name: training_step(rng, source="predicted", anchor_s=None) for name in ("fsmoe", "my_$policy$")}
    found = texts(of_policies)
    assert {*of_policies} <= set(found) and not any(text.startswith("rank ") for text in found)


def test_long_label_ends_before_names_of_resources():
    chosen = figure({"two_micro_batches_with_buckets": training_step(random.Random())})
    chosen.draw_without_rendering()
    page, renderer = chosen.axes[0], chosen.canvas.get_renderer()
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in page.texts}
    assert boxes["two_micro_batches_with_buckets"].x1 < min(boxes[name].x0 for name in ("compute", "intra", "inter"))


def test_unused_links_have_no_row():
    found = texts(Timeline(0, (Span("expert", "expert", "compute", 0.0, 1.0),)))
    assert "compute" in found and "inter" not in found and "intra" not in found


@pytest.mark.parametrize("timelines", [[], Timeline(), [Timeline(0), Timeline(1)]])
def test_empty_timelines_draw_no_spans_note(timelines, tmp_path):
    draw(timelines, tmp_path / "none.png")
    assert "no spans" in texts(timelines)


def test_too_many_timelines_are_rejected():
    with pytest.raises(ConfigError, match=str(MAX_TIMELINES)):
        figure([Timeline(rank) for rank in range(MAX_TIMELINES + 1)])


def test_draw_does_not_import_pyplot(tmp_path):
    code = (
        "import sys\n"
        "from fusedmoe.schedule.draw import draw\n"
        "from fusedmoe.schedule.timeline import Span, Timeline\n"
        "draw(Timeline(0, (Span('a', 'other', 'compute', 0.0, 1.0),)), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png")], check=True, timeout=100)


FUSED_SPANS = tuple(
    Span(kind, kind, "compute", 0.5 * layer, 0.5 * layer + 0.5, 0, layer, "forward", resources_of(kind)[1:])
    for layer, kind in enumerate(FUSED)
)


def random_spans(rng: random.Random) -> tuple[Span, ...]:
    """Spans on a grid of milliseconds that overlap in any way; some use several resources."""
    spans = []
    for number in range(rng.randrange(1, 30)):
        start, on = rng.randrange(200), rng.sample(RESOURCES, rng.choice([1, 1, 2, 3]))
        times = (start / 1e3, (start + rng.randrange(30)) / 1e3)
        spans.append(Span(f"s{number}", rng.choice(KINDS), on[0], *times, also=tuple(on[1:])))
    return tuple(spans)


def test_busy_time_of_multi_resource_spans_equals_grid():
    rng = random.Random()
    for _ in range(100):
        timeline = Timeline(0, random_spans(rng))
        used = {resource: np.zeros(300, dtype=bool) for resource in RESOURCES}
        for span in timeline.spans:
            for resource in span.resources:
                used[resource][round(span.start_s * 1e3) : round(span.end_s * 1e3)] = True
        for resource in RESOURCES:
            assert timeline.busy_s(resource) == pytest.approx(used[resource].sum() / 1e3)
            assert (resource in timeline.resources) == any(resource in span.resources for span in timeline.spans)
            assert set(timeline.on(resource)) == {span for span in timeline.spans if resource in span.resources}
        exposed = (used["intra"] | used["inter"]) & ~used["compute"]
        assert timeline.exposed_s() == pytest.approx(exposed.sum() / 1e3)
        assert sum(timeline.totals_s().values()) == pytest.approx(sum(span.duration_s for span in timeline.spans))
        assert Timeline.from_json(timeline.to_json()) == timeline


def test_json_omits_also_for_single_resource_spans():
    alone = Timeline(0, (Span("gate", "gate", "compute", 0.0, 1.0),))
    assert "also" not in alone.to_json()


@pytest.mark.parametrize("also", [("network",), ("compute",), ("intra", "intra"), ["intra"], None, "intra", ([],)])
def test_invalid_also_resources_are_rejected(also):
    with pytest.raises(ConfigError, match="further resources"):
        Timeline(0, (Span("x", "expert", "compute", 0.0, 1.0, also=also),))


@pytest.mark.parametrize("also", ['"intra"', '["network"]', "[[]]", "3", "null"])
def test_invalid_also_resources_in_json_are_rejected(also):
    text = Timeline(0, (Span("x", "expert", "compute", 0.0, 1.0, also=("intra",)),)).to_json()
    with pytest.raises(ConfigError, match="timeline"):
        Timeline.from_json(text.replace('["intra"]', also))


def test_trace_repeats_fused_span_on_each_resource_thread():
    names, events = check_format(trace(Timeline(0, FUSED_SPANS)))
    labels = {e["tid"]: e["args"]["name"] for e in names if e["name"] == "thread_name"}
    found = Counter((event["args"]["kind"], labels[event["tid"]]) for event in events)
    assert found == Counter((span.kind, resource) for span in FUSED_SPANS for resource in span.resources)


def test_stripes_distinguish_fused_kinds():
    looks = {kind: tuple(bar_stripes(kind)) for kind in KINDS}
    assert len(set(looks.values())) == len(KINDS)
    for kind, parts in FUSED.items():
        ground, *bands = looks[kind]
        assert ground == (0.0, 1.0, COLOURS["expert"]) and len(bands) == len(parts) - 1
        top, bottom = bands[0].bottom, bands[1].top
        assert 0 <= top < bottom <= 1 and bottom - top >= 0.5
        ordered = sorted(bands)
        assert [band.colour for band in ordered] == [COLOURS[part] for part in parts if part != "expert"]
        for band in bands:  # outside the rest, and next to each other
            assert band.bottom <= top + 1e-9 or band.top >= bottom - 1e-9
        for one, two in zip(ordered, ordered[1:], strict=False):
            assert one.bottom <= two.top + 1e-9


def test_figure_draws_fused_span_in_each_resource_row():
    picture = figure(Timeline(0, FUSED_SPANS))
    picture.canvas.draw()
    image = np.asarray(picture.canvas.buffer_rgba())[..., :3]
    chart = picture.axes[1]
    texts = [text.get_text() for axes in picture.axes for text in axes.texts]
    assert "DEC  dispatch-expert-combine" in texts and "0.000 ms exposed" in texts
    assert sum(text.startswith("dispatch-expert-combine 0") for text in texts) == 2  # one in each row
    rows = {"compute": 0.2, "intra": 0.59, "inter": 0.98}  # inches: the tops
    for span in FUSED_SPANS:
        for resource in RESOURCES:
            column, _ = chart.transData.transform(((span.start_s + 0.02) * 1e3, 0))
            found = []
            for share in (0.05, 0.25):
                _, y = chart.transData.transform((0, rows[resource] + 0.34 * share))
                found.append(tuple(image[image.shape[0] - 1 - round(y), round(column)]))
            band = tuple(rgb(COLOURS[FUSED[span.kind][0]]))
            assert (found == [band, tuple(rgb(COLOURS["expert"]))]) == (resource in span.resources), (span, resource)


def test_durations_have_three_digits_and_their_unit():
    durations = {
        0.00012: "0.120 ms",
        0.0123: "12.3 ms",
        0.317: "317 ms",
        9.9: "9900 ms",
        10.0: "10.0 s",
        99.97: "100 s",
    }
    assert {seconds: format_ms(seconds) for seconds in durations} == durations
