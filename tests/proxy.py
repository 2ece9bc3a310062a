"""A proxy of HTTP connections on this machine that adds latency, and cuts connections."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

_BLOCK = 2**16


class Proxy:
    """Forwards connections to a server.

    Parameters
    ----------
    target
        URL of the server.
    latency
        Seconds before each request is forwarded.
    cut
        Share of requests whose connection is closed in the middle of the answer.
    within
        Bytes of the answer after which that happens at the latest.
    """

    def __init__(self, target: str, latency: float = 0.0, cut: float = 0.0, within: int = 2**15):
        parts = urlsplit(target)
        self._target = parts.hostname, parts.port
        self.latency, self.cut, self.within, self.cuts = latency, cut, within, 0
        self._dice = random.Random(0)
        self._listening = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        state = {"left": -1}
        with suppress(OSError), client, socket.create_connection(self._target) as server:
            answers = threading.Thread(
                target=self._answers, args=(server, client, state), daemon=True
            )
            answers.start()
            while block := client.recv(_BLOCK):
                time.sleep(self.latency)
                if self._dice.random() < self.cut:
                    state["left"] = self._dice.randrange(1, self.within)
                server.sendall(block)
            server.shutdown(socket.SHUT_WR)
            answers.join()

    def _answers(self, server: socket.socket, client: socket.socket, state: dict) -> None:
        with suppress(OSError):
            while block := server.recv(_BLOCK):
                if 0 <= state["left"] < len(block):
                    client.sendall(block[: state["left"]])
                    self.cuts += 1
                    break
                client.sendall(block)
                if state["left"] >= 0:
                    state["left"] -= len(block)
            for side in (client, server):
                side.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(target: str, **faults: Any) -> Iterator[Proxy]:
    proxy = Proxy(target, **faults)
    try:
        yield proxy
    finally:
        proxy.close()
