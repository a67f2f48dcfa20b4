"""Checkpoints of W ranks as one, and one as those of W ranks: `python -m fusedmoe.tutel.checkpoint.gather --help`."""
