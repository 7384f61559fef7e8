"""What a channel is sent, in words and as JSON, and how: by HTTP, by SMTP, by a program of the site's own."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import smtplib
import socket
import ssl
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from email.message import EmailMessage
from email.utils import formatdate
from typing import TYPE_CHECKING, Any

from deeplink.core.errors import DeepLinkError
from deeplink.core.text import counted, printable
from deeplink.rpc.tokens import read_token
from deeplink.scheduler.journal.incident_json import IncidentNews, cost, document, gravity, totals
from deeplink.scheduler.recovery.records import IncidentOutcome
from deeplink.scheduler.slurm.command import DEVNULL, TimeoutExpired, kill_group, spawn
from deeplink.scheduler.watch.notify.channels import Email, Program, Webhook, checked_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deeplink.scheduler.recovery.records import Incident, JobRecord
    from deeplink.scheduler.watch.notify.channels import Channel

log = logging.getLogger(__name__)

MOST_LINES = 20
MOST_DOCUMENTS = 100
LONGEST_EVIDENCE = 400
LONGEST_ANSWER = 200
LONGEST_OWNER = 120
LONGEST_READ = 4_096
AGAIN_S = 0.5
DAY_S = 86_400.0
MOST_OF_EACH = 8  # lines of a digest about kinds, nodes, jobs and what is open
KILLED_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Notification:
    """What a channel sends."""

    id: str  # the same for the same news: whoever gets it twice can tell
    subject: str  # in one line
    text: str  # in full
    document: dict[str, Any]  # for programs; `text` is in it, which is what Slack and its like show


@dataclass(frozen=True, slots=True, kw_only=True)
class NewsContext:
    """What makes news of use to who reads them: whose jobs they are about, on which cluster, where to see more."""

    cluster: str = ""  # empty: not known
    page: str = ""  # URL of the console; empty: none
    jobs: Mapping[int, JobRecord] = field(default_factory=dict)  # by raw id, those that are known

    def owner(self, incident: Incident) -> str:
        """Return whose job it is and what that is called; empty where it is about none, or not known."""
        job = self.jobs.get(incident.attempt.job) if incident.attempt else None
        return printable(f"{job.name} of {job.user}" if job.name else job.user)[:LONGEST_OWNER] if job else ""

    def link(self, incident: Incident) -> str:
        """Return where the console shows it; empty where there is none."""
        return f"{self.page}/#/incidents/{incident.number}" if self.page and incident.number else ""

    def facts(self, incident: Incident) -> dict[str, Any]:
        """Return the same for programs."""
        job = self.jobs.get(incident.attempt.job) if incident.attempt else None
        return {
            "job_name": job.name if job else "",
            "user": job.user if job else "",
            "url": self.link(incident),
        }


UNKNOWN = NewsContext()


def notification(seed: str, subject: str, text: str, host: str, **facts: Any) -> Notification:
    """Return a message of the watchdog on `host`; those of one seed have one id."""
    name = hashlib.sha256(seed.encode()).hexdigest()[:32]
    return Notification(name, subject, text, {"id": name, "text": text, "host": host, **facts})


def message(batch: Sequence[IncidentNews], host: str, known: NewsContext = UNKNOWN) -> Notification:
    """Return one message about all news of a batch, told by the watchdog on `host`."""
    subject = f"DeepLink{f' {known.cluster}' if known.cluster else ''}: {_subject(batch)}"
    lines = [line(news, known) for news in batch[:MOST_LINES]]
    if len(batch) > MOST_LINES:
        lines.append(f"and {len(batch) - MOST_LINES} more: deeplink incidents")
    text = "\n".join(lines if len(batch) == 1 else [_subject(batch), *lines])
    documents = [
        {**document(news.incident), "severity": gravity(news.incident).value, **known.facts(news.incident)}
        for news in batch[:MOST_DOCUMENTS]
    ]
    return notification(
        "\n".join(map(str, batch)),
        subject,
        text,
        host,
        cluster=known.cluster,
        test=False,
        incidents=documents,
        incidents_left_out=len(batch) - len(documents),
    )


def trial(host: str, unix: float) -> Notification:
    """Return a message that says it is a test, of the watchdog on `host`."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
    text = f"This is a test of notifications by `deeplink watch` on {host}, {when}. Nothing is wrong."
    subject, seed = "DeepLink: a test of notifications", f"test {host} {unix}"
    return notification(seed, subject, text, host, test=True, incidents=[], incidents_left_out=0)


def _subject(batch: Sequence[IncidentNews]) -> str:
    if len(batch) == 1:
        return _title(batch[0])
    kinds = Counter(news.incident.kind for news in batch).most_common(3)
    states = Counter(news.incident.outcome.value for news in batch)
    nodes = sorted({news.incident.node for news in batch if news.incident.node})
    where = f" on {', '.join(nodes[:4])}{' and others' if len(nodes) > 4 else ''}" if nodes else ""  # noqa: PLR2004 - names in a title
    of = ", ".join(f"{count} {kind}" for kind, count in kinds)
    how = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"{counted(len(batch), 'incident')} ({of}){where}: {how}"


def _title(news: IncidentNews) -> str:
    incident = news.incident
    about = [incident.kind]
    if incident.node:
        about.append(f"on {incident.node}")
    if incident.attempt:
        about.append(f"job {incident.job}")
    return f"{' '.join(about)}: {incident.outcome.value}"


def line(news: IncidentNews, known: NewsContext = UNKNOWN) -> str:
    """Return what there is to say of an incident, in one line."""
    incident = news.incident
    owner, link = known.owner(incident), known.link(incident)
    words = [_title(news)]
    if owner:
        words.append(f"({owner})")
    if incident.recovered_unix:
        words.append(f"after {max(0.0, incident.recovered_unix - incident.began_unix):.1f} s")
    if incident.action != "none":
        words.append(f"by {incident.action}")
    lost = cost(incident).total_h
    if incident.outcome is not IncidentOutcome.OPEN and lost:
        words.append(f"at {lost:,.2f} rank-hours")
    evidence = printable(incident.evidence)[:LONGEST_EVIDENCE]
    where = f"deeplink incident {incident.number}{f', {link}' if link else ''}"
    return f"{' '.join(words)}{f'. {evidence}' if evidence else ''} ({where})"


def latest(at: tuple[int, int], unix: float) -> float:
    """Return when it was last `at` hour and minute of the day, local time; both in Unix seconds."""
    for before in (0, 1):
        now = time.localtime(unix)
        due = time.mktime((now.tm_year, now.tm_mon, now.tm_mday - before, *at, 0, 0, 0, -1))
        if due <= unix:
            return due
    return unix


def digest(
    incidents: Sequence[Incident], host: str, known: NewsContext, since_unix: float, until_unix: float
) -> Notification:
    """Return the message of all incidents between two times; there is at least one."""
    begun, ended = (time.strftime("%Y-%m-%d %H:%M", time.localtime(unix)) for unix in (since_unix, until_unix))
    where = f" {known.cluster}" if known.cluster else ""
    (whole,) = totals(incidents, lambda _incident: "all")
    healed = whole.incidents - whole.failed - whole.open
    cost = f", {whole.lost_h:,.2f} rank-hours lost" + (f" ({whole.unknown} not known)" if whole.unknown else "")
    states = f"{healed} recovered, {whole.failed} failed, {whole.open} open"
    said = f"{counted(whole.incidents, 'incident')}: {states}{cost}"
    lines = [f"{begun} to {ended}, {said}"]
    parts: tuple[tuple[str, Callable[[Incident], str]], ...] = (
        ("By kind", lambda one: str(one.kind)),
        ("By node", lambda one: str(one.node or "")),
        ("By job", lambda one: f"{one.job} ({known.owner(one)})" if known.owner(one) else one.job),
    )
    for title, name in parts:
        found = [total for total in totals(incidents, name) if total.name]
        lines += [
            f"{title}: {total.name}: {total.incidents}, {total.lost_h:,.2f} rank-hours"
            for total in found[:MOST_OF_EACH]
        ]
        if len(found) > MOST_OF_EACH:
            lines.append(f"{title}: and {len(found) - MOST_OF_EACH} more")
    opened = [one for one in incidents if one.outcome is IncidentOutcome.OPEN]
    lines += [f"Still open: {line(IncidentNews(one), known)}" for one in opened[:MOST_OF_EACH]]
    text = "\n".join(lines)
    facts = {
        "since": since_unix,
        "until": until_unix,
        "incidents": whole.incidents,
        "recovered": healed,
        "failed": whole.failed,
        "open": whole.open,
        "lost_rank_hours": whole.lost_h,
        "cost_unknown": whole.unknown,
    }
    return notification(
        f"digest {host} {since_unix} {until_unix}",
        f"DeepLink{where}: the day: {said}",
        text,
        host,
        cluster=known.cluster,
        test=False,
        digest=facts,
        incidents=[],
        incidents_left_out=whole.incidents,
    )


# One try to deliver a message: in bounded time, and what is said of a failure holds no URL and no password.


class NotSentError(DeepLinkError):
    """A message was not taken. What is said of it holds no URL, no password, and at most a line of the answer."""

    def __init__(self, channel: str, problem: str, after_s: float = 0.0) -> None:
        line = " ".join(problem.split())[:LONGEST_ANSWER]
        super().__init__(
            f"channel {channel}: {line}", remedy="`deeplink watch --notify-test` tries every channel."
        )
        self.channel, self.problem = channel, line
        self.after_s = after_s  # the other side asked to be left alone for so long; 0: it did not say


def sender(channel: Channel) -> Callable[[Notification], None]:
    """Return what tries once to send a message, in bounded time, and raises NotSentError where it is not taken."""

    def send(message: Notification) -> None:
        try:
            match channel.way:
                case Program():
                    _run(channel, channel.way, message)
                case Email():
                    _mail(channel, channel.way, message)
                case Webhook():
                    _post(channel, channel.way, message)
        except NotSentError:
            raise
        except smtplib.SMTPResponseException as problem:
            said = problem.smtp_error.decode(errors="replace") if isinstance(problem.smtp_error, bytes) else ""
            raise NotSentError(channel.name, f"it answered {problem.smtp_code} {said}") from problem
        # DeepLinkError: of a file with a URL, token or password. UnicodeError and ValueError: of host names and
        # header fields that cannot be sent.
        except (OSError, DeepLinkError, http.client.HTTPException, UnicodeError, ValueError) as problem:
            raise NotSentError(channel.name, str(problem) or type(problem).__name__) from problem

    return send


@contextlib.contextmanager
def cut_off(after_s: float, socket_of: Callable[[], socket.socket | None]) -> Iterator[None]:
    """Shut a connection once the time is up: a socket's own timeout bounds each read, not a whole slow answer."""
    # One that is made only then, to the second of a host's addresses, is shut as well.
    done = threading.Event()

    def cut() -> None:
        wait_s = after_s
        while not done.wait(wait_s):
            wait_s = AGAIN_S
            held = socket_of()
            if held is not None:
                with contextlib.suppress(OSError):
                    held.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=cut, name="deeplink-notify-cut", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _mail(channel: Channel, way: Email, message: Notification) -> None:
    """Hand a mail to the SMTP server."""
    password = read_token(way.password_file) if way.password_file else ""
    us = socket.gethostname()  # smtplib would ask for the full name, which may take long
    tls = None if way.tls == "none" else ssl.create_default_context(cafile=way.ca_file)
    server: smtplib.SMTP = (
        smtplib.SMTP_SSL(local_hostname=us, timeout=channel.timeout_s, context=tls)
        if way.tls == "tls"
        else smtplib.SMTP(local_hostname=us, timeout=channel.timeout_s)
    )
    # `connect` does not tell it, and certificates are checked by it.
    server._host = way.host  # type: ignore[attr-defined]  # noqa: SLF001 - as smtplib does itself with a host
    try:
        with cut_off(channel.timeout_s, lambda: server.sock):
            server.connect(way.host, way.port)
            if way.tls == "starttls":
                server.starttls(context=tls)
            if way.user:
                server.login(way.user, password)
            refused = server.send_message(_letter(message, way))
            with contextlib.suppress(OSError):
                server.quit()  # whatever becomes of it: the mail was taken
    finally:
        server.close()
    if refused:  # the others have it: sent again, they would have it twice
        log.warning("channel %s: it was not taken for %s", channel.name, ", ".join(sorted(refused)))


def _letter(message: Notification, way: Email) -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["To"] = way.sender, ", ".join(way.to)
    mail["Subject"] = " ".join(message.subject.split())[:200]
    mail["Date"] = formatdate(localtime=True)
    # The same news have the same id: a mail program shows a repeated one once.
    mail["Message-ID"] = f"<{message.id}@{way.sender.partition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"  # no one's holiday notice answers it
    mail.set_content(message.text + "\n")
    return mail


def _run(channel: Channel, way: Program, message: Notification) -> None:
    """Give a program of the site's the message on its standard input; what it leaves in the background goes on."""
    # Files, not pipes: those are closed only when the last that it started has ended, and the message would be
    # sent again and again though it was taken.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(f"{json.dumps(message.document)}\n".encode())
        given.seek(0)
        process = spawn(way.argv, stdin=given, stdout=DEVNULL, stderr=said)
        try:
            code = process.wait(channel.timeout_s)
        except TimeoutExpired as late:
            kill_group(process)
            with contextlib.suppress(TimeoutExpired):  # it hangs in the kernel
                process.wait(KILLED_WAIT_S)
            problem = f"{way.argv[0]} did not end within {channel.timeout_s:g} s and was stopped"
            raise NotSentError(channel.name, problem) from late
        if code:
            said.seek(0)
            problem = said.read(LONGEST_ANSWER).decode(errors="replace").strip()
            raise NotSentError(channel.name, f"{way.argv[0]} exited {code}: {problem}")


def _post(channel: Channel, way: Webhook, message: Notification) -> None:
    """Post the message as JSON; through the proxy that the environment names, where it names one."""
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "deeplink-watch",
        "Idempotency-Key": message.id,
        "Connection": "close",
    }
    connection, target = _connection(urllib.parse.urlsplit(_url(channel, way)), way, channel.timeout_s)
    if way.token_file is not None:
        headers["Authorization"] = f"Bearer {read_token(way.token_file)}"
    try:
        with cut_off(channel.timeout_s, lambda: connection.sock):
            connection.request("POST", target, json.dumps(message.document).encode(), headers)
            answer = connection.getresponse()
            answer.read(LONGEST_READ)
    finally:
        connection.close()
    if answer.status not in range(200, 300):
        wait = answer.getheader("Retry-After") or ""  # as a date it is left to our own pauses
        after_s = float(wait) if wait.isascii() and wait.isdigit() and len(wait) < 6 else 0.0  # noqa: PLR2004 - a day and more
        raise NotSentError(channel.name, f"it answered {answer.status} {answer.reason}", after_s)


def _url(channel: Channel, way: Webhook) -> str:
    if way.url_file is None:
        return way.url

    def wrong(_key: str, problem: str) -> NotSentError:
        return NotSentError(channel.name, f"{way.url_file}: {problem}")

    return checked_url(way.url_file.read_text(encoding="utf-8").strip(), wrong)


def _connection(
    url: urllib.parse.SplitResult, way: Webhook, timeout_s: float
) -> tuple[http.client.HTTPConnection, str]:
    host, target = url.hostname or "", urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
    proxy = None if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(url.scheme)
    over = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else url
    if url.scheme == "https":
        context = ssl.create_default_context(cafile=way.ca_file)
        tls = http.client.HTTPSConnection(over.hostname or "", over.port, timeout=timeout_s, context=context)
        if proxy:
            tls.set_tunnel(host, url.port or 443)
        return tls, target
    if proxy:  # it is asked for the whole address
        target = urllib.parse.urlunsplit((url.scheme, url.netloc, url.path or "/", url.query, ""))
    return http.client.HTTPConnection(over.hostname or "", over.port, timeout=timeout_s), target
