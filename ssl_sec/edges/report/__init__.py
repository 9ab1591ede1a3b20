"""Reports: results of runs compared with the papers, figures, and comparisons of two runs."""
