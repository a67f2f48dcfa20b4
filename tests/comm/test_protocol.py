"""No interleaving of the protocol's steps reads a wrong row or hangs, and every rule is necessary."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.comm.protocol import Model, Network, Tiles
from tests.marks import slowly


@pytest.mark.parametrize(
    ("exchanges", "tiles", "empty"),
    [
        (4, 1, None),
        *slowly((4, 1, 0), (4, 1, 1)),
        (2, 2, 0),
        *(pytest.param(2, 2, empty, marks=pytest.mark.slow) for empty in (None, 1)),
        *(pytest.param(3, 2, empty, marks=pytest.mark.slow) for empty in (None, 0, 1)),
    ],
)
def test_model_checker_finds_no_fault(exchanges: int, tiles: int, empty: int | None) -> None:
    fault, states = Model(exchanges, tiles, empty=empty).search()
    assert not fault and states > 1000


@pytest.mark.slow
def test_model_checker_finds_no_fault_in_longer_runs() -> None:
    fault, states = Model(5, 2).search(most=20_000_000)
    assert not fault and states > 10_000


def test_dead_rank_needs_bounded_waits() -> None:
    assert Model(3, 1, dies=True).search()[0] == ""
    assert Model(3, 1, dies=True, bounded=False).search()[0] == "waits for ever"


@pytest.mark.parametrize(
    ("rule", "value", "fault"),
    [
        ("credit", False, "overwritten"),
        ("release", False, "stale"),
        ("fresh", False, "a row is"),
    ],
)
def test_removing_any_rule_causes_fault(rule: str, value: bool, fault: str) -> None:
    assert fault in replace(Model(4, 1), **{rule: value}).search()[0]


def test_single_slot_is_safe_only_with_credit() -> None:
    assert Model(4, 1, uses=(0,)).search()[0] == ""
    assert "overwritten" in Model(4, 1, uses=(0,), credit=False, in_order=False).search()[0]


def test_empty_exchange_signals_first_tile() -> None:
    """Otherwise a rank would credit an exchange its peer has not begun, and a later credit might arrive first."""
    assert Model(4, 1, uses=(0,), empty=0).search()[0] == ""
    assert Model(4, 1, uses=(0,), empty=0, signal_empty=False).search()[0] == "waits for ever"


def test_last_program_signals_for_all_tiles() -> None:
    assert Tiles(4).search()[0] == ""
    assert "stale" in Tiles(4, release=False).search()[0]
    assert Tiles(3, beyond=1).search()[0] == "waits for ever", "what has no room is not wanted"


@pytest.mark.parametrize("slots", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_staging_is_safe_only_per_slot(slots: int) -> None:
    uses = tuple(range(slots))
    assert Model(3, 1, uses, staging=slots).search()[0] == ""
    assert Model(2, 2, uses, staging=slots).search()[0] == ""
    assert "overwritten" in Model(4, 1, (0, 1), staging=1).search()[0]


@pytest.mark.parametrize("uses", [(0, 1, 0), (0, 1, 1, 0, 1)], ids=str)
def test_graph_replays_need_device_counters(uses: tuple[int, ...]) -> None:
    """A graph's launches use the same slots in each replay, where the last and first slot may be equal."""
    assert Model(len(uses) + 2, 1, uses).search()[0] == ""
    # The captured numbers are stale in the second replay.
    assert Model(len(uses) + 2, 1, uses, counted=False).search()[0] == "a row is stale when it is read"
    assert Model(len(uses) + 2, 1, uses, in_order=False).search()[0] != ""


def test_network_model_has_no_fault() -> None:
    assert Network().search()[0] == "" and Network(3, 3).search()[0] == ""


@pytest.mark.parametrize("rule", ["counted", "behind", "fence", "asks"])
def test_removing_any_network_rule_causes_stale_rows(rule: str) -> None:
    assert "stale" in replace(Network(), **{rule: False}).search()[0]
