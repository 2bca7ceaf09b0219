"""The header with which onebox's own clients send an API key."""

from onebox.spec.errors import UsageError

__all__ = ["authorization"]


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers for a key, none without one. Refuses what no header carries; the error does not show the key."""
    if not api_key:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise UsageError(
            "The API key holds spaces or characters beyond printable ASCII, which no header carries; give one key "
            "alone, with --api-key or ONEBOX_API_KEY."
        )
    return {"Authorization": f"Bearer {api_key}"}
