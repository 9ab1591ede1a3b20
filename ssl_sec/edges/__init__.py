"""What knows the frameworks: Hydra, Ray, MLflow, and how they meet in a run."""
