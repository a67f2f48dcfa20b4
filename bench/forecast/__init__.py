"""How long a layer's kernels take on Hopper, by a model: tiles, waves, start and end of a tile, caches, memory.

`python -m bench.forecast` prints it; `--help` says what the model takes for granted.

- machine.py: the GPUs; work.py: the tiles that an operation has at a shape
- model.py: seconds of the Triton form, fitted to what was measured, and of each candidate of the Gluon form
- measured.py: what the Triton form was measured to take; tables.py: all of it side by side
"""
