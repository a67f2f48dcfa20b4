"""`bench.same_numbers`: verdicts on records, moved public names, and a fault planted between two versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.same_numbers import record as records
from bench.same_numbers.__main__ import FAILED, ROOT, SKIPPED, compare_trees, outcome
from bench.same_numbers.record import Record, public
from bench.same_numbers.runs import RUNS, Run
from bench.same_numbers.verdict import DIFFERENT, LIMITS, ROUNDING, SAME, bits, compare, distance


def random_record(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"y": torch.randn(5, 3, dtype=torch.float64).to(dtype), "load": torch.arange(4)}


@pytest.mark.parametrize("dtype", LIMITS)
def test_equal_bits_compare_as_same(dtype: torch.dtype) -> None:
    before = random_record(dtype)
    before["y"][0, 0], before["y"][1, 1] = torch.nan, torch.inf
    before["empty"], before["scalar"] = torch.empty(0, 3), torch.tensor(2.5)
    verdict = compare(before, {name: tensor.clone() for name, tensor in before.items()})
    assert (verdict.status, verdict.tensors, verdict.relative) == (SAME, 4, 0.0)


@pytest.mark.parametrize("dtype", LIMITS)
def test_one_ulp_difference_is_rounding(dtype: torch.dtype) -> None:
    """A difference of one ulp in a single element is reported as rounding."""
    before = random_record(dtype)
    after = {name: tensor.clone() for name, tensor in before.items()}
    bits(after["y"])[7] += 1
    verdict = compare(before, after)
    assert verdict.status == ROUNDING and verdict.ulps == 1.0 and verdict.text == "y"
    assert 0 < verdict.relative <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", LIMITS)
def test_limit_separates_rounding_from_different(dtype: torch.dtype) -> None:
    before = {"y": torch.ones(9, dtype=dtype), "z": torch.full((2,), 1e-3, dtype=dtype)}
    for factor, status in ((0.5, ROUNDING), (3.0, DIFFERENT)):
        for name in before:  # each tensor is normalized by its own maximum
            after = {key: tensor.clone() for key, tensor in before.items()}
            after[name][0] *= 1 + factor * LIMITS[dtype]
            verdict = compare(before, after)
            assert verdict.status == status and verdict.text == name


def test_worst_tensor_determines_verdict() -> None:
    """Rounding in one tensor does not hide a wrong tensor before or after it."""
    before = {name: torch.ones(4, dtype=torch.float64) for name in "abc"}
    for wrong in before:
        after = {name: tensor * (1 + 2**-52) for name, tensor in before.items()}
        after[wrong] = before[wrong] * 1.01
        verdict = compare(before, after)
        assert verdict.status == DIFFERENT and verdict.text == wrong
        assert verdict.relative == pytest.approx(0.01)


def test_non_finite_mismatch_is_different() -> None:
    for one, other in ((1.0, torch.nan), (torch.inf, 1.0), (torch.inf, -torch.inf), (torch.nan, torch.inf)):
        before, after = torch.tensor([2.0, one]), torch.tensor([2.0, other])
        assert compare({"y": before}, {"y": after}).status == DIFFERENT
    zeros = {"y": torch.zeros(3)}
    assert compare(zeros, {"y": torch.tensor([0.0, 0.0, 1e-30])}).status == DIFFERENT
    assert compare(zeros, {"y": -torch.zeros(3)}).status == ROUNDING  # different bits at distance zero
    assert distance(torch.tensor([0.0, torch.nan]), torch.tensor([-0.0, torch.nan])) == (0.0, 0.0)


def test_integer_shape_dtype_or_name_change_is_different() -> None:
    before = random_record()
    for change in (
        {"load": torch.tensor([0, 1, 2, 4])},
        {"load": before["load"].int()},
        {"y": before["y"].float()},
        {"y": before["y"].view(3, 5)},
        {"new": torch.ones(1)},
    ):
        assert compare(before, before | change).status == DIFFERENT
    assert compare(before, {"y": before["y"]}).status == DIFFERENT


def test_rounding_limit_follows_least_precise_dtype() -> None:
    before = {"y": torch.ones(3)}
    after = {"y": torch.ones(3) * 1.01}
    assert compare(before, after).status == DIFFERENT
    assert compare(before, after, torch.bfloat16).status == ROUNDING
    assert compare(before | {"z": torch.ones(1).bfloat16()}, after | {"z": torch.ones(1).bfloat16()}).status == ROUNDING


def test_outcome_reports_skipped_and_failed_runs() -> None:
    run, done = Run("a run", "layers.gate"), {"record": random_record(), "seconds": 1.0, "cpu_s": 2.0}
    assert outcome(run, done, done)[0] == SAME
    assert outcome(run, {"skipped": "no package"}, {"skipped": "no package"}) == (SKIPPED, "no package")
    assert outcome(run, done, {"skipped": "no package"})[0] == FAILED
    status, text = outcome(run, done, {"error": "Traceback\nValueError: bad"})
    assert status == FAILED and "after: Traceback" in text and "ValueError: bad" in text and "before" not in text


def test_records_are_detached_copies() -> None:
    record, value = Record(), torch.ones(2, requires_grad=True)
    record.note("value", {"own": value, "none": None, "number": 3})
    with torch.no_grad():
        value.add_(1)
    assert record["value own"].tolist() == [1.0, 1.0] and not record["value own"].requires_grad
    assert record["value none"].numel() == 0 and record["value number"] == 3
    with pytest.raises(ValueError, match="'value own' is recorded twice"):
        record.note("value own", value)


def test_moved_public_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in records.PLACES:
        assert public(name) is not None
    monkeypatch.setitem(records.PLACES, "Tensor", ("fusedmoe.nowhere", "torch"))
    assert public("Tensor") is Tensor
    monkeypatch.setitem(records.PLACES, "Tensor", ("fusedmoe.nowhere", "fusedmoe"))
    with pytest.raises(ImportError, match="Tensor is in none of fusedmoe.nowhere, fusedmoe; add its new place"):
        public("Tensor")


def test_runs_refer_to_existing_programs() -> None:
    assert all(callable(run.program()) for run in RUNS)
    assert {run.world for run in RUNS} == {1, 2, 4} and any(run.interpreted for run in RUNS)


#: A version of `fusedmoe.training` with gradients a millionth too large, and with an error.
FAULTS = """
_right = sync_gradients


def sync_gradients(model, topology, **more):
    _right(model, topology, **more)
    next(model.parameters()).grad.mul_(1 + 1e-6)


def load_checkpoint(*_):
    raise ValueError("a planted error")
"""


@pytest.mark.slow
def test_injected_faults_are_detected(tmp_path: Path) -> None:
    """Wrong gradients and an error are named; runs without the faults, before and after, stay bitwise equal."""
    wrong = tmp_path / "wrong"
    shutil.copytree(ROOT / "fusedmoe", wrong / "fusedmoe", ignore=shutil.ignore_patterns("__pycache__"))
    with (wrong / "fusedmoe" / "training" / "__init__.py").open("a") as training:
        training.write(FAULTS)
    expected = {
        "capacity: drops from many to none": SAME,
        "optimizer steps": DIFFERENT,
        "checkpoint saved by ep, loaded by esp": FAILED,
        "tutel, two ranks": SAME,
    }
    outcomes = compare_trees(ROOT, wrong, [run for run in RUNS if run.name in expected], tmp_path)
    assert {name: status for name, (status, _) in outcomes.items()} == expected, outcomes
    assert "gradient of 0.weight" in outcomes["optimizer steps"][1]
    assert "a planted error" in outcomes["checkpoint saved by ep, loaded by esp"][1]
