"""Spans that occupy several resources: sums, files, traces and pictures."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.draw import COLOURS, figure, free_of, stripes_of
from fusedmoe.schedule.task import FUSED, resources_of
from fusedmoe.schedule.timeline import KINDS, RESOURCES, Span, Timeline, trace
from tests.schedule.test_draw import rgb
from tests.schedule.test_trace import check_format

FUSED_SPANS = tuple(
    Span(kind, kind, "compute", 0.5 * layer, 0.5 * layer + 0.5, 0, layer, "forward", resources_of(kind)[1:])
    for layer, kind in enumerate(FUSED)
)


def random_spans(rng: random.Random) -> tuple[Span, ...]:
    """On a grid of milliseconds, overlapping in any way, some on several resources."""
    spans = []
    for number in range(rng.randrange(1, 30)):
        start, on = rng.randrange(200), rng.sample(RESOURCES, rng.choice([1, 1, 2, 3]))
        times = (start / 1e3, (start + rng.randrange(30)) / 1e3)
        spans.append(Span(f"s{number}", rng.choice(KINDS), on[0], *times, also=tuple(on[1:])))
    return tuple(spans)


def test_sums_equal_the_naive_ones():
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


def test_files_of_others_have_nothing_new():
    alone = Timeline(0, (Span("gate", "gate", "compute", 0.0, 1.0),))
    assert "also" not in alone.to_json()


@pytest.mark.parametrize("also", [("network",), ("compute",), ("intra", "intra"), ["intra"], None, "intra", ([],)])
def test_bad_further_resources_are_refused(also):
    with pytest.raises(ConfigError, match="further resources"):
        Timeline(0, (Span("x", "expert", "compute", 0.0, 1.0, also=also),))


@pytest.mark.parametrize("also", ['"intra"', '["network"]', "[[]]", "3", "null"])
def test_bad_further_resources_in_a_file_are_refused(also):
    text = Timeline(0, (Span("x", "expert", "compute", 0.0, 1.0, also=("intra",)),)).to_json()
    with pytest.raises(ConfigError, match="timeline"):
        Timeline.from_json(text.replace('["intra"]', also))


def test_a_trace_has_it_on_every_thread():
    names, events = check_format(trace(Timeline(0, FUSED_SPANS)))
    labels = {e["tid"]: e["args"]["name"] for e in names if e["name"] == "thread_name"}
    found = Counter((event["args"]["kind"], labels[event["tid"]]) for event in events)
    assert found == Counter((span.kind, resource) for span in FUSED_SPANS for resource in span.resources)


def test_bands_tell_the_kinds_apart():
    looks = {kind: tuple(stripes_of(kind)) for kind in KINDS}
    assert len(set(looks.values())) == len(KINDS)
    for kind, parts in FUSED.items():
        ground, *bands = looks[kind]
        assert ground == (0.0, 1.0, COLOURS["expert"]) and len(bands) == len(parts) - 1
        top, bottom = free_of(bands)
        assert 0 <= top < bottom <= 1 and bottom - top >= 0.5
        ordered = sorted(bands)
        assert [band.colour for band in ordered] == [COLOURS[part] for part in parts if part != "expert"]
        for band in bands:  # outside of what is left, and beside each other
            assert band.bottom <= top + 1e-9 or band.top >= bottom - 1e-9
        for one, two in zip(ordered, ordered[1:], strict=False):
            assert one.bottom <= two.top + 1e-9


def test_a_picture_shows_it_in_each_of_its_rows():
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
