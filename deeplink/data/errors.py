"""What can be wrong with how training uses datasets, order and batches."""

from __future__ import annotations

import sys

from deeplink.core.errors import DeepLinkError


class DatasetError(DeepLinkError):
    """The dataset has not what was asked of it: no samples below a root, no label, no file for a column."""


class SamplerError(DeepLinkError):
    """The sampler was misused, has too few samples left, or its state is of another run."""


class BatchError(DeepLinkError):
    """A packed batch cannot be had: too little shared memory, its worker died, or its samples differ in length."""


def misuse(problem: str, remedy: str) -> SamplerError:
    """Return the error for calls in an order that would lose or repeat samples unseen."""
    return SamplerError(f"ResumableSampler: {problem}", remedy=remedy)


def unfinished(batches: int | str) -> SamplerError:
    """Return the error for a state that would have the batches that a pass handed out come again."""
    return misuse(
        f"state_dict() of a pass that gave {batches} batches, without a finished(): they would come again",
        "Call finished() after each optimizer step, before the state is saved; or set_epoch(epoch) first, to say "
        "that the pass was left on purpose.",
    )


def asked_by_torchdata() -> bool:
    """Tell whether the caller's caller is torchdata, which keeps the state of a pass, and asks the sampler too."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("torchdata.")  # noqa: SLF001


def foreign_state(key: str, found: object, expected: object) -> SamplerError:
    """Return the error for a state of another run: `key` is `found` in it, and `expected` here."""
    return SamplerError(
        f"the sampler's state is of another run: {key} is {found!r}, here it is {expected!r}",
        remedy="Resume with the dataset version, subset, seed and order of the state, or start again.",
    )
