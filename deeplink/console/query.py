"""What is asked of a long list: which rows, in what order, which page of them; and the search over all; pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from deeplink.core.errors import DeepLinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deeplink.console.jobs import JobView

PAGE = 50  # rows of a page
MOST_HITS = 12
_LONGEST = 200  # characters of what is asked
_MOST = 1e12


class QueryError(DeepLinkError):
    """A question to the console's API that cannot be understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question to a list. What is empty or 0 is not asked; times are in Unix seconds."""

    text: str = ""
    state: str = ""
    user: str = ""
    node: str = ""
    job: str = ""
    kind: str = ""
    since: float = 0.0
    until: float = 0.0
    sort: str = ""
    turned: bool = False  # the other way round
    page: int = 1

    @classmethod
    def of(cls, said: Mapping[str, str]) -> Query:
        """Read the parameters of a URL; others than ours are an error, as is a number that is none."""
        known = {field.name: field.type for field in fields(cls)}
        unknown = sorted(said.keys() - known.keys())
        if unknown:
            raise QueryError(f"{unknown[0][:40]!r} cannot be asked", remedy=f"These can: {', '.join(known)}.")
        return cls(**{name: _value(name, str(known[name]), text) for name, text in said.items()})


def _value(name: str, kind: str, text: str) -> Any:
    if kind == "str":
        return text[:_LONGEST]
    if kind == "bool":
        return text not in {"", "0", "no"}
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < _MOST:  # nor NaN
        raise QueryError(f"{name}={text[:40]!r} is no number that fits", remedy="Give digits.")
    return max(1, int(value)) if kind == "int" else value


def paged(rows: Sequence[Any], page: int, name: str, size: int = PAGE) -> dict[str, Any]:
    """Return one page of rows, and how many there are; the last one where the page asked for is behind it.

    >>> paged("abcde", 9, "letters", 2)
    {'letters': ['e'], 'found': 5, 'page': 3, 'pages': 3}
    """
    pages = max(1, math.ceil(len(rows) / size))
    page = min(page, pages)
    return {name: list(rows[(page - 1) * size : page * size]), "found": len(rows), "page": page, "pages": pages}


_SORTS: dict[str, Callable[[JobView], Any]] = {
    "id": lambda job: job.id,
    "name": lambda job: job.name.lower(),
    "user": lambda job: job.user.lower(),
    "state": lambda job: job.word,
    "nodes": lambda job: len(job.nodes),
    "step": lambda job: job.step,
    "rate": lambda job: job.rate,
    "loss": lambda job: job.loss if isinstance(job.loss, float) else None,
    "heard": lambda job: job.heard_unix or None,
}


def select_jobs(jobs: Iterable[JobView], asked: Query, plain: Callable[[JobView], Any]) -> dict[str, Any]:
    """Return a page of the jobs asked for, as `plain` makes them, with the count of each state."""
    others = [job for job in jobs if _fits(job, asked)]
    states = Counter(job.word for job in others)
    found = [job for job in others if asked.state in {"", job.word}]
    if asked.sort not in {"", *_SORTS}:
        raise QueryError(f"jobs cannot be sorted by {asked.sort[:40]!r}", remedy=f"By these: {', '.join(_SORTS)}.")
    made = paged(_ordered(found, asked), asked.page, "jobs")
    return {**made, "jobs": [plain(job) for job in made["jobs"]], "states": dict(sorted(states.items()))}


def _fits(job: JobView, asked: Query) -> bool:
    if asked.user not in {"", job.user} or (asked.node and asked.node not in {*job.nodes, *job.spares}):
        return False
    text = asked.text.lower()
    return not text or any(text in word.lower() for word in (job.label, str(job.id), job.name, job.user))


def _ordered(jobs: list[JobView], asked: Query) -> list[JobView]:
    if not asked.sort:  # as they come: what needs somebody first, and the newest of them
        return jobs[::-1] if asked.turned else jobs
    by = _SORTS[asked.sort]
    known = [job for job in jobs if by(job) is not None]
    return sorted(known, key=by, reverse=asked.turned) + [job for job in jobs if by(job) is None]


_ORDER = {"job": 0, "node": 1, "user": 2, "dataset": 3, "incident": 4}  # a number alone is a job's


def search(text: str, document: Mapping[str, Any], jobs: Sequence[JobView]) -> list[dict[str, str]]:
    """Return what goes by this name: jobs, nodes, users, datasets, incidents; whole names first."""
    text = text.strip().lower()[:_LONGEST]
    if not text:
        return []
    hits = [
        (_closeness(text, words), {"what": what, "name": name, "about": about, "place": place})
        for what, name, about, place, words in _named(document, jobs)
        if text in words.lower()
    ]
    return [hit for _, hit in sorted(hits, key=lambda one: (one[0], _ORDER[one[1]["what"]], len(one[1]["name"])))][
        :MOST_HITS
    ]


def _closeness(text: str, words: str) -> int:
    found = words.lower().split("\n")
    return 0 if text in found else 1 if any(word.startswith(text) for word in found) else 2


def _named(document: Mapping[str, Any], jobs: Sequence[JobView]) -> Iterable[tuple[str, str, str, str, str]]:
    """Yield what it is, its name, something about it, its place, and the words that it is found by, one a line."""
    for name, node in document["nodes"].items():
        place = urlencode({"leaf": node["switch"], "node": name})
        yield "node", name, node["health"], f"fabric?{place}", name
    for job in jobs:
        about = " · ".join(filter(None, (job.name, job.user, job.word)))
        yield "job", job.label, about, f"jobs/{job.id}", f"{job.label}\n{job.id}\n{job.name}"
    for user, count in Counter(job.user for job in jobs if job.user).items():
        yield "user", user, f"{count} job{'s' * (count > 1)}", f"jobs?{urlencode({'user': user})}", user
    for row in document["datasets"].values():
        if row["newest"]:
            yield (
                "dataset",
                row["name"],
                row["source"],
                f"cache?{urlencode({'dataset': row['name']})}",
                row["name"],
            )
    for row in document["incidents"].values():
        about = " · ".join(filter(None, (row["kind"], row["node"], row["outcome"])))
        yield (
            "incident",
            str(row["number"]),
            about,
            f"incidents/{row['number']}",
            f"{row['number']}\n{row['kind']}",
        )
