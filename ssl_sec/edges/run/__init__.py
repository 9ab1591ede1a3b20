"""A run from its configuration to its end: driver, workers, runtimes, sweeps."""
