"""The benchmark of one GPU: every kernel, the passes of a layer, and other libraries beside it, against the limit.

`python -m bench.gpu` (`make bench-gpu`) runs all of it; `--help` says how. The parts, each a file:

- run.py: all of it in the time given; steps.py: what "all" is, and four steps for a GPU that nobody has used before;
  part.py, process.py: what a part works with, and processes that are watched; rehearsal.py, pretend.py: without a GPU
- shapes.py: the nine layers; case.py: random inputs of one of them
- precompile.py: what they launch, compiled before (`bench.aot`)
- checks.py, exercise.py: the tests, and the kernels under compute-sanitizer; pool.py, notes.py: tests side by side
- verify.py: which configurations of the grouped products are right; correctness.py, apart.py: one of them, in a process
- whole.py, training.py: a layer in a graph, compiled, without waits; the main job
- clock.py: how a step is timed; limits.py: what the GPU can do at the most, and the least time that follows
- kernels.py, ours.py, peers/: what is timed; reference.py: that it is right, before; memory.py: what it keeps
- spread.py, ranks.py: layers over virtual ranks of the GPU, by puts and by copies
- suite.py: from a shape to rows; spool.py: rows as they come; session.py: a process that measures, and its time;
  suites.py: such processes one after the other
- results.py: from rows to one file of results; device.py: where they come from; once.py: one kernel for a profiler
- gluon_first.py: the Gluon form's first minutes on a GPU; two_procs.py: a layer over two processes that share one
"""
