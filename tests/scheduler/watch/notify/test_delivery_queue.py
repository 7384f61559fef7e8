"""Messages really sent: over HTTP, by SMTP, to a program; to servers that hang, refuse, drip and talk nonsense."""

from __future__ import annotations

import email
import email.policy
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from deeplink.scheduler.watch.notify.channels import Channel, Email, Program, Webhook
from deeplink.scheduler.watch.notify.delivery import Notification, NotSentError, cut_off, message, sender
from tests.scheduler.watch.notify.servers import SLOW_S, Heard, Post, certificate, mail_server, web
from tests.scheduler.watch.notify.things import news
from tests.waiting import LIMIT_S

MESSAGE = message([news(17, number=12)], "head")


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


def send(way: Webhook | Email | Program, timeout_s: float = LIMIT_S, what: Notification = MESSAGE) -> None:
    sender(Channel(name="there", way=way, timeout_s=timeout_s))(what)


def refusal(way: Webhook | Email | Program, timeout_s: float = LIMIT_S) -> NotSentError:
    with pytest.raises(NotSentError) as caught:
        send(way, timeout_s)
    assert "hush" not in str(caught.value), "what a URL or a password holds is told to nobody"
    return caught.value


# By HTTP.


def test_a_webhook_gets_the_document(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hush-token\n")
    (tmp_path / "token").chmod(0o600)
    with web(Heard()) as heard:
        send(Webhook(url=heard.url, token_file=tmp_path / "token"))
    assert heard.paths == ["/hook?key=hush"]
    assert heard.documents == [json.loads(json.dumps(MESSAGE.document))]
    (fields,) = heard.fields
    assert fields["Content-Type"] == "application/json"
    assert fields["Idempotency-Key"] == MESSAGE.id
    assert fields["Authorization"] == "Bearer hush-token"


def test_a_url_may_be_kept_in_a_file(tmp_path: Path) -> None:
    with web(Heard()) as heard:
        (tmp_path / "url").write_text(heard.url + "\n")
        send(Webhook(url_file=tmp_path / "url"))
    assert heard.paths == ["/hook?key=hush"]
    (tmp_path / "url").write_text("file:///hush")
    assert "no http" in str(refusal(Webhook(url_file=tmp_path / "url")))
    assert "No such file" in str(refusal(Webhook(url_file=tmp_path / "nowhere")))


def test_another_answer_than_2xx_is_no_delivery() -> None:
    with web(Heard(answers=[500, 302, 404, 429], headers={"Retry-After": "7", "Location": "/"})) as heard:
        refused = [refusal(Webhook(url=heard.url)) for _ in range(4)]
    assert [str(each).rpartition("answered ")[2].partition(" ")[0] for each in refused] == [
        "500",
        "302",
        "404",
        "429",
    ]
    assert refused[-1].after_s == 7.0
    assert len(heard.documents) == 4, "it goes nowhere else"


@pytest.mark.parametrize("behaviour", ["hangs", "drips", "takes no connection"])
def test_a_server_that_is_too_slow_is_left(behaviour: str) -> None:
    began = time.monotonic()
    if behaviour == "takes no connection":
        with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
            refusal(Webhook(url=f"http://127.0.0.1:{silent.getsockname()[1]}/hush"), timeout_s=0.5)
    else:
        with web(Heard(answers=[0 if behaviour == "hangs" else 200], drip=behaviour == "drips")) as heard:
            refusal(Webhook(url=heard.url), timeout_s=0.5)
    assert time.monotonic() - began < SLOW_S


def test_a_server_that_is_not_there_or_speaks_another_language_is_said(closed_port: int) -> None:
    assert "refused" in str(refusal(Webhook(url=f"http://127.0.0.1:{closed_port}/hush")))
    with mail_server(Post()) as post:
        refusal(Webhook(url=f"http://127.0.0.1:{post.port}/hush"), timeout_s=2.0)
    refusal(Webhook(url="http://a name that is none/hush"))


def test_certificates_are_checked(tmp_path: Path) -> None:
    server_side, trusted = certificate(tmp_path)
    with web(Heard(), tls=server_side) as heard:
        url = f"https://localhost:{heard.port}/hook"
        assert "CERTIFICATE" in str(refusal(Webhook(url=url)))
        send(Webhook(url=url, ca_file=trusted))
        assert "CERTIFICATE" in str(refusal(Webhook(url=url.replace("localhost", "127.0.0.1"), ca_file=trusted)))
    assert len(heard.documents) == 1


def test_the_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with web(Heard()) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        send(Webhook(url="http://hooks.example.invalid/x?y=1"))
        assert proxy.paths == ["http://hooks.example.invalid/x?y=1"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with web(Heard()) as heard:
            send(Webhook(url=heard.url))
        assert len(heard.paths) == len(proxy.paths) == 1


# By mail.


def mail(post: Post, **more: object) -> Email:
    return Email(
        to=("ops@example.org", "night@example.org"),
        sender="deeplink@example.org",
        host="localhost",
        port=post.port,
        **more,  # type: ignore[arg-type] # its own fields
    )


def test_a_mail_goes_to_everybody() -> None:
    with mail_server(Post()) as post:
        send(mail(post))
    assert post.receivers == ["ops@example.org", "night@example.org"]
    (text,) = post.mails
    mailed = email.message_from_string(text, policy=email.policy.default)
    assert mailed["Subject"] == "DeepLink: node-dead on n1 job 17: open"
    assert mailed["Message-ID"] == f"<{MESSAGE.id}@example.org>"
    assert mailed.get_content().strip() == MESSAGE.text


def test_a_mail_with_password_and_starttls(tmp_path: Path) -> None:
    server_side, trusted = certificate(tmp_path)
    password = tmp_path / "password"
    password.write_text("hush\n")
    password.chmod(0o600)
    with mail_server(Post(user="deeplink", password="hush"), server_side) as post:  # noqa: S106 - opens nothing
        way = mail(post, tls="starttls", user="deeplink", password_file=password, ca_file=trusted)
        send(way)
        assert (len(post.mails), post.was_tls) == (1, True)
    with mail_server(Post(user="deeplink", password="another"), server_side) as post:  # noqa: S106 - opens nothing
        way = mail(post, tls="starttls", user="deeplink", password_file=password, ca_file=trusted)
        assert "535" in str(refusal(way))
    with mail_server(Post(), server_side) as post:
        assert "CERTIFICATE" in str(refusal(mail(post, tls="starttls")))
    with mail_server(Post()) as post:
        assert "STARTTLS" in str(refusal(mail(post, tls="starttls", ca_file=trusted))), (
            "never in the clear instead"
        )
        assert post.mails == []
    password.chmod(0o644)
    with mail_server(Post(), server_side) as post:
        assert "0600" in str(refusal(mail(post, tls="starttls", user="deeplink", password_file=password)))


@pytest.mark.parametrize("refuse", ["MAIL 550 go away", "RCPT 452 full", "DATA 451 later"])
def test_a_mail_that_is_not_taken_is_said(refuse: str) -> None:
    with mail_server(Post(refuse=refuse)) as post:
        refusal(mail(post))
        assert post.mails == []


def test_a_mail_server_that_hangs_or_is_not_there_is_left(closed_port: int) -> None:
    began = time.monotonic()
    with mail_server(Post(hang=True)) as post:
        refusal(mail(post), timeout_s=0.5)
    assert time.monotonic() - began < SLOW_S
    refusal(mail(Post(port=closed_port)))


def test_a_connection_that_is_made_after_the_time_was_up_is_cut_off_too() -> None:
    ours, theirs = socket.socketpair()
    made: list[socket.socket] = []
    tried = threading.Event()

    def newest() -> socket.socket | None:
        tried.set()
        return made[0] if made else None

    with ours, theirs, cut_off(0.05, newest):
        assert tried.wait(LIMIT_S)
        made.append(ours)
        ours.settimeout(LIMIT_S)
        assert ours.recv(1) == b""


# By a program.


def program(tmp_path: Path, body: str) -> Program:
    path = tmp_path / "page"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return Program(argv=(str(path), "--now"))


def test_a_program_gets_the_document_on_its_standard_input(tmp_path: Path) -> None:
    send(program(tmp_path, f'cat > {tmp_path}/got; echo "$@" > {tmp_path}/args'))
    assert json.loads((tmp_path / "got").read_text()) == json.loads(json.dumps(MESSAGE.document))
    assert (tmp_path / "args").read_text() == "--now\n"
    send(program(tmp_path, "exit 0"))  # it need not read


def test_a_program_that_leaves_something_in_the_background_has_taken_it(tmp_path: Path) -> None:
    send(program(tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid"), timeout_s=30.0)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)  # it goes on


def test_a_program_that_fails_hangs_or_is_not_there_is_said(tmp_path: Path) -> None:
    assert "exited 3: no phone" in str(refusal(program(tmp_path, "echo no phone >&2; exit 3")))
    began = time.monotonic()
    refusal(program(tmp_path, "sleep 30"), timeout_s=0.5)
    assert time.monotonic() - began < SLOW_S
    refusal(Program(argv=(str(tmp_path / "nowhere"),)))
    (tmp_path / "page").chmod(0o644)
    refusal(Program(argv=(str(tmp_path / "page"),)))
