"""Tutel's launchers, for the environment of Open MPI or torchrun."""
