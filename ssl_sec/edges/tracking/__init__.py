"""MLflow: runs and their metrics, its pages, and searches for runs."""
