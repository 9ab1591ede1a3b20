"""All that is measured on a GPU, in parts that go on where they stopped; see `python -m benchmarks.campaign --help`."""
