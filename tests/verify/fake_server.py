"""A fake of a server of vLLM, without a model: it is healthy, and ends when it is asked for the page /end.

FAKE_SERVER is no-start, for one that ends before it answers, hangs, for one that writes its process id to the file
FAKE_SERVER_PID and never answers, or nothing.
"""

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    """Answers every page."""

    def do_GET(self) -> None:
        """Send an empty page, or end."""
        if self.path == "/end":
            print("MemoryError: the KV cache is gone", flush=True)
            os._exit(3)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    print("the server's log", flush=True)
    if os.environ.get("FAKE_SERVER") == "no-start":
        sys.exit("ValueError: there is no such model")
    if os.environ.get("FAKE_SERVER") == "hangs":
        Path(os.environ["FAKE_SERVER_PID"]).write_text(str(os.getpid()))
        time.sleep(600)
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    HTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
