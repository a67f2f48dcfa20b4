"""`make reproduce`: well-formed tables, figures that match hand calculations, and a page that matches the file."""

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
from fusedmoe.placement.placement import NodeLayout, Placement
from fusedmoe.schedule.cost import NO_CONTENTION, TaskDurations
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.passes import choose_degree
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.policies.lancet_plans import Gap
from fusedmoe.schedule.workload import uniform_share
from tests.marks import slowly

QUICK = ("fsmoe-table2", "flowmoe-table2", "hecate-table1", "hecate-volume")


def check_progress(done: float, total: float) -> None:
    assert 0 <= done <= total


def make_tables(name: str) -> list[Table]:
    part = next(part for part in command.PARTS if part.name == name)
    return list(part.run(check_progress))


def parse_paper_figure(row: Row) -> float:
    """The paper's figure, parsed from its printed form."""
    text = shown(row.paper, row.form)
    number = float(re.sub(r"[^0-9.]", "", text))
    return number / 100 if "%" in text else number


def check(table: Table, head: Table) -> None:
    """The table has the announced head, and each figure can be shown."""
    assert replace(table, rows=(), text="", reasons=()) == replace(head, text="", reasons=())
    assert table.rows and not any(mark in table.text + "".join(table.reasons) for mark in "{}")
    assert len({row.what for row in table.rows}) == len(table.rows)
    for row in table.rows:
        assert all(one is None or math.isfinite(one) for one in row.ours), row
        assert row.paper is not None or any(one is not None for one in row.ours), row
        assert isinstance(row.paper, str | None) or parse_paper_figure(row) == pytest.approx(row.paper, rel=1e-12), (
            "not as printed"
        )
        assert reasons_of(row) != "not known", f"{table.name}, {row.what}: why do they differ?"
        assert len(cells(row)) == 3 + len(table.columns)
    used = {number for row in table.rows for number in row.why}
    assert used == set(range(1, 1 + len(table.reasons))), f"{table.name}: a reason of no row"
    assert Table.from_dict(json.loads(json.dumps(table.as_dict()))) == table


@pytest.mark.parametrize("name", QUICK)
def test_quick_tables_are_well_formed(name):
    for table, head in zip(
        make_tables(name), next(part for part in command.PARTS if part.name == name).heads, strict=True
    ):
        check(table, head)


@pytest.mark.parametrize("name", [*QUICK, *slowly("flowmoe-table3", "hecate-figure13", "published-steps")])
def test_quick_tables_equal_recorded_results(name):
    stored = json.loads((command.ROOT / "bench/results" / command.FILE).read_text())["tables"]
    for table in make_tables(name):
        assert [cells(row) for row in table.rows] == [cells(row) for row in Table.from_dict(stored[table.name]).rows]


def test_simulated_workloads_send_every_pair():
    """Plans that send every pair, as in the papers, equal plans that send each token once per rank."""
    for where in TESTBEDS.values():
        for work in workloads(where):
            assert work.share == uniform_share(work.experts, work.k, work.ep) == 1


def shorten_tables(monkeypatch) -> None:
    """Shorten every table to a few cases."""
    for module, name, value in (
        (fsmoe, "workloads", lambda testbed: islice(workloads(testbed), 0, None, 97)),
        (fsmoe, "run_grid", lambda **of: run_shortened_grid(**of)),
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


def run_shortened_grid(**of):
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
def test_every_table_is_well_formed_on_few_cases(part: Part, monkeypatch):
    shorten_tables(monkeypatch)
    told: list[float] = []

    def show(done: float, total: float) -> None:
        check_progress(done, total)
        told.append(done / total)

    for table, head in zip(part.run(show), part.heads, strict=True):
        check(table, head)
    assert told == sorted(told)


def test_unexplained_difference_is_marked_not_known():
    assert reasons_of(Row("one", 1.004, (1.0, None))) == ""
    assert reasons_of(Row("one", 1.02, (1.0,))) == "not known"
    assert reasons_of(Row("one", 1.02, (1.0,), why=(2, 3))) == "2, 3"
    assert reasons_of(Row("one", None, (1.0,))) == ""
    assert cells(Row("one", "up to 3", (2.0, None), "{:.1f}×", (1,))) == ["one", "up to 3", "2.0×", "–", "1"]


# Calculations by hand


def test_fsmoe_operation_times_equal_hand_computation():
    """GPT2-XL on testbed A: k·f·B·L·M = 2·4096·1600 elements of gathered rows, an eighth of them sent."""
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


def test_parameter_counts_equal_hand_computation():
    assert hecate.parameters(768, 12) == pytest.approx((12 * 4 * 768**2 + 12 * 64 * 2 * 768 * 1536) / 1e9)
    attention, experts = flowmoe.parameters(12, 256, 512, 1)
    assert attention == pytest.approx(12 * 4 * 256 * 256 / 1e6)
    assert experts == pytest.approx(12 * 16 * (256 * 512 + 512 + 512 * 256 + 256) / 1e6)


def test_hecate_memory_equals_hand_computation():
    """Parameters take 4 times the owned share, whose state takes 8: 3 of replicas, and 0.75 of their gradients."""
    assert hecate.memory_by_arithmetic(4.0, 0.25) == pytest.approx(((8 + 3 + 0.75) / 8, (8 + 0.75 + 0.75) / 8))


def test_differing_degrees_are_counted_per_head_count():
    testbed = TESTBEDS["B"]
    cases = list(workloads(testbed))[::31]
    differ = 0
    for work in cases:
        there, back = work.layer_costs(testbed.costs).chunks.values()
        differ += choose_degree(there, max_degree=8).degree != choose_degree(back, max_degree=8).degree
    assert 0 < differ < len(cases)
    assert fsmoe.differing(testbed, NO_CONTENTION, 8, cases) == 3 * differ
    assert fsmoe.differing(testbed, NO_CONTENTION, 1, cases) == 0


def test_printed_cases_are_exact_if_gather_time_equals_scatter():
    off, off_even, largest = fsmoe.printed_against_exact(300, seed=random.randrange(2**32))
    assert 0.05 < off < 0.5 and off_even == 0 and largest > 0.01


def test_exact_degree_has_no_regret():
    passes = list(islice(fsmoe.passes(TESTBEDS["A"], 60), 6))
    assert fsmoe.regrets(iter(passes), lambda chunks, gar: choose_degree(chunks, gar).degree) == [0.0] * 6
    assert min(fsmoe.regrets(iter(passes), lambda chunks, gar: 1)) >= -1e-12


def test_lancet_greedy_share_equals_hand_computation():
    """Greedy fills the 2 s gap with the best fit, 2.1 s, the only unit that could hide in the 3 s gap: 2 of 3.6 s."""
    gaps = [Gap(2.0, {0, 1}), Gap(3.0, {1})]
    assert lancet.greedy_share(gaps, [1.5, 2.1]) == pytest.approx(2.0 / 3.6, rel=1e-3)
    assert lancet.greedy_share([Gap(1.0, set())], [1.0]) == 1.0


def test_flowmoe_layer_time_equals_hand_computation():
    """Each all-to-all 1 s, experts 1 s forward and 2 s backward: 3 + 4; in two chunks 2 + 3."""
    assert flowmoe.moe_s(3 / 7, 7.0, 1) == pytest.approx(7.0)
    assert flowmoe.moe_s(3 / 7, 7.0, 2) == pytest.approx(5.0)


def test_flowmoe_step_time_is_between_bounds():
    """Experts alone take their time; otherwise a step lies between maximum and sum of compute and communication."""
    assert flowmoe.flowmoe_s(1.0, 6.0, 0.0, 0.0, 2) == pytest.approx(12.0)
    compute, travel = 3 * (0.5 * 6 + 1.5), 3 * (0.5 * 6 + 0.8)
    assert max(compute, travel) < flowmoe.flowmoe_s(0.5, 6.0, 1.5, 0.8, 3) < compute + travel


def two_layers(inter: str) -> tuple[Plan, TaskDurations]:
    plan = Plan.parse(f"compute: b1.E0 b1.E1 b1.A0 b1.A1 b0.E0 b0.E1 b0.A0 b0.A1\ninter: {inter}")
    return plan, TaskDurations({task: 2.0 if task.kind == "gradient-all-reduce" else 1.0 for task in plan})


def test_link_blocked_by_all_reduce_is_detected():
    """Layer 1's all-reduce needs both chunks of its attention; layer 0's first dispatch is ready earlier."""
    before = "b1.D0 b1.D1 b1.C0 b1.C1"
    assert flowmoe.keeps_waiting(*two_layers(f"{before} b1.AR0 b0.D0 b0.D1 b0.C0 b0.C1 b0.AR0"))
    assert not flowmoe.keeps_waiting(*two_layers(f"{before} b0.D0 b0.D1 b1.AR0 b0.C0 b0.C1 b0.AR0"))


def test_theorem_1_holds_without_link_waits():
    rng = random.Random()
    found = [flowmoe.inserted(rng, flowmoe.random_pass(rng)) for _ in range(300)]
    assert not any(longer for waits, longer in found if not waits)
    assert any(longer for waits, longer in found if waits)


def test_partitioned_all_reduce_time_equals_hand_computation():
    """One chunk of one layer hides nothing: four tasks of 1 s, a 2 s all-reduce, four launches of 0.2 s."""
    chain = Plan.parse("phase: backward\ncompute: E0 A0\ninter: D0 C0")
    of = flowmoe.Pass(
        {"compute": list(chain.compute), "inter": list(chain.inter)}, dict.fromkeys(chain, 1.0), layers=1, reduce_s=2.0
    )
    assert flowmoe.in_parts(of, 1, 0.0) == flowmoe.in_parts(of, 4, 0.0) == pytest.approx(6.0)
    assert flowmoe.in_parts(of, 4, 0.1) == pytest.approx(4 + 4 * (0.5 + 0.2))


def test_replica_group_share_equals_hand_computation():
    """An expert on four ranks sends 3/4, an expert on two ranks 1/2; unreplicated experts are not sent."""
    holds = Placement.even(4, 4).holds_EW.copy()
    holds[0], holds[1, 3] = True, True
    assert hecate.group_share(Placement.holding(Placement.even(4, 4).owners, holds)) == pytest.approx(
        (3 / 4 + 1 / 2) / 2
    )


def test_expert_parallelism_speedup_over_itself_is_one():
    ep = replay(make_loads(WINDOW + 2, 2, 4, 8, seed=1), expert_parallelism, NodeLayout(4, 2), CLUSTER_A)
    names = [("ep", 0), ("sharded", 0), *((name, m) for name in ("published", "copies", "searched") for m in (2, 4))]
    rows = hecate.straggler_rows(dict.fromkeys(names, ep))
    assert rows[0].ours == (ep.straggler,) * 2
    assert all(row.ours == pytest.approx((1.0, 1.0)) for row in rows[1:])


# Two nodes


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


def test_two_node_tables_equal_hand_computation():
    found = testbed.from_rows(measured_rows(), 3)
    for table, head in zip(found, testbed.PARTS[0].heads, strict=True):
        check(table, head)
    parts, halves = found
    assert [row.ours for row in parts.rows] == [pytest.approx((one, one)) for one in (2, 3, 4, 5, 6)]
    assert halves.rows[0].ours == pytest.approx((0.6, 0.3))  # 2 s, and 0.8 and 1.4 with every part
    assert halves.rows[-1].ours == pytest.approx((1 - 0.8 / 1.8, 1 - 1.4 / 1.9))
    rows = measured_rows()
    rows["experts, all-reduce, S_p"] = {"same_as": "experts, all-reduce"}
    assert testbed.from_rows(rows, 3)[0].rows[3].ours == parts.rows[2].ours


def test_two_node_tables_without_root_are_marked_not_run(monkeypatch):
    monkeypatch.setattr(testbed, "missing", lambda: "it needs root, to make network namespaces")
    found = testbed.testbed(check_progress)
    assert [table.name for table in found] == [head.name for head in testbed.PARTS[0].heads]
    assert all(table.skipped == "not run: it needs root, to make network namespaces" for table in found)


# The command and the page


def run_command(folder: Path, *arguments: str) -> dict[str, dict]:
    assert command.main(["--results", str(folder), "--page", str(folder / "page.md"), *arguments]) == 0
    found: dict[str, dict] = json.loads((folder / "reproduce.json").read_text())["tables"]
    return found


def test_command_writes_results_file_and_page(tmp_path, monkeypatch, capsys):
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
    assert all(f"## {paper}" in text and f"### {paper}: not reproduced" in text for paper in PAPERS)
    assert "1.84" in capsys.readouterr().out
    (tmp_path / "page.md").unlink()
    assert run_command(tmp_path, "--only", "fsmoe", "--show") == second
    assert (tmp_path / "page.md").read_text() == text
    assert "Mixtral-7B, all-to-all" in capsys.readouterr().out


def test_page_lists_tables_of_other_commits_separately(tmp_path):
    tables = run_command(tmp_path, "--only", "fsmoe-table2", "hecate-table1")
    assert "The run: commit" in page({"tables": tables})
    tables["hecate-table1"]["run"] = tables["hecate-table1"]["run"] | {"commit": "0123456789ab"}
    assert "- commit 0123456789ab" in page({"tables": tables}) and ": `hecate-table1`" in page({"tables": tables})


def test_committed_page_equals_results_file():
    file = command.ROOT / "bench/results" / command.FILE
    if not file.exists():
        pytest.skip("no run of make reproduce is in bench/results yet")
    assert command.PAGE.read_text() == page(json.loads(file.read_text())), "make reproduce ARGS=--show writes it"
