"""The plain twin of the cache write: the format's own encoders."""

from torch import Tensor

from onebox.formats.kv_pages import KVPages, write_tokens

__all__ = ["kv_write"]


def kv_write(pages: KVPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `onebox.kernels.kv_write.kv_write`."""
    write_tokens(pages, key, value, slots)
