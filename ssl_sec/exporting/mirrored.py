"""Python code that combines the embeddings of images and of their mirror images, as the scores of faces do."""

from typing import Literal

from ssl_sec.exporting.formats import Exportable, Format


def combining(form: Format, exportable: Exportable, flips: Literal["sum_of_directions", "sum_of_embeddings"]) -> str:
    """Python code that, after the encoder is loaded, computes `embeddings` of `images` and of their mirror images.

    Args:
        form: format of the files.
        exportable: the encoder.
        flips: whether the normalised or the raw embeddings of both are added.
    """
    found, imports = exportable.output, "import numpy\n\n\n" if form.takes_numpy else ""
    norm = f"numpy.linalg.norm({found}, axis=1, keepdims=True)" if form.takes_numpy else f"{found}.norm(dim=1)[:, None]"
    mirrored = "numpy.ascontiguousarray(images[..., ::-1])" if form.takes_numpy else "images.flip(-1)"
    summand = f"{found} / {norm}" if flips == "sum_of_directions" else found
    return (
        f"{imports}def embed(images):\n"
        f"    {form.use(exportable)}\n"
        f"    return {summand}\n\n\n"
        f"{found} = embed(images) + embed({mirrored})"
    )
