"""Serves paths below packed folders from the cache to code that opens files: `deeplink run --paths`, or `install`.

Other packages import: `packed_folder`, `patches`, `routing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deeplink.cache.reader import ReadStats
    from deeplink.core.config import Config

__all__ = ["install", "stats", "uninstall"]


def install(*names: str, config: Config | None = None) -> list[str]:
    """Serve paths below packed folders from the cache, in this process and in every Python that it starts.

    From now on `open`, `os.stat`, `os.scandir` and what stands on them (pathlib, os.walk, os.path, glob, PIL)
    answer from the cache where a path lies below the source of a dataset; docs/paths.md says what does not. The
    version is the one that is the newest now. Calling it again replaces the folders.

    Args:
        names: datasets, as `NAME` or `NAME@VERSION`; without any, all that were packed from a folder.
        config: where the catalog is; what the environment and the files say when None. It holds for this process;
            those that it starts go by their environment.

    Returns:
        The folders that are served.

    Raises:
        DatasetMissingError: there is no such dataset, or not this version of it.
        DeepLinkError: no dataset was packed from a folder, or one that is named was not; or they are too many.
        ConfigError: the configuration cannot be used.
    """
    from deeplink.paths.packed_folder import packed_roots  # noqa: PLC0415
    from deeplink.paths.patches import install_roots  # noqa: PLC0415 - `import deeplink.paths` costs nothing

    roots = packed_roots(names, config)
    install_roots(roots, config)
    return [root.folder for root in roots]


def uninstall() -> None:
    """Give this process, and those it starts from now on, the real files again. Open files stay as they are."""
    from deeplink.paths.patches import uninstall as undo  # noqa: PLC0415

    undo()


def stats() -> ReadStats:
    """Return where the samples came from that this process read by path; files read themselves count as source."""
    from deeplink.paths.patches import stats as counted  # noqa: PLC0415

    return counted()
