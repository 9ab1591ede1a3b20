"""Deep variational metric learning (DVML): variation within classes as a distribution (Lin et al. 2018).

The head's embedding z_I of an image holds what its class has in common; two further linear layers give mean μ and
log-variance log σ² of the variation, from the backbone's features x. With T draws

    ẑ = z_I + z_V,    z_V = μ + σ ε,    ε ~ N(0, I),    x̂ = decoder(ẑ),

and J dimensions, B images, the objective is λ₁ L₁ + λ₂ L₂ + λ₃ L₃ + λ₄ L₄:

    L₁ = −1/(2B) Σ_i Σ_j (1 + log σ²_ij − μ²_ij − σ²_ij)        the distance from N(0, I)
    L₂ = 1/(TB) Σ_i Σ_t ‖x_i − x̂_it‖₂                           the reconstruction
    L₃ = the metric loss of the ẑ, L₄ = that of the z_I.

In a first phase no gradient of L₂ goes past the decoder; in the second one it reaches all layers.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.losses.base import Loss
from ssl_sec.losses.generators.base import GlobalBatch, RowGenerator, Shares, initialised
from ssl_sec.losses.geometry import norms
from ssl_sec.rules import Range, check
from ssl_sec.seeding import derived_seed, mix, normal

# λ₁ to λ₄.
Weights = tuple[float, ...]


class VariationalSynthesis(RowGenerator):
    """DVML: rows with other variations, drawn from a learned distribution (Lin et al. 2018).

    L₃ is the mean over the draws, each of which is a batch of its own. Draws depend on the seed, the step and the row
    alone. The features that are reconstructed are a constant: they do not move toward what the decoder makes of them.

    Args:
        num_features: width of the backbone's features.
        dim: dimensions of the embeddings.
        draws: draws T ≥ 1 for each image in each step.
        first_phase_steps: steps of the first phase, ≥ 0.
        first_weights: λ₁ to λ₄ in the first phase, each ≥ 0.
        second_weights: λ₁ to λ₄ in the second phase, each ≥ 0.
        hidden_dim: width of the decoder's hidden layer, ≥ 1.
        seed: seed of the initial weights and the draws.
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        draws: int = 20,
        first_phase_steps: int = 1500,
        first_weights: Weights = (1.0, 1.0, 0.1, 1.0),
        second_weights: Weights = (0.8, 1.0, 0.2, 0.8),
        hidden_dim: int = 512,
        seed: int = 0,
    ) -> None:
        super().__init__()
        Range(ge=1, le=2**20).check("draws", draws)
        Range(ge=0).check("first_phase_steps", first_phase_steps)
        for name, weights in (("first_weights", first_weights), ("second_weights", second_weights)):
            check(len(weights) == 4, name, list(weights), "four numbers, λ₁ to λ₄")
            for weight in weights:
                Range(ge=0).check(name, weight)
        Range(ge=1, le=2**20).check("hidden_dim", hidden_dim)
        self.draws = draws
        self.first_phase_steps = first_phase_steps
        self.first_weights = first_weights
        self.second_weights = second_weights
        self.seed = seed
        with initialised(seed):
            self.mean = nn.Linear(num_features, dim)
            self.log_variance = nn.Linear(num_features, dim)
            self.decoder = nn.Sequential(nn.Linear(dim, hidden_dim), nn.Tanh(), nn.Linear(hidden_dim, num_features))

    def extra_repr(self) -> str:
        """The values that define the generator."""
        phases = f"first_phase_steps={self.first_phase_steps}, weights={self.first_weights}, {self.second_weights}"
        return f"draws={self.draws}, {phases}"

    def weights(self, step: int) -> tuple[float, float]:
        """λ₄ and λ₃."""
        _, _, of_generated, of_batch = self._weights(step)
        return of_batch, of_generated

    def forward(self, batch: GlobalBatch, anchors: slice, head: nn.Module, loss: Loss) -> Shares:
        """The shares of the draws' metric losses, and of the distance from N(0, I) and the reconstruction."""
        with torch.autocast(batch.embeddings.device.type, enabled=False):
            features, embeddings = batch.features, batch.embeddings
            mean, log_variance = self.mean(features), self.log_variance(features)
            variations = mean + torch.exp(log_variance / 2) * self._noise(batch.step, embeddings)
            generated = embeddings + variations
            metric_losses = [loss(each, batch.labels, anchors) for each in generated]
            decoded_from = generated[:, anchors]
            if batch.step < self.first_phase_steps:
                decoded_from = decoded_from.detach()
            errors = features[anchors].detach() - self.decoder(decoded_from)
            reconstruction = norms(errors.flatten(0, 1)).sum() / (self.draws * len(batch.labels))
            exponents = (mean.square() + log_variance.exp() - 1 - log_variance)[anchors]
            divergence = exponents.sum() / (2 * len(batch.labels))
            of_divergence, of_reconstruction, _, _ = self._weights(batch.step)
            return Shares(
                generated_loss=torch.stack(metric_losses).mean(),
                generator_loss=of_divergence * divergence + of_reconstruction * reconstruction,
                classifier_loss=divergence.new_zeros(()),
            )

    def _weights(self, step: int) -> Weights:
        return self.first_weights if step < self.first_phase_steps else self.second_weights

    def _noise(self, step: int, like: Float[Tensor, "batch dim"]) -> Float[Tensor, "draws batch dim"]:
        """ε of each draw of each row, a function of (seed, step, draw, row) alone."""
        draws, rows, columns = (torch.arange(size, device=like.device) for size in (self.draws, *like.shape))
        keys = mix(mix(draws + derived_seed(self.seed, "variation", step)).unsqueeze(1) + rows)
        return normal(mix(keys.unsqueeze(2) + columns), like.dtype)
