"""Tutel's launchers: ranks from Open MPI's or torchrun's environment."""
