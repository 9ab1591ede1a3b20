"""Which images of a set are trained on: some classes, or all but listed ones."""
