"""Distribute tests over processes that share the GPU; a hang or crash costs only the test in question."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.gpu.part import Outcome, Place, size
from bench.gpu.spool import Record, Spool

# A test compiles up to some dozens of kernels on its own core.
_TEST_S = 90
_SILENCE_S = _TEST_S + 15.0
# Processes per share before giving up.
_TRIES = 6
# Exit statuses of pytest for import and option errors.
_UNUSABLE = (2, 4)
# The last is a test interrupted by the time limit.
_RESULTS = ("passed", "skipped", "failed", "did not end", "was running")


def run_tests(place: Place, paths: Sequence[str], count: int, most: int | None = None) -> Outcome:
    """Run tests under `paths` in `count` processes; `most`: tests per process, for a rehearsal."""
    with ThreadPoolExecutor(count) as threads:
        return judge([*threads.map(lambda index: _share(place, paths, index, count, most), range(count))])


def _share(place: Place, paths: Sequence[str], index: int, count: int, most: int | None) -> list[Record]:
    """Return the records of one share; the last is "broken" if no process could continue."""
    notes = place.scratch / f"{place.who.replace(' ', '-')}-{index}.notes"
    options = ["-p", "bench.gpu.notes", "--notes", str(notes), "--share", f"{index}/{count}"]
    options += [] if most is None else ["--most", str(most)]
    # By a thread: a signal does not reach a test that waits in the driver.
    options += ["-p", "no:cacheprovider", "--timeout", str(_TEST_S), "--timeout-method", "thread"]
    for _ in range(_TRIES):
        begun = len(Spool(notes).of("begin"))
        command = ["-m", "pytest", *paths, *options]
        one_core = {"OMP_NUM_THREADS": "1"}
        ended = place.run(command, one_core, who=str(index), silence_s=_SILENCE_S, sign=lambda: size(notes))
        spool = Spool(notes)
        for work in spool.unfinished():
            how = ended.why or f"its process ended with {ended.code}"
            result = "did not end" if place.left > 0 else "was running"
            spool.add("end", name=work["name"], result=result, text=f"{how}\n{ended.output[-4000:]}")
        collected = spool.of("collected")
        if ended.code in _UNUSABLE:
            break
        if place.left < 1 or (collected and len(spool.of("begin")) >= collected[0]["count"]):
            return spool.records
        if len(spool.of("begin")) == begun:  # ended before the first test
            break
    spool.add("broken", word=f"its process ended with {ended.code}", text=ended.output[-4000:])
    return spool.records


def judge(shares: Sequence[Sequence[Record]]) -> Outcome:
    """Combine the outcomes of all shares."""
    records = [record for share in shares for record in share]
    ended: dict[str, list[Record]] = {result: [] for result in _RESULTS}
    for record in records:
        if record["event"] == "end":
            ended[record["result"]].append(record)
    # A share that continues in another process is collected again.
    counts = [next((record["count"] for record in share if record["event"] == "collected"), None) for share in shares]
    total = sum(count or 0 for count in counts)
    missing = total - sum(map(len, ended.values()))
    left_out = sorted({record["word"] for record in records if record["event"] == "left out"})
    words = [f"{len(found)} {result}" for result, found in ended.items() if found]
    words += [f"{missing} not run"] * (missing > 0) + [f"{len(left_out)} configurations not used"] * bool(left_out)
    named = [record for result in _RESULTS[2:] for record in ended[result]]
    broken = [record for record in records if record["event"] == "broken"]
    texts = [f"{record['result'].upper()}: {record['name']}\n{record['text']}" for record in named]
    texts += [f"A SHARE OF THE TESTS BROKE OFF: {record['word']}\n{record['text']}" for record in broken]
    words += [record["word"] for record in broken]
    names = ", ".join(record["name"].rsplit("/", 1)[-1] for record in named)
    word = (", ".join(words) or "no test was found") + f": {names}" * bool(names)
    found = {result: [record["name"] for record in ended[result]] for result in _RESULTS[2:]} | {"not used": left_out}
    if ended["failed"] or ended["did not end"] or broken or (None not in counts and not total):
        result = "failed"
    else:
        result = "unfinished" if missing or None in counts or ended["was running"] else "passed"
    return Outcome(result, word, "\n\n".join(texts), found)
