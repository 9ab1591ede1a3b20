"""Batch normalisation by the statistics of the global batch.

Worker w has n_w values a channel with mean m_w and sum of squared deviations M_w. Over all of them (Chan et al.)

    m = Σ n_w m_w / n,    M = Σ (M_w + n_w (m_w − m)²),    x̂ = (x − m) / √(M/n + ε),    y = γ x̂ + β .

Backward, with sums over the values of all workers,

    ∂x = γ / √(M/n + ε) · (∂y − Σ∂y / n − x̂ · Σ(∂y x̂) / n) .

One gather forward and one sum backward; `state_dict` is that of `torch.nn.BatchNorm2d`. SimCLR calls this
global BN; SEC uses it (appendix B.3).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from ssl_sec.collectives import gather_rows, sum_over_workers, world_size
from ssl_sec.networks.frozen import replace_batch_norm, through_children


class _GlobalBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        count, mean, variance = _statistics(images)
        # One gather for all of a worker's statistics.
        own = torch.cat([count, mean, variance * count])
        counts, means, deviations = gather_rows(own.unsqueeze(0)).split([1, len(mean), len(mean)], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (deviations + counts * (means - mean).square()).sum(0) / total
        ctx.save_for_backward(images, weight, mean, variance, total)
        ctx.eps = eps
        outputs, _, _ = torch.native_batch_norm(images, weight, bias, mean, variance, False, 0.0, eps)
        ctx.mark_non_differentiable(mean, variance, total)
        return outputs, mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        images, weight, mean, variance, total = ctx.saved_tensors
        scale = torch.rsqrt(variance + ctx.eps)
        # With given statistics, as in evaluation, the gradients of weight and bias are the two sums. CUDA's kernel
        # takes the statistics from where training saves its own.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad_outputs[0], images, weight, mean, variance, mean, scale, False, ctx.eps, [False, True, True]
        )
        sums = sum_over_workers(torch.stack([grad_bias, grad_weight]))
        # Inductor would copy the maps of a kernel that it does not know to another layout, and fuses the formula below.
        if images.is_cuda and not torch.compiler.is_compiling():
            return (
                _gradient_on_gpu(grad_outputs[0], images, weight, mean, scale, sums, total),
                grad_weight,
                grad_bias,
                None,
            )
        sum_bias, sum_weight = sums / total
        # The formula of the module, as a linear combination of ∂y and x.
        of_grad = weight * scale
        of_images = -of_grad * scale * sum_weight
        offset = -of_grad * sum_bias - of_images * mean
        shape = [1, -1, *[1] * (images.dim() - 2)]
        of_grad, of_images, offset = (each.view(shape) for each in (of_grad, of_images, offset))
        grad_images = offset + of_images * images.to(mean.dtype)
        grad_images.addcmul_(of_grad, grad_outputs[0].to(mean.dtype))
        return grad_images.to(images.dtype), grad_weight, grad_bias, None


def _statistics(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number of values a channel, with shape (1,), and their means and variances, in float32 or better."""
    # On a GPU the kernel adds values in half precision up in float32.
    values = images if images.is_cuda or images.dtype == torch.float64 else images.float()
    mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)  # ten times as fast as var_mean
    return mean.new_full((1,), float(values.numel() // values.shape[1])), mean, variance


def _gradient_on_gpu(
    grad: Tensor, images: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, sums: Tensor, total: Tensor
) -> Tensor:
    """The formula of the module in one launch, which reads and writes maps in their own precision.

    Args:
        grad: ∂y.
        images: x.
        weight: γ.
        mean: m.
        scale: 1 / √(M/n + ε).
        sums: Σ∂y and Σ(∂y x̂) over all workers.
        total: n.
    """
    # Both in the same layout: the kernel assumes equal strides.
    layout = torch.contiguous_format
    if images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last):
        layout = torch.channels_last
    grad, images = grad.contiguous(memory_format=layout), images.contiguous(memory_format=layout)
    sum_grad, sum_grad_images = sums
    return torch.batch_norm_backward_elemt(
        grad, images, mean, scale, weight, sum_grad, sum_grad_images / scale, total.to(torch.int32).reshape(1)
    )


class GlobalBatchNorm(_BatchNorm):
    """Batch normalisation of [batch, channels, ...] by the global batch; plain batch norm with one worker."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"GlobalBatchNorm: found {input.dim()} dimensions, needs [batch, channels, ...]")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises by the batch's statistics in training, by the running ones in evaluation.

        Args:
            input: [batch, channels, ...]; this worker's rows.
        """
        if world_size() == 1 or not self.training:
            return through_children(self, super().forward(input))
        self._check_input_dim(input)
        weight = self.weight if self.weight is not None else input.new_ones(input.shape[1])
        bias = self.bias if self.bias is not None else input.new_zeros(input.shape[1])
        outputs, mean, variance, total = _GlobalBatchNormFunction.apply(input, weight, bias, self.eps)  # pyright: ignore[reportGeneralTypeIssues]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked += 1
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_((variance * total / (total - 1)).to(self.running_var.dtype), momentum)
        return through_children(self, outputs)


def globalise_batch_norm(module: nn.Module) -> nn.Module:
    """Replaces every batch norm in `module` by the global one, keeping parameters, buffers and names.

    Frozen ones are kept.
    """
    return replace_batch_norm(module, GlobalBatchNorm)
