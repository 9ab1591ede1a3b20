"""MLflow: the run of a run, its figures, its pages, and the runs that it has."""
