"""`onebox fleet simulate`: placeholder until the next commit."""

__all__ = ["simulate"]


def simulate() -> None:
    """Placeholder."""
