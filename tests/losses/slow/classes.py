import math

from tests.losses.slow.geometry import distance, dot, mean, square, unit


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


def with_margin(rows, labels, weight, scale, harder, sub_centres=1):
    logits = []
    for row, label in zip(rows, labels, strict=True):
        angles = []
        for w in weight:
            parts = [w[i : i + len(row)] for i in range(0, len(w), len(row))]
            assert len(parts) == sub_centres
            angles.append(min(math.acos(max(-1, min(1, dot(unit(row), unit(part))))) for part in parts))
        logits.append([scale * (harder(a) if k == label else math.cos(a)) for k, a in enumerate(angles)])
    return cross_entropies(logits, labels)


def normface(rows, labels, weight, scale):
    return with_margin(rows, labels, weight, scale, math.cos)


def sphereface(rows, labels, weight, scale, margin):
    def harder(angle):
        k = min(math.floor(margin * angle / math.pi), margin - 1)
        return (-1) ** k * math.cos(margin * angle) - 2 * k

    return with_margin(rows, labels, weight, scale, harder)


def cosface(rows, labels, weight, scale, margin, sub_centres=1):
    return with_margin(rows, labels, weight, scale, lambda angle: math.cos(angle) - margin, sub_centres)


def arcface(rows, labels, weight, scale, margin_radians, sub_centres=1):
    def harder(angle):
        shifted = angle + margin_radians
        return math.cos(shifted) if shifted <= math.pi else -2 - math.cos(shifted)

    return with_margin(rows, labels, weight, scale, harder, sub_centres)


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
