"""Benchmark of one GPU: every kernel, the passes of a layer, and other libraries, compared with hardware limits.

`python -m bench.gpu` (`make bench-gpu`) runs everything; see `--help`. Files:

- run.py: a run within a time budget; steps.py: its parts, and four steps for a new GPU; part.py, process.py: context of
  a part, monitored processes; rehearsal.py, pretend.py: runs without a GPU
- shapes.py: the nine layers; case.py: random inputs of a layer
- precompile.py: compiles all launches ahead of time (`bench.aot`)
- checks.py, exercise.py: tests, and kernels under compute-sanitizer; pool.py, notes.py: parallel tests
- verify.py: correctness of the grouped products' configurations; correctness.py, apart.py: of one, in its own process
- whole.py, training.py: a layer in a CUDA graph, compiled, without synchronisation; the training job
- clock.py: step timing; limits.py: measured peak rates and the resulting minimum time
- kernels.py, ours.py, peers/: measured operations; reference.py: their check; memory.py: saved memory
- spread.py, ranks.py: layers over virtual ranks of the GPU, with one-sided puts and with copies
- suite.py: from a shape to rows; spool.py: incremental results; session.py: a measuring process and its budget;
  suites.py: a sequence of these processes
- results.py: results file; device.py: provenance; once.py: one kernel for a profiler
- gluon_first.py: first runs of the Gluon form on a GPU; two_procs.py: a layer over two processes on one GPU
"""
