"""Makes a Python serve the paths that DEEPLINK_PATH_ROOTS names; then runs the site's own `sitecustomize`.

In words that every Python takes: those of the system read it, too, where they are started below a rank.
"""

import os
import sys


def _serve_paths():  # type: ignore[no-untyped-def] # noqa: ANN202 - see above
    if not os.environ.get("DEEPLINK_PATH_ROOTS"):
        return
    try:
        from deeplink.paths import patches  # noqa: PLC0415 - it may not be there
    except Exception as problem:  # noqa: BLE001 - whatever is wrong, the script runs, and reads its files itself
        text = "deeplink: %s does not serve paths, it reads the files themselves: %s\n"
        sys.stderr.write(text % (sys.executable, problem))
        return
    patches.install_from(os.environ)


def _run_next():  # type: ignore[no-untyped-def] # noqa: ANN202 - see above
    # This module hides the site's own one; a Python without importlib.util has no packages of ours either.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - see above
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]  # noqa: PTH100
    try:
        from importlib.machinery import PathFinder  # noqa: PLC0415
        from importlib.util import module_from_spec  # noqa: PLC0415
    except ImportError:
        return
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_serve_paths()  # type: ignore[no-untyped-call]
_run_next()  # type: ignore[no-untyped-call]
