"""Files by reference: sent from disk, saved to disk, and only if the caller may name them."""

import asyncio
import gzip
import io
import os
import tracemalloc
from base64 import urlsafe_b64encode
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.limits import scaled
from tests.openapi.serving import document, imported, serving

from operations import CallError, ErrorCode, OperationContext, OperationRegistry
from operations.contract.channel import CallerChannel
from operations.openapi import HTTPServiceConfig, from_openapi
from operations.server import create_app
from operations.server.http11.running import running

OCTETS: dict[str, Any] = {"application/octet-stream": {}}
MULTIPART = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "properties": {
                "title": {"type": "string"},
                "file": {"type": "string", "format": "binary"},
                "more": {"type": "array", "items": {"type": "string", "format": "binary"}},
            },
        }
    }
}
UPLOAD = document("/files", "post", requestBody={"required": True, "content": OCTETS})
FORM = document("/files", "post", requestBody={"required": True, "content": MULTIPART})
DOWNLOAD = document("/files", responses={"200": {"description": "a file", "content": OCTETS}})
LARGE = 40 << 20


class Server:
    """Accepts and returns files; counts the bytes that arrive instead of storing them."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.content = b"content"
        self.chunks = 1
        self.headers: dict[str, str] = {}

    async def respond(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await self._give(request)
        seen: dict[str, Any] = {
            "length": request.headers.get("Content-Length"),
            "encoding": request.headers.get("Transfer-Encoding"),
            "type": request.headers.get("Content-Type", ""),
        }
        if seen["type"].startswith("multipart/"):
            seen["parts"] = await self._parts(request)
        else:
            size, start = 0, b""
            async for chunk in request.content.iter_any():
                start, size = (start + chunk)[:64], size + len(chunk)
            seen |= {"size": size, "start": start}
        self.requests.append(seen)
        status = self.statuses.pop(0) if self.statuses else 200
        return web.json_response({"ok": True}, status=status, headers={"Retry-After": "0"})

    async def _parts(self, request: web.Request) -> list[tuple[str | None, str | None, bytes]]:
        reader = await request.multipart()
        parts: list[tuple[str | None, str | None, bytes]] = []
        while (part := await reader.next()) is not None:
            assert isinstance(part, aiohttp.BodyPartReader)
            parts.append((part.name, part.filename, bytes(await part.read())))
        return parts

    async def _give(self, request: web.Request) -> web.StreamResponse:
        self.requests.append({"accept": request.headers.get("Accept")})
        status = self.statuses.pop(0) if self.statuses else 200
        response = web.StreamResponse(status=status, headers=self.headers)
        response.content_type = "application/pdf"
        if not self.headers and status == 200:
            response.content_length = len(self.content) * self.chunks
        await response.prepare(request)
        for _ in range(self.chunks if status == 200 else 0):
            await response.write(self.content)
        if "Content-Length" in self.headers:
            assert request.transport is not None
            request.transport.close()
        return response


@asynccontextmanager
async def connected(
    doc: dict[str, Any], **config: Any
) -> AsyncGenerator[tuple[Server, OperationRegistry]]:
    server = Server()
    async with serving(server.respond) as url, imported(doc, base_url=url, **config) as registry:
        yield server, registry


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.write(b"start")
        file.truncate(LARGE)
    return path


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# ------------------------------------------------------------ sending


@pytest.mark.parametrize("kind", ["path", "file", "bytes"])
async def test_a_body_is_sent_from_a_file(kind: str, large: Path) -> None:
    content = b"start" + bytes(LARGE - 5)
    async with connected(UPLOAD, max_request_bytes=LARGE) as (server, registry):
        with large.open("rb") as file:
            value: Any = {"path": large, "file": file, "bytes": content}[kind]
            result = await registry.execute("api.call", {"body": value})

    assert result.data == {"ok": True}
    (seen,) = server.requests
    assert (seen["size"], seen["start"][:5], seen["length"]) == (LARGE, b"start", str(LARGE))


async def test_a_file_is_not_held_in_memory(large: Path, tmp_path: Path) -> None:
    get = {**DOWNLOAD["paths"]["/files"]["get"], "operationId": "get"}
    doc = {**UPLOAD, "paths": {"/files": {**UPLOAD["paths"]["/files"], "get": get}}}
    async with connected(doc) as (server, registry):
        server.content, server.chunks = bytes(1 << 16), LARGE >> 16
        tracemalloc.start()
        try:
            await registry.execute("api.call", {"body": large})
            await registry.execute("api.get", {"save_to": tmp_path / "copy"})
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert (tmp_path / "copy").stat().st_size == LARGE
    assert peak < LARGE / 4


async def test_a_file_of_unknown_length_is_sent_in_chunks() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"through a pipe")
    with os.fdopen(reading, "rb") as file:
        async with connected(UPLOAD) as (server, registry):
            await registry.execute("api.call", {"body": file})

    (seen,) = server.requests
    assert (seen["start"], seen["length"], seen["encoding"]) == (b"through a pipe", None, "chunked")


async def test_a_file_whose_seek_returns_nothing_is_sent() -> None:
    class File(io.BytesIO):
        def seek(self, *position: Any) -> Any:
            super().seek(*position)

    async with connected(UPLOAD) as (server, registry):
        await registry.execute("api.call", {"body": File(b"content")})

    assert server.requests[0]["start"] == b"content"


async def test_parts_of_a_form_are_sent_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "b.txt").write_bytes(b"second")
    body = {
        "title": "two",
        "file": tmp_path / "a.txt",
        "more": [
            {"content": tmp_path / "b.txt", "filename": "other.txt", "contentType": "text/plain"},
            io.BytesIO(b"third"),
            b"fourth",
        ],
    }
    async with connected(FORM) as (server, registry):
        await registry.execute("api.call", {"body": body})

    (seen,) = server.requests
    assert seen["length"] is not None
    assert seen["parts"] == [
        ("title", None, b"two"),
        ("file", "a.txt", b"first"),
        ("more", "other.txt", b"second"),
        ("more", "more", b"third"),
        ("more", "more", b"fourth"),
    ]


async def test_progress_is_reported_both_ways(large: Path, tmp_path: Path) -> None:
    reports: list[tuple[float, float | None]] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        reports.append((done, total))

    context = OperationContext(channel=CallerChannel(progress=progress))
    async with connected(UPLOAD) as (_, registry):
        await registry.execute("api.call", {"body": large}, context)
    assert len(reports) >= 30
    assert reports[-1] == (LARGE, LARGE)
    assert reports == sorted(reports)

    reports.clear()
    async with connected(DOWNLOAD) as (server, registry):
        server.content, server.chunks = bytes(1 << 16), 64
        await registry.execute("api.call", {"save_to": tmp_path / "saved"}, context)
    assert reports[-1] == (4 << 20, 4 << 20)


async def test_a_repeated_request_sends_the_whole_file_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    file = io.BytesIO(b"skipped content")
    file.seek(8)
    for value in (tmp_path / "a", file):
        async with connected(UPLOAD) as (server, registry):
            server.statuses = [429]
            await registry.execute("api.call", {"body": value})
        assert [seen["start"] for seen in server.requests] == [b"content", b"content"]


async def test_a_request_is_not_repeated_with_half_a_file() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(b"once")
    with os.fdopen(reading, "rb") as file:
        async with connected(UPLOAD) as (server, registry):
            server.statuses = [429]
            with pytest.raises(CallError, match="429"):
                await registry.execute("api.call", {"body": file})
    assert len(server.requests) == 1


@pytest.mark.parametrize("place", ["missing", "folder"])
async def test_a_missing_file_is_reported(place: str, tmp_path: Path) -> None:
    value = tmp_path / "missing" if place == "missing" else tmp_path
    async with connected(UPLOAD) as (server, registry):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"body": value})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert caught.value.details["errors"][0]["path"] == "/body"
    assert server.requests == []


async def test_a_file_that_fails_while_it_is_sent_is_reported() -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise OSError(5, "Input/output error")

    async with connected(UPLOAD) as (_, registry):
        with pytest.raises(CallError, match="Input/output error") as caught:
            await registry.execute("api.call", {"body": Broken()})
    assert caught.value.code == ErrorCode.EXECUTION_ERROR


async def test_a_server_that_stops_reading_ends_the_call(large: Path) -> None:
    stopped = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stopped.wait()
        writer.close()

    stalled = await asyncio.start_server(stall, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{stalled.sockets[0].getsockname()[1]}"
    async with imported(UPLOAD, base_url=url, timeout=0.5) as registry:
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"body": large})
    stopped.set()
    stalled.close()
    assert caught.value.code == ErrorCode.TIMEOUT


async def test_a_path_for_a_plain_argument_is_a_text(tmp_path: Path) -> None:
    doc = document(
        "/files", parameters=[{"in": "query", "name": "q", "schema": {"type": "string"}}]
    )
    async with connected(doc) as (server, registry):
        server.headers = {"Content-Encoding": "identity"}
        await registry.execute("api.call", {"q": tmp_path / "x"})
    assert len(server.requests) == 1


# ------------------------------------------------------------ saving


async def test_a_response_larger_than_the_limit_goes_to_a_file(tmp_path: Path) -> None:
    async with connected(DOWNLOAD, max_response_bytes=1000) as (server, registry):
        server.content, server.chunks = b"x" * 1000, 5
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {})
        assert caught.value.code == ErrorCode.RESOURCE_EXHAUSTED

        path = tmp_path / "saved.pdf"
        path.write_bytes(b"an older version")
        result = await registry.execute("api.call", {"save_to": path})

    expected = {"path": str(path), "size": 5000, "contentType": "application/pdf"}
    assert result.data == expected
    assert result.meta.status_code == 200  # type: ignore[union-attr]
    assert path.read_bytes() == b"x" * 5000
    assert names(tmp_path) == ["saved.pdf"]


@pytest.mark.parametrize("place", [".", "missing/copy"])
async def test_a_request_is_not_sent_if_its_response_cannot_be_saved(
    place: str, tmp_path: Path
) -> None:
    async with connected(DOWNLOAD) as (server, registry):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"save_to": tmp_path / place})

    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert server.requests == []


async def test_a_response_is_saved_to_an_open_file() -> None:
    file = io.BytesIO(b"before ")
    file.seek(7)
    async with connected(DOWNLOAD) as (server, registry):
        server.statuses = [503]
        result = await registry.execute("api.call", {"save_to": file})
    assert file.getvalue() == b"before content"
    assert result.data == {"size": 7, "contentType": "application/pdf"}


async def test_a_json_response_can_be_saved_unchanged(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"declared": {"type": "string"}}}
    answer = {"200": {"description": "", "content": {"application/json": {"schema": schema}}}}
    async with connected(document("/files", responses=answer)) as (server, registry):
        server.content = b'{"undeclared": 1}'
        result = await registry.execute("api.call", {"save_to": tmp_path / "saved"})
    assert (tmp_path / "saved").read_bytes() == b'{"undeclared": 1}'
    assert result.data["size"] == 17


async def test_a_compressed_response_is_saved_without_its_coding(tmp_path: Path) -> None:
    async with connected(DOWNLOAD) as (server, registry):
        server.content = gzip.compress(b"plain" * 1000)
        server.headers = {"Content-Encoding": "gzip"}
        await registry.execute("api.call", {"save_to": tmp_path / "saved"})
    assert (tmp_path / "saved").read_bytes() == b"plain" * 1000


def declared_as_base64(schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/pdf": {"schema": {"type": "string", **schema}}}
    return document("/files", responses={"200": {"description": "", "content": content}})


@pytest.mark.parametrize("content", [b"%PDF-1.7", b"YWJj"])
async def test_a_response_that_is_declared_as_base64_is_saved_unchanged(
    content: bytes, tmp_path: Path
) -> None:
    async with connected(declared_as_base64({"format": "byte"})) as (server, registry):
        server.content = content
        await registry.execute("api.call", {"save_to": tmp_path / "saved"})
    assert (tmp_path / "saved").read_bytes() == content


@pytest.mark.parametrize(("doc", "body"), [(FORM, {"file": "a.txt"}), (UPLOAD, "a.txt")], ids=str)
async def test_the_name_of_a_file_as_text_is_rejected_with_advice(doc: Any, body: Any) -> None:
    async with connected(doc) as (server, registry):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"body": body})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert "In Python, pass bytes or a Path" in caught.value.message
    assert server.requests == []


@pytest.mark.parametrize("size", [1, 5, 100_000])
@pytest.mark.parametrize("schema", [{"format": "byte"}, {"contentEncoding": "base64url"}], ids=str)
async def test_the_padding_of_a_response_in_base64_is_optional(
    schema: dict[str, str], size: int
) -> None:
    content = b"\xff" * size
    async with connected(declared_as_base64(schema)) as (server, registry):
        server.content = urlsafe_b64encode(content).rstrip(b"=")
        assert (await registry.execute("api.call", {})).data == content


@pytest.mark.parametrize("fault", ["status", "cut", "limit", "gzip"])
async def test_a_file_is_not_replaced_by_half_a_response(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"kept")
    async with connected(DOWNLOAD, max_file_bytes=1000, retries=0) as (server, registry):
        server.content = b"x" * 800
        if fault == "status":
            server.statuses = [404]
        elif fault == "cut":
            server.headers = {"Content-Length": "900"}
        elif fault == "gzip":
            server.content = gzip.compress(server.content)[:-8]
            server.headers = {"Content-Encoding": "gzip"}
        else:
            server.chunks = 2
        with pytest.raises(CallError):
            await registry.execute("api.call", {"save_to": path})
    assert path.read_bytes() == b"kept"
    assert names(tmp_path) == ["kept"]


async def test_a_download_may_take_longer_than_the_timeout_as_long_as_it_continues(
    tmp_path: Path,
) -> None:
    goes_on, limit = asyncio.Event(), scaled(1.5)

    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(8):
            await response.write(b"x")
            await asyncio.sleep(limit / 6)
        if request.query_string == "stall":
            await goes_on.wait()
        return response

    doc = document("/files", parameters=[{"in": "query", "name": "stall", "allowEmptyValue": True}])
    async with serving(respond) as url, imported(doc, base_url=url, timeout=limit) as registry:
        result = await registry.execute("api.call", {"save_to": tmp_path / "slow"})
        assert result.data["size"] == 8
        goes_on.set()


# ------------------------------------------------------------ who may name files


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("text", ["/etc/passwd", "../secret", "secret"])
async def test_no_text_names_a_file_without_a_root(text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with connected(UPLOAD) as (server, registry):
        for value in ({"path": text}, {"content": {"path": text}}, {"content": text, "path": text}):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {"body": value})
            assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert server.requests == []

    async with connected(DOWNLOAD) as (server, registry):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"save_to": str(tmp_path / "new")})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert server.requests == []
    assert not (tmp_path / "new").exists()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder to share, with links that lead out of it."""
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (root / "in" / "report.txt").write_bytes(b"report")
    (tmp_path / "secret").write_bytes(b"secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "inner_link").symlink_to(root / "in" / "report.txt")
    (root / "up").symlink_to(tmp_path)
    (root / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(root / "pipe")
    return root


OUTSIDE = [
    "/etc/passwd", "../secret", "in/../../secret", "link", "inner_link", "up/secret", "up/root/in/report.txt", "pipe",
    "in", "", ".", "./in/report.txt", "in//report.txt", "in\\report.txt", "C:/x", "a\0b", "in/report.txt/x",
    "\u202ereport", "x" * 300,
]  # fmt: skip


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("text", [*OUTSIDE, "missing", "~/x"])
async def test_a_caller_sends_only_plain_files_below_the_root(text: str, root: Path) -> None:
    for doc, body in ((UPLOAD, {"path": text}), (FORM, {"file": {"path": text}})):
        async with connected(doc, files_root=root) as (server, registry):
            with pytest.raises(CallError) as caught:
                await registry.execute("api.call", {"body": body})
        assert caught.value.code == ErrorCode.VALIDATION_ERROR
        assert str(root) not in str(caught.value.to_wire())
        assert server.requests == []


@pytest.mark.requirement("R64")
@pytest.mark.parametrize("text", [*OUTSIDE, "in/report.txt", "dangling", "up/new", "in/x/y"])
async def test_a_caller_saves_only_new_files_below_the_root(text: str, root: Path) -> None:
    before = sorted(root.parent.rglob("*"))
    async with connected(DOWNLOAD, files_root=root) as (server, registry):
        with pytest.raises(CallError) as caught:
            await registry.execute("api.call", {"save_to": text})
    assert caught.value.code == ErrorCode.VALIDATION_ERROR
    assert server.requests == []
    assert sorted(root.parent.rglob("*")) == before
    assert (root.parent / "secret").read_bytes() == b"secret"


@pytest.mark.requirement("R64")
async def test_remote_callers_use_files_below_the_root(root: Path) -> None:
    server = Server()
    async with serving(server.respond) as url, OperationRegistry() as registry:
        for name, doc in (("up", UPLOAD), ("form", FORM), ("down", DOWNLOAD)):
            config = HTTPServiceConfig(namespace=name, base_url=url, files_root=root)
            registry.register_all(from_openapi(doc, config))
        async with running(create_app(registry)) as hub, aiohttp.ClientSession() as session:

            async def call(operation: str, value: Any) -> Any:
                body = {"operation": operation, "input": value}
                async with session.post(f"{hub}/call", json=body) as response:
                    return response.status, await response.json()

            assert (await call("up.call", {"body": {"path": "in/report.txt"}}))[0] == 200
            form = {"file": {"path": "in/report.txt", "contentType": "text/plain"}}
            assert (await call("form.call", {"body": form}))[0] == 200
            status, saved = await call("down.call", {"save_to": "in/new.pdf"})
            assert (status, saved["data"]["path"]) == (200, "in/new.pdf")
            assert (await call("down.call", {"save_to": "in/new.pdf"}))[0] == 422
            assert (await call("up.call", {"body": {"path": "../secret"}}))[0] == 422

    assert server.requests[0]["start"] == b"report"
    assert server.requests[1]["parts"] == [("file", "report.txt", b"report")]
    assert (root / "in" / "new.pdf").read_bytes() == b"content"
    assert names(root / "in") == ["new.pdf", "report.txt"]


def test_a_root_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="files_root"):
        HTTPServiceConfig(namespace="api", files_root=tmp_path / "missing")


async def test_a_body_that_is_declared_as_base64_takes_bytes_and_no_file_on_disk(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"\xfb\xff")
    octets = {"application/octet-stream": {"schema": {"contentEncoding": "base64"}}}
    doc = document("/files", "post", requestBody={"required": True, "content": octets})
    async with connected(doc) as (server, registry):
        await registry.execute("api.call", {"body": b"\xfb\xff"})
        with pytest.raises(CallError, match="pass its bytes"):
            await registry.execute("api.call", {"body": path})
    assert [request["start"] for request in server.requests] == [b"+/8="]
