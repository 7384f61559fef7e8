"""Servers that messages are sent to: real sockets, each told how to behave."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.waiting import LIMIT_S

SLOW_S = 20.0
"""How long a server that hangs does, unless it is closed."""


@dataclass
class Heard:
    """What a web server was sent: paths, header fields and documents, in order."""

    port: int = 0
    answers: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    drip: bool = False
    paths: list[str] = field(default_factory=list)
    fields: list[dict[str, str]] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?key=hush"


@contextmanager
def web(heard: Heard, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Heard]:
    """Serve; each request gets the next of `answers`, at last 200. 0: it hangs; `drip`: a byte at a time."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.paths.append(self.path)
            heard.fields.append(dict(self.headers.items()))
            heard.documents.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status = heard.answers.pop(0) if heard.answers else 200
            if status == 0:
                heard.closing.wait(SLOW_S)
                return
            if heard.drip:
                self._drip(f"HTTP/1.1 {status} OK\r\nX-Slow: {'x' * 400}\r\n\r\n".encode())
                return
            self.send_response(status)
            for name, value in heard.headers.items():
                self.send_header(name, value)
            self.end_headers()

        def _drip(self, answer: bytes) -> None:
            with suppress(OSError):
                for place in range(len(answer)):
                    self.wfile.write(answer[place : place + 1])
                    if heard.closing.wait(0.05):
                        return

        @override
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    heard.port = server.server_address[1]
    heard.closing.clear()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield heard
    finally:
        heard.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Post:
    """What a mail server was given."""

    port: int = 0
    refuse: str = ""
    hang: bool = False
    user: str = ""
    password: str = ""
    was_tls: bool = False
    receivers: list[str] = field(default_factory=list)
    mails: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


class _Talk:
    """One SMTP session."""

    def __init__(self, post: Post, talk: socket.socket, tls: ssl.SSLContext | None) -> None:
        self._post, self._talk, self._tls = post, talk, tls
        self._file = talk.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._talk.close()

    def run(self) -> None:
        self._say("220 here")
        while line := self._file.readline():
            word, _, rest = line.decode().strip().partition(" ")
            if self._post.refuse and word.upper() == self._post.refuse.partition(" ")[0]:
                self._say(self._post.refuse.partition(" ")[2])
            elif not getattr(self, f"on_{word.lower()}", self._other)(rest):
                return

    def _say(self, *lines: str) -> bool:
        self._talk.sendall("".join(f"{line}\r\n" for line in lines).encode())
        return True

    def _other(self, _: str) -> bool:
        return self._say("250 fine")

    def on_ehlo(self, _: str) -> bool:
        offers = ["250-here", "250-AUTH PLAIN"] + (
            ["250-STARTTLS"] if self._tls and not self._post.was_tls else []
        )
        return self._say(*offers, "250 SIZE 100000")

    def on_starttls(self, _: str) -> bool:
        assert self._tls is not None
        self._say("220 go on")
        self._file.close()
        self._talk = self._tls.wrap_socket(self._talk, server_side=True)
        self._file, self._post.was_tls = self._talk.makefile("rb"), True
        return True

    def on_auth(self, rest: str) -> bool:
        _, user, password = base64.b64decode(rest.partition(" ")[2]).decode().split("\0")
        right = (user, password) == (self._post.user, self._post.password)
        return self._say("235 welcome" if right else "535 wrong password")

    def on_rcpt(self, rest: str) -> bool:
        self._post.receivers.append(rest.partition("<")[2].partition(">")[0])
        return self._say("250 fine")

    def on_data(self, _: str) -> bool:
        self._say("354 go on")
        lines = []
        while (line := self._file.readline()) not in {b".\r\n", b""}:
            lines.append(line.decode())
        self._post.mails.append("".join(lines))
        return self._say("250 taken")

    def on_quit(self, _: str) -> bool:
        self._say("221 bye")
        return False


@contextmanager
def mail_server(post: Post, tls: ssl.SSLContext | None = None) -> Iterator[Post]:
    """Serve SMTP; with `tls` it offers STARTTLS."""
    listening = socket.create_server(("127.0.0.1", 0))
    post.port = listening.getsockname()[1]
    post.closing.clear()

    def run() -> None:
        while not post.closing.is_set():
            with suppress(OSError):
                talk, _ = listening.accept()
                with talk:
                    if post.hang:
                        post.closing.wait(SLOW_S)
                    else:
                        with closing(_Talk(post, talk, tls)) as session:
                            session.run()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield post
    finally:
        post.closing.set()
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", post.port), timeout=1).close()
        listening.close()
        thread.join()


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Make a certificate for localhost; return the server's side of it, and the file that clients trust."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-keyout", key, "-out", cert, "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context, cert
