"""The root of every error DeepLink raises on purpose.

Each package adds its own classes beneath, one for each thing a caller may do differently.
A constructor takes facts, keeps them as attributes, and writes the message itself.
"""


class DeepLinkError(Exception):
    """Base of every error DeepLink raises on purpose.

    Attributes:
        remedy: what the reader can do about it, one sentence, printed under the message; may be empty.
        exit_code: what the `deeplink` command exits with when nothing catches the error.
    """

    exit_code: int = 1

    def __init__(self, message: str, *, remedy: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy
        if exit_code is not None:
            self.exit_code = exit_code
