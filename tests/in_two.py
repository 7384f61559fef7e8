"""Run pytest twice at once: the tests that drive a cluster, which mostly wait, and all the others.

The others end first; then those that try a cluster in many cases (`table`) run beside the rest of the cluster's.

python tests/in_two.py [ARGUMENT OF PYTEST...]

The others' output is shown as it comes, the cluster's when both have ended. Fails when either does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import IO

NO_TESTS = 5
"""What pytest exits with when nothing was chosen: fine for one half, not for both."""


def main(argv: list[str]) -> int:
    """Return 0, or what pytest exited with where a half failed."""
    with tempfile.TemporaryFile("w+") as kept:
        cluster = _half("cluster and not table", argv, kept)
        codes = [_half("not cluster", argv, None).wait(), _half("cluster and table", argv, None).wait()]
        codes.append(cluster.wait())
        kept.seek(0)
        sys.stdout.write(kept.read())
    bad = [code for code in codes if code not in {0, NO_TESTS}]
    return bad[0] if bad else min(codes)


def _half(marker: str, argv: list[str], output: IO[str] | None) -> subprocess.Popen[bytes]:
    # A cache of its own for each: they write at the same time.
    cache = f"cache_dir=.pytest_cache/{marker.replace(' ', '-')}"
    command = [sys.executable, "-m", "pytest", "-m", marker, "-o", cache, *argv]
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT if output else None)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # both halves have it too
        sys.exit(130)
