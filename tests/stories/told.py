"""Runs a script as Python does, and says behind each line that it prints where the samples came from.

python told.py SCRIPT [ARGS]...
"""

import builtins
import os
import runpy
import sys

import deeplink.paths

say = builtins.print
counts = [deeplink.paths.stats()]


def said(text: str, *, flush: bool = False) -> None:
    say(text, flush=flush)
    counts.append(deeplink.paths.stats())
    came = [
        f"{place} {getattr(counts[-1], f'{place}_samples') - getattr(counts[-2], f'{place}_samples')}"
        for place in ("local", "peer", "home", "source")
    ]
    say(f"{os.environ['SLURMD_NODENAME']} task 0 {text.partition(':')[0]}: {', '.join(came)}", flush=True)


builtins.print = said  # type: ignore[assignment]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
