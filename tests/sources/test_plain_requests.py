"""Requests with the standard library, for token endpoints and the keys of issuers."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from operations.base.json.values import JSONValueError
from operations.io.http.plain import BrokenResponseError, StatusError, read_object


@contextmanager
def answering(response: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server that sends these bytes once, and what it has received."""
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not received or b"\r\n\r\n" not in received[-1]:
                received.append(b"".join(received) + connection.recv(65536))
            connection.sendall(response)
            connection.shutdown(socket.SHUT_WR)
            # Closed with unread data, the connection would be reset, and the response lost.
            while connection.recv(65536):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/token", received
        thread.join(5)


def whole(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_body_is_posted_and_the_object_returned() -> None:
    with answering(whole("200 OK", b'{"access_token":"t"}')) as (url, received):
        found = read_object(url, 5, {"Accept": "application/json"}, b"grant_type=x")

    assert found == {"access_token": "t"}
    assert received[-1].startswith(b"POST /token HTTP/1.1\r\n")
    assert b"Accept: application/json\r\n" in received[-1]


def test_other_json_than_an_object_is_an_empty_object() -> None:
    with answering(whole("200 OK", b"[1]")) as (url, received):
        assert read_object(url, 5, {}) == {}
    assert received[-1].startswith(b"GET ")


@pytest.mark.parametrize(
    ("response", "status", "content"),
    [
        (whole("400 Bad Request", b'{"error":"invalid_grant"}'), 400, b'{"error":"invalid_grant"}'),
        # A redirect could send a token to another address.
        (whole("302 Found", b"", "Location: http://127.0.0.1:9/"), 302, b""),
        (whole("307 Temporary Redirect", b"", "Location: http://127.0.0.1:9/"), 307, b""),
        (b"HTTP/1.1 500 Broken\r\nContent-Length: 99\r\n\r\nx", 500, b"x"),
    ],
)
def test_an_error_and_a_redirect_are_raised_with_their_status(
    response: bytes, status: int, content: bytes
) -> None:
    with answering(response) as (url, _), pytest.raises(StatusError) as caught:
        read_object(url, 5, {}, b"secret")

    assert (caught.value.status, caught.value.content[:99]) == (status, content)


def test_a_response_that_is_cut_off_is_an_error_of_the_connection() -> None:
    cut = b'HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"access'
    with answering(cut) as (url, _), pytest.raises((OSError, JSONValueError)):
        read_object(url, 5, {})


def test_a_response_that_is_not_http_is_an_error_of_the_connection() -> None:
    with answering(b"SSH-2.0-x\r\n\r\n") as (url, _), pytest.raises(BrokenResponseError):
        read_object(url, 5, {})
