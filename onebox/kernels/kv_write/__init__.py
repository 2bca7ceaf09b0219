"""New keys and values into the pages of a KV cache, encoded on the way."""

from torch import Tensor

from onebox.formats.kv_pages import KVPages
from onebox.kernels.dispatch import implementation

__all__ = ["kv_write"]


def kv_write(pages: KVPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Encodes key and value [R, V, D] into the tokens named by slots, int64 [R]: page * P + offset, negative to skip.

    The bytes are those of `onebox.formats`, bit for bit, and a vector's bytes depend on that vector alone. Two rows
    of one call must not name the same slot. Changes the pages in place.
    """
    implementation(__name__, key).kv_write(pages, key, value, slots)
