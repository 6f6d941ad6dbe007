"""Ending connections whose peers do not answer."""

import asyncio
from typing import Any


def abort_connection(response: Any) -> None:
    """Close the connection of an unfinished aiohttp response at once.

    Otherwise asyncio waits up to 30 seconds for the other side to end TLS. Meanwhile a proxy such as nginx or HAProxy
    does not notice that the client has gone, and the server behind it continues its work.
    """
    connection = response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


def fail_if_closed(response: Any, error: Exception) -> None:
    """Let the reader of an aiohttp response fail with `error` if the connection closes before the body is complete.

    aiohttp reports this itself, except after an invalid chunk size.
    """
    content, connection = response.content, response.connection
    if connection is None or connection.protocol is None:
        # The body is complete.
        return

    def fail(_closed: object) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(error)

    closed: asyncio.Future[None] | None = connection.protocol.closed
    if closed is None:
        fail(closed)
        return
    # Once per connection, which serves many requests; asyncio logs an error that is not retrieved.
    closed.remove_done_callback(_retrieve)
    closed.add_done_callback(_retrieve)
    closed.add_done_callback(fail)
    content.on_eof(lambda: closed.remove_done_callback(fail))


def _retrieve(closed: asyncio.Future[None]) -> None:
    if not closed.cancelled():
        closed.exception()
