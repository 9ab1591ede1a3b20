"""Every loss, term by term from its equation, in Python's own numbers.

Each function takes rows and labels as lists, and what defines the loss; it returns the terms of the anchors, in the
order of the rows, whose sum is the loss.
"""
