"""`make reproduce`: tables are well-formed, figures are those of a hand's sum, and the page is what the file says."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from bench.placement.baselines import CLUSTER_A, expert_parallelism
from bench.placement.made_loads import make_loads
from bench.placement.replay import replay
from bench.reproduce import __main__ as command
from bench.reproduce import flowmoe, fsmoe, hecate, lancet, testbed
from bench.reproduce.page import page
from bench.reproduce.table import PAPERS, Part, Row, Table, cells, reasons_of, shown
from bench.simulate.grid import workloads
from fusedmoe.placement.hecate import WINDOW
from fusedmoe.placement.placement import Nodes, Placement
from fusedmoe.schedule.cost import ALONE, Durations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import choose_degree
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.lancet_plans import Gap
from fusedmoe.schedule.workload import uniform_share
from tests.marks import slowly

QUICK = ("fsmoe-table2", "flowmoe-table2", "hecate-table1", "hecate-volume")


def silent(done: float, total: float) -> None:
    assert 0 <= done <= total


def made(name: str) -> list[Table]:
    part = next(part for part in command.PARTS if part.name == name)
    return list(part.run(silent))


def as_read(row: Row) -> float:
    """The paper's figure as a reader of the table reads it."""
    text = shown(row.paper, row.form)
    number = float(re.sub(r"[^0-9.]", "", text))
    return number / 100 if "%" in text else number


def check(table: Table, head: Table) -> None:
    """It is the table that was announced, and each of its figures can be shown."""
    assert replace(table, rows=(), text="", reasons=()) == replace(head, text="", reasons=())
    assert table.rows and not any(mark in table.text + "".join(table.reasons) for mark in "{}")
    assert len({row.what for row in table.rows}) == len(table.rows)
    for row in table.rows:
        assert all(one is None or math.isfinite(one) for one in row.ours), row
        assert row.paper is not None or any(one is not None for one in row.ours), row
        assert isinstance(row.paper, str | None) or as_read(row) == pytest.approx(row.paper, rel=1e-12), (
            "not as printed"
        )
        assert reasons_of(row) != "not known", f"{table.name}, {row.what}: why do they differ?"
        assert len(cells(row)) == 3 + len(table.columns)
    used = {number for row in table.rows for number in row.why}
    assert used == set(range(1, 1 + len(table.reasons))), f"{table.name}: a reason of no row"
    assert Table.from_dict(json.loads(json.dumps(table.as_dict()))) == table


@pytest.mark.parametrize("name", QUICK)
def test_quick_tables(name):
    for table, head in zip(made(name), next(part for part in command.PARTS if part.name == name).heads, strict=True):
        check(table, head)


@pytest.mark.parametrize("name", [*QUICK, *slowly("flowmoe-table3", "hecate-figure13")])
def test_quick_tables_print_what_the_record_says(name):
    stored = json.loads((command.ROOT / "bench/results" / command.FILE).read_text())["tables"]
    for table in made(name):
        assert [cells(row) for row in table.rows] == [cells(row) for row in Table.from_dict(stored[table.name]).rows]


def test_simulated_layers_have_as_many_tokens_as_pairs():
    """Their plans, which send pairs as the papers' do, are those of tokens that travel once as well."""
    for where in TESTBEDS.values():
        for work in workloads(where):
            assert work.share == uniform_share(work.experts, work.k, work.ep) == 1


def shortened(monkeypatch) -> None:
    """Every table on a few cases."""
    for module, name, value in (
        (fsmoe, "workloads", lambda testbed: islice(workloads(testbed), 0, None, 97)),
        (fsmoe, "run_grid", lambda **of: few_layers(**of)),
        (fsmoe, "_RANDOM", 50),
        (fsmoe, "_MODELS", tuple((name, where, 2, *of) for name, where, _, *of in fsmoe._MODELS)),
        (lancet, "_RANDOM", 5),
        (lancet, "_LAYERS_OF_GRID", 1),
        (lancet, "CASES", 2),
        (flowmoe, "_INSERTIONS", 60),
        (flowmoe, "_SPLITS", 4),
        (flowmoe, "_TASKS_MS", {name: (*of[:-1], 2) for name, of in flowmoe._TASKS_MS.items()}),
        (flowmoe, "CASES", 1),
        (flowmoe, "_SAMPLES", 3),
        (hecate, "_ITERATIONS", WINDOW + 1),
    ):
        monkeypatch.setattr(module, name, value)


def few_layers(**of):
    from bench.simulate import grid

    whole, grid.workloads = grid.workloads, lambda testbed: islice(workloads(testbed), 0, None, 97)
    try:
        return grid.run_grid(**of)
    finally:
        grid.workloads = whole


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part", [part for part in command.PARTS if part not in testbed.PARTS], ids=lambda part: part.name
)
def test_every_table_on_a_few_cases(part: Part, monkeypatch):
    shortened(monkeypatch)
    told: list[float] = []

    def show(done: float, total: float) -> None:
        silent(done, total)
        told.append(done / total)

    for table, head in zip(part.run(show), part.heads, strict=True):
        check(table, head)
    assert told == sorted(told)


def test_a_difference_without_a_reason_is_said():
    assert reasons_of(Row("one", 1.004, (1.0, None))) == ""
    assert reasons_of(Row("one", 1.02, (1.0,))) == "not known"
    assert reasons_of(Row("one", 1.02, (1.0,), why=(2, 3))) == "2, 3"
    assert reasons_of(Row("one", None, (1.0,))) == ""
    assert cells(Row("one", "up to 3", (2.0, None), "{:.1f}×", (1,))) == ["one", "up to 3", "2.0×", "–", "1"]


# By hand.


def test_times_of_operations_by_hand():
    """GPT2-XL on testbed A: k·f·B·L·M = 2·4096·1600 elements of all gathered rows, an eighth of them sent."""
    rows = 2 * 4 * 1024 * 1600
    shared = 4 * 1024 * 1600
    products = 2 * (4.26e-2 + 2.29e-11 * 4 * 2 * 4096 * 1600 * 6400 / 8)
    assert fsmoe.operations_ms(TESTBEDS["A"], 1600, 6400, "ffn", 3.0) == pytest.approx(
        [
            2 * (2.87e-1 + 2.21e-6 * rows / 8),
            2 * 3.37e-1 + 2.32e-7 * (rows + shared),
            2 * 3.95e-1 + 2.34e-7 * (rows + shared),
            products,
            2 * products,
            5.11e-1 + 4.95e-6 * 3 * 1600**2 / 8,
        ]
    )


def test_sizes_by_hand():
    assert hecate.parameters(768, 12) == pytest.approx((12 * 4 * 768**2 + 12 * 64 * 2 * 768 * 1536) / 1e9)
    attention, experts = flowmoe.parameters(12, 256, 512, 1)
    assert attention == pytest.approx(12 * 4 * 256 * 256 / 1e6)
    assert experts == pytest.approx(12 * 16 * (256 * 512 + 512 + 512 * 256 + 256) / 1e6)


def test_memory_by_hand():
    """Four of parameters where one is owned, which takes 8 in all: 3 copies, and a quarter of their gradients."""
    assert hecate.memory_by_arithmetic(4.0, 0.25) == pytest.approx(((8 + 3 + 0.75) / 8, (8 + 0.75 + 0.75) / 8))


def test_differing_degrees_are_counted_for_each_number_of_heads():
    testbed = TESTBEDS["B"]
    cases = list(workloads(testbed))[::31]
    differ = 0
    for work in cases:
        there, back = work.layer_costs(testbed.costs).chunks.values()
        differ += choose_degree(there, limit=8).degree != choose_degree(back, limit=8).degree
    assert 0 < differ < len(cases)
    assert fsmoe.differing(testbed, ALONE, 8, cases) == 3 * differ
    assert fsmoe.differing(testbed, ALONE, 1, cases) == 0


def test_printed_cases_are_exact_where_gather_and_scatter_take_the_same():
    off, off_even, largest = fsmoe.printed_against_exact(300, seed=random.randrange(2**32))
    assert 0.05 < off < 0.5 and off_even == 0 and largest > 0.01


def test_no_choice_beats_the_exact_one():
    passes = list(islice(fsmoe.passes(TESTBEDS["A"], 60), 6))
    assert fsmoe.regrets(iter(passes), lambda chunks, gar: choose_degree(chunks, gar).degree) == [0.0] * 6
    assert min(fsmoe.regrets(iter(passes), lambda chunks, gar: 1)) >= -1e-12


def test_greedy_share_by_hand():
    """Into two seconds greedy puts what fits best, 2.1, which is all that could hide behind the three: 2 of 3.6."""
    gaps = [Gap(2.0, {0, 1}), Gap(3.0, {1})]
    assert lancet.greedy_share(gaps, [1.5, 2.1]) == pytest.approx(2.0 / 3.6, rel=1e-3)
    assert lancet.greedy_share([Gap(1.0, set())], [1.0]) == 1.0


def test_a_layer_in_two_chunks_by_hand():
    """A second for each all-to-all, one for the experts and two backward: 3 + 4; in two chunks 2 + 3."""
    assert flowmoe.moe_s(3 / 7, 7.0, 1) == pytest.approx(7.0)
    assert flowmoe.moe_s(3 / 7, 7.0, 2) == pytest.approx(5.0)


def test_flowmoe_s_step_by_hand():
    """Experts alone take their own time; with all the rest a step takes no less than its computation and than its
    communication, and less than their sum."""
    assert flowmoe.flowmoe_s(1.0, 6.0, 0.0, 0.0, 2) == pytest.approx(12.0)
    compute, travel = 3 * (0.5 * 6 + 1.5), 3 * (0.5 * 6 + 0.8)
    assert max(compute, travel) < flowmoe.flowmoe_s(0.5, 6.0, 1.5, 0.8, 3) < compute + travel


def two_layers(inter: str) -> tuple[Plan, Durations]:
    plan = Plan.parse(f"compute: b1.E0 b1.E1 b1.A0 b1.A1 b0.E0 b0.E1 b0.A0 b0.A1\ninter: {inter}")
    return plan, Durations({task: 2.0 if task.kind == "gradient-all-reduce" else 1.0 for task in plan})


def test_a_link_that_waits_for_an_all_reduce():
    """Layer 1's is ready when both chunks of its attention are; the dispatch of layer 0's first chunk is before."""
    before = "b1.D0 b1.D1 b1.C0 b1.C1"
    assert flowmoe.keeps_waiting(*two_layers(f"{before} b1.AR0 b0.D0 b0.D1 b0.C0 b0.C1 b0.AR0"))
    assert not flowmoe.keeps_waiting(*two_layers(f"{before} b0.D0 b0.D1 b1.AR0 b0.C0 b0.C1 b0.AR0"))


def test_theorem_1_holds_where_the_link_never_waits():
    rng = random.Random()
    found = [flowmoe.inserted(rng, flowmoe.random_pass(rng)) for _ in range(300)]
    assert not any(longer for waits, longer in found if not waits)
    assert any(longer for waits, longer in found if waits)


def test_parts_of_an_all_reduce_by_hand():
    """Nothing of one layer of one chunk can hide: four tasks of a second, two seconds, and four starts of a fifth."""
    chain = Plan.parse("phase: backward\ncompute: E0 A0\ninter: D0 C0")
    of = flowmoe.Pass(
        {"compute": list(chain.compute), "inter": list(chain.inter)}, dict.fromkeys(chain, 1.0), layers=1, reduce_s=2.0
    )
    assert flowmoe.in_parts(of, 1, 0.0) == flowmoe.in_parts(of, 4, 0.0) == pytest.approx(6.0)
    assert flowmoe.in_parts(of, 4, 0.1) == pytest.approx(4 + 4 * (0.5 + 0.2))


def test_a_group_s_share_by_hand():
    """An expert on four ranks sends 3/4, one on two 1/2; the others do not travel."""
    holds = Placement.even(4, 4).holds_EW.copy()
    holds[0], holds[1, 3] = True, True
    assert hecate.group_share(Placement.holding(Placement.even(4, 4).owners, holds)) == pytest.approx(
        (3 / 4 + 1 / 2) / 2
    )


def test_against_itself_expert_parallelism_gains_nothing():
    ep = replay(make_loads(WINDOW + 2, 2, 4, 8, seed=1), expert_parallelism, Nodes(4, 2), CLUSTER_A)
    names = [("ep", 0), ("sharded", 0), *((name, m) for name in ("published", "copies", "searched") for m in (2, 4))]
    rows = hecate.straggler_rows(dict.fromkeys(names, ep))
    assert rows[0].ours == (ep.straggler,) * 2
    assert all(row.ours == pytest.approx((1.0, 1.0)) for row in rows[1:])


# Two nodes.


def measured_rows() -> dict[str, dict[str, object]]:
    names = ("sequential", "experts", "experts, attention", "experts, all-reduce", "experts, all-reduce, S_p")
    names += ("flowmoe", "lancet", "lancet, weights", "lancet, ranges")
    return {
        name: {
            "median_s": 4.0 / (1 + place),
            "predicted_s": 5.0 / (1 + place),
            "exposed_s": 2.0 - 0.2 * place,
            "predicted_exposed_s": 2.0 - 0.1 * place,
        }
        for place, name in enumerate(names)
    }


def test_tables_of_two_nodes_by_hand():
    found = testbed.from_rows(measured_rows(), 3)
    for table, head in zip(found, testbed.PARTS[0].heads, strict=True):
        check(table, head)
    parts, halves = found
    assert [row.ours for row in parts.rows] == [pytest.approx((one, one)) for one in (2, 3, 4, 5, 6)]
    assert halves.rows[0].ours == pytest.approx((0.6, 0.3))  # 2 s, and 0.8 and 1.4 with all of it
    assert halves.rows[-1].ours == pytest.approx((1 - 0.8 / 1.8, 1 - 1.4 / 1.9))
    rows = measured_rows()
    rows["experts, all-reduce, S_p"] = {"same_as": "experts, all-reduce"}
    assert testbed.from_rows(rows, 3)[0].rows[3].ours == parts.rows[2].ours


def test_where_two_nodes_cannot_be_made_it_says_so(monkeypatch):
    monkeypatch.setattr(testbed, "missing", lambda: "it needs root, to make network namespaces")
    found = testbed.testbed(silent)
    assert [table.name for table in found] == [head.name for head in testbed.PARTS[0].heads]
    assert all(table.skipped == "not run: it needs root, to make network namespaces" for table in found)


# The command and the page.


def run_command(folder: Path, *arguments: str) -> dict[str, dict]:
    assert command.main(["--results", str(folder), "--page", str(folder / "page.md"), *arguments]) == 0
    found: dict[str, dict] = json.loads((folder / "reproduce.json").read_text())["tables"]
    return found


def test_the_command_writes_the_file_and_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(testbed, "missing", lambda: "not here")
    first = run_command(tmp_path, "--only", "fsmoe-table2", "flowmoe-table5-testbed")
    assert list(first) == ["fsmoe-table2", "flowmoe-table5-testbed", "lancet-testbed"]
    run = first["fsmoe-table2"]["run"]
    assert run["machine"]["cores"] and run["date"] and "commit" in run and first["fsmoe-table2"]["seconds"] >= 0
    second = run_command(tmp_path, "--only", "hecate-table1")
    assert list(second) == ["fsmoe-table2", "hecate-table1", "flowmoe-table5-testbed", "lancet-testbed"]
    assert second["fsmoe-table2"] == first["fsmoe-table2"]
    text = (tmp_path / "page.md").read_text()
    assert text == page({"tables": second}) and text.count("**No figures in this run**, not run: not here.") == 2
    for one in second.values():
        assert f"### {one['title']}" in text
        for row in Table.from_dict(one).rows:
            assert f"| {' | '.join(cells(row))} |" in text
    assert all(f"## {paper}" in text and f"### {paper}: what is not reproduced" in text for paper in PAPERS)
    assert "1.84" in capsys.readouterr().out
    (tmp_path / "page.md").unlink()
    assert run_command(tmp_path, "--only", "fsmoe", "--show") == second
    assert (tmp_path / "page.md").read_text() == text
    assert "Mixtral-7B, all-to-all" in capsys.readouterr().out


def test_what_was_run_apart_is_said_apart(tmp_path):
    tables = run_command(tmp_path, "--only", "fsmoe-table2", "hecate-table1")
    assert "The run: commit" in page({"tables": tables})
    tables["hecate-table1"]["run"] = tables["hecate-table1"]["run"] | {"commit": "0123456789ab"}
    assert "- commit 0123456789ab" in page({"tables": tables}) and ": `hecate-table1`" in page({"tables": tables})


def test_the_committed_page_is_the_file_s():
    file = command.ROOT / "bench/results" / command.FILE
    if not file.exists():
        pytest.skip("no run of make reproduce is in bench/results yet")
    assert command.PAGE.read_text() == page(json.loads(file.read_text())), "make reproduce ARGS=--show writes it"
