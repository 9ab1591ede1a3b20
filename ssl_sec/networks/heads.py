"""Heads: features -> raw embeddings, which losses normalise and the norm constraint uses as they are."""

from collections import OrderedDict
from typing import Annotated, Literal

from jaxtyping import Float
from torch import Tensor, nn

from ssl_sec.errors import ConfigError, check_option
from ssl_sec.networks.backbones.light_cnn import MFM_BIAS, max_feature_map
from ssl_sec.networks.dropout import GlobalDropout
from ssl_sec.networks.initialisation import caffe_xavier_
from ssl_sec.rules import BelowOne, Range

Dim = Annotated[int, Range(ge=1, le=2**20)]
Initial = Literal["zeros", "normal"]


class ProjectionHead(nn.Module):
    """SimCLR's projection MLP: (linear, batch norm, ReLU) for each hidden layer, then a linear layer.

    The last layer has no batch norm: it would fix the norms of the embeddings, on which the spherical constraint acts.
    A hidden layer has a bias if no batch norm follows it.

    Args:
        num_features: width of the encoder's features.
        hidden_dim: width of the hidden layers; None takes that of the features.
        dim: dimensions of the embeddings.
        num_layers: linear layers, with batch norm and ReLU between them.
        batch_norm: whether the hidden layers have batch norm.
    """

    def __init__(
        self,
        num_features: int,
        hidden_dim: Dim | None = None,
        dim: Dim = 128,
        num_layers: Literal[2, 3] = 2,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        widths = [num_features, *[hidden_dim or num_features] * (num_layers - 1)]
        layers: list[nn.Module] = []
        for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
            normalised = [nn.BatchNorm1d(outputs)] if batch_norm else []
            layers += [nn.Linear(inputs, outputs, bias=not batch_norm), *normalised, nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], dim))

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dim"]:
        """Raw embeddings."""
        return self.layers(features)


class PredictionHead(nn.Sequential):
    """A head and a predictor on its embeddings: BYOL's and MoCo v3's second MLP, which a teacher does not have.

    Args:
        projector: features -> embeddings, like the teacher's head.
        predictor: embeddings -> predictions of the teacher's embeddings.
    """

    def __init__(self, projector: nn.Module, predictor: nn.Module) -> None:
        super().__init__(OrderedDict(projector=projector, predictor=predictor))
        self.projector = projector


class LinearHead(nn.Module):
    """One linear layer, the head of SEC's multi-similarity runs without a constraint (appendix B.1).

    Args:
        num_features: width of the encoder's features.
        dim: dimensions of the embeddings.
        dropout: probability with which an entry of the embeddings is 0 in training.
        seed: seed of the dropout.
    """

    def __init__(self, num_features: int, dim: Dim = 512, dropout: BelowOne = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features, dim)
        self.dropout = GlobalDropout(dropout, dim, seed)

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dim"]:
        """Raw embeddings."""
        return self.dropout(self.fc(features))


class LinearClassifier(LinearHead):
    """One linear layer whose outputs are the logits of the classes.

    If the weights start at 0, classes are equally probable and the first step has no gradient for the encoder; SimCLR's
    fine-tuning draws normal weights of standard deviation 0.01.

    Args:
        num_features: width of the encoder's features.
        dim: number of classes.
        initial: the initial weights; biases are 0.
    """

    def __init__(self, num_features: int, dim: Dim, initial: Initial = "zeros") -> None:
        check_option("initial", initial, Initial)
        super().__init__(num_features, dim)
        nn.init.zeros_(self.fc.bias)
        if initial == "zeros":
            nn.init.zeros_(self.fc.weight)
        else:
            nn.init.normal_(self.fc.weight, std=0.01)


class BatchNormLinearHead(nn.Module):
    """Batch norm, then a linear layer: the head of SEC's other metric learning (appendix B.1).

    Args:
        num_features: width of the encoder's features.
        dim: dimensions of the embeddings.
        dropout: probability with which an entry of the embeddings is 0 in training.
        seed: seed of the dropout.
    """

    def __init__(self, num_features: int, dim: Dim = 512, dropout: BelowOne = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(num_features)
        self.fc = nn.Linear(num_features, dim)
        self.dropout = GlobalDropout(dropout, dim, seed)

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dim"]:
        """Raw embeddings."""
        return self.dropout(self.fc(self.bn(features)))


class LinearBatchNormHead(nn.Module):
    """Dropout, a linear layer, batch norm: the output E of face recognition (ArcFace), after an IR network.

    The scale of the batch norm is fixed at 1, so that the mean of ‖f‖² over a training batch is dim + ‖β‖², with β its
    shift. The norm of a single row is free: the spherical constraint can still act on it.

    Parameter names are those of InsightFace's iresnet.

    Args:
        num_features: width of the encoder's features.
        dim: dimensions of the embeddings.
        dropout: probability with which an entry of the features is 0 in training.
        seed: seed of the dropout.
    """

    def __init__(self, num_features: int, dim: Dim = 512, dropout: BelowOne = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features, dim)
        self.features = nn.BatchNorm1d(dim)
        self.features.weight.requires_grad_(False)
        self.dropout = GlobalDropout(dropout, num_features, seed)

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dim"]:
        """Raw embeddings."""
        return self.features(self.fc(self.dropout(features)))


class MaxoutHead(nn.Module):
    """The elementwise maximum of two linear layers: the last layer of Wu et al. 2015, after the Light CNN.

    Args:
        num_features: width of the encoder's features.
        dim: dimensions of the embeddings.
        dropout: probability with which an entry of the embeddings is 0 in training.
        seed: seed of the dropout.
    """

    def __init__(self, num_features: int, dim: Dim = 256, dropout: BelowOne = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.fc = nn.Linear(num_features, 2 * dim)
        caffe_xavier_(self.fc, MFM_BIAS)
        self.dropout = GlobalDropout(dropout, dim, seed)

    def forward(self, features: Float[Tensor, "batch features"]) -> Float[Tensor, "batch dim"]:
        """Raw embeddings."""
        return self.dropout(max_feature_map(self.fc(features)))


class IdentityHead(nn.Identity):
    """The features are the embeddings.

    Args:
        num_features: width of the encoder's features.
        dim: dimensions of the embeddings; must equal num_features.

    Raises:
        ConfigError: the numbers differ.
    """

    def __init__(self, num_features: int, dim: Dim) -> None:
        super().__init__()
        if dim != num_features:
            allowed = f"{num_features}, the number of features, with head=identity"
            raise ConfigError(f"head.dim: found {dim}, must be {allowed}")


def building(head: nn.Module) -> str:
    """Python code that builds `head` for evaluation, with the same key names and without weights.

    It uses only the modules `torch` and `collections`.

    Args:
        head: a head of this module.
    """
    lines: list[str] = []
    kind = "torch.nn.Sequential"
    if isinstance(head, MaxoutHead):
        kind = "Maxout"
        lines += [
            "class Maxout(torch.nn.Sequential):",
            "    def forward(self, features):",
            "        return torch.maximum(*super().forward(features).chunk(2, dim=1))",
            "",
        ]
    # Every head applies its layers in their order; dropout does nothing in evaluation.
    layers = [
        f"{name}={_layer(layer)}" for name, layer in head.named_children() if not isinstance(layer, GlobalDropout)
    ]
    return "\n".join([*lines, f"head = {kind}(collections.OrderedDict({', '.join(layers)}))"])


def _layer(layer: nn.Module) -> str:
    match layer:
        case nn.Linear():
            bias = "" if layer.bias is not None else ", bias=False"
            return f"torch.nn.Linear({layer.in_features}, {layer.out_features}{bias})"
        case nn.BatchNorm1d():
            return f"torch.nn.BatchNorm1d({layer.num_features})"
        case nn.ReLU():
            return "torch.nn.ReLU()"
        case nn.Sequential():
            return f"torch.nn.Sequential({', '.join(_layer(each) for each in layer)})"
        case _:
            raise AssertionError(f"no head has a {type(layer).__name__}")
