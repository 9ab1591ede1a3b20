"""Figures: matplotlib's, from numbers; nothing below them draws."""
