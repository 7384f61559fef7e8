"""Frozen dataclasses as JSON, rows of a database and protobuf messages, by the annotations of their fields.

In JSON a dataclass with positional fields is an array, one with keyword fields an object. In a row a dataclass in
a field is columns, a tuple or mapping JSON text. In a message None is an empty text or a field that is not set.
What is missing, because an older program wrote it, has the default of its field.

`field(metadata={"wire": NAME, "longest": N})`: its name in messages, and how much of a text from there is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable
    from dataclasses import Field

    from google.protobuf.message import Message

LONGEST_TEXT = 4_096
LARGEST = (1 << 63) - 1  # messages have 64 bits without a sign, rows 63

T = TypeVar("T")
M = TypeVar("M")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """How one field is written and read."""

    name: str
    wire: str
    kind: Any  # of one item; dict for a mapping
    is_record: bool  # the kind is a dataclass
    is_enum: bool
    many: bool
    optional: bool
    default: Any
    longest: int
    columns: tuple[str, ...]  # where it holds one dataclass
    plain: bool  # a text or a number, which is written as it is


@cache
def _plans(owner: Hashable) -> tuple[_Plan, ...]:
    kind: Any = owner
    hints = get_type_hints(kind)
    return tuple([_plan(each, hints[each.name]) for each in fields(kind)])


def _plan(field: Field[Any], hint: Any) -> _Plan:
    options = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    (kind,) = [option for option in options if option is not NoneType]
    many = get_origin(kind) is tuple
    if many:
        kind = get_args(kind)[0]
    elif get_origin(kind) is not None:
        kind = dict
    kind = getattr(kind, "__supertype__", kind)  # of a NewType
    return _Plan(
        name=field.name,
        wire=field.metadata.get("wire", field.name),
        kind=kind,
        is_record=is_dataclass(kind),
        is_enum=issubclass(kind, Enum),
        many=many,
        optional=len(options) > 1,
        default="" if field.default is MISSING else field.default,
        longest=field.metadata.get("longest", LONGEST_TEXT),
        columns=tuple([each.name for each in fields(kind)]) if is_dataclass(kind) and not many else (),
        plain=not many and kind in {str, int, float, bool},
    )


_STAND_INS: dict[Any, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {}


def stand_in(kind: type[T], other: type[M], to: Callable[[T], M], back: Callable[[M], T]) -> None:
    """Write and read values of `kind` as those of `other`."""
    _STAND_INS[kind] = (other, to, back)


def to_json(value: object) -> str:
    """Return a value, dataclasses and enumerations in it, as JSON text."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if value.__class__ in _STAND_INS:
        value = _STAND_INS[value.__class__][1](value)
    listed = fields(value)
    told = {each.name: getattr(value, each.name) for each in listed}
    return told if listed[0].kw_only else list(told.values())


def to_row(value: Any, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """Return the columns of a dataclass, without those to leave out."""
    row: dict[str, Any] = {}
    for plan in _plans(value.__class__):
        if plan.name in leave_out:
            continue
        held = getattr(value, plan.name)
        if plan.columns:
            for name in plan.columns:
                row[name] = None if held is None else getattr(held, name)
        elif plan.many or plan.kind is dict:
            row[plan.name] = to_json(held) if held else "[]" if plan.many else "{}"
        else:
            row[plan.name] = held.value if isinstance(held, Enum) else held
    return row


def from_row(kind: Callable[..., T], row: Mapping[str, Any]) -> T:
    """Return the dataclass of a row, or of a JSON object, which may hold more."""
    if kind in _STAND_INS:
        other, _, back = _STAND_INS[kind]
        return cast("T", back(from_row(other, row)))
    given: dict[str, Any] = {}
    for plan in _plans(kind):
        if plan.columns and plan.columns[0] in row:
            values = [row[name] for name in plan.columns]
            given[plan.name] = None if values[0] is None else plan.kind(*values)
        elif plan.name in row:
            held = row[plan.name]
            given[plan.name] = held if plan.plain else _read(plan, held)
    return kind(**given)


def _read(plan: _Plan, held: Any) -> Any:
    if plan.is_enum and not plan.many:
        return plan.kind(held)
    held = json.loads(held) if isinstance(held, str) else held
    if not plan.many:
        return held
    if plan.is_record:
        return tuple([from_row(plan.kind, each) if isinstance(each, dict) else plan.kind(*each) for each in held])
    return tuple(held)


class _Wire(NamedTuple):
    """How one field stands in messages of one class."""

    plan: _Plan
    name: str
    wire: str
    is_text: bool
    is_float: bool
    is_number: bool
    has_presence: bool
    prefix: str  # of the names of an enumeration's values, as in PHASE_UNSPECIFIED; empty: it is sent as a word
    names: dict[int, str]  # of the values of such an enumeration
    nested: Any  # the class of messages in it


@cache
def _wires(kind: Hashable, message: Any) -> tuple[_Wire, ...]:
    known = message.DESCRIPTOR.fields_by_name
    return tuple([_wire(plan, known[plan.wire]) for plan in _plans(kind) if plan.wire in known])


def _wire(plan: _Plan, field: Any) -> _Wire:
    values = field.enum_type.values_by_number if field.enum_type else {}
    prefix = values[0].name.removesuffix("UNSPECIFIED") if values else ""
    return _Wire(
        plan=plan,
        name=plan.name,
        wire=plan.wire,
        is_text=plan.plain and plan.kind is str and not plan.optional,
        is_float=plan.plain and plan.kind is float and not plan.optional,
        is_number=plan.plain and plan.kind in {int, bool} and not plan.optional,
        has_presence=field.has_presence,
        prefix=prefix,
        names={number: value.name.removeprefix(prefix) for number, value in values.items()},
        nested=field.message_type._concrete_class if plan.is_record else None,  # noqa: SLF001 - protobuf's own way
    )


def to_message(value: Any, message: Callable[..., M]) -> M:
    """Return a message with the fields of a dataclass that the message has, too."""
    if value.__class__ in _STAND_INS:
        value = _STAND_INS[value.__class__][1](value)
    told: dict[str, Any] = {}
    for wire in _wires(value.__class__, message):
        held = getattr(value, wire.name)
        if held is None or not (held or wire.has_presence):
            continue  # unset
        if wire.nested:
            nested = wire.nested
            held = [to_message(each, nested) for each in held] if wire.plan.many else to_message(held, nested)
        elif isinstance(held, Enum):
            held = f"{wire.prefix}{held.name}" if wire.prefix else held.value
        elif wire.plan.kind is dict:
            held = dict(held)
        told[wire.wire] = held
    return message(**told)


def from_message(kind: Callable[..., T], message: Message, leave_out: Collection[str] = ()) -> T:
    """Return the dataclass of a message; ValueError where a number or a word cannot be kept."""
    if kind in _STAND_INS:
        other, _, back = _STAND_INS[kind]
        return cast("T", back(from_message(other, message)))
    given: dict[str, Any] = {}
    of: Any = message.__class__
    for wire in _wires(kind, of):
        held = getattr(message, wire.wire)
        if wire.is_text:
            held = held[: wire.plan.longest] or wire.plan.default
        elif wire.is_float:
            if not 0.0 <= held < math.inf:
                raise ValueError("a time in it is no number")
        elif wire.is_number:
            if held > LARGEST:
                raise ValueError("a number in it is too large")
        elif wire.name in leave_out:
            continue
        else:
            held = _heard(wire, message, held)
        given[wire.name] = held
    return kind(**given)


def _heard(wire: _Wire, message: Message, held: Any) -> Any:
    plan = wire.plan
    if plan.many:
        return tuple([from_message(plan.kind, each) for each in held] if plan.is_record else held)
    if plan.kind is dict:
        return dict(held)
    if plan.optional and (not message.HasField(wire.wire) if wire.has_presence else held == ""):
        return None
    if plan.is_record:
        return from_message(plan.kind, held)
    if plan.is_enum:
        return _member(wire, held)
    if plan.kind is int and held > LARGEST:
        raise ValueError("a number in it is too large")
    return held[: plan.longest] if plan.kind is str else held


def _member(wire: _Wire, held: Any) -> Enum:
    kind: Any = wire.plan.kind
    if wire.prefix:
        found = kind.__members__.get(wire.names.get(held, ""))
    else:
        found = {each.value: each for each in kind}.get(held) if held else wire.plan.default
    if not found:
        raise ValueError(f"{wire.name} {held!r} is none")
    return cast("Enum", found)
