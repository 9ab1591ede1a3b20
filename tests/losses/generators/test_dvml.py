import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from ssl_sec.losses import TripletLoss
from ssl_sec.losses.generators.base import GlobalBatch
from ssl_sec.losses.generators.dvml import VariationalSynthesis
from tests.losses.cases import DIM, rows
from tests.losses.generators.batches import CASES, FEATURES, LABELS, batch, head, moved, under_autocast

ALL = slice(0, len(LABELS))
FIRST, SECOND = (0.7, 1.3, 0.1, 1.0), (0.8, 1.1, 0.2, 0.9)


def synthesis(**options):
    values = {"draws": 3, "first_phase_steps": 10, "first_weights": FIRST, "second_weights": SECOND, "seed": 1}
    return VariationalSynthesis(FEATURES, DIM, hidden_dim=6, **{**values, **options}).double()


def named(found, given, embed):
    return {
        "features": given.features,
        "embeddings": given.embeddings,
        **{f"head.{name}": parameter for name, parameter in embed.named_parameters()},
        **dict(found.named_parameters()),
    }


@pytest.mark.parametrize("step", [3, 10])
@pytest.mark.parametrize("name", CASES)
def test_the_shares_are_the_papers_term_by_term(name, step):
    found, given, case = synthesis().requires_grad_(False), batch(step=step), CASES[name]
    given.embeddings.requires_grad_(False), given.features.requires_grad_(False)
    loss = case.build()
    shares = found(given, ALL, head(), loss)
    noise = found._noise(step, given.embeddings).tolist()
    generated, reconstruction, divergence = 0.0, 0.0, 0.0
    for t in range(3):
        drawn = []
        for i, row in enumerate(given.features):
            mean, log_variance = found.mean(row), found.log_variance(row)
            drawn.append(
                torch.stack(
                    [
                        given.embeddings[i, j] + mean[j] + math.exp(log_variance[j] / 2) * noise[t][i][j]
                        for j in range(DIM)
                    ]
                )
            )
            reconstruction += (row - found.decoder(drawn[-1])).square().sum().sqrt().item() / (3 * len(LABELS))
            if t == 0:
                posterior = Normal(mean, (log_variance / 2).exp())
                divergence += kl_divergence(posterior, Normal(0.0, 1.0)).sum().item() / len(LABELS)
        generated += sum(case.slow_terms(loss, torch.stack(drawn), LABELS)) / 3
    of_divergence, of_reconstruction, of_generated, of_batch = FIRST if step == 3 else SECOND
    assert shares.generated_loss.item() == pytest.approx(generated, rel=1e-10)
    expected = of_divergence * divergence + of_reconstruction * reconstruction
    assert shares.generator_loss.item() == pytest.approx(expected, rel=1e-10)
    assert shares.classifier_loss.item() == 0
    assert found.weights(step) == (of_batch, of_generated)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("unchecked_types")  # hundreds of calls; the other tests check the types
def test_the_gradients_are_right(name):
    """The second phase's: with the target of the reconstruction as a constant."""
    found, loss = synthesis(first_phase_steps=0), CASES[name].build()

    def of(embeddings, weight, bias):
        found.mean.weight.data.copy_(weight.detach())
        parameters = {"mean.weight": weight, "log_variance.bias": bias}
        given = GlobalBatch(features=rows(len(LABELS), FEATURES), embeddings=embeddings, labels=LABELS, step=3)
        shares = torch.func.functional_call(found, parameters, (given, ALL, head(), loss))
        return shares.generated_loss, shares.generator_loss

    weight, bias = (each.detach().clone().requires_grad_() for each in (found.mean.weight, found.log_variance.bias))
    assert torch.autograd.gradcheck(of, (batch().embeddings, weight, bias))


def test_each_loss_trains_the_parameters_of_the_paper():
    branches = {f"{branch}.{kind}" for branch in ("mean", "log_variance") for kind in ("weight", "bias")}
    decoder = {f"decoder.{place}.{kind}" for place in (0, 2) for kind in ("weight", "bias")}
    for step in (3, 10):
        alone = {"first_weights": (0.0, 1.0, 0.1, 1.0), "second_weights": (0.0, 1.0, 0.1, 1.0)}
        found, given, embed = synthesis(**alone), batch(step=step), head()
        shares = found(given, ALL, embed, TripletLoss())
        tensors = named(found, given, embed)
        assert moved(shares.generated_loss, tensors) == {"features", "embeddings", *branches}
        # No gradient goes past the decoder in the first phase.
        beyond = set() if step == 3 else {"features", "embeddings", *branches}
        assert moved(shares.generator_loss, tensors) == {*decoder, *beyond}
    alone = {"first_weights": (1.0, 0.0, 0.1, 1.0)}
    found, given, embed = synthesis(**alone), batch(), head()
    shares = found(given, ALL, embed, TripletLoss())
    assert moved(shares.generator_loss, named(found, given, embed)) == {"features", *branches}


def test_the_features_that_are_reconstructed_do_not_move_toward_the_reconstruction():
    found, given = synthesis(first_phase_steps=0, second_weights=(0.0, 1.0, 0.0, 0.0)), batch()
    torch.nn.init.zeros_(found.mean.weight), torch.nn.init.zeros_(found.log_variance.weight)
    shares = found(given, ALL, head(), TripletLoss())
    assert moved(shares.generator_loss, {"features": given.features, "embeddings": given.embeddings}) == {"embeddings"}


def test_the_shares_of_a_partition_add_up():
    found, given, embed = synthesis(), batch(), head()
    whole = found(given, ALL, embed, TripletLoss())
    parts = [found(given, part, embed, TripletLoss()) for part in (slice(0, 3), slice(3, 4), slice(4, 10))]
    torch.testing.assert_close(torch.stack(whole), torch.stack([torch.stack(part) for part in parts]).sum(0))


def test_a_variation_like_the_prior_has_no_divergence():
    found = synthesis(first_weights=(1.0, 0.0, 0.0, 0.0))
    for parameter in [*found.mean.parameters(), *found.log_variance.parameters()]:
        torch.nn.init.zeros_(parameter)
    assert found(batch(), ALL, head(), TripletLoss()).generator_loss.item() == 0


def test_draws_depend_on_seed_step_draw_and_row_alone():
    found = synthesis()
    few, many = (found._noise(4, rows(count, DIM)) for count in (4, 10))
    assert torch.equal(few, many[:, :4])
    assert few.unique().numel() == few.numel()
    assert not torch.isin(few, found._noise(5, rows(4, DIM))).any()
    assert not torch.isin(few, synthesis(seed=2)._noise(4, rows(4, DIM))).any()


def test_it_computes_in_single_precision_under_autocast():
    without, under = under_autocast(synthesis(), TripletLoss())
    assert torch.equal(without, under)


def test_equal_reconstructions_have_a_finite_gradient():
    found, given = synthesis(), batch()
    torch.nn.init.zeros_(found.decoder[2].weight), torch.nn.init.zeros_(found.decoder[2].bias)
    with torch.no_grad():
        given.features.zero_()
    shares = found(given, ALL, head(), TripletLoss())
    (gradient,) = torch.autograd.grad(shares.generator_loss, found.decoder[2].bias)
    assert torch.equal(gradient, torch.zeros(FEATURES, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 0}, r"draws: found 0"),
        ({"first_phase_steps": -1}, r"first_phase_steps: found -1, must be ≥ 0"),
        ({"first_weights": (1.0, 1.0, 0.1)}, r"first_weights: found \[1.0, 1.0, 0.1\], must be four numbers"),
        ({"first_weights": (1.0, 1.0, -0.1, 1.0)}, r"first_weights: found -0.1, must be ≥ 0"),
        ({"second_weights": (1.0, 1.0, 0.1, math.nan)}, r"second_weights: found nan"),
        ({"hidden_dim": 0}, r"hidden_dim: found 0"),
    ],
)
def test_a_value_outside_its_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        VariationalSynthesis(FEATURES, DIM, **options)
