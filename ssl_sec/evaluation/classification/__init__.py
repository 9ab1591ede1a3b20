"""What classifiers of frozen features are measured by, beyond one accuracy on a whole labelled set."""
