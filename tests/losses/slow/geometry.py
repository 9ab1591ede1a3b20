import math


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def unit(row):
    length = math.sqrt(dot(row, row))
    return [x / length for x in row] if length else row


def square(a, b):
    """d² = ‖â − b̂‖² of two unit rows."""
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def distance(a, b):
    return math.sqrt(square(a, b))


def positives(labels, i):
    return [j for j, label in enumerate(labels) if label == labels[i] and j != i]


def negatives(labels, i):
    return [j for j, label in enumerate(labels) if label != labels[i]]


def mean(values):
    return sum(values) / len(values)
