"""What the cost model refuses."""

from __future__ import annotations

from deeplink.errors import DeepLinkError


class ModelInputError(DeepLinkError):
    """A job, a placement or a constant that cannot be, such as a bandwidth of zero."""

    exit_code = 2

    def __init__(self, what: str, value: object, wanted: str) -> None:
        super().__init__(f"{what} is {value}, but must be {wanted}", remedy=f"Give {what} as {wanted}.")
        self.what, self.value, self.wanted = what, value, wanted


class TooFewMeasurementsError(DeepLinkError):
    """Step times were to be fitted, and there are hardly any."""

    exit_code = 2

    def __init__(self, there: int, wanted: int) -> None:
        super().__init__(
            f"{there} measured step times, but a fit needs {wanted}",
            remedy="Measure other batch sizes or other placements, or predict with the default constants.",
        )
        self.there, self.wanted = there, wanted


def above_zero(what: str, value: float) -> None:
    """Check that a value is above zero (infinity is).

    Raises:
        ModelInputError: it is not.
    """
    if not value > 0:
        raise ModelInputError(what, value, "above zero")


def not_below_zero(what: str, value: float) -> None:
    """Check that a value is zero or more, and finite.

    Raises:
        ModelInputError: it is not.
    """
    if not 0 <= value < float("inf"):
        raise ModelInputError(what, value, "zero or more")


def a_share(what: str, value: float) -> None:
    """Check that a value is from 0 to 1.

    Raises:
        ModelInputError: it is not.
    """
    if not 0 <= value <= 1:
        raise ModelInputError(what, value, "from 0 to 1")
