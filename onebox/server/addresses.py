"""Whose a request is on a server without keys: the address that it comes from.

One address alone may use all slots. Where others wait, it keeps half of them, and the queue is served by turns, so that
nobody on an open server waits for all that another machine has asked for. Programs behind one proxy are one address.
"""

import contextvars
from ipaddress import IPv6Address, IPv6Network, ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["SLOT_SHARE", "Addresses", "current_address", "sender_of"]

SLOT_SHARE = 0.5
"""Of the slots, what an address keeps while others wait."""
_IPV6_SENDER_BITS = 64
"""A machine may have any number of addresses within its network."""

current_address: contextvars.ContextVar[str | None] = contextvars.ContextVar("current_address", default=None)
"""Of the HTTP request that is being handled; None where the server has keys, or the connection has no address."""


class Addresses:
    """Tells the rest of a request's handling where it comes from."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = scope.get("client")
            current_address.set(sender_of(client[0]) if client else None)
        await self._app(scope, receive, send)


def sender_of(host: str) -> str:
    """The address, or the network of an IPv6 one; what is no address is its own."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(IPv6Network((address, _IPV6_SENDER_BITS), strict=False))
