"""Web servers on this machine."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Prints nothing on standard error; ``self.server.of`` is the `WebServer` it belongs to."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms, as its head is sent first
    server: "WebServer"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, status: int, data: bytes = b"", **headers: object) -> None:
        """Answer; a header that is None is left out, and an underscore in its name is a dash."""
        self.send_response(status)
        for name, value in ({"Content_Length": len(data)} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class WebServer(ThreadingHTTPServer):
    """A server of a handler, which runs until it is closed or its block ends."""

    daemon_threads = True

    def __init__(self, handler: type[Handler], of: object = None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.of, self.url = of, f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.005,), daemon=True).start()

    def server_close(self) -> None:
        """Close the server."""
        self.shutdown()
        super().server_close()
