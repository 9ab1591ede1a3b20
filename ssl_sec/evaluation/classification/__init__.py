"""Measures of classifiers of frozen features, beyond the accuracy on a whole labelled set."""
