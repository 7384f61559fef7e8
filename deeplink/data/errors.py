"""What can be wrong with how training uses order, place and audit."""

from __future__ import annotations

from deeplink.errors import DeepLinkError


class SamplerMisuseError(DeepLinkError):
    """The sampler was called in an order that would lose or repeat samples unseen."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"ResumableSampler: {problem}", remedy=remedy)
        self.problem = problem


class SamplerStateError(DeepLinkError):
    """A state does not belong to this sampler.

    Attributes:
        key: which part of the state differs.
        found: what the state says; `expected` is what this sampler has.
    """

    def __init__(self, key: str, found: object, expected: object) -> None:
        super().__init__(
            f"the sampler's state is of another run: {key} is {found!r}, here it is {expected!r}",
            remedy="Resume with the dataset version, seed and order the state was saved with, or start from anew.",
        )
        self.key, self.found, self.expected = key, found, expected


class TooFewSamplesError(DeepLinkError):
    """The samples left in the epoch cannot be shared out so that every rank gets some, and none twice."""

    def __init__(self, left: int, world_size: int, batch_size: int) -> None:
        super().__init__(
            f"{left} samples left in the epoch cannot be shared by {world_size} ranks in batches of {batch_size}",
            remedy="Use a batch size over 1 and no more ranks than samples, or go on with set_epoch(epoch + 1).",
        )
        self.left, self.world_size, self.batch_size = left, world_size, batch_size
