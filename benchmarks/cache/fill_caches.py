"""Puts samples into redis or memcached under their row numbers; runs in the peers' virtual environment.

python -m benchmarks.cache.fill_caches redis|memcached HOST PORT FLAT SIZE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

_TRIES = 100
_AT_ONCE = 500


def _filled_redis(host: str, port: int, samples: list[bytes]) -> None:
    import redis  # noqa: PLC0415 - only one of the two is needed

    client: Any = redis.Redis(host, port)
    for _ in range(_TRIES):
        try:
            client.ping()
            break
        except redis.exceptions.ConnectionError:
            time.sleep(0.05)
    for start in range(0, len(samples), _AT_ONCE):
        part = samples[start : start + _AT_ONCE]
        client.mset({b"%d" % row: data for row, data in enumerate(part, start)})


def _filled_memcached(host: str, port: int, samples: list[bytes]) -> None:
    from pymemcache.client.base import Client  # noqa: PLC0415 - as above

    client: Any = Client((host, port), no_delay=True)
    for _ in range(_TRIES):
        try:
            client.version()
            break
        except OSError:
            time.sleep(0.05)
    for row, data in enumerate(samples):
        client.set(str(row), data, noreply=False)


def main() -> None:
    """Fill one server."""
    kind, host, port, path, size = sys.argv[1:]
    whole, length = Path(path).read_bytes(), int(size)
    samples = [whole[start : start + length] for start in range(0, len(whole), length)]
    {"redis": _filled_redis, "memcached": _filled_memcached}[kind](host, int(port), samples)


if __name__ == "__main__":
    main()
