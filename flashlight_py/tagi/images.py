"""What the layers of images share: how they read shapes, pad, and describe themselves."""

from __future__ import annotations

from flashlight_py.tagi.layer import BaseLayer, Shape
from flashlight_py.tagi.windows import Windows


class ImageLayer(BaseLayer):
    """The base of layers that move a square window over images ``[batch, channels, height,
    width]``.

    Args:
        kernel_size: height and width of the window, at least 1.
        stride: from one window to the next, at least 1.
        padding: how many rows and columns of zeros are put around the images.
        padding_type: where: 1: on all sides; 2: below and to the right; 0: nowhere, and then
            ``padding`` must be 0.

    Raises:
        ValueError: one of them is out of range.
    """

    def __init__(self, kernel_size: int, stride: int, padding: int, padding_type: int) -> None:
        super().__init__()
        name = self.get_layer_name()
        if kernel_size < 1 or stride < 1 or padding < 0:
            raise ValueError(
                f"{name}: kernel_size and stride must be at least 1, padding at least 0; got "
                f"{kernel_size}, {stride}, {padding}"
            )
        if padding_type not in (0, 1, 2):
            raise ValueError(f"{name}: padding_type must be 0, 1 or 2, got {padding_type}")
        if padding and padding_type == 0:
            raise ValueError(
                f"{name}: padding_type 0 is no padding, got padding={padding}; pass padding_type=1 "
                "for all sides, 2 for below and to the right"
            )
        self.kernel_size, self.stride = kernel_size, stride
        self.padding, self.padding_type = padding, padding_type

    @property
    def in_channels(self) -> int:
        """Channels of the input; 0 until they are known."""
        return _part(self.input_shape, 0)

    @property
    def in_height(self) -> int:
        """Rows of an input image; 0 until they are known."""
        return _part(self.input_shape, 1)

    @property
    def in_width(self) -> int:
        """Columns of an input image; 0 until they are known."""
        return _part(self.input_shape, 2)

    @property
    def out_channels(self) -> int:
        """Channels of the output; 0 until they are known."""
        return _part(self.output_shape, 0)

    @property
    def out_height(self) -> int:
        """Rows of an output image; 0 until they are known."""
        return _part(self.output_shape, 1)

    @property
    def out_width(self) -> int:
        """Columns of an output image; 0 until they are known."""
        return _part(self.output_shape, 2)

    def get_layer_info(self) -> str:
        """Return its kind and sizes: ``"Conv2d(in_channels,out_channels,out_width,out_height,
        kernel_size)"``; a size is 0 until it is known.
        """
        sizes = (
            self.in_channels,
            self.out_channels,
            self.out_width,
            self.out_height,
            self.kernel_size,
        )
        return f"{self.get_layer_name()}({','.join(map(str, sizes))})"

    def _windows(self, height: int, width: int) -> Windows:
        """Return the windows over images of this size.

        Raises:
            ValueError: they do not cover the images exactly.
        """
        before = self.padding if self.padding_type == 1 else 0
        windows = Windows(self.kernel_size, self.stride, before, self.padding, height, width)
        for name, size in (("height", height), ("width", width)):
            rest = size + before + self.padding - self.kernel_size
            if rest < 0 or rest % self.stride:
                raise ValueError(
                    f"windows of {self.kernel_size}, {self.stride} apart, do not cover a {name} of "
                    f"{size} with padding {before} before and {self.padding} after it exactly; "
                    f"{rest} is to be 0 or a multiple of {self.stride}: change padding, "
                    "padding_type, kernel_size or the images"
                )
        return windows


def _part(shape: Shape | None, index: int) -> int:
    return 0 if shape is None else shape[index]


def images_of(shape: Shape) -> tuple[int, int, int]:
    """Return the shape of a sample as (channels, height, width).

    Raises:
        ValueError: it has not three dimensions.
    """
    if len(shape) != 3:
        raise ValueError(
            f"expected images (channels, height, width), got samples of shape {shape}; pass an "
            "array [batch, channels, height, width], or in_width and in_height to a convolution"
        )
    return shape
