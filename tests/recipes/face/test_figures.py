import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssl_sec.edges.folder.folder import RunFolder
from ssl_sec.evaluation.faces.roc import equal_error_rate
from ssl_sec.recipes.face.figures import (
    COMPARISONS,
    Discards,
    HardPairs,
    Verification,
    discards_figure,
    hardest_pairs_figure,
    histograms_figure,
    measure,
    roc_figure,
    scores_figure,
)
from tests.figures.test_directions import legend_of, shares_shown
from tests.figures.test_training import draw


def verified(count=400, gap=0.4, spread=0.15, seed=0) -> Verification:
    same = torch.arange(count) % 4 == 0
    return Verification((gap * same + spread * draw(count, seed=seed)).clamp(-1, 1), same)


def curve(figure, place=0):
    line = figure.axes[0].lines[place]
    return line.get_xdata(), line.get_ydata()


@settings(max_examples=15)
@given(
    scores=st.lists(st.integers(-3, 3), min_size=3, max_size=30),
    same=st.lists(st.booleans(), min_size=28, max_size=28),
)
def test_the_curve_is_the_true_accept_rate_at_each_false_accept_rate(scores, same):
    given = Verification(torch.tensor(scores) / 4, torch.tensor([True, False, *same])[: len(scores)])
    x, y = curve(roc_figure({"a": given}, ""))
    genuine, impostors = given.scores[given.same], given.scores[~given.same].sort(descending=True).values
    num_impostors = len(impostors)
    assert x == pytest.approx(np.arange(1, num_impostors + 1) / num_impostors)
    for accepted, shown in enumerate(y.tolist(), start=1):
        beaten = impostors[accepted] if accepted < num_impostors else -torch.inf
        assert shown == pytest.approx(100 * (genuine > beaten).double().mean().item())


def test_all_test_sets_are_in_one_plot_over_a_logarithmic_axis():
    given = {"lfw": verified(), "cfp_fp": verified(count=1200, gap=0.2)}
    figure = roc_figure(given, "ROC")
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and axes.get_title() == "ROC"
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "false accept rate (share of the impostors)",
        "true accept rate (%)",
    )
    assert legend_of(axes) == [f"{name}: EER {100 * equal_error_rate(*one):.2f} %" for name, one in given.items()]
    assert {line.get_drawstyle() for line in axes.lines} == {"steps-post"}
    low, high = axes.get_ylim()
    assert low < min(curve(figure, place)[1].min() for place in (0, 1)) and high > 100
    assert len({line.get_color() for line in axes.lines}) == 2


def test_discards_are_drawn_up_to_half_of_the_pairs_beside_the_rate_without_them():
    quality, refused = torch.arange(10.0), torch.arange(10) < 4
    figure = discards_figure(
        {"lfw": Discards(quality, refused, 0.1), "all": Discards(quality, refused | True, 1e-3)}, ""
    )
    shares, rates = curve(figure)
    assert shares == pytest.approx([0, 10, 20, 30, 40, 50])
    assert rates == pytest.approx([40, 100 / 3, 25, 100 / 7, 0, 0])
    assert curve(figure, 1)[1] == pytest.approx([40, 40])
    assert legend_of(figure.axes[0]) == ["lfw, FAR 10 %, AUC 100.0 %", "all, FAR 0.1 %", "nothing discarded"]


def test_scores_of_both_kinds_and_the_threshold_between_them():
    scores = torch.tensor([-0.5, 0.0, 0.1, 0.35, 0.3, 0.6, 0.7, 0.9])
    same = torch.tensor([False, False, False, False, True, True, True, True])
    other = verified()
    figure = scores_figure({"lfw": Verification(scores, same), "other": other}, "cosines", num_bins=20)
    low, high = torch.cat([scores, other.scores]).aminmax()
    low, high = low.item(), high.item()
    assert figure.get_suptitle() == "cosines" and [axes.get_title() for axes in figure.axes] == ["lfw", "other"]
    axes = figure.axes[0]
    assert legend_of(axes) == [
        f"two people: {scores[:4].mean():z.2f} ± {scores[:4].std(correction=0):.2f}",
        f"one person: {scores[4:].mean():.2f} ± {scores[4:].std(correction=0):.2f}",
        "threshold 0.20: 87.50 % right",
    ]
    assert axes.lines[0].get_xdata()[0] == pytest.approx(0.2)
    for kind, chosen in (("two people", scores[:4]), ("one person", scores[4:])):
        counts, _ = np.histogram(chosen.double().numpy(), np.linspace(low, high, 21))
        assert shares_shown(axes, kind) == pytest.approx(100 * counts / 4)
    assert axes.get_xlim() == figure.axes[1].get_xlim() == pytest.approx((low - 0.02, high + 0.02))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_each_test_set_has_a_panel(number):
    figure = scores_figure({f"set {place}": verified(seed=place) for place in range(number)}, "")
    assert [axes.get_title() for axes in figure.axes] == [f"set {place}" for place in range(number)]


@pytest.mark.parametrize("value", [0.25, 1.0, torch.nan])
def test_scores_that_are_all_the_same_or_not_finite(value):
    same = torch.arange(40) % 4 == 0
    given = {"collapsed": Verification(torch.full((40,), value), same)}
    (axes,) = scores_figure(given, "").axes
    suffix = ": none" if value != value else f": {value:.2f} ± 0.00"
    assert legend_of(axes)[:2] == [f"two people{suffix}", f"one person{suffix}"]
    assert ("75.00 % right" in legend_of(axes)[2]) == (value == value)
    figure = roc_figure(given, "")
    assert curve(figure)[1].tolist() == [0] * (len(curve(figure)[1]) - 1) + [0 if value != value else 100]
    assert legend_of(figure.axes[0]) == [f"collapsed: EER {100 if value != value else 50:.2f} %"]
    figure.draw_without_rendering()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_hardest_pairs_are_drawn_one_image_above_the_other(channels):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (4, 3, channels, 6, 5), generator=generator, dtype=torch.uint8)
    different = HardPairs(pixels[0], pixels[1], torch.tensor([0.9, 0.8, 0.71]))
    same = HardPairs(pixels[2, :2], pixels[3, :2], torch.tensor([-0.1, 0.25]))
    figure = hardest_pairs_figure(different, same, "lfw")
    assert figure.get_suptitle() == "lfw"
    above, below = figure.subfigs
    assert (above.get_suptitle(), below.get_suptitle()) == (
        "two people, most similar (cosine)",
        "one person, least similar (cosine)",
    )
    assert [axes.get_title() for axes in above.axes] == ["0.90", "0.80", "0.71", "", "", ""]
    assert [axes.get_title() for axes in below.axes] == ["-0.10", "0.25", "", "", "", ""]
    for part, pairs in ((above, different), (below, same)):
        for row, images in enumerate((pairs.first, pairs.second)):
            for column, image in enumerate(images):
                shown = part.axes[3 * row + column].images[0].get_array()
                assert np.array_equal(np.squeeze(shown), image.permute(1, 2, 0).squeeze(2 if channels == 1 else ()))
    assert not below.axes[2].images and not below.axes[5].images


def test_the_cosines_of_the_test_sets_pairs_are_kept_as_plain_values(tmp_path):
    scores, same = torch.tensor([0.5, 0.9, -0.5, torch.nan]), torch.tensor([True, True, False, False])
    folder = RunFolder(tmp_path)
    torch.save({"scores": scores, "same": same}, folder.test_set_path("lfw"))
    found = json.loads(json.dumps(measure(folder)))
    pairs = found["cosines"]["lfw"]
    assert pairs["positives"]["mean"] == pytest.approx(0.7) and sum(pairs["positives"]["counts"]) == 2
    assert pairs["negatives"]["mean"] == -0.5 and sum(pairs["negatives"]["counts"]) == 1  # NaN has no place
    (tmp_path / "numbers.json").write_text(json.dumps(found))
    read = COMPARISONS["cosines"].read(tmp_path / "numbers.json")
    figure, rows = COMPARISONS["cosines"].draw({"run": [read]}, "cosines")
    assert figure.get_suptitle() == "cosines, lfw"
    assert max(row["share_percent"] for row in rows if row["pairs"] == "negative") == 100


def test_histograms_are_rows_of_pairs_from_minus_1_to_1():
    different, same = torch.rand(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    same = same[:2] / same[:2].sum(1, keepdim=True)
    different[1] = torch.nan
    figure = histograms_figure(different, same, "ytf")
    assert [axes.get_title() for axes in figure.axes[:2]] == ["3 pairs of two people", "2 pairs of one person"]
    for axes, shares in zip(figure.axes, (different, same), strict=False):
        (image,) = axes.images
        assert image.get_extent() == [-1, 1, len(shares), 0]
        assert np.allclose(image.get_array().filled(np.nan), 100 * shares.numpy(), equal_nan=True)
        assert image.norm.vmax == pytest.approx(100 * different.nan_to_num().max().item())
    nothing = torch.full((2, 10), torch.nan)
    figure = histograms_figure(nothing, nothing, "")
    figure.draw_without_rendering()
    assert all(axes.images[0].get_array().mask.all() for axes in figure.axes[:2])
