"""Every loss, term by term from its equation, in Python's own numbers.

Each function takes rows and labels as lists, and what defines the loss; it returns the terms of the anchors, in the
order of the rows, whose sum is the loss.
"""

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


def cross_entropies(logits, labels):
    return [
        -math.log(math.exp(z[y]) / sum(math.exp(v) for v in z)) / len(labels)
        for z, y in zip(logits, labels, strict=True)
    ]


def softmax(rows, labels, weight):
    return cross_entropies([[dot(row, w) for w in weight] for row in rows], labels)


def softmax_bias(rows, labels, weight, bias):
    assert bias
    return cross_entropies([[dot(row, w[:-1]) + w[-1] for w in weight] for row in rows], labels)


def agent_distortion(rows, agents):
    """NormFace, Proposition 3: one term for each row as f_0, and the bound."""
    rows, agents = [unit(row) for row in rows], [unit(agent) for agent in agents]
    others = [[j for j in range(len(rows)) if j != i] for i in range(len(rows))]
    terms = [
        mean([(distance(row, rows[j]) - distance(row, agents[j])) ** 2 for j in others[i]]) / len(rows)
        for i, row in enumerate(rows)
    ]
    return terms, mean([square(row, agent) for row, agent in zip(rows, agents, strict=True)])


def l2softmax(rows, labels, weight, scale):
    return cross_entropies([[scale * dot(unit(row), w) for w in weight] for row in rows], labels)


def modified_softmax(rows, labels, weight):
    return cross_entropies([[dot(row, unit(w)) for w in weight] for row in rows], labels)


def with_margin(rows, labels, weight, scale, harder):
    logits = []
    for row, label in zip(rows, labels, strict=True):
        angles = [math.acos(max(-1, min(1, dot(unit(row), unit(w))))) for w in weight]
        logits.append([scale * (harder(a) if k == label else math.cos(a)) for k, a in enumerate(angles)])
    return cross_entropies(logits, labels)


def normface(rows, labels, weight, scale):
    return with_margin(rows, labels, weight, scale, math.cos)


def sphereface(rows, labels, weight, scale, margin):
    def harder(angle):
        k = min(math.floor(margin * angle / math.pi), margin - 1)
        return (-1) ** k * math.cos(margin * angle) - 2 * k

    return with_margin(rows, labels, weight, scale, harder)


def cosface(rows, labels, weight, scale, margin):
    return with_margin(rows, labels, weight, scale, lambda angle: math.cos(angle) - margin)


def arcface(rows, labels, weight, scale, margin_radians):
    def harder(angle):
        shifted = angle + margin_radians
        return math.cos(shifted) if shifted <= math.pi else -2 - math.cos(shifted)

    return with_margin(rows, labels, weight, scale, harder)


def magface(rows, labels, weight, scale, norm_weight, **bounds):
    least, greatest = bounds["least_norm"], bounds["greatest_norm"]
    lower, upper = bounds["least_margin_radians"], bounds["greatest_margin_radians"]
    terms = []
    for row, label in zip(rows, labels, strict=True):
        length = min(max(math.sqrt(dot(row, row)), least), greatest)
        margin = (upper - lower) / (greatest - least) * (length - least) + lower
        (of_angle,) = arcface([row], [label], weight, scale, margin)
        terms.append((of_angle + norm_weight * (1 / length + length / greatest**2)) / len(rows))
    return terms


def adaface(rows, labels, weight, scale, margin, concentration):
    lengths = [math.sqrt(dot(row, row)) for row in rows]
    centre = mean(lengths)
    deviation = math.sqrt(sum((x - centre) ** 2 for x in lengths) / max(len(rows) - 1, 1))
    terms = []
    for row, label, length in zip(rows, labels, lengths, strict=True):
        quality = min(max(concentration * (length - centre) / (deviation + 1e-3), -1), 1)

        def harder(angle, quality=quality):
            return math.cos(min(max(angle - margin * quality, 0), math.pi)) - (margin + margin * quality)

        terms.append(with_margin([row], [label], weight, scale, harder)[0] / len(rows))
    return terms


def c_contrastive(rows, labels, weight, margin):
    agents = [unit(w) for w in weight]
    return [
        sum(square(unit(row), w) if k == y else max(0, margin - square(unit(row), w)) for k, w in enumerate(agents))
        / len(rows)
        for row, y in zip(rows, labels, strict=True)
    ]


def proxy_anchor(rows, labels, weight, scale, margin):
    proxies, present = [unit(w) for w in weight], sorted(set(labels))
    cosine = [[dot(unit(row), proxy) for proxy in proxies] for row in rows]
    first_rows = {labels.index(k): k for k in present}
    terms = []
    for i in range(len(rows)):
        own = [cosine[j][first_rows[i]] for j, y in enumerate(labels) if y == first_rows[i]] if i in first_rows else []
        pull = math.log(1 + sum(math.exp(-scale * (each - margin)) for each in own)) / len(present)
        pushes = [
            math.log(1 + sum(math.exp(scale * (cosine[j][k] + margin)) for j, y in enumerate(labels) if y != k))
            for k in range(i * len(proxies) // len(rows), (i + 1) * len(proxies) // len(rows))
        ]
        terms.append(pull + sum(pushes) / len(proxies))
    return terms


def c_triplet(rows, labels, weight, margin):
    agents = [unit(w) for w in weight]
    return [
        sum(
            max(0, margin + square(unit(row), agents[y]) - square(unit(row), w)) for k, w in enumerate(agents) if k != y
        )
        / len(rows)
        for row, y in zip(rows, labels, strict=True)
    ]


def c_triplet_center(rows, labels, weight, margin, add_center):
    assert add_center
    terms = []
    for row, y in zip(rows, labels, strict=True):
        squares = [square(unit(row), unit(w)) for w in weight]
        hinges = [margin + squares[y] - squares[k] for k in range(len(weight)) if k != y]
        active = [hinge for hinge in hinges if hinge > 0]
        terms.append((sum(active) if active else squares[y]) / len(rows))
    return terms


def center(rows, labels, centres):
    return [
        sum((x - c) ** 2 for x, c in zip(row, centres[y], strict=True)) / 2 / len(rows)
        for row, y in zip(rows, labels, strict=True)
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
