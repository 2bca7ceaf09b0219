"""The directory for files that onebox can regenerate: compiled code, tuning tables, small checkpoints."""

import os
from pathlib import Path

__all__ = ["user_cache_directory"]


def user_cache_directory() -> Path:
    """The `onebox` directory in the user's cache directory; it may not exist yet.

    `$XDG_CACHE_HOME`, else `~/.cache`. As the XDG standard requires, an empty value counts as unset and a relative one
    is ignored. Raises RuntimeError if neither is set.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = given if given.is_absolute() else Path.home() / ".cache"
    return home / "onebox"
