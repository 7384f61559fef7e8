"""Commands that stand for a program of Slurm's: its words are not ours to read."""

from __future__ import annotations

import click
from typing_extensions import override


class Verbatim(click.Command):
    """Takes every word as it is, as the parameter `words`; only a lone --help is its own."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args == ["--help"]:
            return super().parse_args(ctx, args)
        ctx.params = {"words": tuple(args)}
        return []
