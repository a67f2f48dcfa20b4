"""Figures that the four papers print, beside what this library gives for them."""
