"""Text from files reaches a terminal without control characters: in errors, warnings and the output of commands."""

from __future__ import annotations

import json
import os
import pickle
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusedmoe.cli.main import main
from fusedmoe.cli.settings import Settings, describe, read_settings
from fusedmoe.cli.step_plans import format_rows
from fusedmoe.comm.topology import Topology
from fusedmoe.errors import ConfigError, DerivativeError, RankError, printable, warn
from fusedmoe.files import dump_with_digest
from fusedmoe.schedule.cost import CostModel
from fusedmoe.schedule.machines import TESTBEDS
from fusedmoe.schedule.plan import Plan
from fusedmoe.schedule.refit import PartComparison
from fusedmoe.training import load_checkpoint, save_checkpoint
from fusedmoe.training.survival.node_memory import NodeMemory
from fusedmoe.training.survival.survival import Survival
from tests.training.planted import rewrite, value

ALONE = Topology()
#: ESC with a colour, BEL, the 8-bit CSI, a bidirectional override, ends of lines, and markup of rich.
EVIL = "\x1b[31m\x07\x9b2J\u202e\u2028\n\r[red][/]"


def assert_harmless(text: str, lines: bool = False) -> None:
    assert "\\x1b" in text, f"the text is not from the file: {text!r}"
    bad = [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert not [one for one in bad if not (lines and one == "\n")], text
    assert "[red][/]" in text or "[" not in EVIL


@pytest.mark.parametrize("kind", [ConfigError, RankError, DerivativeError])
def test_errors_have_no_control_characters(kind: type[Exception]) -> None:
    error = kind(f"the tensor {EVIL}")
    assert_harmless(str(error))
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == str(kind(str(error)))
    assert printable("x_SM: 3 × 4, é 漢 …") == "x_SM: 3 × 4, é 漢 …"


def test_warnings_have_no_control_characters() -> None:
    with pytest.warns(UserWarning) as caught:
        warn(f"the file {EVIL}")
    assert_harmless(str(caught[0].message))
    assert caught[0].filename == __file__


def rename_tensor(path: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["tensors"][f"model.{EVIL}"] = body["tensors"].pop("model.weight")

    rewrite(path, change)


def change_optimizer_kind(path: Path) -> None:
    about = {"format": 3, "optimizer": {"kind": EVIL, "settings": [EVIL]}}
    rewrite(path, value(path, "fusedmoe", json.dumps(about)))


def change_param_group(path: Path) -> None:
    rewrite(path, value(path, "optimizer.param_groups", json.dumps([{"params": [EVIL]}])))


def add_unknown_tag(path: Path) -> None:
    rewrite(path, value(path, "extra", json.dumps({"a": {f"${EVIL}": 1}})))


def change_chunk_path(path: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        body["tensors"]["model.weight"]["chunks"][0][2] = EVIL

    rewrite(path, change)


@pytest.mark.parametrize(
    "change", [rename_tensor, change_optimizer_kind, change_param_group, add_unknown_tag, change_chunk_path]
)
def test_checkpoint_errors_have_no_control_characters(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path, model = tmp_path / "checkpoint", nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_checkpoint(path, model, optimizer, ALONE)
    change(path)
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(path, model, optimizer, ALONE)
    assert_harmless(str(caught.value).replace("\\\\", "\\"))


def test_path_errors_have_no_control_characters(tmp_path: Path) -> None:
    for read in (lambda path: load_checkpoint(path, nn.Linear(1, 1), None, ALONE), read_settings):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / EVIL)
        assert_harmless(str(caught.value))


def _setting(folder: Path) -> None:
    settings = Settings().to_dict() | {EVIL: 1}
    (folder / "config.json").write_text(dump_with_digest({"settings": settings}))
    read_settings(folder)


def _gate(folder: Path) -> None:
    settings = Settings().to_dict()
    settings["model"]["gate"] = EVIL
    (folder / "config.json").write_text(dump_with_digest({"settings": settings}))
    raise ConfigError(describe(read_settings(folder).model))


READS: dict[str, Callable[[Path], Any]] = {
    "a setting": _setting,
    "a gate": _gate,
    "a plan": lambda _: Plan.parse(f"phase: {EVIL}"),
    "a task": lambda _: Plan.parse(f"phase: forward\nlayer: 0\ncompute: {EVIL.replace(chr(10), '')}"),
    "costs": lambda _: CostModel.from_json(json.dumps({"format": EVIL, "version": 1})),
}


@pytest.mark.parametrize("what", READS)
def test_file_errors_have_no_control_characters(tmp_path: Path, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        READS[what](tmp_path)
    text = str(caught.value)
    assert not [one for one in text if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")], text


def test_node_memory_errors_have_no_control_characters(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    Survival(ALONE, NodeMemory(os.getpid(), tmp_path)).refresh(1, model, None, {"step": 1})
    (header,) = tmp_path.glob("*.json")
    held = json.loads(header.read_text())
    held["parts"] = [[EVIL if field == "model.weight" else field for field in part] for part in held["parts"]]
    held["keys"] = {EVIL if key == "model.weight" else key: shape for key, shape in held["keys"].items()}
    held["digests"] = ["0" * 64 for _ in held["digests"]]
    header.write_text(dump_with_digest(held))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Survival(ALONE, NodeMemory(os.getpid(), tmp_path))
    assert caught
    for one in caught:
        assert not [c for c in str(one.message) if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]


def test_command_output_has_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine name in a cost file, printed in tables and lines."""
    costs = next(iter(TESTBEDS.values())).costs
    (tmp_path / "costs.json").write_text(replace(costs, machine=EVIL).to_json())
    assert main(["plan", "--costs", str(tmp_path / "costs.json"), "--ranks", "8"]) == 0
    assert_harmless(capsys.readouterr().out, lines=True)
    row = PartComparison(EVIL, 1.0, 1.0)
    assert_harmless(format_rows([row, row, row]), lines=True)
    assert main(["plan", "--costs", str(tmp_path / EVIL), "--ranks", "8"]) == 2
    assert_harmless(capsys.readouterr().err, lines=True)
