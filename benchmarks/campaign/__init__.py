"""All measurements on a GPU, in parts that can be resumed; see `python -m benchmarks.campaign --help`."""
