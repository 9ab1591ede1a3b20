"""The code that uses Hydra, Ray and MLflow, and joins them in a run."""

from ssl_sec.edges.environment import complete

complete()  # before MLflow is imported, which needs a home folder
