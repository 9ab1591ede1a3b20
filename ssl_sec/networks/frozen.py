"""Frozen batch norms, and the replacement of batch norms by others in their places."""

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.lazy import LazyModuleMixin


class FrozenBatchNorm(_BatchNorm):
    """Batch normalisation of [batch, channels, ...] by the running statistics, also in training; never trained."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Accepts both rows and maps."""

    def train(self, mode: bool = True) -> "FrozenBatchNorm":
        """Stays in evaluation mode."""
        super().train(mode)
        self.training = False
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the running statistics."""
        return through_children(self, super().forward(input))


def freeze_batch_norm(module: nn.Module) -> nn.Module:
    """Replaces every batch norm in `module` by a frozen one, whose weights take no gradients; names are kept.

    As in SEC's metric learning (appendix B.1).
    """
    module = replace_batch_norm(module, FrozenBatchNorm)
    for layer in module.modules():
        if isinstance(layer, FrozenBatchNorm):
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    return module


def replace_batch_norm(module: nn.Module, kind: type[_BatchNorm]) -> nn.Module:
    """Turns every batch norm in `module` into one of `kind`, in place: it stays where it is, with all that it has.

    Frozen ones are kept: they use no statistics of the batch.

    Raises:
        ValueError: a batch norm is lazy and does not know its channels yet.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, LazyModuleMixin) and isinstance(layer, _BatchNorm):
            raise ValueError(
                f"batch norm {name or type(layer).__name__}: found a lazy one without channels; run the network once "
                "before"
            )
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, (kind, FrozenBatchNorm)):
            layer.__class__ = kind
            layer.train(layer.training)
    return module


def through_children(layer: _BatchNorm, outputs: Tensor) -> Tensor:
    """Applies the layers inside a batch norm: timm's batch norms contain a dropout and the activation."""
    for child in layer.children():
        outputs = child(outputs)
    return outputs
