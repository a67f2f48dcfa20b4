"""Routers, from tokens [T, D] to logits [T, E]; module `NAME` implements gate type `NAME`."""
