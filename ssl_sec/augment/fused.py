"""SimCLR's views of small colour images in one launch of a GPU (Triton).

One program makes one view, whose pixels stay in registers: it samples the drawn crop bilinearly, mirrors it, distorts
its colours in the drawn order, and converts it to grey. The draws and the operations are kornia's
(`ssl_sec.augment.views.SimCLRAugmentation`); the views differ from kornia's by rounding alone.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

# The numbers drawn for a view, in this order.
NUMBERS = (
    *("left", "top", "pixels_right", "pixels_down", "flipped", "jittered", "greyed"),
    *("brightness", "contrast", "saturation", "hue_turns", "order"),
)


def fused_views(
    images: UInt8[Tensor, "batch 3 height width"],
    numbers: Float[Tensor, "numbers views"],
    size_px: int,
    layout: torch.memory_format = torch.contiguous_format,
) -> Float[Tensor, "views 3 {size_px} {size_px}"]:
    """The views of some images, all first views before all second ones.

    Args:
        images: 0-255, contiguous.
        numbers: values for each view in the order of `NUMBERS`, on the images' device: position of the first pixel and
            steps to the next ones, in pixels of the image; whether it is flipped, jittered and grey (0 or 1); kornia's
            four colour factors, the hue's in turns of the circle; and their order as digits of a number in base 4.
        size_px: side of the views; their pixels must fit into the registers of one program.
        layout: memory layout of the views.
    """
    assert images.is_contiguous()
    batch, channels, height, width = images.shape
    num_views = numbers.shape[1]
    views = torch.empty(
        (num_views, channels, size_px, size_px), dtype=torch.float32, device=images.device, memory_format=layout
    )
    _views_kernel[(num_views,)](
        images, numbers.contiguous(), views, batch, num_views, height, width, size_px,
        views.stride(1), views.stride(3),
        **{"BLOCK": triton.next_power_of_2(size_px**2), "num_warps": 4 if size_px <= 32 else 8},
    )  # fmt: skip
    return views


# Triton reads the source of its functions: the tests' type checks must not wrap them.


@triton.jit
@no_type_check
def _grey(red, green, blue):
    return 0.299 * red + 0.587 * green + 0.114 * blue


@triton.jit
@no_type_check
def _clamped(values):
    return tl.minimum(tl.maximum(values, 0.0), 1.0)


@triton.jit
@no_type_check
def _fraction(values):
    return values - tl.floor(values)


@triton.jit
@no_type_check
def _sampled(plane, upper_left, upper_right, lower_left, lower_right, across, down):
    """Bilinear interpolation in one channel, in [0, 1]."""
    upper = tl.load(plane + upper_left) * (1 - across) + tl.load(plane + upper_right) * across
    lower = tl.load(plane + lower_left) * (1 - across) + tl.load(plane + lower_right) * across
    return (upper * (1 - down) + lower * down) / 255.0


@triton.jit
@no_type_check
def _channel_of_hue(turns, saturation, value, offset):
    """A channel of HSV colours: v - v s max(0, min(k, 4 - k, 1)) with k = (offset + 6 h) mod 6."""
    sector = offset + 6.0 * turns
    sector -= 6.0 * tl.floor(sector / 6.0)
    return value - value * saturation * tl.maximum(0.0, tl.minimum(tl.minimum(sector, 4.0 - sector), 1.0))


@triton.jit
@no_type_check
def _views_kernel(
    images, numbers, views, batch, num_views, height, width, size, channel_stride, pixel_stride, BLOCK: tl.constexpr
):
    view = tl.program_id(0)
    drawn = numbers + view
    left, top = tl.load(drawn), tl.load(drawn + num_views)
    pixels_right, pixels_down = tl.load(drawn + 2 * num_views), tl.load(drawn + 3 * num_views)
    flipped, jittered = tl.load(drawn + 4 * num_views), tl.load(drawn + 5 * num_views)
    greyed, brightness = tl.load(drawn + 6 * num_views), tl.load(drawn + 7 * num_views)
    contrast, saturation = tl.load(drawn + 8 * num_views), tl.load(drawn + 9 * num_views)
    hue_turns, order = tl.load(drawn + 10 * num_views), tl.load(drawn + 11 * num_views).to(tl.int32)

    pixels = tl.arange(0, BLOCK)
    is_inside = pixels < size * size
    row, column = pixels // size, pixels % size
    column = tl.where(flipped > 0.5, size - 1 - column, column)
    x, y = left + column.to(tl.float32) * pixels_right, top + row.to(tl.float32) * pixels_down
    across, down = x - tl.floor(x), y - tl.floor(y)
    x_left = tl.minimum(tl.maximum(tl.floor(x).to(tl.int32), 0), width - 1)
    y_upper = tl.minimum(tl.maximum(tl.floor(y).to(tl.int32), 0), height - 1)
    x_right, y_lower = tl.minimum(x_left + 1, width - 1), tl.minimum(y_upper + 1, height - 1)
    upper_left, upper_right = y_upper * width + x_left, y_upper * width + x_right
    lower_left, lower_right = y_lower * width + x_left, y_lower * width + x_right
    plane = images + (view % batch).to(tl.int64) * (3 * height * width)
    red = _sampled(plane, upper_left, upper_right, lower_left, lower_right, across, down)
    plane += height * width
    green = _sampled(plane, upper_left, upper_right, lower_left, lower_right, across, down)
    plane += height * width
    blue = _sampled(plane, upper_left, upper_right, lower_left, lower_right, across, down)

    if jittered > 0.5:
        for _ in range(4):
            operation = order % 4
            order = order // 4
            if operation == 0:
                red, green, blue = _clamped(red * brightness), _clamped(green * brightness), _clamped(blue * brightness)
            elif operation == 1:
                mean = tl.sum(tl.where(is_inside, _grey(red, green, blue), 0.0)) / (size * size) * (1 - contrast)
                red, green = _clamped(red * contrast + mean), _clamped(green * contrast + mean)
                blue = _clamped(blue * contrast + mean)
            elif operation == 2:
                grey = _grey(red, green, blue) * (1 - saturation)
                red, green = _clamped(red * saturation + grey), _clamped(green * saturation + grey)
                blue = _clamped(blue * saturation + grey)
            else:
                value = tl.maximum(red, tl.maximum(green, blue))
                chroma = value - tl.minimum(red, tl.minimum(green, blue))
                vivid = chroma / tl.where(value == 0, 1.0, value + 1e-8)
                divisor = tl.where(chroma == 0, 1.0, chroma)
                sixths = tl.where(
                    (red >= green) & (red >= blue),
                    green - blue,
                    tl.where(green >= blue, blue - red + 2.0 * divisor, red - green + 4.0 * divisor),
                )
                turns = _fraction(_fraction(sixths / divisor / 6.0) + hue_turns)
                red = _channel_of_hue(turns, vivid, value, 5.0)
                green = _channel_of_hue(turns, vivid, value, 3.0)
                blue = _channel_of_hue(turns, vivid, value, 1.0)
        red, green, blue = _clamped(red), _clamped(green), _clamped(blue)
    if greyed > 0.5:
        grey = _grey(red, green, blue)
        red, green, blue = grey, grey, grey

    place = views + view.to(tl.int64) * (3 * size * size) + pixels * pixel_stride
    tl.store(place, red, mask=is_inside)
    tl.store(place + channel_stride, green, mask=is_inside)
    tl.store(place + 2 * channel_stride, blue, mask=is_inside)
