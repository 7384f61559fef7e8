"""Programs that stand for Slurm's: they answer from a file, and note what they were asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PROGRAM = f"""#!{sys.executable} -S
import json, os, sys
name, argv = os.path.basename(sys.argv[0]), sys.argv[1:]
folder = {{folder!r}}
with open(folder + "/asked", "a") as file:
    file.write(json.dumps([name, *argv]) + "\\n")
said = json.load(open(folder + "/said"))
if name in said.get("slow", []):
    import time
    time.sleep(said["slow"][name])
if name in said.get("fail", {{{{}}}}):
    sys.stderr.write(said["fail"][name] + "\\n")
    sys.exit(1)
if name == "squeue" and "-O" in argv:
    fields = [part.split(":", 1) for part in argv[argv.index("-O") + 1].split(",")]
    user = argv[argv.index("-u") + 1] if "-u" in argv else ""
    wanted = argv[argv.index("-j") + 1] if "-j" in argv else ""
    for row in said.get("jobs", []):
        if (not user or row["UserName"] == user) and (not wanted or row["JobID"] == wanted):
            print("".join(row.get(field, "") + separator for field, separator in fields))
else:
    sys.stdout.write(said.get(" ".join([name, *argv[:2]]), ""))
"""


class Programs:
    """Slurm's programs in a folder for PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        for name in ("squeue", "scontrol", "scancel"):
            (self.bin / name).write_text(_PROGRAM.format(folder=str(folder)))
            (self.bin / name).chmod(0o755)
        self.said: dict[str, Any] = {}
        self.say()

    def say(self, **facts: Any) -> None:
        """Change what they answer."""
        self.said.update(facts)
        (self.folder / "said").write_text(json.dumps(self.said))

    def asked(self, name: str = "") -> list[list[str]]:
        """Return what they were asked, in order."""
        path = self.folder / "asked"
        lines = path.read_text().splitlines() if path.exists() else []
        return [argv for line in lines for argv in [json.loads(line)] if not name or argv[0] == name]


def job(number: int, state: str = "RUNNING", **fields: str) -> Mapping[str, str]:
    """Return a job as squeue tells it."""
    return {
        "JobID": str(number),
        "JobArrayID": str(number),
        "State": state,
        "Reason": "None",
        "RestartCnt": "0",
        "Requeue": "1",
        "UserName": "eve",
        "NodeList": "n[0-2]" if state == "RUNNING" else "",
        "BatchHost": "n0" if state == "RUNNING" else "n/a",
        "Name": "tr ü",
        "Partition": "main",
        "TimeUsed": "1:00",
        "TimeLimit": "1:00:00",
        "StartTime": "N/A",
        "STDOUT": "(null)",
        "ReqNodes": "",
        **fields,
    }


def nodes(names: Sequence[str], state: str = "IDLE") -> str:
    """Return nodes as scontrol tells them."""
    return "".join(f"NodeName={name} NodeAddr={name} NodeHostName={name} State={state}\n" for name in names)


TOPOLOGY = (
    "SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=n[0,2]\nSwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n1\n"
    "SwitchName=core Level=1 LinkSpeed=1 Nodes=n[0-2] Switches=leaf[0-1]\n"
)
