"""The benchmark of one GPU: every kernel, the passes of a layer, and other libraries beside it, against the limit.

`python -m bench.gpu` (`make bench-gpu`) runs all of it; `--help` says how. The parts, each a file:

- shapes.py: the eight layers; case.py: random inputs of one of them
- clock.py: how a step is timed; limits.py: what the GPU can do at the most, and the least time that follows
- kernels.py, ours.py, peers/: what is timed; reference.py: that it is right, before; memory.py: what it keeps
- spread.py, ranks.py: layers over virtual ranks of the GPU, by puts and by copies
- suite.py: from a shape to rows; spool.py: rows as they come; session.py: a process that measures, and its time
- results.py: from rows to one file of results; device.py: where they come from
- checks.py, exercise.py: the tests, and the kernels under compute-sanitizer
- run.py: all of it in the time given
"""
