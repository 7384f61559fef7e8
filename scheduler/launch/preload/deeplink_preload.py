"""Imports what a rank will need, waits, and lets Python go on with the script as that rank.

Started as the rank would be: the same interpreter, arguments, folder and limits. What differs between this
process's environment and the rank's comes with the order to go on, and only if no import has asked for it.
"""

from __future__ import annotations

import array
import ast
import importlib
import importlib.util
import json
import os
import site
import socket
import sys

VARIABLE = "DEEPLINK_PRELOADING"
HOOKED = 79  # how one exits that is only to show that it came here
_LARGEST = 1 << 20


def wait_for_rank() -> None:
    """Return once this process is to be a rank; else it ends here."""
    told = json.loads(os.environ[VARIABLE])
    if "control" not in told:
        os._exit(HOOKED)
    room = _Room()
    _unhook(told["pythonpath"])
    control = socket.socket(fileno=told["control"])
    try:
        loaded, asked = _preloaded(told)
        room.write({})  # where this cannot be, it is to be known now
        _hold_no_device()
    except BaseException as problem:  # noqa: BLE001 - SystemExit, too: whatever it is, the rank starts without
        control.send(json.dumps({"failed": f"{type(problem).__name__}: {problem}"[:1000]}).encode())
        os._exit(0)
    control.send(json.dumps({"loaded": loaded, "asked": sorted(asked)}).encode())
    order, ancillary, _, _ = control.recvmsg(_LARGEST, socket.CMSG_SPACE(4 * array.array("i").itemsize))
    if not order:
        os._exit(0)
    for _, _, held_lock in ancillary:  # kept open to the rank's end, and by what it starts
        for descriptor in array.array("i", held_lock):
            os.set_inheritable(descriptor, True)  # noqa: FBT003 - its only form
    changes = json.loads(order)
    for name in changes["unset"]:
        os.environ.pop(name, None)
    os.environ.update(changes["set"])
    room.write(changes["set"])
    control.send(b"ok")
    control.close()


_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def _hold_no_device() -> None:
    """Raise where an import has opened what the ranks need."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink("/proc/self/fd/" + descriptor)
        except OSError:  # that of the listing itself
            continue
        if path.startswith(_DEVICES):
            raise OSError(f"an import opened {path}, which the ranks need")


class _Room:
    """Where /proc shows this process's first environment: others know ranks by it, and what ranks start."""

    def __init__(self) -> None:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as stat:
            start = int(stat.read().rpartition(")")[2].split()[47])  # env_start of proc(5)
        with open("/proc/self/environ", "rb") as environ:
            shown = b"\0" + environ.read()
        at = shown.index(b"\0" + VARIABLE.encode() + b"=")
        self._at, self._size = start + at, shown.index(b"\0", at + 1) - at - 1

    def write(self, settings: dict[str, str]) -> None:
        # Nothing but this module's own variable lay there, and nobody has kept a pointer to it.
        text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in settings.items())
        if len(text) > self._size:
            raise ValueError("the rank's environment is too large")
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(self._at)
            memory.write(text.ljust(self._size, b"\0"))


def _unhook(pythonpath: str | None) -> None:
    """Be as without this folder, and run the site's own sitecustomize, where there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    del os.environ[VARIABLE]
    if pythonpath is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = pythonpath
    sys.path[:] = [one for one in sys.path if os.path.abspath(one) != here]
    sys.path_importer_cache.pop(here, None)
    ours = sys.modules.pop("sitecustomize")
    site.execsitecustomize()  # type: ignore[attr-defined, unused-ignore]
    sys.modules.setdefault("sitecustomize", ours)  # Python's import of this one looks for it


def _preloaded(told: dict[str, object]) -> tuple[list[str], set[str]]:
    """Import; return what, and the variables of the environment that were asked for by name."""
    asked: set[str] = set()
    kind = type(os.environ)
    get = kind.__getitem__

    def noting(environ: os._Environ[str], name: str) -> str:
        asked.add(os.fsdecode(name))
        return get(environ, name)

    script, module = told["script"], told["module"]
    first = os.path.dirname(os.path.realpath(str(script))) if script else os.getcwd()
    is_safe = getattr(sys.flags, "safe_path", False)
    main = sys.modules["__main__"]
    kind.__getitem__ = noting  # type: ignore[method-assign]
    try:
        if not is_safe:
            sys.path.insert(0, first)
        if script:
            main.__file__ = str(script)
        names = told["modules"]
        if isinstance(names, list):
            for name in names:
                importlib.import_module(str(name))
            loaded = [str(name) for name in names]
        else:
            loaded = _import_leading(_files(str(script or ""), str(module or ""), first))
    finally:
        kind.__getitem__ = get  # type: ignore[method-assign]
        if not is_safe:
            sys.path.remove(first)
        if script:
            del main.__file__
    return loaded, asked


def _files(script: str, module: str, folder: str) -> list[str]:
    """Return the files that run first: the script, or the packages of a module of this folder, and it."""
    if script:
        return [script]
    files, here = [], folder
    for part in module.split("."):
        package, alone = os.path.join(here, part, "__init__.py"), os.path.join(here, part + ".py")
        files.append(package if os.path.exists(package) else alone)
        here = os.path.join(here, part)
    if files[-1].endswith("__init__.py"):
        files.append(os.path.join(here, "__main__.py"))
    return files


def _import_leading(files: list[str]) -> list[str]:
    """Do the imports that these files begin with, up to the first that is of the user's own or does more.

    Before it no code of the user's runs in a fresh process either: none that sets what an import reads, say.
    """
    loaded: list[str] = []
    for file in files:
        with open(file, "rb") as opened:
            body = ast.parse(opened.read()).body
        for statement in body:
            wanted: list[tuple[str, list[str]]]
            if isinstance(statement, ast.Import):
                wanted = [(alias.name, []) for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
                wanted = [(statement.module, [alias.name for alias in statement.names])]
            elif _does_nothing(statement):
                continue
            else:
                return loaded
            for name, members in wanted:
                if not _is_installed(name.split(".")[0]):
                    return loaded
                found = importlib.import_module(name)
                for member in members:
                    if member != "*" and not hasattr(found, member):
                        importlib.import_module(f"{name}.{member}")
                loaded.append(name)
    return loaded


def _does_nothing(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or for type checkers alone."""
    if isinstance(statement, ast.If) and not statement.orelse:
        test = statement.test
        return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_installed(name: str) -> bool:
    """Whether a module is Python's or of an installed package, not of the user's own folders."""
    if name in sys.builtin_module_names or name == "__future__":
        return True
    spec = importlib.util.find_spec(name)
    if spec is None:
        return False
    if spec.origin in {"built-in", "frozen"}:
        return True
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    library = os.path.dirname(os.path.realpath(os.__file__))
    place = os.path.realpath(places[0])
    return any(part in place.split(os.sep) for part in ("site-packages", "dist-packages")) or place.startswith(
        library + os.sep
    )
