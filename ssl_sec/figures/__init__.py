"""Figures drawn from numbers with matplotlib, which no package below imports."""

# The file of a run with the numbers behind its figures, by the names of its comparisons.
NUMBERS = "numbers.json"
