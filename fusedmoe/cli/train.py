"""Train a mixture-of-experts language model.

Trains a mixture-of-experts transformer on bytes of text and prints its held-out loss.

Started by torchrun, its ranks form the layout of the paper: experts spread over the nodes
(EP), each expert and the attention split inside a node (ESP, MP), data parallel over the
rest. Started alone, it is one process that does all of it.

Everything lies in one run folder, runs/<date-time>: config.json (every setting, and what
was chosen), metrics.jsonl (a line a step, and every ten steps what the routing was like:
max_vio, dead experts, router entropy, dropped rows, tokens a second and more, as
fusedmoe.metrics has them), checkpoint/, and the timeline of one step on every rank as
timeline.png and as trace.json, for ui.perfetto.dev and chrome://tracing. loads.json has what
the gates chose, step by step, and loads.png is a picture of it.

--placement fssdp owns each expert once in the world and copies the popular ones, step by
step, to the ranks that would otherwise send them their tokens (Hecate); losses stay.

--schedule auto hides what travels behind what is computed: tokens in chunks, gradients in
buckets during the backward pass. What this machine and the parts of this model take is measured
once and kept; then the most promising plans run in turn in the first steps, and the fastest one is
kept. The folder also has costs.json, plan.txt and schedule.json, to which a resumed job keeps, and
parts.txt, the drawn step beside its prediction.

--survive N keeps the state, every N steps, in the host memory of two nodes. When a rank or a node is
lost, torchrun starts the ranks anew on the nodes that are left, and they go on from there; no step
counts twice. A node that comes back is taken in again. A line after the first step says what it costs.

Ctrl-C finishes the step, saves and ends; --resume goes on to the same losses.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedmoe import Topology, keep_memory
from fusedmoe.cli.data import Corpus, load_corpus
from fusedmoe.cli.job import (
    Launch,
    Sizes,
    StopRequest,
    choose_device,
    choose_sizes,
    in_words,
    make_topology,
    process_group,
    settle,
)
from fusedmoe.cli.run_dir import LoadLog, RunDir
from fusedmoe.cli.settings import Commands, Settings, add_flags, add_parser, changes_of, describe, read_settings
from fusedmoe.cli.step_plans import compute_dtype, follows_plan, policy_followed, table_of
from fusedmoe.cli.survive import Survivor, check_launcher, end_with_launcher, fitting_sizes, leave
from fusedmoe.cli.trainer import Trainer
from fusedmoe.comm import all_gather_object
from fusedmoe.errors import ConfigError, RankError, printable
from fusedmoe.files import read_text, write_kept, write_text
from fusedmoe.layers.measure import measured_costs
from fusedmoe.metrics import Metrics
from fusedmoe.runtime.cache import cached_profile, choice_text
from fusedmoe.runtime.progress import make_display
from fusedmoe.schedule import CostModel, Timeline, draw
from fusedmoe.schedule.draw import MAX_TIMELINES
from fusedmoe.schedule.refit import compare
from fusedmoe.schedule.timeline import save_trace
from fusedmoe.training import load_checkpoint, save_checkpoint
from fusedmoe.training.checkpoint_folder import saved_at
from fusedmoe.training.copies import replicas

EXAMPLES = """\
examples:
  one process:
    fusedmoe train
  4 ranks of this machine as 2 nodes of 2:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --ranks-per-node 2
  go on where a job stopped (its settings come with it; flags that are given override):
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --resume runs/2026-01-31_12-00-00
  a paper's model, fewer layers, another gate, experts in 16 bits on the wire:
    fusedmoe train --model GPT2-Tiny-MoE --layers 4 --gate gshard --wire-dtype bf16 --steps 50
  communication hidden behind computation:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --ranks-per-node 2 --schedule auto
  experts copied to where their tokens are:
    torchrun --standalone --nproc-per-node 4 -m fusedmoe train --ranks-per-node 2 --placement fssdp
  2 nodes, of which either may be lost (on each; "meet" is a host that does not train):
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 100
      --rdzv-backend c10d --rdzv-endpoint meet:29500 --rdzv-id job
      --rdzv-conf last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3
      -m fusedmoe train --survive 10 --timeout 60
  your own text:
    fusedmoe train --data ~/notes --pattern '*.md' --seq-len 256
"""

#: Steps between two collections of metrics.
METRICS_EVERY = 10
STOPPED = 130  # exit code of a job that saved and stopped at a request, as shells report Ctrl-C


def add_command(commands: Commands) -> None:
    """Adds `train` to the commands of `fusedmoe`."""
    parser = add_parser(commands, "train", __doc__, EXAMPLES, run)
    where = parser.add_argument_group("run folder")
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="a new folder (default: runs/<date-time>)")
    where.add_argument("--resume", type=Path, metavar="DIR", help="the run folder of a job to go on with")
    where.add_argument("--stop-at", type=int, metavar="N", help="save a checkpoint and stop after step N")
    add_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns the exit code. Errors that every rank finds alike are raised as `ConfigError`."""
    launch = Launch.from_environment()
    changes = changes_of(arguments)
    if arguments.resume is not None and arguments.run_dir is not None:
        raise ConfigError("--resume goes on in the folder of its run: leave out --run-dir")
    if arguments.stop_at is not None and arguments.stop_at < 1:
        raise ConfigError(f"--stop-at {arguments.stop_at} must be at least 1")
    settings = (Settings() if arguments.resume is None else read_settings(arguments.resume)).changed(changes)
    if settings.survive:
        check_launcher()
        end_with_launcher()
    sizes, settings = settle(settings, launch, fitting_sizes if settings.survive else choose_sizes)
    policy_followed(settings, sizes)  # refuses before the machine is measured, and before a folder is made
    device, stop = choose_device(settings, launch), StopRequest()
    if device.type == "cpu":
        keep_memory()  # each step allocates tensors of the same sizes: page faults once, not in each step
    with ExitStack() as held:
        # With --survive torchrun may end a rank while it waits for others: SIGTERM must then end the process.
        if not settings.survive:
            held.enter_context(stop)
        held.enter_context(process_group(launch, device, settings.timeout_s))
        survivor = Survivor(launch, settings) if settings.survive else None
        if survivor is not None:
            # A restarted rank knows only its flags; the note in the node's memory has the job's settings.
            settings, sizes = survivor.settings, survivor.sizes
        topology = make_topology(sizes, settings.timeout_s)
        try:
            # An exception that leaves the block ends the other ranks with its text, wherever they wait.
            with topology.guard("fusedmoe train"):
                if survivor is not None:
                    survivor.join(topology)
                job = TrainingJob(settings, launch, sizes, topology, device, stop, survivor)
                verdict = job.run(arguments.run_dir, arguments.resume, arguments.stop_at)
        except RankError as error:
            if survivor is None:
                raise
            # torchrun starts all ranks anew once this process has ended; waiting for an orderly end would take minutes.
            leave(topology, error)
    if launch.rank == 0:
        print(printable(verdict.last_line), flush=True)
    return verdict.code


class JobEnd(NamedTuple):
    """The end of a job: the last line it prints and its exit code."""

    last_line: str
    code: int


class TrainingJob:
    """One job on this rank, from its data to its last checkpoint."""

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
        stop: StopRequest,
        survivor: Survivor | None = None,
    ) -> None:
        self.settings, self.launch, self.sizes = settings, launch, sizes
        self.topology, self.device, self.stop, self.survivor = topology, device, stop, survivor
        self._peak_flops: float | None = None

    def run(self, run_dir: Path | None, resume: Path | None, stop_at: int | None) -> JobEnd:
        """Trains up to the last step, or to `stop_at`, or until asked to stop; then the held-out loss."""
        self.corpus = self._corpus()
        shares = None if self.survivor is None else self.survivor.shares
        self.trainer = Trainer(self.settings, self.topology, self.device, self.corpus, self.stop, shares)
        with closing(self.trainer):
            return self._run(run_dir, resume, stop_at)

    def _run(self, run_dir: Path | None, resume: Path | None, stop_at: int | None) -> JobEnd:
        settings, topology = self.settings, self.topology
        done = 0
        # A note in memory comes before --resume: it belongs to the same job, and memory is never older than the disk.
        if self.survivor is not None and self.survivor.run_dir is not None:
            self.folder = RunDir(self.survivor.run_dir)
            done = self._go_on(self.survivor)
        elif resume is not None:
            self.folder = RunDir(resume)
            done = self._load()
        else:
            self.folder = self._new_folder(run_dir)
        if self.survivor is not None:
            # From here on a restart finds the job, also before its first refresh: it begins anew in the same folder.
            self.survivor.announce(self.folder.path)
        if follows_plan(settings, topology.ep.size, topology.esp.size):
            self._follow()
        last = settings.steps if stop_at is None else min(stop_at, settings.steps)
        if topology.is_first:
            self._open(done, last)
        self.loads = LoadLog(self.folder, topology, f"fusedmoe train, {describe(settings.model)}", done)
        if self.survivor is not None:
            # The first state is kept before the first step, so that no step is lost to a failure in it.
            self.survivor.refresh(self.trainer, done, self._extra(done))
        try:
            # Signals are caught only now, as all ranks are here; before, they had to end a rank that waits.
            late: AbstractContextManager[object] = nullcontext() if self.survivor is None else self.stop
            with late, make_display(topology.rank, settings.steps, done) as self.display:
                done, stopped = self._train(done, last)
            self.loads.draw(f"Loads of experts: {describe(settings.model)}")
        except BrokenPipeError:
            raise  # nobody reads the output any more: no file is to blame
        except (RankError, OSError) as error:
            said = str(error)
            if isinstance(error, OSError):
                writing = f"writing {error.filename or f'a file of {self.folder.path}'}"  # a failing write names none
                topology.stop(writing, error)
                said = f"rank {topology.rank} failed in {writing}: {error.strerror or error}. Make room for it there"
            if saved_at(self.folder.checkpoint) is not None:
                said += f"\nThe last checkpoint stands: --resume {self.folder.path}"
            raise RankError(said) from error
        loss = None
        if not stopped and done == settings.steps:
            if topology.is_first:
                print(f"held-out text: {settings.eval_batches * self.trainer.shares} batches", flush=True)
            loss = self.trainer.held_out_loss()
        # Stopped in training, or while the held-out text was read.
        if loss is None:
            again = f"Start again the same way with: --resume {self.folder.path}"
            code = STOPPED if self.stop.wanted else 0
            return JobEnd(f"stopped after step {done} of {settings.steps}, saved. {again}", code)
        if topology.is_first:
            self.folder.note(done, {"held_out_loss": loss})
            print(printable(f"run folder: {self.folder.path}"))
        return JobEnd(f"held-out loss: {loss:.4f} nats per byte", 0)

    def _follow(self) -> None:
        """Makes the trainer follow its policy's plan, by this machine's costs, or those a resumed job began with."""
        path, trainer = self.folder.costs, self.trainer
        # Only rank 0 may read the folder: on several nodes the others may not see it, or see it late.
        text = read_text(path) if self.topology.is_first and path.exists() else None
        text = all_gather_object(self.topology.world, text, "reading the run folder")[0]
        if text is None:
            profile, _ = cached_profile(self.topology, self.device, dtype=compute_dtype(self.settings))
            costs = trainer.measured(profile.costs)
        else:
            try:
                costs = CostModel.from_json(text)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}; remove it, and this machine is measured again") from error

        def tell(line: str) -> None:
            assert trainer.tuning is not None
            write_text(self.folder.plan, str(trainer.tuning.plan))
            write_kept(self.folder.choice, choice_text(trainer.tuning))
            self.display.say(line)

        # The fastest product that was measured here stands for the device's peak in mfu.
        self._peak_flops = costs.line("gemm").per_s
        plan, _ = trainer.set_plan(costs, self.folder.choice, tell, self._measured)
        if self.topology.is_first:
            write_kept(self.folder.costs, costs.to_json())
            write_text(self.folder.plan, str(plan))

    def _measured(self, again_s: float) -> CostModel:
        """Measures this machine and the model's steps again, for about so many seconds, as steps have drifted."""
        costs = measured_costs(self.topology, self.device, compute_dtype(self.settings), again_s / 2)
        costs = self.trainer.measured(costs, again_s / 2, again=True)
        if self.topology.is_first:
            write_kept(self.folder.costs, costs.to_json())  # a resumed job goes on by them
        return costs

    def _train(self, done: int, last: int) -> tuple[int, bool]:
        """Does steps `done` to `last`; returns how many are done, all saved, and whether a rank was asked to stop."""
        settings, trainer = self.settings, self.trainer
        # A resumed job has drawn its step, but the plan that measuring chooses may be another now.
        drawn = None if trainer.tuning is not None or done <= settings.timeline_step else trainer.followed
        # State that came from memory may be ahead of the disk: then the first save is due whatever `done` is.
        saved, stop, speed = done if self.survivor is None else -1, False, 0.0
        # A refresh runs after a step's line in the metrics is written: its seconds go into the next line.
        told, refreshed = False, dict[str, float]()
        metrics = self._metrics()
        while done < last and not stop:
            values, refreshed = refreshed, {}
            if _is_drawn(settings, done, trainer, drawn):
                drawn = trainer.followed
                # A recorded step waits for each kernel, so it runs once and does not count for tuning.
                report, timeline = trainer.recorded_step(done)
                values["exposed_s"] = self._draw(timeline, done + 1)
            else:
                report = trainer.step(done)
            done, stop = done + 1, report.stop
            load_LE = trainer.load_LE()
            if load_LE is not None:
                self.loads.note(load_LE)
            if metrics is not None and (done % METRICS_EVERY == 0 or done == last or stop):
                # All ranks collect at the same steps: it is an all-reduce.
                values |= metrics.collect()
            if self.topology.is_first:
                facts = {name: value for name, value in vars(report).items() if name != "stop"}
                rate = settings.learning_rate(done - 1)
                self.folder.note(done, facts | {"lr": rate, "time": time.time()} | values)
                now = report.tokens / report.seconds
                # A moving mean: single steps vary with the load of the machine.
                speed = 0.9 * speed + 0.1 * now if speed else now
                self.display.step(done, report.loss, speed)
            # After the step's line in the metrics: a restart goes on from here, and no line may be missing.
            if self.survivor is not None and done % settings.survive == 0:
                refreshed = {"refresh_s": self.survivor.refresh(trainer, done, self._extra(done))}
                # The first refresh came before the first step, when the optimizer had no state: its size says nothing.
                if not told and self.topology.is_first:
                    self.display.say(f"survival: {self.survivor.price(refreshed['refresh_s'])}")
                told = True
            if settings.checkpoint_every and done % settings.checkpoint_every == 0:
                self._save(done)
                saved = done
        if saved != done:
            self._save(done)
        return done, stop

    def _metrics(self) -> Metrics | None:
        """Begins to count what the gates choose; None for a model without experts. Collective."""
        model = self.trainer.model
        if next(model.moe_layers(), None) is None:
            return None
        # 6 FLOP a parameter and token: two for the forward product, four for the gradients of input and weight.
        flops = None if self._peak_flops is None else 6.0 * count_parameters(self.trainer)[1]
        return Metrics(model, flops_per_token=flops, peak_flops=self._peak_flops)

    def _corpus(self) -> Corpus:
        """Reads the text, and checks that it is the same on every rank."""
        settings = self.settings
        source = None if settings.data is None else Path(os.path.expanduser(settings.data))
        corpus = load_corpus(source, settings.pattern, settings.held_out)
        # A rank with other text would train on as if nothing were wrong.
        prints = all_gather_object(self.topology.world, corpus.fingerprint, "comparing the text")
        for rank, fingerprint in enumerate(prints):
            if fingerprint != prints[0]:
                raise RankError(
                    f"rank {rank} reads another text in {corpus.source} than rank 0: give all of them the same files "
                    "with --data (and the same Python, whose library is the default)"
                )
        return corpus

    def _save(self, done: int) -> None:
        trainer, extra = self.trainer, self._extra(done)
        # Loads are gathered before each checkpoint, so that the file has every step that a resumed job skips.
        self.loads.flush()
        save_checkpoint(self.folder.checkpoint, trainer.model, trainer.optimizer, self.topology, extra=extra)
        # Memory must never be older than the disk: a restart takes memory first.
        if self.survivor is not None and done % self.settings.survive:
            self.survivor.refresh(trainer, done, extra)
        trainer.interrupted()

    def _extra(self, done: int) -> dict[str, Any]:
        """Returns what is saved with model and optimizer."""
        moves = self.trainer.sharded_experts
        placement = {} if moves is None else {"placement": moves.state_dict()}
        return {"step": done, "text": self.corpus.fingerprint, **placement}

    def _go_on(self, survivor: Survivor) -> int:
        """Takes up a job whose ranks were started anew, and returns how many steps its state has seen."""
        extra = survivor.restore(self.trainer)
        if extra is not None:
            source, done = "memory", self._taken(extra)
        elif saved_at(self.folder.checkpoint) is not None:
            source = f"the checkpoint {self.folder.checkpoint}: none was whole in memory"
            done = self._load()
        else:
            source, done = "the beginning: none was whole in memory, and there is no checkpoint", 0
        if self.topology.is_first:
            ranks = in_words(self.topology.size)
            print(printable(f"survival: {ranks} go on after step {done} with the state from {source}"), flush=True)
        return done

    def _load(self) -> int:
        """Loads the checkpoint and returns how many steps it has seen."""
        if saved_at(self.folder.checkpoint) is None:
            raise ConfigError(f"{self.folder.path} has no checkpoint: the job ended before its first; start it anew")
        trainer = self.trainer
        return self._taken(load_checkpoint(self.folder.checkpoint, trainer.model, trainer.optimizer, self.topology))

    def _taken(self, extra: dict[str, Any]) -> int:
        """Checks and takes up what was saved with model and optimizer; returns how many steps that has seen."""
        # A checkpoint of another program loads as well where names and shapes agree; its extra data tells.
        if type(extra.get("step")) is not int or "text" not in extra:
            raise ConfigError(f"{self.folder.checkpoint} is of something else than fusedmoe train")
        if extra["text"] != self.corpus.fingerprint and self.topology.is_first:
            print(printable(f"Note: the text in {self.corpus.source} is not what the checkpoint was trained on."))
        if self.trainer.sharded_experts is not None and "placement" in extra:
            self.trainer.sharded_experts.load_state_dict(extra["placement"])
        return int(extra["step"])

    def _open(self, done: int, last: int) -> None:
        """Prints what is about to happen, and writes it to config.json. On rank 0."""
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
        self.folder.write_config(settings, self.launch, sizes, facts)
        self.folder.forget_after(done)
        nodes = topology.size // sizes.ranks_per_node
        print(describe(settings.model))
        print(f"{parameters:,} parameters, {active:,} of them active for a token")
        ranks = in_words(topology.size) + f" ({nodes} × {sizes.ranks_per_node})" * (topology.size > 1)
        layout = f"ep {topology.ep.size}, esp {topology.esp.size}, mp {topology.mp.size}, dp {topology.dp.size}"
        print(f"{ranks} on {self.device.type}: {layout}")
        print(
            f"text: {printable(str(corpus.source))}, {corpus.train_files} files ({len(corpus.train) / 1e6:.1f} MB) to "
            f"train on, {corpus.held_out_files} ({len(corpus.held_out) / 1e6:.1f} MB) held out"
        )
        print(printable(f"run folder: {self.folder.path}"))
        print(_to_do(done, last, settings.steps), flush=True)

    def _draw(self, timeline: Timeline, step: int) -> float:
        """Writes the timelines of all ranks beside the plan (rank 0 does; the others go on), and returns the seconds of
        communication that nothing hid, in the mean of ranks. `step` counts from 1, as metrics and loads do."""
        timelines = all_gather_object(self.topology.world, timeline, "gathering timelines")
        trainer, planned = self.trainer, self.trainer.planned
        if self.topology.is_first:
            plan = f"schedule {trainer.followed}{'' if trainer.settled else ' (tried; none is chosen yet)'}"
            title = f"{self.settings.model.name}, step {step}, {in_words(self.topology.size)}, {plan}"
            save_trace(timelines, self.folder.trace)
            draw(timelines[:MAX_TIMELINES], self.folder.picture, title=title)
            if planned is not None:
                write_text(self.folder.parts, f"step {step}, {plan}\n" + table_of(compare(*planned, timelines)))
        return sum(timeline.exposed_s() for timeline in timelines) / len(timelines)

    def _new_folder(self, run_dir: Path | None) -> RunDir:
        """Makes the folder on rank 0 and returns it on every rank; an error there is an error everywhere."""
        made: Path | ConfigError | None = None
        if self.topology.is_first:
            try:
                made = RunDir.make(run_dir).path
            except (ConfigError, OSError) as error:
                made = ConfigError(str(error))
        path = all_gather_object(self.topology.world, made, "naming the run folder")[0]
        if isinstance(path, ConfigError):
            raise path
        assert path is not None
        return RunDir(path)


def _is_drawn(settings: Settings, step: int, trainer: Trainer, drawn: str | None) -> bool:
    """Returns whether the timeline of a step is drawn: once for each plan that is kept, and at the end if none was.

    `drawn`: the plan of the picture that there is already.
    """
    # A job shorter than the tuning would else end without any picture.
    if drawn is None and step == settings.steps - 1:
        return True
    return step >= settings.timeline_step and trainer.settled and trainer.followed != drawn


def _to_do(done: int, last: int, steps: int) -> str:
    """Says in words which steps follow: from `done` to `last` of all."""
    if done >= last:
        return f"{done} of {steps} steps are done: none is left" + f" until step {last}" * (last < steps)
    if last == steps and not done:
        return f"{steps} steps"
    return f"steps {done + 1} to {last}" + f" of {steps}" * (last < steps)


def count_parameters(trainer: Trainer) -> tuple[int, int]:
    """Counts parameters of the whole model, and those that one token meets. Without communication."""
    model, topology = trainer.model, trainer.model.topology
    # Experts are counted apart: a token meets k of them, and with copies a rank owns any number.
    routed = {id(p): layer for layer in model.moe_layers() for p in layer.experts.parameters()}
    share = min(1.0, model.config.k / (model.config.experts or 1))
    whole = active = 0.0
    for replica in replicas(model, topology):
        parameter, layer = replica.parameter, routed.get(id(replica.parameter))
        ranks = math.prod(getattr(topology, axis).size for axis in replica.sharding)
        size = parameter.numel() * ranks
        # With experts that move a rank owns any number of them: count all experts by the shape of one.
        if layer is not None and layer.placed is not None:
            size = parameter.shape[1:].numel() * layer.gate.experts * ranks // topology.ep.size
        whole += size
        active += size * (share if layer is not None else 1.0)
    return round(whole), round(active)
