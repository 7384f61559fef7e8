"""The file of channels: what it may say, and that every mistake is named by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.core.config import ConfigError
from deeplink.scheduler.journal.incident_json import Gravity, IncidentNews, NewsFilter, gravity
from deeplink.scheduler.recovery.records import IncidentKind, IncidentOutcome
from deeplink.scheduler.watch.notify.channels import Channel, ChannelRate, Email, Program, Webhook, load_channels
from tests.scheduler.watch.notify.things import dead, recovered

EVERYTHING = """
page = "https://console.example/"
cluster = "tiny"

[[notify]]
name = "chat"
kind = "webhook"
url_file = "/etc/deeplink/chat.url"
severity = "warning"
on = ["opened"]
after_s = { warning = 300 }

[[notify]]
kind = "email"
to = ["ops@example.org", "night@example.org"]
from = "deeplink@example.org"
host = "mail.example.org"
tls = "starttls"
user = "deeplink"
password_file = "/etc/deeplink/mail.password"
burst = 3
every_s = 600
after_s = 5
digest = "07:30"
timeout_s = 20

[[notify]]
kind = "command"
argv = ["/usr/local/bin/page", "--now"]
kinds = ["job-stranded", "switch-suspect"]

[[notify]]
kind = "heartbeat"
url = "https://hc.example.org/ping"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "notify.toml"
    path.write_text(text)
    return path


def test_each_kind_is_read(tmp_path: Path) -> None:
    chat, mail, page, beat = load_channels(written(tmp_path, EVERYTHING))
    assert chat == Channel(
        name="chat",
        way=Webhook(url_file=Path("/etc/deeplink/chat.url")),
        wanted=NewsFilter(severity=Gravity.WARNING, closed=False),
        after_s={Gravity.INFO: 600.0, Gravity.WARNING: 300.0, Gravity.CRITICAL: 30.0},
        digest=(8, 0),
        page="https://console.example",
        cluster="tiny",
    )
    assert (mail.digest, set(mail.after_s.values())) == ((7, 30), {5.0})
    assert page.digest is None
    assert mail.way == Email(
        to=("ops@example.org", "night@example.org"),
        sender="deeplink@example.org",
        host="mail.example.org",
        port=587,
        tls="starttls",
        user="deeplink",
        password_file=Path("/etc/deeplink/mail.password"),
    )
    assert (mail.pace, mail.timeout_s) == (ChannelRate(burst=3, every_s=600.0), 20.0)
    assert page.way == Program(argv=("/usr/local/bin/page", "--now"))
    assert page.wanted.kinds == {"job-stranded", "switch-suspect"}
    assert (beat.name, beat.heartbeat) == ("heartbeat", True)
    assert load_channels(written(tmp_path, "")) == ()


HOOK = '[[notify]]\nkind = "webhook"\nurl = "https://x.example/y"\n'
MAIL = '[[notify]]\nkind = "email"\nto = "a@b"\nfrom = "c@d"\n'


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("not toml", "(file)"),
        ("notfy = 1", "notfy"),
        ("notify = 1", "notify"),
        ("notify = [1]", "notify #1"),
        ('[[notify]]\nurl = "https://x"', "notify #1: kind"),
        ('[[notify]]\nkind = "pigeon"', "notify #1: kind"),
        ('[[notify]]\nkind = "webhook"', "notify #1: url"),
        (HOOK + 'url_file = "/x"', "notify #1: url"),
        (HOOK.replace("https", "ftp"), "notify #1: url"),
        (HOOK.replace("x.example", "me:secret@x.example"), "notify #1: url"),
        (HOOK.replace("/y", "/\\u0000secret"), "notify #1: url"),
        (HOOK.replace("/y", "/secr\\u00e9t"), "notify #1: url"),
        (HOOK + "urll = 1", "notify #1: urll"),
        (HOOK + 'to = "a@b"', "notify #1: to"),
        (HOOK + 'on = "sometimes"', "notify #1: on"),
        (HOOK + 'kinds = ["node-deaf"]', "notify #1: kinds"),
        (HOOK + 'severity = "grave"', "notify #1: severity"),
        (HOOK + "after_s = -1", "notify #1: info"),
        (HOOK + "after_s = { grave = 1 }", "notify #1: grave"),
        (HOOK + 'after_s = "long"', "notify #1: info"),
        (HOOK + 'digest = "24:00"', "notify #1: digest"),
        ('page = "console"\n' + HOOK, "url"),
        ("cluster = 1\n" + HOOK, "cluster"),
        (HOOK + "burst = 0", "notify #1: burst"),
        (HOOK + "every_s = nan", "notify #1: every_s"),
        (HOOK + "timeout_s = true", "notify #1: timeout_s"),
        (HOOK + 'name = "Über"', "notify #1: name"),
        (HOOK + HOOK, "notify.name"),
        (HOOK * 17, "notify"),
        (MAIL.replace("a@b", "a b"), "notify #1: to"),
        (MAIL.replace("c@d", "c@d\\nBcc: e@f"), "notify #1: from"),
        (MAIL + 'user = "me"', "notify #1: password_file"),
        (MAIL + 'user = "me"\npassword_file = "/x"', "notify #1: tls"),
        ('[[notify]]\nkind = "command"\nargv = []', "notify #1: argv"),
        ('[[notify]]\nkind = "command"\nargv = [1]', "notify #1: argv"),
        ('[[notify]]\nkind = "heartbeat"\nurl = "https://x"\nkinds = []', "notify #1: kinds"),
    ],
)
def test_a_mistake_is_named_by_its_key(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_channels(written(tmp_path, text))
    assert caught.value.key == key
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_channels(tmp_path / "absent.toml")


def test_who_wants_what() -> None:
    open_one, ended = IncidentNews(dead(17)), IncidentNews(recovered(dead(17)), opened_told=True)
    missed = IncidentNews(recovered(dead(17)))
    failed = IncidentNews(dead(17, outcome=IncidentOutcome.FAILED), opened_told=True)
    assert [NewsFilter().wants(one) for one in (open_one, ended, failed)] == [True] * 3
    begins = NewsFilter(closed=False)
    assert [begins.wants(one) for one in (open_one, ended, missed)] == [True, False, True]
    ends = NewsFilter(opened=False)
    assert [ends.wants(one) for one in (open_one, ended, missed)] == [False, True, True]
    assert not NewsFilter(kinds=frozenset({"ranks-hung"})).wants(open_one)
    worst = NewsFilter(severity=Gravity.CRITICAL)
    assert [worst.wants(one) for one in (open_one, ended, failed)] == [False, False, True]
    assert [
        gravity(dead(1, kind=kind))
        for kind in (IncidentKind.NODE_BACK, IncidentKind.NODE_DEAD, IncidentKind.JOB_STRANDED)
    ] == list(Gravity)
