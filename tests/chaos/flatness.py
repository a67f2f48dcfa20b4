"""`make flat`: many steps, topologies, plans and checkpoints in one process, whose memory and handles must not grow."""

from __future__ import annotations

import gc
import random
import re
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusedmoe.runtime.progress import ProgressBar
from fusedmoe.training import load_checkpoint, save_checkpoint
from tests.chaos.command import parser_of, write_record
from tests.chaos.conditions import conditions
from tests.chaos.jobs import Rank, Spec
from tests.chaos.ranks import held
from tests.cluster import Cluster

DESCRIPTION = """\
Two ranks live through many rounds: in each a topology and a model on it are made, trained for ten steps and dropped. In
half of the rounds the steps follow a plan, in a quarter a checkpoint is saved and loaded again. The layouts take turns:
EP, ESP, chunks that overlap, blocks in micro-batches.

At the start, after each quarter of the rounds and at the end each rank counts what it holds: threads, open files by
kind, child processes, mappings of shared memory, Python's objects, resident memory, and keys in the job's store (some
for each process group that is made, which PyTorch leaves there: counted, not judged). The command ends with 1 where the
end has more of anything than the first quarter, 50 more objects, or 16 MB more of memory.
"""

EXAMPLES = """\
examples:
  a look, half a minute:   python -m tests.chaos.flatness --rounds 40
  the record of the house: python -m tests.chaos.flatness --json bench/results/flatness.json
"""

STEPS, LAYOUTS = 10, ("ep 2", "esp 2", "chunks 2", "blocks 2")
DONE, PATIENCE_S = "done", 3600.0
#: Allowed growth in three quarters of the rounds: allocator fragmentation and cache contents.
MORE_BYTES, MORE_OBJECTS = 16 * 2**20, 50


def live_long(rank: int, world: int, folder: str, rounds: int) -> list[dict[str, Any]]:
    """Run the rounds on one rank and sample its resources; a file in the folder counts completed rounds."""
    rng, did, found = random.Random(rank), Counter[str](), []

    def look() -> None:
        gc.collect()
        has = {"resident_bytes": resident_bytes(), "objects": len(gc.get_objects())}
        has["store_keys"] = dist.distributed_c10d._get_default_store().num_keys()
        found.append({**did, **has, "held": dict(_without_names(held()))})

    looks = {round(rounds * quarter / 4) for quarter in range(1, 5)}
    look()
    for number in range(rounds):
        counts = tuple(tuple(rng.randint(1, 9) for _ in range(STEPS)) for _ in range(world))
        kind = "plan" if number % 4 < 2 else "train"
        job = Rank(rank, Spec(kind, LAYOUTS[number % 4], number, counts, folder=folder, timeout_s=60.0))
        job.run()
        if number % 4 == 0:
            where = Path(folder, "checkpoint"), job.model, job.optimizer, job.topology
            save_checkpoint(*where)
            load_checkpoint(*where)
        did += Counter(rounds=1, steps=STEPS, topologies=1, plans=kind == "plan", checkpoints=number % 4 == 0)
        job.topology.close()
        del job
        if rank == 0:
            Path(folder, DONE).write_text(str(number + 1))
        if number + 1 in looks:
            look()
    return found


def _without_names(found: Counter[str]) -> Counter[str]:
    """Merge file descriptors, whose names depend on the machine."""
    kept = Counter[str]()
    for what, count in found.items():
        kept["descriptor of a file" if re.match("descriptor /(?!dev/)", what) else what] += count
    return kept


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def growth(looks: list[dict[str, Any]]) -> list[str]:
    """Describe the growth of one rank from the first quarter to the end."""
    _, early, *_, last = looks
    more = Counter(last["held"]) - Counter(early["held"])
    grown = [f"{count} more of {what!r}" for what, count in more.items()]
    if (grew := last["objects"] - early["objects"]) > MORE_OBJECTS:
        grown.append(f"{grew} more objects of Python")
    if (grew := last["resident_bytes"] - early["resident_bytes"]) > MORE_BYTES:
        grown.append(f"{grew / 2**20:.0f} MB more resident memory")
    return grown


def lives(rounds: int) -> list[list[dict[str, Any]]]:
    """Return the resource samples of both ranks."""
    cluster = Cluster()
    with tempfile.TemporaryDirectory() as folder, watched(Path(folder, DONE), rounds):
        try:
            found = cluster.run(2, live_long, folder, rounds, timeout_s=PATIENCE_S)
        finally:
            cluster.close()
        left = sorted(path.name for path in Path(folder).iterdir())
        assert left == sorted([DONE, "checkpoint"]), left
    return found


@contextmanager
def watched(file: Path, rounds: int) -> Iterator[None]:
    """Show the number of completed rounds from that file, while the context is open."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            bar.show(int(file.exists() and file.read_text() or 0), rounds)

    with ProgressBar("rounds") as bar:
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def main() -> int:
    parser = parser_of("tests.chaos.flatness", DESCRIPTION, EXAMPLES)
    parser.add_argument("--rounds", type=int, default=200, help="of ten steps and a topology each (default: 200)")
    given = parser.parse_args()
    if given.rounds < 4 * len(LAYOUTS):
        parser.error(f"--rounds {given.rounds} must be at least {4 * len(LAYOUTS)}: each layout once in a quarter")
    where, began = conditions(), time.monotonic()
    ranks = lives(given.rounds)
    problems = [f"rank {rank}: {text}" for rank, looks in enumerate(ranks) for text in growth(looks)]
    record = {**where, "seconds": round(time.monotonic() - began, 1), "problems": problems, "ranks": ranks}
    write_record(record, given.json)
    for rank, looks in enumerate(ranks):
        for look in looks:
            threads = sum(count for what, count in look["held"].items() if what.startswith("thread"))
            files = sum(count for what, count in look["held"].items() if what.startswith("descriptor"))
            print(
                f"rank {rank} after {look.get('steps', 0)} steps and {look.get('topologies', 0)} topologies: "
                f"{threads} threads, {files} descriptors, {look['held']['mapping']} shared mappings, "
                f"{look['resident_bytes'] / 2**20:.1f} MB, "
                f"{look['objects']} objects of Python, {look['store_keys']} keys in the job's store"
            )
    print("\n".join(problems) or "nothing has grown")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
