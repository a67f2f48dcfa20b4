"""Settings, their flags, and the layout chosen from them."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

import fusedmoe
from fusedmoe.cli.job import Launch, Sizes, choose_device, choose_sizes
from fusedmoe.cli.main import main, make_parser
from fusedmoe.cli.settings import GROUPS, Settings, given_settings, read_settings
from fusedmoe.errors import ConfigError
from fusedmoe.gates import GATES
from fusedmoe.models.config import MODELS, ModelConfig, named_model


def parse(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["train", *arguments])


def test_settings_json_round_trip() -> None:
    settings = Settings(
        model=ModelConfig(gate="deepseek_v3", gate_options={"groups": 2}, capacity_factor=None), ep=2, data="x"
    )
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings


def test_unknown_settings_in_json_are_rejected() -> None:
    data = Settings().to_dict()
    data["model"]["flavour"] = data["colour"] = 1
    with pytest.raises(ConfigError, match=r"colour, model\.flavour"):
        Settings.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("steps", value) for value in ("7", 1e300, True, None, 10**30, [7], {})),
        *(("lr", value) for value in ("1", False, float("nan"), float("inf"), 10**400)),
        *(("data", 7), ("model.layers", 2.0), ("model.gate_options", []), ("model", 3), ("recompute", 1)),
    ],
)
def test_run_config_with_wrong_value_type_is_rejected(tmp_path: Path, name: str, value: Any) -> None:
    data = Settings().to_dict()
    holder = data["model"] if name.startswith("model.") else data
    holder[name.removeprefix("model.")] = value
    (tmp_path / "config.json").write_text(json.dumps({"settings": data}))
    with pytest.raises(ConfigError) as error:
        read_settings(tmp_path)
    assert str(tmp_path / "config.json") in str(error.value)
    assert name == "model" or name.removeprefix("model.") in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"lr": -1.0}, {"dtype": "fp8"}, {"timeout_s": 0.0}, {"timeout_s": 1e300}, {"clip": float("nan")}],
)
def test_settings_error_names_invalid_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)


def test_learning_rate_warms_up_and_decays() -> None:
    settings = Settings(steps=100, warmup=10, lr=1.0)
    rates = [settings.learning_rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[10] == pytest.approx(1.0)
    assert sorted(rates[:10]) == rates[:10] and sorted(rates[10:], reverse=True) == rates[10:]
    assert 0.1 < rates[-1] < 0.11
    assert Settings(steps=1, warmup=0).learning_rate(0) == Settings().peak_lr


def test_every_setting_has_flag_with_help_text() -> None:
    flags = {flag.setting: flag for group in GROUPS.values() for flag in group}
    settings = {f.name for f in fields(Settings)} - {"model"}
    model = {f"model.{f.name}" for f in fields(ModelConfig)} - {"model.name", "model.gate_options"}
    model -= {f"model.{name}" for name in ("q_rank", "kv_rank", "rope_dim", "value_dim")}  # of plan --config only
    assert set(flags) == settings | model
    assert all(flag.help for flag in flags.values())


def test_train_help_lists_models_gates_and_examples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as end:
        main(["train", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for word in (*MODELS, *GATES, "--resume", "torchrun --standalone", "held-out loss", "(default: 320)", "perfetto"):
        assert word in text
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "train" in capsys.readouterr().out


def test_help_is_printed_on_rank_0_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert capsys.readouterr().out == ""


def test_flags_override_named_model() -> None:
    arguments = parse(
        *("--model", "mixtral-7b", "--layers", "2", "--capacity-factor", "none", "--gate-option", "noise=1.5"),
        *("--gate-option", 'aux={"z": 1}', "--no-bias", "--ep", "2", "--lr", "0.5", "--data", "/x"),
    )
    settings = Settings().changed(given_settings(arguments))
    expected = replace(
        named_model("Mixtral-7B"),
        layers=2,
        capacity_factor=None,
        gate_options={"noise": 1.5, "aux": {"z": 1}},
        bias=False,
    )
    assert settings == Settings(model=expected, ep=2, lr=0.5, data="/x")


def test_omitted_flags_preserve_settings() -> None:
    assert given_settings(parse()) == {}
    saved = Settings(model=named_model("LLaMA2-MoE"), steps=7, dtype="bf16")
    assert saved.changed(given_settings(parse("--steps", "9"))) == replace(saved, steps=9)


def test_gate_option_preserves_others_and_new_gate_drops_all() -> None:
    """Changing one gate option keeps the gate's other options; topk has no groups."""
    model = named_model("DeepSeek-V3")
    flags = ("--model", "DeepSeek-V3", "--gate-option", "route_scale=1")
    settings = Settings().changed(given_settings(parse(*flags)))
    assert settings.model == replace(model, gate_options={**model.gate_options, "route_scale": 1})
    assert settings.changed(given_settings(parse("--gate", "deepseek_v3"))) == settings
    other = settings.changed(given_settings(parse("--gate", "topk")))
    assert other.model == replace(model, gate="topk", gate_options={})
    other = settings.changed(given_settings(parse("--gate", "topk", "--gate-option", "noise=1")))
    assert other.model.gate_options == {"noise": 1}


def test_gate_option_without_value_is_rejected() -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        given_settings(parse("--gate-option", "noise"))


def test_gates_of_a_program_can_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program registers a gate and calls the command."""
    monkeypatch.setitem(fusedmoe.gates.GATES, "mine", fusedmoe.gates.TopK)
    assert Settings().changed(given_settings(parse("--gate", "mine"))).model.gate == "mine"


def test_unknown_model_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--model", "gpt9"])
    assert end.value.code == 2 and "invalid choice: 'gpt9' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "layers = 0"),
        (["--resume", "/nowhere"], "config.json"),
        (["--resume", "a", "--run-dir", "b"], "leave out"),
        (["--stop-at", "0"], "stop-at"),
        (["--mp", "3"], "does not divide"),
    ],
)
def test_wrong_flag_exits_with_one_line_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def launch(ranks: int, local: int) -> Launch:
    return Launch(rank=0, ranks=ranks, local_rank=0, local_ranks=local)


@pytest.mark.parametrize(
    ("changes", "start", "sizes"),
    [
        ({}, launch(1, 1), Sizes(1, 1, 1, 1)),
        ({}, launch(4, 4), Sizes(4, 1, 4, 4)),
        ({"ranks_per_node": 2}, launch(4, 4), Sizes(2, 2, 2, 2)),
        ({}, launch(16, 4), Sizes(4, 4, 4, 4)),
        ({}, launch(3, 3), Sizes(3, 1, 1, 1)),  # 4 heads do not split in three
        ({}, launch(48, 8), Sizes(8, 2, 8, 4)),  # 8 experts over 6 nodes, 4 heads over 8 ranks
        ({"ep": 4}, launch(4, 4), Sizes(4, 4, 1, 4)),
        ({"ep": 2, "esp": 1, "mp": 1}, launch(4, 4), Sizes(4, 2, 1, 1)),
        ({"mp": 1}, launch(4, 2), Sizes(2, 2, 2, 1)),
        ({"model": named_model("GPT2-XL-MoE")}, launch(8, 4), Sizes(4, 2, 4, 1)),  # 25 heads
        ({"model": ModelConfig(hidden=6, moe_every=2)}, launch(4, 4), Sizes(4, 1, 2, 2)),
        ({"model": named_model("GPT2-Tiny-MoE")}, launch(6, 2), Sizes(2, 3, 2, 2)),  # experts follow world size
    ],
)
def test_default_layout_follows_paper_within_model_limits(changes: dict[str, Any], start: Launch, sizes: Sizes) -> None:
    settings = Settings(**changes)
    assert choose_sizes(settings, start) == sizes
    experts = settings.model.with_experts(start.ranks, sizes.ep).experts
    assert experts is not None and experts % sizes.ep == 0
    assert start.ranks % (sizes.ep * sizes.esp) == start.ranks % sizes.mp == 0


@pytest.mark.parametrize(
    ("changes", "message"), [({"ranks_per_node": 3}, "nodes of 3"), ({"ep": 3}, "ep · esp"), ({"mp": 8}, "mp = 8")]
)
def test_layout_not_matching_ranks_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_sizes(Settings(**changes), launch(4, 4))


def test_device_follows_local_rank_and_rejects_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    start = Launch(rank=3, ranks=4, local_rank=1, local_ranks=2)
    assert str(choose_device(Settings(), start)) == "cuda:1"
    assert str(choose_device(Settings(device="cpu"), launch(4, 4))) == "cpu"
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="--device cpu"):
            choose_device(Settings(device=device), launch(4, 4))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert str(choose_device(Settings(), start)) == "cpu"
    with pytest.raises(ConfigError, match="0 GPUs"):
        choose_device(Settings(device="cuda"), start)
