"""Linear evaluation."""
