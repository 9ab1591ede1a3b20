"""What the package costs, beside its peers; each module is a command and leaves its figures in `results/`."""
