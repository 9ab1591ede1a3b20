import math

from tests.losses.slow.geometry import distance, dot, mean, negatives, positives, square, unit


def ntxent(rows, labels, temperature):
    rows = [unit(row) for row in rows]
    terms = []
    for i, row in enumerate(rows):
        denominator = sum(math.exp(dot(row, other) / temperature) for k, other in enumerate(rows) if k != i)
        own = [-math.log(math.exp(dot(row, rows[j]) / temperature) / denominator) for j in positives(labels, i)]
        terms.append(mean(own) / len(rows))
    return terms


def supcon(rows, labels, temperature):
    rows = [unit(row) for row in rows]
    anchors = [i for i in range(len(rows)) if positives(labels, i)]
    terms = [0.0] * len(rows)
    for i in anchors:
        denominator = sum(math.exp(dot(rows[i], other) / temperature) for k, other in enumerate(rows) if k != i)
        each = [math.log(math.exp(dot(rows[i], rows[p]) / temperature) / denominator) for p in positives(labels, i)]
        terms[i] = -1 / len(each) * sum(each) / len(anchors)
    return terms


def dcl(rows, labels, temperature):
    rows = [unit(row) for row in rows]
    terms = []
    for i, row in enumerate(rows):
        at_positives = mean([dot(row, rows[p]) / temperature for p in positives(labels, i)])
        of_negatives = sum(math.exp(dot(row, rows[k]) / temperature) for k in negatives(labels, i))
        terms.append((-at_positives + math.log(of_negatives)) / len(rows))
    return terms


def contrastive(rows, labels, margin):
    rows = [unit(row) for row in rows]
    pairs = len(rows) * (len(rows) - 1)
    return [
        sum(
            square(row, rows[j]) if labels[i] == labels[j] else max(0, margin - square(row, rows[j]))
            for j in range(len(rows))
            if j != i
        )
        / pairs
        for i, row in enumerate(rows)
    ]


def triplet(rows, labels, margin):
    rows = [unit(row) for row in rows]
    count = sum(len(positives(labels, a)) * len(negatives(labels, a)) for a in range(len(rows)))
    return [
        sum(
            max(0, square(rows[a], rows[p]) - square(rows[a], rows[n]) + margin)
            for p in positives(labels, a)
            for n in negatives(labels, a)
        )
        / count
        for a in range(len(rows))
    ]


def triplet_disjoint(rows, labels, margin):
    rows = [unit(row) for row in rows]
    terms = [0.0] * len(rows)
    for a in range(0, len(rows), 3):
        term = square(rows[a], rows[a + 1]) - square(rows[a], rows[a + 2]) + margin
        terms[a] = max(0, term) / (len(rows) / 3)
    return terms


def semihard(rows, labels, margin):
    rows = [unit(row) for row in rows]
    count = sum(len(positives(labels, a)) for a in range(len(rows)))
    terms = []
    for a, row in enumerate(rows):
        term = 0
        for p in positives(labels, a):
            at_positive = square(row, rows[p])
            at_negatives = [square(row, rows[n]) for n in negatives(labels, a)]
            beyond = [d for d in at_negatives if d > at_positive]
            term += max(0, at_positive - (min(beyond) if beyond else max(at_negatives)) + margin)
        terms.append(term / count)
    return terms


def npair_normalized(rows, labels, scale):
    rows = [unit(row) for row in rows]
    pairs = {}
    for i, label in enumerate(labels):
        pairs.setdefault(label, []).append(i)
    pairs = {label: members[:2] for label, members in pairs.items() if len(members) > 1}
    terms = [0.0] * len(rows)
    for label, (a, p) in pairs.items():
        at_negatives = [dot(rows[a], rows[pair[1]]) for other, pair in pairs.items() if other != label]
        at_positive = dot(rows[a], rows[p])
        terms[a] = math.log(1 + sum(math.exp(scale * (s - at_positive)) for s in at_negatives)) / len(pairs)
    return terms


def npair(rows, labels):
    terms = []
    for a, row in enumerate(rows):
        if not positives(labels, a):
            terms.append(0.0)
            continue
        p = positives(labels, a)[0]
        total = sum(math.exp(dot(row, rows[n]) - dot(row, rows[p])) for n in negatives(labels, a))
        terms.append(math.log(1 + total) / len(rows))
    return terms


def multi_similarity(rows, labels, epsilon, threshold, alpha, beta):
    rows = [unit(row) for row in rows]
    terms = []
    for a, row in enumerate(rows):
        at_positives = [dot(row, rows[p]) for p in positives(labels, a)]
        at_negatives = [dot(row, rows[n]) for n in negatives(labels, a)]
        if not at_positives or not at_negatives:
            terms.append(0.0)
            continue
        kept_negatives = [s for s in at_negatives if s + epsilon > min(at_positives)]
        kept_positives = [s for s in at_positives if s - epsilon < max(at_negatives)]
        if not kept_positives or not kept_negatives:
            terms.append(0.0)
            continue
        pulled = math.log(1 + sum(math.exp(-alpha * (s - threshold)) for s in kept_positives)) / alpha
        pushed = math.log(1 + sum(math.exp(beta * (s - threshold)) for s in kept_negatives)) / beta
        terms.append((pulled + pushed) / len(rows))
    return terms


def circle(rows, labels, scale, margin):
    rows = [unit(row) for row in rows]
    terms = []
    for a, row in enumerate(rows):
        at_positives = [dot(row, rows[p]) for p in positives(labels, a)]
        at_negatives = [dot(row, rows[n]) for n in negatives(labels, a)]
        pulled = sum(math.exp(-scale * max(0, 1 + margin - s) * (s - (1 - margin))) for s in at_positives)
        pushed = sum(math.exp(scale * max(0, s + margin) * (s - margin)) for s in at_negatives)
        terms.append(math.log(1 + pulled * pushed))
    count = sum(bool(positives(labels, a)) for a in range(len(rows)))
    return [term / count for term in terms]


def lifted_structure(rows, labels, margin):
    rows = [unit(row) for row in rows]
    count = sum(len(positives(labels, a)) for a in range(len(rows)))
    terms = []
    for i, row in enumerate(rows):
        term = 0
        for j in positives(labels, i):
            repulsion = sum(math.exp(margin - distance(row, rows[k])) for k in negatives(labels, i))
            repulsion += sum(math.exp(margin - distance(rows[j], rows[k])) for k in negatives(labels, j))
            term += max(0, math.log(repulsion) + distance(row, rows[j])) ** 2 / 2
        terms.append(term / count)
    return terms


def ranked_list(rows, labels, margin, alpha, negative_temperature, positive_temperature, imbalance):
    rows = [unit(row) for row in rows]

    def weighted(values, temperature):
        weights = [math.exp(temperature * value) for value in values]
        return dot(weights, values) / sum(weights) if values else 0.0

    terms = []
    for i, row in enumerate(rows):
        too_far = [distance(row, rows[p]) - (alpha - margin) for p in positives(labels, i)]
        too_near = [alpha - distance(row, rows[n]) for n in negatives(labels, i)]
        pulled = weighted([v for v in too_far if v > 0], positive_temperature)
        pushed = weighted([v for v in too_near if v > 0], negative_temperature)
        terms.append(((1 - imbalance) * pulled + imbalance * pushed) / len(rows))
    return terms


def angular(rows, labels, alpha_degrees):
    rows = [unit(row) for row in rows]
    squared = math.tan(math.radians(alpha_degrees)) ** 2
    terms = []
    for a, row in enumerate(rows):
        if not positives(labels, a):
            terms.append(0.0)
            continue
        other = rows[positives(labels, a)[0]]
        both = [x + y for x, y in zip(row, other, strict=True)]
        exponents = [
            4 * squared * dot(both, rows[n]) - 2 * (1 + squared) * dot(row, other) for n in negatives(labels, a)
        ]
        terms.append(math.log(1 + sum(math.exp(f) for f in exponents)) / len(rows))
    return terms


def angular_hinge(rows, labels, alpha_degrees):
    terms = [0.0] * len(rows)
    for a in range(0, len(rows), 3):
        anchor, positive, negative = rows[a : a + 3]
        centre = [(x + y) / 2 for x, y in zip(anchor, positive, strict=True)]
        bound = 4 * math.tan(math.radians(alpha_degrees)) ** 2 * square(negative, centre)
        terms[a] = max(0, square(anchor, positive) - bound) / (len(rows) / 3)
    return terms


def npair_angular(rows, labels, alpha_degrees, weight):
    return [
        first + weight * second
        for first, second in zip(npair(rows, labels), angular(rows, labels, alpha_degrees), strict=True)
    ]


def byol(predictions, targets, labels):
    """Against the rows of a teacher."""
    rows, keys = [unit(row) for row in predictions], [unit(row) for row in targets]
    return [mean([square(row, keys[p]) for p in positives(labels, i)]) / len(rows) for i, row in enumerate(rows)]


def mocov3(predictions, targets, labels, temperature):
    """Likewise; rows are compared to the views of other numbers."""
    rows, keys = [unit(row) for row in predictions], [unit(row) for row in targets]
    view = [labels[:i].count(label) for i, label in enumerate(labels)]
    terms = []
    for i, row in enumerate(rows):
        others = [j for j in range(len(keys)) if view[j] != view[i]]
        denominator = sum(math.exp(dot(row, keys[j]) / temperature) for j in others)
        each = [math.log(math.exp(dot(row, keys[p]) / temperature) / denominator) for p in positives(labels, i)]
        terms.append(-2 * temperature * mean(each) / len(rows))
    return terms
