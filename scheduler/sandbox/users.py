"""Who jobs run as: a user that exists only inside the sandbox, or one of the host's."""

from __future__ import annotations

import pwd
from typing import TYPE_CHECKING

from deeplink.scheduler.sandbox.errors import UserError
from deeplink.scheduler.sandbox.settings import User

if TYPE_CHECKING:
    from deeplink.scheduler.sandbox.layout import SandboxLayout

DEFAULT = "deeplink"
_UID = 64100
_HIGHEST = 2**31


def choose(wanted: str, layout: SandboxLayout) -> User:
    """Return the user of that name or number: the host's, or else a new one; the home is the sandbox's own.

    Raises:
        UserError: a number that is none, or a name that no user can have.
    """
    try:
        known = pwd.getpwuid(int(wanted)) if wanted.isdecimal() else pwd.getpwnam(wanted)
    except KeyError:
        return _new(wanted, layout)
    except OverflowError:
        raise UserError(wanted, "the number is too large") from None
    return User(known.pw_name, known.pw_uid, known.pw_gid, layout.homes / known.pw_name)


def _new(wanted: str, layout: SandboxLayout) -> User:
    if wanted.isdecimal():
        if int(wanted) >= _HIGHEST:
            raise UserError(wanted, "the number is too large")
        return User(f"u{wanted}", int(wanted), int(wanted), layout.homes / f"u{wanted}")
    if not (wanted.isascii() and wanted.replace("-", "_").isidentifier() and wanted.islower()):
        raise UserError(wanted, "no user can be called so")
    return User(wanted, _UID, _UID, layout.homes / wanted)
