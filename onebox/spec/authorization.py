"""The header with which onebox's own clients send an API key."""

from onebox.spec.errors import UsageError

__all__ = ["authorization", "is_sendable"]


def is_sendable(api_key: str) -> bool:
    """Whether a header carries this key."""
    return api_key.isascii() and api_key.isprintable() and " " not in api_key


def authorization(api_key: str | None) -> dict[str, str]:
    """The headers for a key, none without one. Refuses what no header carries; the error does not show the key."""
    if not api_key:
        return {}
    if not is_sendable(api_key):
        raise UsageError(
            "The API key holds spaces or characters beyond printable ASCII, which no header carries; give one key "
            "alone, with --api-key or ONEBOX_API_KEY."
        )
    return {"Authorization": f"Bearer {api_key}"}
