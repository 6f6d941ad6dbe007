"""The two processes of `test_idle`: a server, and a client with very many connections.

    python idlers.py serve              prints its port
    python idlers.py connect PORT N     prints `open` when N are open, `closed` when the server has closed them all

Each may open as many files as the system allows.
"""

import resource
import selectors
import socket
import sys

import uvicorn

from operations import OperationRegistry
from operations.server import create_app
from operations.server.http11.running import build_server

HALF = b"POST /test/run HTTP/1.1\r\nHost: loc"


def serve() -> None:
    registry = OperationRegistry()

    @registry.operation("test.run")
    async def run() -> str:
        return "fine"

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            print(self.servers[0].sockets[0].getsockname()[1], flush=True)

    Server(build_server(create_app(registry), port=0).config).run()


def connect(port: int, count: int) -> None:
    sockets: list[socket.socket] = []
    for number in range(count):
        sockets.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        if number % 2:
            sockets[-1].sendall(HALF)
    print("open", flush=True)
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ, each)
        while selector.get_map():
            for key, _ in selector.select():
                connection: socket.socket = key.data
                try:
                    ended = connection.recv(4096) == b""
                except ConnectionError:
                    ended = True
                if ended:
                    selector.unregister(connection)
                    connection.close()
    print("closed", flush=True)


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if sys.argv[1] == "serve":
        serve()
    else:
        connect(int(sys.argv[2]), int(sys.argv[3]))
