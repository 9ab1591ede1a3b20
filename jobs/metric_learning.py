"""Deep metric learning: python -m jobs.metric_learning experiment=cars196_triplet_sec data.root=<folder>."""

from ssl_sec.__main__ import main

if __name__ == "__main__":
    main("metric_learning")
