"""`fusedmoe train`: the job from settings to held-out loss, on every rank."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import torch

from fusedmoe import Topology, keep_memory
from fusedmoe.cli.data import Corpus, load_corpus
from fusedmoe.cli.job import (
    Launch,
    Sizes,
    StopRequest,
    choose_device,
    choose_sizes,
    format_ranks,
    make_topology,
    process_group,
    resolve_sizes,
)
from fusedmoe.cli.restart import (
    Attempt,
    Survivor,
    check_launcher,
    describe_restart,
    end_with_launcher,
    exit_for_restart,
    find_attempt,
    sizes_for_ranks,
    write_launch,
)
from fusedmoe.cli.run_dir import LoadLog, RunDir
from fusedmoe.cli.settings import Settings, describe, given_settings, read_settings
from fusedmoe.cli.step_plans import compute_dtype, followed_policy, follows_plan, format_rows
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm.collectives import all_gather_object
from fusedmoe.environment import launch_command
from fusedmoe.errors import ConfigError, RankError, printable
from fusedmoe.files import read_text, write_cache_file, write_text
from fusedmoe.metrics import Metrics
from fusedmoe.runtime.cache import cached_profile, choice_text, measured_costs
from fusedmoe.runtime.progress import make_display
from fusedmoe.schedule import CostModel, draw
from fusedmoe.schedule.draw import MAX_TIMELINES
from fusedmoe.schedule.refit import compare_parts
from fusedmoe.schedule.timeline import Timeline, save_trace
from fusedmoe.training import load_checkpoint, save_checkpoint
from fusedmoe.training.checkpoint_folder import find_checkpoint
from fusedmoe.training.replicated_parameters import list_replicas

#: Steps between two collections of metrics.
METRICS_EVERY = 10
STOPPED = 130  # exit code of a job that saved and stopped at a request, as shells report Ctrl-C


def run(arguments: argparse.Namespace) -> int:
    """Train and return the exit code. Errors that all ranks detect are raised as `ConfigError`."""
    launch = Launch.from_environment()
    changes = given_settings(arguments)
    if arguments.resume is not None and arguments.run_dir is not None:
        raise ConfigError("--resume continues in its own run folder: leave out --run-dir")
    if arguments.stop_at is not None and arguments.stop_at < 1:
        raise ConfigError(f"--stop-at {arguments.stop_at} must be at least 1")
    settings = (Settings() if arguments.resume is None else read_settings(arguments.resume)).changed(changes)
    if settings.survive:
        check_launcher()
        end_with_launcher()
    sizes, settings = resolve_sizes(settings, launch, sizes_for_ranks if settings.survive else choose_sizes)
    settings.model.require_byte_vocabulary()
    followed_policy(settings, sizes)  # raises before measuring
    device, stop_request = choose_device(settings, launch), StopRequest()
    if device.type == "cpu":
        keep_memory()
    with ExitStack() as held:
        # With --survive, SIGTERM must terminate a rank that waits for others.
        if not settings.survive:
            held.enter_context(stop_request)
        held.enter_context(process_group(launch, device, settings.timeout_s))
        survivor = Survivor(launch, settings) if settings.survive else None
        if survivor is not None:
            # The note in the node's memory has the job's settings.
            settings, sizes = survivor.settings, survivor.sizes
        # --resume and --survive find their run folder themselves.
        searches = survivor is None and arguments.resume is None
        attempt = find_attempt(arguments.run_dir, settings.timeout_s) if searches else Attempt()
        if attempt.settings is not None:
            # As with --resume: the number of ranks may have changed, but not the model.
            sizes, settings = resolve_sizes(attempt.settings.changed(changes), launch)
        topology = make_topology(sizes, settings.timeout_s)
        try:
            with topology.guard("fusedmoe train"):
                if survivor is not None:
                    survivor.join(topology)
                job = TrainingJob(settings, launch, sizes, topology, device, stop_request, survivor, attempt)
                last_line, code = job.run(arguments.run_dir, arguments.resume, arguments.stop_at)
        except RankError as error:
            if survivor is None:
                raise
            # An orderly shutdown would take minutes.
            exit_for_restart(topology, error)
    if launch.rank == 0:
        print(printable(last_line), flush=True)
    return code


class TrainingJob:
    """Training job on this rank, from loading data to the last checkpoint."""

    corpus: Corpus
    trainer: Trainer
    folder: RunDir

    def __init__(
        self,
        settings: Settings,
        launch: Launch,
        sizes: Sizes,
        topology: Topology,
        device: torch.device,
        stop_request: StopRequest,
        survivor: Survivor | None = None,
        attempt: Attempt | None = None,
    ) -> None:
        self.settings, self.launch, self.sizes, self.attempt = settings, launch, sizes, attempt or Attempt()
        self.topology, self.device, self.stop_request, self.survivor = topology, device, stop_request, survivor
        self._gemm_flop_per_s: float | None = None
        self._saved: int | None = None  # step of the last checkpoint; None while a save may replace it

    def run(self, run_dir: Path | None, resume: Path | None, stop_at: int | None) -> tuple[str, int]:
        """Train until the last step, `stop_at` or a stop request. Return the last line to print, and the exit code.

        After the last step, compute the held-out loss.
        """
        self.corpus = self._corpus()
        batches_per_step = None if self.survivor is None else self.survivor.batches_per_step
        self.trainer = Trainer(
            self.settings, self.topology, self.device, self.corpus, self.stop_request, batches_per_step
        )
        with closing(self.trainer):
            return self._run(run_dir, resume, stop_at)

    def _run(self, run_dir: Path | None, resume: Path | None, stop_at: int | None) -> tuple[str, int]:
        settings, topology = self.settings, self.topology
        done = 0
        # A note in memory has priority over --resume: it belongs to the same job and is never older than the disk.
        if self.survivor is not None and self.survivor.run_dir is not None:
            self.folder = RunDir(self.survivor.run_dir)
            done = self._restore(self.survivor)
        elif resume is not None:
            done = self._resume(RunDir(resume))
        else:
            done = self._start(run_dir)
        if self.survivor is not None:
            # From here on a restart finds the job; before the first refresh it restarts at step 0.
            self.survivor.write_note(self.folder.path)
        if follows_plan(settings, topology.ep.size, topology.esp.size):
            self._follow_plan()
        last = settings.steps if stop_at is None else min(stop_at, settings.steps)
        if topology.is_first:
            self._print_summary(done, last)
        self.loads = LoadLog(self.folder, topology, f"fusedmoe train, {describe(settings.model)}", done)
        if self.survivor is not None:
            # A failure in the first step must lose nothing.
            self.survivor.refresh(self.trainer, done, self._extra_values(done))
        try:
            # Not earlier: until all ranks are here, signals must terminate a waiting rank.
            stop_context: AbstractContextManager[object] = nullcontext() if self.survivor is None else self.stop_request
            with stop_context, make_display(topology.rank, settings.steps, done) as self.display:
                done, stopped = self._train(done, last)
            self.loads.draw(f"Loads of experts: {describe(settings.model)}")
        except BrokenPipeError:
            raise  # stdout was closed; no file of the run failed
        except (RankError, OSError) as error:
            message = str(error)
            if isinstance(error, OSError):
                writing = f"writing {error.filename or f'a file of {self.folder.path}'}"  # a failing write names none
                topology.stop(writing, error)
                message = f"rank {topology.rank} failed {writing}: {error.strerror or error}. Free some space there"
            if find_checkpoint(self.folder.checkpoint) is not None:
                step = "" if self._saved is None else f" (step {self._saved})"
                message += f". The last checkpoint{step} is intact. Continue with: {self._resume_command()}"
            raise RankError(message) from error
        loss = None
        if not stopped and done == settings.steps:
            if topology.is_first:
                print(f"held-out text: {settings.eval_batches * self.trainer.batches_per_step} batches", flush=True)
            loss = self.trainer.held_out_loss()
        if loss is None:
            again = f"Continue with: {self._resume_command()}"
            code = STOPPED if self.stop_request.is_requested else 0
            return f"stopped after step {done} of {settings.steps}, checkpoint saved. {again}", code
        if topology.is_first:
            self.folder.write_metrics(done, {"held_out_loss": loss})
            print(printable(f"run folder: {self.folder.path}"))
        return f"held-out loss: {loss:.4f} nats per byte", 0

    def _resume_command(self) -> str:
        arguments = f"train --resume {shlex.quote(str(self.folder.path))}"
        # The rendezvous flags of a surviving job are not in its environment.
        surviving = f"torchrun … -m fusedmoe {arguments}"
        if self.settings.survive:
            return surviving
        fixed = [f"--{axis}" for axis in ("ep", "esp", "mp") if (getattr(self.settings, axis) or 1) > 1]
        hint = f" (on fewer ranks, change {', '.join(fixed)} to divide them)" if fixed else ""
        return launch_command(self.topology.size, arguments) + hint

    def _follow_plan(self) -> None:
        """Follow the policy's plan, with the costs of the run folder or newly measured costs. Collective."""
        path, trainer = self.folder.costs, self.trainer
        # Other nodes may not see the folder, or see it late.
        text = read_text(path) if self.topology.is_first and path.exists() else None
        text = all_gather_object(self.topology.world, text, "reading the run folder")[0]
        if text is None:
            profile, _ = cached_profile(self.topology, self.device, dtype=compute_dtype(self.settings))
            costs = trainer.with_measured_times(profile.costs)
        else:
            try:
                costs = CostModel.from_json(text)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}; remove the file to measure this machine again") from error

        def tell(line: str) -> None:
            assert trainer.tuning is not None
            write_text(self.folder.plan, str(trainer.tuning.plan))
            write_cache_file(self.folder.choice, choice_text(trainer.tuning))
            self.display.show_message(line)

        # The fastest measured matrix product serves as the device's peak for mfu.
        self._gemm_flop_per_s = costs.line("gemm").per_s
        plan, _ = trainer.set_plan(costs, self.folder.choice, tell, self._remeasure)
        if self.topology.is_first:
            write_cache_file(self.folder.costs, costs.to_json())
            write_text(self.folder.plan, str(plan))

    def _remeasure(self, budget_s: float) -> CostModel:
        """Measure machine and model steps again, for about `budget_s` seconds, after step times have drifted."""
        costs = measured_costs(self.topology, self.device, compute_dtype(self.settings), budget_s / 2)
        costs = self.trainer.with_measured_times(costs, budget_s / 2, again=True)
        if self.topology.is_first:
            write_cache_file(self.folder.costs, costs.to_json())  # for a resumed job
        return costs

    def _train(self, done: int, last: int) -> tuple[int, bool]:
        """Run the steps after `done` up to `last`, and save. Return the completed steps and whether to stop the job."""
        settings, trainer = self.settings, self.trainer
        # A resumed job has drawn its timeline, but tuning may choose another plan.
        drawn = None if trainer.tuning is not None or done <= settings.timeline_step else trainer.plan_name
        # State from memory may be newer than the disk: then save in any case.
        saved, stop, speed = done if self.survivor is None else -1, False, 0.0
        # A refresh follows the step's metrics line: its duration is part of the next line.
        has_reported_cost, refresh_values = False, dict[str, float]()
        metrics = self._metrics()
        while done < last and not stop:
            values, refresh_values = refresh_values, {}
            if _needs_timeline(settings, done, trainer, drawn):
                drawn = trainer.plan_name
                # Recording is slow: exclude the step from tuning.
                report, timeline = trainer.recorded_step(done)
                values["exposed_s"] = self._draw_timeline(timeline, done + 1)
            else:
                report = trainer.step(done)
            done, stop = done + 1, report.is_stopping
            load_LE = trainer.load_LE()
            if load_LE is not None:
                self.loads.record(load_LE)
            if metrics is not None and (done % METRICS_EVERY == 0 or done == last or stop):
                values |= metrics.collect()
            if self.topology.is_first:
                facts = {name: value for name, value in vars(report).items() if name != "is_stopping"}
                rate = settings.learning_rate(done - 1)
                self.folder.write_metrics(done, facts | {"lr": rate, "time": time.time()} | values)
                now = report.tokens / report.seconds
                speed = 0.9 * speed + 0.1 * now if speed else now
                self.display.show_step(done, report.loss, speed)
            # After the metrics line: a restart continues from here.
            if self.survivor is not None and done % settings.survive == 0:
                refresh_values = {"refresh_s": self.survivor.refresh(trainer, done, self._extra_values(done))}
                # The refresh before step 0 had no optimizer state.
                if not has_reported_cost and self.topology.is_first:
                    self.display.show_message(f"survival: {self.survivor.describe_cost(refresh_values['refresh_s'])}")
                has_reported_cost = True
            if settings.checkpoint_every and done % settings.checkpoint_every == 0:
                self._save(done)
                saved = done
        if saved != done:
            self._save(done)
        return done, stop

    def _metrics(self) -> Metrics | None:
        """Start routing metrics; None without MoE layers. Collective."""
        model = self.trainer.model
        if next(model.moe_layers(), None) is None:
            return None
        # 6 FLOP per parameter and token: 2 forward, 4 backward.
        flops = None if self._gemm_flop_per_s is None else 6.0 * count_parameters(self.trainer)[1]
        return Metrics(model, flops_per_token=flops, peak_flops=self._gemm_flop_per_s)

    def _corpus(self) -> Corpus:
        settings = self.settings
        source = None if settings.data is None else Path(os.path.expanduser(settings.data))
        corpus = load_corpus(source, settings.pattern, settings.held_out)
        prints = all_gather_object(self.topology.world, corpus.fingerprint, "comparing the text")
        for rank, fingerprint in enumerate(prints):
            if fingerprint != prints[0]:
                raise RankError(
                    f"the text in {corpus.source} on rank {rank} differs from rank 0: use the same files on all "
                    "ranks with --data (and the same Python, whose library is the default)"
                )
        return corpus

    def _save(self, done: int) -> None:
        trainer, extra = self.trainer, self._extra_values(done)
        # The file must have every step that a resumed job skips.
        self.loads.flush()
        self._saved = None
        save_checkpoint(self.folder.checkpoint, trainer.model, trainer.optimizer, self.topology, extra=extra)
        self._saved = done
        # The copy in memory must never be older than the disk: a restart prefers memory.
        if self.survivor is not None and done % self.settings.survive:
            self.survivor.refresh(trainer, done, extra)
        trainer.exclude_next_step()

    def _extra_values(self, done: int) -> dict[str, Any]:
        moves = self.trainer.sharded_experts
        placement = {} if moves is None else {"placement": moves.state_dict()}
        return {"step": done, "text": self.corpus.fingerprint, **placement}

    def _restore(self, survivor: Survivor) -> int:
        """Load a restarted job's state from memory or a checkpoint. Return its number of completed steps."""
        extra = survivor.restore(self.trainer)
        if extra is not None:
            source, done = "memory", self._apply_extra_values(extra)
        elif find_checkpoint(self.folder.checkpoint) is not None:
            source = f"the checkpoint {self.folder.checkpoint} (no complete state in memory)"
            done = self._load()
        else:
            source, done = "the beginning (no complete state in memory, no checkpoint)", 0
        if self.topology.is_first:
            ranks = format_ranks(self.topology.size)
            print(printable(f"survival: {ranks} continue after step {done} with the state from {source}"), flush=True)
        return done

    def _start(self, run_dir: Path | None) -> int:
        """Start a new run, or continue the run of an earlier attempt. Return its number of completed steps."""
        earlier, done = self.attempt.earlier, 0
        self.folder = self._new_folder(run_dir) if earlier is None else RunDir(earlier)
        has_checkpoint = earlier is not None and find_checkpoint(self.folder.checkpoint) is not None
        if has_checkpoint:
            done = self._resume(self.folder)
        if self.topology.is_first:
            write_launch(self.folder.path, self.attempt.agents)
            if line := describe_restart(self.attempt, self.folder.path, done, has_checkpoint):
                print(line, flush=True)
        return done

    def _resume(self, folder: RunDir) -> int:
        """Load a run's checkpoint and print changes of the layout. Return its number of completed steps."""
        self.folder = folder
        done = self._load()
        if self.topology.is_first and (
            line := folder.layout_change(self.settings, self.launch, self.sizes, self._sequences_per_step)
        ):
            print(line, flush=True)
        return done

    @property
    def _sequences_per_step(self) -> int:
        return self.settings.model.batch * self.trainer.batches_per_step

    def _load(self) -> int:
        if find_checkpoint(self.folder.checkpoint) is None:
            raise ConfigError(f"{self.folder.path} has no checkpoint: the job ended before its first save; start anew")
        trainer = self.trainer
        extra = load_checkpoint(self.folder.checkpoint, trainer.model, trainer.optimizer, self.topology)
        self._saved = self._apply_extra_values(extra)
        return self._saved

    def _apply_extra_values(self, extra: dict[str, Any]) -> int:
        if type(extra.get("step")) is not int or "text" not in extra:
            raise ConfigError(f"{self.folder.checkpoint} was not written by fusedmoe train")
        if extra["text"] != self.corpus.fingerprint and self.topology.is_first:
            print(printable(f"Note: the text in {self.corpus.source} differs from the text of the checkpoint."))
        if self.trainer.sharded_experts is not None and "placement" in extra:
            self.trainer.sharded_experts.load_state_dict(extra["placement"])
        return int(extra["step"])

    def _print_summary(self, done: int, last: int) -> None:
        """Print the job's summary and write config.json. Rank 0 only."""
        settings, sizes, topology, corpus = self.settings, self.sizes, self.topology, self.corpus
        parameters, active = count_parameters(self.trainer)
        text = {name: value for name, value in vars(corpus).items() if name not in ("train", "held_out")}
        facts = {
            "parameters": parameters,
            "active_parameters": active,
            "text": text | {"train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out)},
            "device": str(self.device),
            "torch": torch.__version__,
        }
        self.folder.write_config(settings, self.launch, sizes, self._sequences_per_step, facts)
        self.folder.drop_metrics_after(done)
        nodes = topology.size // sizes.ranks_per_node
        print(describe(settings.model))
        print(f"{parameters:,} parameters, {active:,} active per token")
        ranks = format_ranks(topology.size) + f" ({nodes} × {sizes.ranks_per_node})" * (topology.size > 1)
        layout = f"ep {topology.ep.size}, esp {topology.esp.size}, mp {topology.mp.size}, dp {topology.dp.size}"
        print(f"{ranks} on {self.device.type}: {layout}")
        print(
            f"text: {printable(str(corpus.source))}, {corpus.train_files} training files ("
            f"{len(corpus.train) / 1e6:.1f} MB), {corpus.held_out_files} held out ({len(corpus.held_out) / 1e6:.1f} MB)"
        )
        print(printable(f"run folder: {self.folder.path}"))
        print(_remaining_steps(done, last, settings.steps), flush=True)

    def _draw_timeline(self, timeline: Timeline, step: int) -> float:
        """Write timelines on rank 0; return the exposed seconds, mean over ranks. `step` counts from 1. Collective."""
        timelines = all_gather_object(self.topology.world, timeline, "gathering timelines")
        trainer, planned = self.trainer, self.trainer.planned
        if self.topology.is_first:
            plan = f"schedule {trainer.plan_name}{'' if trainer.is_settled else ' (on trial)'}"
            title = f"{self.settings.model.label}, step {step}, {format_ranks(self.topology.size)}, {plan}"
            save_trace(timelines, self.folder.trace)
            draw(timelines[:MAX_TIMELINES], self.folder.timeline_figure_path, title=title)
            if planned is not None:
                write_text(
                    self.folder.parts, f"step {step}, {plan}\n" + format_rows(compare_parts(*planned, timelines))
                )
        # Otherwise the other ranks would wait in the next step, and `Metrics` would count it as exposed communication.
        all_gather_object(self.topology.world, None, "drawing the timeline")
        return sum(timeline.exposed_s() for timeline in timelines) / len(timelines)

    def _new_folder(self, run_dir: Path | None) -> RunDir:
        """Create the run folder on rank 0 and return it on all ranks. All ranks raise its errors."""
        made: Path | ConfigError | None = None
        if self.topology.is_first:
            try:
                made = RunDir.make(run_dir).path
            except (ConfigError, OSError) as error:
                made = ConfigError(str(error))
        path = all_gather_object(self.topology.world, made, "creating the run folder")[0]
        if isinstance(path, ConfigError):
            raise path
        assert path is not None
        return RunDir(path)


def _needs_timeline(settings: Settings, step: int, trainer: Trainer, drawn: str | None) -> bool:
    """Return whether to record a step's timeline: once per final plan, and in the last step if none was recorded.

    `drawn`: the plan of the existing timeline.
    """
    if drawn is None and step == settings.steps - 1:
        return True
    return step >= settings.timeline_step and trainer.is_settled and trainer.plan_name != drawn


def _remaining_steps(done: int, last: int, steps: int) -> str:
    if done >= last:
        return f"{done} of {steps} steps are done: nothing left to do" + f" until step {last}" * (last < steps)
    if last == steps and not done:
        return f"{steps} steps"
    return f"steps {done + 1} to {last}" + f" of {steps}" * (last < steps)


def count_parameters(trainer: Trainer) -> tuple[int, int]:
    """Count the parameters of the whole model and those active per token. No communication."""
    model, topology = trainer.model, trainer.model.topology
    routed = {id(p): layer for layer in model.moe_layers() for p in layer.experts.parameters()}
    share = min(1.0, model.config.k / (model.config.experts or 1))
    whole = active = 0.0
    for replica in list_replicas(model, topology):
        parameter, layer = replica.parameter, routed.get(id(replica.parameter))
        ranks = math.prod(getattr(topology, axis).size for axis in replica.sharding)
        size = parameter.numel() * ranks
        # With a dynamic placement a rank owns any number of experts.
        if layer is not None and layer.placed is not None:
            size = parameter.shape[1:].numel() * layer.gate.experts * ranks // topology.ep.size
        whole += size
        active += size * (share if layer is not None else 1.0)
    return round(whole), round(active)
