"""The train step and all that it needs, the same for every recipe, runtime and number of workers."""
