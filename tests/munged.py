"""A real munged of a test's own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.waiting import LIMIT_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def running_munged() -> Iterator[str]:
    """Run a munged with a key of its own; yield its socket."""
    program = shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program is not None
    folder = Path(tempfile.mkdtemp(prefix="deeplink-munge-"))  # where other users may go, too
    folder.chmod(0o755)
    key = folder / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    places = {"key-file": key, "socket": folder / "s", "pid-file": folder / "pid", "log-file": folder / "log"}
    places["seed-file"] = folder / "seed"
    argv = [program, "--foreground", "--force", *(f"--{name}={path}" for name, path in places.items())]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as munged:
        try:
            until((folder / "s").exists, LIMIT_S)
            yield str(folder / "s")
        finally:
            munged.terminate()
            munged.wait(30)
            shutil.rmtree(folder)


def set_munge_socket(tmp_path: Path, socket: str) -> None:
    """Let Slurm's settings, as `PATH` with tmp_path/bin finds them, name a munged."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir(exist_ok=True)
    scontrol.write_text(f"#!/bin/sh\necho 'AuthInfo                = socket={socket},cred_expire=5'\n")
    scontrol.chmod(0o755)
