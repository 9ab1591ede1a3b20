"""What knows the frameworks: Hydra, Ray, MLflow, and how they meet in a run."""

from ssl_sec.edges.environment import complete

complete()  # before anything imports MLflow, which looks for a home at once
