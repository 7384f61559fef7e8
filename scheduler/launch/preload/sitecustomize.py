"""Python imports this before the script that it was started with; it returns once that is to run, as a rank."""

import os

if "DEEPLINK_PRELOADING" in os.environ:
    try:
        from deeplink_preload import wait_for_rank  # type: ignore[import-not-found, unused-ignore]

        wait_for_rank()
    except BaseException:  # noqa: BLE001 - Python would go on with the user's script, where no rank is to run
        os._exit(70)
