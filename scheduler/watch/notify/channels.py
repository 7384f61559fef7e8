"""Where messages go, as the site's file says: `notify_file`, TOML with a `[[notify]]` table for each channel."""

from __future__ import annotations

import re
import tomllib
from collections import Counter, deque
from collections.abc import Mapping  # noqa: TC003 - of a field
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeplink.core.config import WHOLE, ConfigError
from deeplink.scheduler.journal.incident_json import Gravity, NewsFilter, gravity
from deeplink.scheduler.recovery.records import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deeplink.scheduler.journal.incident_json import IncidentNews

# Which news goes out now, in one message, and what waits to be gathered. Pure: time is passed in.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRate:
    """How much one channel is told."""

    burst: int = 10  # messages that may go out at once
    every_s: float = 60.0  # seconds until one more may
    flaps: int = 4  # after so many messages about a node within `window_s` its news wait until that is over
    window_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do now."""

    batch: tuple[IncidentNews, ...] = ()  # news for one message; none: nothing may go out now
    wait_s: float | None = None  # until that changes by itself; None: never, without other news


@dataclass(slots=True)
class Pacer:
    """Keeps account of what one channel was told lately."""

    pace: ChannelRate
    _tokens: float = field(init=False)
    _at: float | None = None
    _told: deque[tuple[float, str]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Begin with all messages of a burst."""
        self._tokens = float(self.pace.burst)

    def turn(self, waiting: Sequence[IncidentNews], now: float) -> Turn:
        """Return what goes out of the news that wait, which are in order; `now` is monotonic."""
        self._pass(now)
        held = self._flapping(now)
        free = [news for news in waiting if news.incident.node not in held or _urgent(news)]
        if not free:
            waits = [held[news.incident.node] for news in waiting if news.incident.node]
            return Turn(wait_s=min(waits, default=None))
        if self._tokens < 1.0:
            return Turn(wait_s=(1.0 - self._tokens) * self.pace.every_s)
        if len(free) > self._tokens:
            return Turn(batch=tuple(free))
        return Turn(batch=tuple(news for news in free if _together(news, free[0])))

    def sent(self, batch: Sequence[IncidentNews], now: float) -> None:
        """Note that a message went out."""
        self._pass(now)
        self._tokens = max(0.0, self._tokens - 1.0)
        self._told.extend((now, node) for node in {news.incident.node for news in batch if news.incident.node})

    def _pass(self, now: float) -> None:
        if self._at is not None:
            more = max(0.0, now - self._at) / self.pace.every_s
            self._tokens = min(float(self.pace.burst), self._tokens + more)
        self._at = now
        while self._told and now - self._told[0][0] >= self.pace.window_s:
            self._told.popleft()

    def _flapping(self, now: float) -> dict[str | None, float]:
        """Nodes that flap, and for how many seconds more their news are held."""
        counts = Counter(node for _, node in self._told)
        held: dict[str | None, float] = {}
        for at, node in self._told:
            # Until the newest messages alone are too few to make a node one that flaps.
            if counts[node] >= self.pace.flaps:
                held[node] = at + self.pace.window_s - now
                counts[node] -= 1
        return held


def _together(one: IncidentNews, other: IncidentNews) -> bool:
    """Whether two are told in one message: of the same node, or of the same job."""
    ours, theirs = one.incident, other.incident
    same_node = ours.node is not None and ours.node == theirs.node
    same_job = ours.attempt is not None and theirs.attempt is not None and ours.attempt.job == theirs.attempt.job
    return one is other or same_node or same_job


def _urgent(news: IncidentNews) -> bool:
    return gravity(news.incident) is Gravity.CRITICAL


AFTER_S = {Gravity.INFO: 600.0, Gravity.WARNING: 120.0, Gravity.CRITICAL: 30.0}
"""Seconds that an incident lasts before it is told, where a site does not say: most heal before."""
DIGEST_AT = "08:00"
MOST_CHANNELS = 16
LONGEST_TIMEOUT_S = 60.0
LARGEST_FILE = 1 << 20

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# Printable ASCII alone: what is refused later, is refused with the whole address in the message.
_URL = re.compile(r"https?://[!-.0-?A-~]+(?:/[!-~]*)?")
_DAYTIME = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])")
_ADDRESS = re.compile(r"[^\s@<>,]+@[^\s@<>,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An HTTP POST of JSON. What it is sent to may be a secret, and is then in a file."""

    url: str = ""
    url_file: Path | None = None
    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Email:
    """A mail by SMTP. `tls` is "starttls", "tls" (from the first byte) or "none"."""

    to: tuple[str, ...]
    sender: str
    host: str = "localhost"
    port: int = 25
    tls: str = "none"
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command that is given the JSON on its standard input; it says by exiting 0 that it took it."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One place messages go to."""

    name: str  # what journal, metrics and log call it
    way: Webhook | Email | Program
    wanted: NewsFilter = field(default_factory=NewsFilter)
    pace: ChannelRate = field(default_factory=ChannelRate)
    after_s: Mapping[Gravity, float] = field(default_factory=dict)  # what is over before is left to the digest
    digest: tuple[int, int] | None = None  # hour and minute of the day's digest; None: it has none
    page: str = ""  # URL of the console, for links to it
    cluster: str = ""  # its name; empty: Slurm's
    heartbeat: bool = False  # it is called every so often while all is well, and told about no incident
    timeout_s: float = 10.0  # bound on one try


def load_channels(path: Path) -> tuple[Channel, ...]:
    """Return the channels that a file names."""
    try:
        with path.open("rb") as file:
            tables = tomllib.loads(file.read(LARGEST_FILE).decode())
    except OSError as problem:
        raise ConfigError(
            str(path), WHOLE, problem.strerror or str(problem), "`notify_file` names it."
        ) from problem
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise ConfigError(
            str(path), WHOLE, f"not TOML: {problem}", "docs/incidents.md has an example."
        ) from problem
    for key in tables.keys() - {"notify", "page", "cluster"}:
        raise ConfigError(str(path), key, "unknown key", "It holds page, cluster, and [[notify]] tables.")
    site = _Table(str(path), 0, {key: tables[key] for key in ("page", "cluster") if key in tables})
    page, cluster = site.text("page", "").rstrip("/"), site.text("cluster", "")
    if page:
        checked_url(page, site.wrong)
    listed = tables.get("notify", [])
    if not isinstance(listed, list) or len(listed) > MOST_CHANNELS:
        raise ConfigError(str(path), "notify", f"expected at most {MOST_CHANNELS} tables [[notify]]")
    channels = tuple(
        replace(_channel(_Table(str(path), number, table)), page=page, cluster=cluster)
        for number, table in enumerate(listed, 1)
    )
    for name, count in Counter(channel.name for channel in channels).items():
        if count > 1:
            raise ConfigError(
                str(path), "notify.name", f"{name!r} is {count} channels", "Give each a name of its own."
            )
    return channels


class _Table:
    """One `[[notify]]` table: keys are taken out one by one, and none may be left."""

    def __init__(self, origin: str, number: int, table: object) -> None:
        self._origin, self._number = origin, number
        if not isinstance(table, dict):
            raise self.wrong("", f"expected a table, got {table!r}")
        self._left: dict[str, Any] = dict(table)

    def wrong(self, key: str, problem: str) -> ConfigError:
        return ConfigError(
            self._origin,
            f"notify #{self._number}{f': {key}' if key else ''}" if self._number else key,
            problem,
            "See docs/incidents.md.",
        )

    def text(self, key: str, default: str | None = None) -> str:
        value = self._left.pop(key, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self.wrong(key, "it is needed, a text" if value is None else f"expected a text, got {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._left.pop(key, [])
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(each, str) and each for each in listed):
            raise self.wrong(key, f"expected a list of texts, got {value!r}")
        return tuple(listed)

    def file(self, key: str) -> Path | None:
        value = self.text(key, "")
        return Path(value).expanduser() if value else None

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self._left.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(key, f"expected a number from {low:g} to {high:g}, got {value!r}")
        return float(value)

    def seconds_by_gravity(self, key: str, default: Mapping[Gravity, float]) -> dict[Gravity, float]:
        value = self._left.pop(key, {})
        by_word = value if isinstance(value, dict) else {each.value: value for each in Gravity}
        inner = _Table(self._origin, self._number, by_word)
        found = {each: inner.number(each.value, default[each], 0.0, 86_400.0) for each in Gravity}
        inner.end()
        return found

    def daytime(self, key: str, default: str) -> tuple[int, int] | None:
        value = self.text(key, default)
        found = _DAYTIME.fullmatch(value)
        if value and not found:
            raise self.wrong(key, f"{value!r} is no time of day such as 08:00; empty for no digest")
        return (int(found[1]), int(found[2])) if found else None

    def one_of(self, key: str, known: Mapping[str, Any], default: str | None = None) -> Any:
        value = self.text(key, default)
        if value not in known:
            raise self.wrong(key, f"{value!r} is none of {', '.join(known)}")
        return known[value]

    def end(self) -> None:
        for key in self._left:
            raise self.wrong(key, "unknown key for this kind")


def _channel(table: _Table) -> Channel:
    kind = table.one_of("kind", {name: name for name in _WAYS})
    name = table.text("name", kind)
    if not _NAME.fullmatch(name):
        raise table.wrong("name", f"{name!r} is no lower-case name")
    heartbeat = kind == "heartbeat"
    channel = Channel(
        name=name,
        way=_WAYS[kind](table),
        wanted=NewsFilter() if heartbeat else _wanted(table),
        pace=ChannelRate() if heartbeat else _pace(table),
        after_s={} if heartbeat else table.seconds_by_gravity("after_s", AFTER_S),
        digest=None if heartbeat else table.daytime("digest", "" if kind == "command" else DIGEST_AT),
        heartbeat=heartbeat,
        timeout_s=table.number("timeout_s", 10.0, 0.1, LONGEST_TIMEOUT_S),
    )
    table.end()
    return channel


def _wanted(table: _Table) -> NewsFilter:
    on = table.texts("on") or ("opened", "closed")
    for word in set(on) - {"opened", "closed"}:
        raise table.wrong("on", f"{word!r} is neither opened nor closed")
    kinds = table.texts("kinds")
    known = {kind.value for kind in IncidentKind}
    for word in set(kinds) - known:
        raise table.wrong("kinds", f"{word!r} is none of {', '.join(sorted(known))}")
    return NewsFilter(
        kinds=frozenset(kinds),
        severity=table.one_of("severity", {each.value: each for each in Gravity}, Gravity.INFO.value),
        opened="opened" in on,
        closed="closed" in on,
    )


def _pace(table: _Table) -> ChannelRate:
    usual = ChannelRate()
    return ChannelRate(
        burst=int(table.number("burst", usual.burst, 1, 1_000)),
        every_s=table.number("every_s", usual.every_s, 0.1, 86_400),
        flaps=int(table.number("flaps", usual.flaps, 1, 1_000)),
        window_s=table.number("window_s", usual.window_s, 1, 86_400),
    )


def _webhook(table: _Table) -> Webhook:
    url, url_file = table.text("url", ""), table.file("url_file")
    if bool(url) == bool(url_file):
        raise table.wrong("url", "one of url and url_file is needed, and not both")
    if url:
        checked_url(url, table.wrong)
    return Webhook(url=url, url_file=url_file, token_file=table.file("token_file"), ca_file=table.file("ca_file"))


def checked_url(url: str, wrong: Callable[[str, str], Exception]) -> str:
    """Return a URL that can be called; else raise what `wrong` makes, which is not told it: it may be a secret."""
    if not _URL.fullmatch(url):
        raise wrong("url", "it is no http:// or https:// URL (without a user name in it)")
    return url


def _email(table: _Table) -> Email:
    to, sender = table.texts("to"), table.text("from")
    for address in (*to, sender):
        if not _ADDRESS.fullmatch(address):
            raise table.wrong("to" if address in to else "from", f"{address!r} is no address")
    if not to:
        raise table.wrong("to", "it is needed, a list of addresses")
    tls: str = table.one_of("tls", {word: word for word in ("starttls", "tls", "none")}, "none")
    user, password_file = table.text("user", ""), table.file("password_file")
    if bool(user) != bool(password_file):
        raise table.wrong("password_file", "user and password_file go together")
    if user and tls == "none":
        raise table.wrong("tls", "a password is not sent in the clear: starttls or tls")
    return Email(
        to=to,
        sender=sender,
        host=table.text("host", "localhost"),
        port=int(table.number("port", {"starttls": 587, "tls": 465, "none": 25}[tls], 1, 65_535)),
        tls=tls,
        user=user,
        password_file=password_file,
        ca_file=table.file("ca_file"),
    )


def _program(table: _Table) -> Program:
    argv = table.texts("argv")
    if not argv:
        raise table.wrong("argv", "it is needed, a list: the program and its arguments")
    return Program(argv=argv)


_WAYS: dict[str, Callable[[_Table], Webhook | Email | Program]] = {
    "webhook": _webhook,
    "email": _email,
    "command": _program,
    "heartbeat": _webhook,
}
