"""Figures drawn from numbers with matplotlib, which no package below imports."""
