"""`fusedmoe plan --config`: answers for jobs of other frameworks, and refused combinations of flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusedmoe.cli import step_plans
from fusedmoe.cli.main import main
from fusedmoe.cli.settings import Settings
from fusedmoe.models.config import ModelConfig, named_model
from fusedmoe.runtime.cache import CACHE
from fusedmoe.schedule import POLICIES
from fusedmoe.schedule.machines import MACHINES, PREDICTION_ERROR, TESTBEDS
from tests.cli.on_ranks import is_picture
from tests.marks import slowly

FILES = Path(__file__).parents[1] / "data" / "job_files"
SMALL = {
    **{"model_type": "qwen3_moe", "num_hidden_layers": 3, "hidden_size": 512, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 256},
    **{"num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 32000, "max_position_embeddings": 2048},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["plan", *flags, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("mixtral_8x7b.json", True),
        *slowly(("qwen3_30b_a3b.json", True), ("deepseek_v3.json", False), ("gpt_oss_120b.json", True)),
        *slowly(("mixtral_8x7b_megatron.sh", True), ("deepseek_v3_megatron.yaml", False)),
    ],
)
def test_published_models_are_planned_on_64_ranks(name: str, fits: bool, capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--config", str(FILES / name), "--machine", "dgx-h100", "--ranks", "64")
    answer, memory = data["answer"], data["answer"]["memory_bytes"]
    assert memory["fits"] is fits and (memory["total"] <= memory["device"]) is fits
    parts = ("parameters", "gradients", "optimizer", "activations", "workspace")
    assert memory["total"] == pytest.approx(sum(memory[part] for part in parts))
    assert answer["step_s"] == pytest.approx(data["policies_s"]["auto"])
    layered = {
        name: s for name, s in data["policies_s"].items() if name == "auto" or not POLICIES[name].uses_micro_batches
    }
    assert answer["step_s"] == pytest.approx(min(layered.values()))
    low_s, high_s = answer["step_range_s"]
    assert low_s <= answer["step_s"] * (1 - PREDICTION_ERROR.value) and high_s >= answer["step_s"] * 1.12
    gain = 1 - answer["step_s"] / data["policies_s"]["sequential"]
    assert answer["overlap"]["gain"] == pytest.approx(gain) and 0 < answer["exposed_s"] < answer["step_s"]
    assert answer["overlap"]["pays"] is (answer["overlap"]["gain_range"][0] > 0.12)
    assert all(numbers and min(numbers) >= 1 for numbers in answer["chunks"].values())


def test_answer_is_printed_with_assumptions(small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ("--machine", "dgx-h100", "--ranks", "16", "--png", str(tmp_path / "step.png"))
    assert main(["plan", "--config", small, *flags]) == 0
    text = capsys.readouterr().out
    for word in ("parallel sizes", "memory per rank", "exposed communication", "two-level dispatch", "replicas"):
        assert word in text
    assert "assumed: one sequence of 2048 tokens" in text and "±12%" in text and is_picture(tmp_path / "step.png")


def test_flags_override_the_file(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--machine", "dgx-h100", "--ranks", "16", "--ep", "4", "--k", "2", "--batch", "2", "--schedule", "fsmoe")
    data = planned(capsys, "--config", small, *flags)
    assert data["layout"]["ep"] == 4 and (data["model"]["k"], data["model"]["batch"]) == (2, 2)
    assert data["answer"]["layouts_compared"] == 0 and data["answer"]["policy"] == "fsmoe"  # the EP size is given
    given = planned(capsys, "--config", small, *flags, "--esp", "1", "--mp", "1")
    assert given["answer"]["layouts_compared"] == 0 and given["layout"]["mp"] == 1


def test_vocabulary_of_the_file_may_be_smaller_than_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The models that the command trains read bytes; a job of another framework has its own symbols."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SMALL | {"vocab_size": 64}))
    data = planned(capsys, "--config", str(path), "--machine", "dgx-h100", "--ranks", "8", "--seq-len", "64")
    assert data["model"]["vocab_size"] == 64
    for command in (["plan", "--testbed", "B"], ["train", "--run-dir", str(tmp_path / "run")], ["trace"]):
        assert main([*command, "--vocab-size", "64"]) == 2
        assert "vocab_size = 64 is smaller than the 256 bytes" in capsys.readouterr().err


def test_overlap_is_left_off_if_it_gains_less_than_the_error(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    """On one node with tiny batches, start-up times leave nothing to gain."""
    flags = ("--machine", "dgx-h100", "--ranks", "8", "--ep", "8", "--esp", "1", "--mp", "1", "--seq-len", "16")
    overlap = planned(capsys, "--config", small, *flags)["answer"]["overlap"]
    assert overlap["gain"] < 0.12 and not overlap["pays"]
    assert main(["plan", "--config", small, *flags]) == 0
    assert "leave it off, or measure" in capsys.readouterr().out


def test_two_level_dispatch_is_compared_where_it_differs(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--esp", "1", "--mp", "1", "--machine", "dgx-h100")
    across = planned(capsys, "--config", small, "--ranks", "32", "--ep", "32", *sizes)["answer"]["two_level"]
    # A token's eight experts are on 3.7 of 4 nodes and on 7.6 of 32 ranks.
    assert across["seconds"]["2dh"] < across["seconds"]["direct"] and 0 < across["gain"] < 1
    assert across["pays"] is (across["gain"] > 0.12)
    followed = planned(capsys, "--config", small, "--ranks", "32", "--ep", "32", "--dispatch", "2dh", *sizes)
    assert followed["answer"]["two_level"]["policy"] == "auto"
    assert followed["answer"]["step_s"] == pytest.approx(across["seconds"]["2dh"])
    tutel = planned(capsys, "--config", small, "--ranks", "32", "--ep", "32", "--schedule", "tutel", *sizes)
    assert tutel["answer"]["two_level"]["policy"] == "tutel"
    assert tutel["answer"]["two_level"]["seconds"]["direct"] == pytest.approx(tutel["step_s"])
    inside = planned(capsys, "--config", small, "--ranks", "32", "--ep", "8", *sizes)["answer"]
    assert inside["two_level"] is None
    alone = planned(capsys, "--config", small, "--ranks", "32", "--ep", "1", *sizes)["answer"]
    assert alone["replicas"] is None


def test_costs_of_a_file_are_planned_without_choice_of_sizes(
    small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(TESTBEDS["B"].costs.to_json())
    data = planned(capsys, "--config", small, "--costs", str(costs), "--ranks", "32", "--ranks-per-node", "4")
    answer = data["answer"]
    assert answer["layouts_compared"] == 0 and answer["memory_bytes"]["fits"] is None and answer["two_level"] is None
    published = planned(capsys, "--config", small, "--testbed", "B")["answer"]
    assert published["error"] == 0.12 and published["step_s"] == answer["step_s"]
    assert answer["error"] == 0.1 and answer["step_range_s"] == pytest.approx(
        [0.9 * data["step_s"], 1.1 * data["step_s"]]
    )


def test_config_and_model_exclude_each_other(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", small, "--model", "Mixtral-7B", "--machine", "dgx-h100", "--ranks", "8"]) == 2
    assert "--config and --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "layers"), [({"first_k_dense_replace": 2}, 2), ({"decoder_sparse_step": 5}, 2)], ids=["dense", "every"]
)
def test_model_without_moe_layers_is_refused_as_such(
    change: dict[str, int], layers: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | change))
    flags = ("--machine", "dgx-h100", "--ranks", "16", "--layers", str(layers))
    assert main(["plan", "--config", str(path), *flags]) == 2
    assert "the model has no MoE layer" in capsys.readouterr().err


def test_plan_of_a_config_builds_the_model_once(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, make = [], step_plans.make_model
    monkeypatch.setattr(step_plans, "make_model", lambda *arguments: built.append(1) or make(*arguments))
    planned(capsys, "--config", small, "--machine", "dgx-h100", "--ranks", "16")
    assert len(built) == 1


def test_machine_at_the_ends_of_its_figures_encloses_the_machine() -> None:
    machine = MACHINES["dgx-h100"]
    slow, fast = machine.at_bounds(False), machine.at_bounds(True)
    assert slow.computes_beside.value < machine.computes_beside.value < fast.computes_beside.value < 1
    assert slow.intra.message_s.value > fast.intra.message_s.value and slow.cards == machine.cards


def test_settings_of_earlier_versions_are_read() -> None:
    new = ("head_dim", "vocab_size", "dense_layers", "dense_hidden", "q_rank", "kv_rank", "rope_dim", "value_dim")
    data = Settings(named_model("Mixtral-7B")).to_dict()
    for field in new:
        del data["model"][field]
    read = Settings.from_dict(data)
    assert read == Settings(named_model("Mixtral-7B")) and read.model.head_size == 128
    assert ModelConfig(**data["model"]).vocabulary == 256


def test_recomputation_given_replaces_that_of_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 8 --seq-length 512 --vocab-size 512"
    path = tmp_path / "job.sh"
    path.write_text(f"{line} --recompute-granularity selective")
    flags = ("--config", str(path), "--machine", "dgx-h100", "--ranks", "8", "--schedule", "fsmoe")
    saved, again = planned(capsys, *flags)["answer"], planned(capsys, *flags, "--recompute")["answer"]
    assert any(words.startswith("no recomputation") for words in saved["assumptions"])
    assert not any("no recomputation" in words for words in again["assumptions"])
    assert any("forward runs again" in words for words in again["assumptions"])
    assert again["step_s"] > saved["step_s"] and again["overlap"]["sequential_s"] > saved["overlap"]["sequential_s"]


def test_integration_gains_by_its_own_schedule_only(
    small: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another framework reduces gradients, with and without overlap; micro-batches are `pipeline`'s."""
    flags = ("--machine", "dgx-h100", "--ranks", "16", "--ep", "16", "--esp", "1", "--mp", "1")
    data = planned(capsys, "--config", small, *flags, "--batch", "4")
    answer, steps_s = data["answer"], data["policies_s"]
    assert answer["policy"] == "auto" and answer["exposed_s"] > answer["gradients_after_s"] > 0
    assert answer["gradients_after_s"] == pytest.approx(sum(data["gradients_after_step_s"].values()))
    assert "gradient-all-reduce" not in data["critical_path_s"] and "gradient-all-reduce" not in data["plan"]
    assert answer["overlap"]["gain"] == pytest.approx(1 - steps_s["auto"] / steps_s["sequential"])
    pipeline = answer["pipeline"]
    assert pipeline["keeps"] == ["all gathered blocks"]
    assert pipeline["call"] == "fusedmoe.hf.pipeline" and pipeline["gain"] > answer["overlap"]["gain"]
    assert pipeline["gain"] == pytest.approx(1 - steps_s["joint"] / steps_s["sequential"])
    assert any("gradients are reduced after the backward pass" in words for words in answer["assumptions"])
    one = planned(capsys, "--config", small, *flags)
    assert "one sample" in one["answer"]["pipeline"]["refusal"] and "joint" not in one["policies_s"]
    line = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 16 --seq-length 512 --vocab-size 512"
    path = tmp_path / "job.sh"
    path.write_text(line)
    assert "no pipeline" in planned(capsys, "--config", str(path), *flags)["answer"]["pipeline"]["refusal"]
    assert main(["plan", "--config", str(path), *flags, "--schedule", "joint"]) == 2
    assert "--schedule joint plans whole models: this integration has no pipeline" in capsys.readouterr().err


def test_step_has_the_micro_batches_of_the_global_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Gradients are reduced once, after the last micro-batch."""
    line = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 16 --seq-length 512 --vocab-size 512"
    path = tmp_path / "job.sh"
    flags = ("--config", str(path), "--machine", "dgx-h100", "--ranks", "16", "--ep", "8")
    path.write_text(line)
    one = planned(capsys, *flags)["answer"]
    path.write_text(f"{line} --global-batch-size 64")
    four = planned(capsys, *flags)["answer"]
    assert (one["micro_batches"], four["micro_batches"]) == (1, 4)
    assert four["gradients_after_s"] == one["gradients_after_s"] > 0
    batch_s = one["step_s"] - one["gradients_after_s"]
    assert four["step_s"] == pytest.approx(4 * batch_s + one["gradients_after_s"])
    assert four["replicas"]["lengthens"] < one["replicas"]["lengthens"] * 4 + 1e-9
    assert any("4 micro-batches per replica and step (global batch 64)" in words for words in four["assumptions"])
    assert main(["plan", *flags]) == 0
    assert "per replica and step 4 micro-batches of 1 × 512 tokens" in capsys.readouterr().out
    assert main(["plan", *flags, "--batch", "3"]) == 2
    assert "global batch of 64 samples is not a multiple of 3 samples on each of 16" in capsys.readouterr().err


def test_pipeline_stage_is_planned_on_its_share_of_the_ranks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 16 --seq-length 512 --vocab-size 512"
    path = tmp_path / "job.sh"
    path.write_text(f"{line} --pipeline-model-parallel-size 2 --global-batch-size 64")
    flags = ("--config", str(path), "--machine", "dgx-h100", "--ep", "8")
    shared = planned(capsys, *flags, "--ranks", "32")
    assert shared["layout"]["ranks"] == 16 and shared["model"]["layers"] == 2
    assert shared["answer"]["micro_batches"] == 4
    assert any("2 of 4 layers" in words for words in shared["answer"]["assumptions"])
    given = planned(capsys, *flags, "--ranks", "16", "--layers", "2")
    assert given["step_s"] == shared["step_s"]


def test_job_that_does_not_fit_is_answered_with_a_remedy(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--config", small, "--machine", "dgx-h100", "--ranks", "8", "--ep", "8", "--esp", "1", "--mp", "1")
    assert planned(capsys, *flags)["answer"]["memory_bytes"]["remedy"] is None
    memory = planned(capsys, *flags, "--batch", "256")["answer"]["memory_bytes"]
    assert memory["fits"] is False and memory["remedy"]["total"] <= memory["device"]
    assert main(["plan", *flags, "--batch", "256"]) == 0
    assert "DOES NOT FIT; " in capsys.readouterr().out
    assert (
        planned(capsys, *flags, "--layers", "300", "--model-dim", "16384")["answer"]["memory_bytes"]["remedy"] is None
    )


def test_chosen_sizes_and_state_are_those_of_the_integration(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hugging Face: EP and FSDP. Experts are not split."""
    data = planned(capsys, "--config", small, "--machine", "dgx-h100", "--ranks", "16")
    answer = data["answer"]
    assert answer["layouts_compared"] > 1 and (data["layout"]["esp"], data["layout"]["mp"]) == (1, 1)
    state = next(words for words in answer["assumptions"] if "AdamW" in words)
    assert state.startswith("float32 parameters") and "sharded over all ranks (FSDP)" in state


def test_config_on_one_rank_needs_costs(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for ranks in ((), ("--ranks", "16")):
        assert main(["plan", "--config", small, *ranks]) == 2
        assert "pass --machine NAME, --costs FILE or run under torchrun" in capsys.readouterr().err
