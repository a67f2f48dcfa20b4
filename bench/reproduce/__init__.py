"""Figures printed in the four papers, compared with this library's results."""
