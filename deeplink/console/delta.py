"""What changed between two snapshots: the few bytes that lead a browser from one to the next; pure."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]

TABLES = ("switches", "nodes", "jobs", "incidents", "sources")
META = ("unix", "cluster", "interval_s", "headline", "jobs_known")


def change(old: Document, new: Document) -> Document:
    """Return what turns `old` into `new`: changed fields of changed things, keys of things gone, new curve points.

    >>> before = {"seq": 1, "unix": 5.0, "nodes": {"n0": {"state": "idle", "gpus": 2}}}
    >>> after = {"seq": 2, "unix": 6.0, "nodes": {"n0": {"state": "down", "gpus": 2}}}
    >>> change(before, after)["set"]
    {'nodes': {'n0': {'state': 'down'}}}
    """
    set_: Document = {}
    gone: Document = {}
    for table in TABLES:
        had, has = old.get(table, {}), new.get(table, {})
        changed = {key: fields for key, row in has.items() if (fields := _fields(had.get(key, {}), row))}
        left = [key for key in had if key not in has]
        if changed:
            set_[table] = changed
        if left:
            gone[table] = left
    return {
        "after": old["seq"],
        "meta": {"seq": new["seq"], **_fields(_meta(old), _meta(new))},
        "set": set_,
        "gone": gone,
        "curves": _curves(old.get("curves", {}), new.get("curves", {})),
        "curves_gone": [job for job in old.get("curves", {}) if job not in new.get("curves", {})],
    }


def apply(old: Document, delta: Document) -> Document:
    """Return the snapshot that `delta` leads to from `old` (what the page does in its own language)."""
    new = {**old, **delta["meta"]}
    for table in TABLES:
        rows = {key: row for key, row in old.get(table, {}).items() if key not in delta["gone"].get(table, ())}
        for key, fields in delta["set"].get(table, {}).items():
            rows[key] = {**rows.get(key, {}), **fields}
        new[table] = rows
    curves = {job: curve for job, curve in old.get("curves", {}).items() if job not in delta["curves_gone"]}
    for job, curve in delta["curves"].items():
        before = curves[job]["points"][: curve["keep"]] if curve["keep"] else []
        curves[job] = {"metric": curve["metric"], "points": [*before, *curve["points"]]}
    new["curves"] = curves
    return new


def _meta(document: Document) -> Document:
    return {key: document[key] for key in META if key in document}


def _fields(old: Document, new: Document) -> Document:
    return {key: value for key, value in new.items() if key not in old or old[key] != value}


def _curves(old: Document, new: Document) -> Document:
    changes = {}
    for job, curve in new.items():
        had = old.get(job)
        if had == curve:
            continue
        points = curve["points"]
        before = had["points"] if had and had["metric"] == curve["metric"] else []
        keep = next(
            (at for at, (a, b) in enumerate(zip(before, points, strict=False)) if a != b),
            min(len(before), len(points)),
        )
        changes[job] = {"metric": curve["metric"], "keep": keep, "points": points[keep:]}
    return changes
