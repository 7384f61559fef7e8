"""The console's API as an OpenAPI document: what can be asked, with which parameters, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deeplink.console.query import Query

_ABOUT = {
    "since": "from this moment on, Unix seconds",
    "until": "up to this moment, Unix seconds",
    "text": "in a name, a kind or the evidence",
    "state": "in this state, or with this end",
    "user": "of this user",
    "node": "on this node",
    "job": "of this job",
    "kind": "of this kind",
    "sort": "name of the column",
    "turned": "1: the other way round",
    "port": "of the agents' metrics",
    "target": "done to this node, job, incident or dataset; may be repeated",
    "page": "which page of 50, from 1; the last one where there are fewer",
}
_KINDS = {"str": "string", "float": "number", "int": "integer", "bool": "string"}
_KINDS_BESIDE = {"port": "integer", "target": "string"}  # of parameters that are no field of `Query`
_ACTION = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["verb", "target"],
                "additionalProperties": False,
                "properties": {
                    **{name: {"type": "string"} for name in ("verb", "target", "nodes", "why", "saw", "request")},
                    "force": {"type": "boolean"},
                },
            }
        }
    },
}
_REFUSALS = {
    "400": "a question that cannot be understood",
    "401": "no valid token",
    "403": "another site's page asked",
    "404": "nothing goes by this name",
    "405": "this is only read",
    "421": "asked by a name that is not this console's",
    "503": "the journal cannot be read, or too many pages are open",
}


@dataclass(frozen=True, slots=True)
class ApiPath:
    """One question to the API."""

    path: str
    summary: str
    asked: tuple[str, ...] = ()  # fields of `Query` that it looks at
    gives: str = "application/json"
    methods: tuple[str, ...] = ("get",)


API = (
    ApiPath("/api/v1/snapshot", "What every page is told, keyed by name or id"),
    ApiPath("/api/v1/nodes", "All nodes, with the age of the facts"),
    ApiPath("/api/v1/datasets", "The datasets of the catalog and where they are"),
    ApiPath("/api/v1/jobs", "A page of the jobs", ("state", "user", "node", "text", "sort", "turned", "page")),
    ApiPath("/api/v1/jobs/{job}", "One job with its attempts and incidents"),
    ApiPath("/api/v1/jobs/{job}/timeline", "A job's course on one axis of time", ("since", "until")),
    ApiPath(
        "/api/v1/incidents",
        "A page of the incidents",
        ("kind", "node", "job", "user", "state", "since", "until", "text", "page"),
    ),
    ApiPath("/api/v1/incidents/{name}", "One incident, by number or id: course, cost, stacks"),
    ApiPath("/api/v1/search", "What goes by a name", ("text",)),
    ApiPath("/api/v1/targets", "For Prometheus: the nodes whose agents can be scraped", ("port",)),
    ApiPath("/api/v1/role", "Who asks: a viewer, or an operator whom the watchdog knows"),
    ApiPath(
        "/api/v1/actions", "What operators had done; POST: have it done", ("target",), methods=("get", "post")
    ),
    ApiPath("/api/v1/actions/plan", "What would be done, with the commands", methods=("post",)),
    ApiPath("/api/v1/events", "The snapshot, then what changes, as server-sent events", gives="text/event-stream"),
    ApiPath("/api/v1/openapi.json", "This document"),
    ApiPath("/metrics", "Metrics for Prometheus", gives="text/plain"),
    ApiPath("/healthz", "Whether it answers, and the state of each source"),
)


def document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "DeepLink console",
            "version": "1",
            "description": "Who asks is a viewer, unless it says who it is.",
        },
        "paths": {each.path: {method: _operation(each, method) for method in each.methods} for each in API},
        "components": {
            "schemas": {
                "Refusal": {
                    "type": "object",
                    "required": ["error", "remedy"],
                    "properties": {"error": {"type": "string"}, "remedy": {"type": "string"}},
                }
            },
            "securitySchemes": {scheme: {"type": "http", "scheme": scheme} for scheme in ("bearer", "basic")},
        },
        "security": [{}, {"bearer": []}, {"basic": []}],
    }


def _operation(each: ApiPath, method: str) -> dict[str, Any]:
    kinds = {field.name: _KINDS[str(field.type)] for field in fields(Query)} | _KINDS_BESIDE
    named = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    refused = {"$ref": "#/components/schemas/Refusal"}
    return {
        "operationId": ("" if method == "get" else f"{method}_")
        + each.path.strip("/").replace("/", "_").translate({ord(mark): None for mark in "{}."}),
        "summary": each.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
        ]
        + [
            {"name": name, "in": "query", "description": _ABOUT[name], "schema": {"type": kinds[name]}}
            for name in each.asked
            if method == "get"
        ],
        **({"requestBody": _ACTION} if method == "post" else {}),
        "responses": {
            "200": {"description": "the answer", "content": {each.gives: {}}},
            **{
                status: {"description": why, "content": {"application/json": {"schema": refused}}}
                for status, why in _REFUSALS.items()
            },
        },
    }
