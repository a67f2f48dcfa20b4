"""Spans that occupy several resources: sums, files, traces, pictures, and what a step waits for."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from fusedmoe.errors import ConfigError
from fusedmoe.schedule.bars import COLOURS, free_of, stripes_of
from fusedmoe.schedule.cost import Durations, LinkUse, Overlap
from fusedmoe.schedule.critical import at_work, critical_path, stretches
from fusedmoe.schedule.draw import figure
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies import POLICIES
from fusedmoe.schedule.simulate import makespan, simulate
from fusedmoe.schedule.task import FUSED, LINKS, Task, resources_of
from fusedmoe.schedule.timeline import KINDS, RESOURCES, Span, Timeline
from fusedmoe.schedule.trace import trace
from tests.schedule.plans import random_costs, random_plan, with_fused
from tests.schedule.test_draw import rgb
from tests.schedule.test_trace import check_format


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
    rng = random.Random()
    costs = with_fused(rng, random_costs(rng))
    plan = random_plan(rng, costs)
    timeline = simulate(plan, costs)
    names, events = check_format(trace(timeline))
    labels = {e["tid"]: e["args"]["name"] for e in names if e["name"] == "thread_name"}
    found = Counter((event["args"]["kind"], labels[event["tid"]]) for event in events)
    assert found == Counter((span.kind, resource) for span in timeline.spans for resource in span.resources)


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
    spans = (
        Span("dispatch-expert", "dispatch-expert", "compute", 0.0, 0.5, 0, 0, "forward", ("inter",)),
        Span("all-gather-expert", "all-gather-expert", "compute", 0.5, 1.0, 0, 1, "forward", ("intra",)),
    )
    picture = figure(Timeline(0, spans))
    picture.canvas.draw()
    image = np.asarray(picture.canvas.buffer_rgba())[..., :3]
    chart = picture.axes[1]
    texts = [text.get_text() for axes in picture.axes for text in axes.texts]
    assert "DE  dispatch-expert" in texts and "AGE  all-gather-expert" in texts and "0.000 ms exposed" in texts
    assert sum(text.startswith("dispatch-expert 0") for text in texts) == 2  # one in each row
    rows = {"compute": 0.2, "intra": 0.59, "inter": 0.98}  # inches: the tops
    for span in spans:
        for resource in RESOURCES:
            column, _ = chart.transData.transform(((span.start_s + 0.02) * 1e3, 0))
            found = []
            for share in (0.05, 0.25):
                _, y = chart.transData.transform((0, rows[resource] + 0.34 * share))
                found.append(tuple(image[image.shape[0] - 1 - round(y), round(column)]))
            band = tuple(rgb(COLOURS[FUSED[span.kind][0]]))
            assert (found == [band, tuple(rgb(COLOURS["expert"]))]) == (resource in span.resources), (span, resource)


SHARDED = "compute: AGE0 AGE1\nintra: AGE0 AGE1 RS0 RS1\ninter: D0 D1 C0 C1"


@pytest.mark.parametrize("link_s", [1.0, 9.0])
def test_what_a_pass_waits_for(link_s):
    """Of a fused operation what it would take without its rows is computation; what it takes longer, its link."""
    plan = Plan.parse(SHARDED)
    seconds = {task: 0.5 if task.kind in LINKS else max(3.0, link_s) for task in plan}
    overlap = Overlap({"intra": LinkUse(link_s, max(0.0, 3.0 - link_s))}, 3.0)
    costs = Durations(seconds, 1.0, dict.fromkeys(plan.fused, overlap))
    timeline = simulate(plan, costs)
    (found,) = stretches(plan, timeline, costs.overlaps(plan))
    waits = found.waits_s
    assert sum(waits.values()) == pytest.approx(found.seconds) and found.degree == 2
    assert waits["compute"] == 6.0 and waits["inter"] == 1.0
    # Two reduce-scatters follow; one of them is on the path with the last combine, or both.
    assert waits["intra"] == pytest.approx(2 * (max(3.0, link_s) - 3.0) + 1.0)
    assert found.bound_by == ("intra" if link_s > 3 else "compute")
    (blind,) = stretches(plan, timeline)  # nothing known: it computes
    assert blind.waits_s["compute"] == 2 * max(3.0, link_s)


@pytest.mark.parametrize("contention", [1.0, 0.6])
def test_the_path_has_no_gap_and_explains_the_whole_step(contention):
    rng = random.Random()
    for _ in range(20):
        costs = with_fused(rng, random_costs(rng, contention))
        plan = rng.choice([random_plan(rng, costs), POLICIES["fused"].plan(costs)])
        timeline, overlaps = simulate(plan, costs), costs.overlaps(plan)
        path = critical_path(plan, timeline)
        assert path[0].start_s == 0 and path[-1].end_s == timeline.end_s
        for one, following in zip(path, path[1:], strict=False):
            assert one.end_s == pytest.approx(following.start_s, abs=1e-12)
        times = at_work(path, overlaps)
        whole_s = sum(end - start for found in times.values() for start, end in found)
        assert whole_s == pytest.approx(timeline.end_s)
        assert all(end >= start for found in times.values() for start, end in found)
        for stretch in stretches(plan, timeline, overlaps):
            assert sum(stretch.waits_s.values()) == pytest.approx(stretch.seconds)


def test_only_what_is_on_the_path_makes_the_step_shorter():
    rng = random.Random()
    for _ in range(20):
        costs = with_fused(rng, random_costs(rng, 1.0))
        plan = random_plan(rng, costs)
        seconds = {task: rng.uniform(0.5, 2) for task in plan}
        path = critical_path(plan, simulate(plan, Durations(seconds)))
        names = {(span.kind, span.chunk, span.layer, span.phase) for span in path}
        elsewhere = {task: s * (1 if task[:4] in names else 0.5) for task, s in seconds.items()}
        assert makespan(plan, Durations(elsewhere)) == pytest.approx(makespan(plan, Durations(seconds)))


def test_a_predicted_timeline_has_each_task_once_on_all_it_occupies():
    plan = Plan.parse(SHARDED)
    timeline = simulate(plan, Durations(dict.fromkeys(plan, 1.0)))
    assert len(timeline.spans) == len(plan) == 8
    for span in timeline.spans:
        assert span.resources == resources_of(span.kind) == plan.resources[Task(span.kind, span.chunk)]
    assert timeline.busy_s("intra") == 4 and timeline.busy_s("compute") == 2
    assert timeline.totals_s()["all-gather-expert"] == 2.0
