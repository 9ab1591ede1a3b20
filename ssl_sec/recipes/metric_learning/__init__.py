"""Deep metric learning."""
