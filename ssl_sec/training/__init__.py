"""The train step and everything it needs, the same for every recipe, runtime and number of workers."""
