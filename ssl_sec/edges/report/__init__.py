"""What the runs gave, beside what the papers report."""
