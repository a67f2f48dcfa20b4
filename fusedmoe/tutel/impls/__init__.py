"""Implementations of Tutel's public modules, under the names that clients import from."""
