"""From sbatch's command line, environment and `#SBATCH` lines to what the job asks; pure.

Whatever is not understood means that no hint is made, with the reason: never a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from deeplink.core.errors import DeepLinkError
from deeplink.core.types import NodeName
from deeplink.scheduler.placement.hint.decision import Ask
from deeplink.scheduler.slurm.sbatch_options import names
from deeplink.scheduler.slurm.states import SlurmValueError, gpus_asked

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from deeplink.scheduler.slurm.sbatch_options import CommandLine

FOREVER_S = 1 << 40
"""A time limit that is none."""
# Text, compiled when first needed: `deeplink sbatch` needs few of them, and waits.
_DAYS = r"(\d{1,6})-(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?"
_CLOCK = r"(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?"
_SIZE = r"(?i)(\d{1,15})([kmgt]?)b?"
_MIB = {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1 << 20}
Settings = dict[str, str]
"""The value of each option that is given somewhere; empty for one without."""
Unfold = Callable[[str], tuple[NodeName, ...]]
_CHOSEN = {
    "batch": "--batch chooses the batch host by its features",
    "cluster-constraint": "another cluster may get the job",
    "clusters": "another cluster may get the job",
    "consolidate-segments": "--segment is a hint of its own",
    "contiguous": "--contiguous is a hint of its own",
    "nodefile": "the nodes are named on the command line",
    "nodelist": "the nodes are named on the command line",
    "oversubscribe": "--oversubscribe shares nodes in a way that is not weighed",
    "prefer": "--prefer is a hint of its own",
    "quiet": "--quiet hides the job's id, and with it the job's record",
    "reservation": "the nodes are those of a reservation",
    "segment": "--segment is a hint of its own",
    "spread-job": "--spread-job asks for the opposite",
    "spread-segments": "--segment is a hint of its own",
    "switches": "--switches is given",
    "test-only": "nothing is submitted",
    "use-min-nodes": "--use-min-nodes leaves the number of nodes open",
}
# Variables that sbatch reads, sbatch(1); they count more than the script's lines and less than the command line.
_VARIABLES = {
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_BATCH": "batch",
    "SBATCH_CLUSTERS": "clusters",
    "SLURM_CLUSTERS": "clusters",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SBATCH_GRES": "gres",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_PARTITION": "partition",
    "SBATCH_REQ_SWITCH": "switches",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SEGMENT_SIZE": "segment",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_TRES_PER_TASK": "tres-per-task",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
    "SLURM_HOSTFILE": "nodefile",
}
FIELDS = (
    "NodeList",
    "Partition",
    "Available",
    "Time",
    "OverSubscribe",
    "StateComplete",
    "Features_act",
    "Gres",
    "GresUsed",
    "CPUsState",
    "Memory",
    "AllocMem",
)
SEPARATOR = "|"
ARGUMENTS = ("sinfo", "-h", "-a", "-N", "-O", ",".join(f"{name}:{SEPARATOR}" for name in FIELDS))
"""What `cluster_survey.parse` reads: a line for each node in each partition."""


def _no_amount(text: str, what: str) -> SlurmValueError:
    return SlurmValueError(text, f"is no {what}", "See sbatch(1) for how it is written.")


def seconds_of(text: str) -> int:
    """Read a time: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S, or INFINITE.

    >>> seconds_of("5"), seconds_of("1:30"), seconds_of("2:00:00"), seconds_of("1-6")
    (300, 90, 7200, 108000)
    """
    said = text.strip()
    if said.upper() in {"INFINITE", "UNLIMITED"}:
        return FOREVER_S
    if found := re.fullmatch(_DAYS, said):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if found := re.fullmatch(_CLOCK, said):
        first, second, third = found.groups()
        if third is not None:
            return (int(first) * 60 + int(second)) * 60 + int(third)
        return int(first) * 60 + int(second or 0)
    raise _no_amount(text, "time")


def time_text(seconds: int) -> str:
    """Write a time as Slurm reads it."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def mebibytes(text: str) -> int:
    """Read an amount of memory; MiB where it names no unit."""
    found = re.fullmatch(_SIZE, text.strip())
    if not found:
        raise _no_amount(text, "amount of memory")
    exact = int(found[1]) * _MIB[found[2].lower()]
    return int(exact) + (exact > int(exact))


def count_of(text: str) -> int:
    """Read a plain number."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise _no_amount(text, "number")
    return int(text)


def node_count(text: str) -> int:
    """Read how many nodes; 0 where it is a range, and so not known.

    >>> node_count("4"), node_count("4-4"), node_count("2-4"), node_count("1K")
    (4, 4, 0, 1024)
    """
    ends = [re.fullmatch(r"([0-9]{1,9})([km]?)", part, re.IGNORECASE) for part in text.strip().split("-")]
    if text.strip().endswith("-"):
        ends.pop()
    if not 1 <= len(ends) <= 2:  # noqa: PLR2004
        raise _no_amount(text, "number of nodes")
    counts = {int(end[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[end[2].lower()] if end else -1 for end in ends}
    if -1 in counts:
        raise _no_amount(text, "number of nodes")
    return counts.pop() if len(counts) == 1 and not text.strip().endswith("-") else 0


# Neither bears on which nodes a job gets, nor on when it could start on those that are free.
_ASIDE = names("""
account acctg-freq bb bbf chdir comment container container-id container-type cpu-freq deadline delay-boot error
export export-file
get-user-env gid gpu-bind gpu-freq hint ignore-pbs input job-name kill-on-invalid-dep licenses mail-type
mail-user mcs-label mem-bind network nice no-kill no-requeue oom-kill-step open-mode output overcommit parsable
power priority profile propagate qos reboot requeue signal stepmgr tres-bind uid verbose wait wait-all-nodes wckey
wrap
""")
# They ask for more of a node than is weighed here. Slurm itself is asked before nodes are named.
_UNWEIGHED = names("""
core-spec cores-per-socket cpus-per-gpu extra-node-info gres-flags mem-per-gpu mincpus ntasks-per-core
ntasks-per-gpu ntasks-per-socket sockets-per-node thread-spec threads-per-core tmp
""")
_WEIGHED = names("""
array begin constraint cpus-per-task dependency distribution exclude exclusive gpus gpus-per-node
gpus-per-task gres hold mem mem-per-cpu nodes ntasks ntasks-per-node partition time
""")


class _NotUnderstoodError(Exception):
    """Carries the reason why no hint can be made, up to `ask_of`."""


def settings_of(line: CommandLine, scripted: CommandLine, env: Mapping[str, str]) -> tuple[Settings, str]:
    """Return what is set, by whoever counts most, and the first option that is not known here, if any."""
    found: Settings = {}
    unknown = ""
    for option in scripted.options:
        found[option.name] = option.value or ""
        unknown = unknown or ("" if option.known else option.words[0])
    found |= {name: env[variable] for variable, name in _VARIABLES.items() if variable in env}
    for option in line.options:
        if not option.name.startswith("deeplink") and option.name != "dry-run":
            found[option.name] = option.value or ""
            unknown = unknown or ("" if option.known else option.words[0])
    return found, unknown


def ask_of(
    line: CommandLine,
    scripted: CommandLine,
    env: Mapping[str, str],
    unfold: Unfold,
    *,
    data: tuple[str, ...] = (),
    patience_s: int | None = None,
    het: bool = False,
    profile: str = "",
    place: bool | None = None,
) -> Ask:
    """Return what a job asks."""
    settings, unknown = settings_of(line, scripted, env)
    try:
        _check(settings, unknown, het=het)
        asked = replace(_asked(settings, data, patience_s, unfold), profile=profile)
        return replace(asked, no_wish="--deeplink-place=off") if place is False else asked
    except _NotUnderstoodError as reason:
        return Ask(data=data, patience_s=patience_s, no_wish=str(reason))
    except SlurmValueError as problem:
        return Ask(data=data, patience_s=patience_s, no_wish=str(problem))


def _check(settings: Settings, unknown: str, *, het: bool) -> None:
    if het:
        raise _NotUnderstoodError("a job of several components is not weighed")
    for name, why in _CHOSEN.items():
        if name in settings:
            raise _NotUnderstoodError(why)
    if settings.get("distribution", "").startswith("arbitrary"):
        raise _NotUnderstoodError("--distribution=arbitrary names the nodes")
    if unknown:
        raise _NotUnderstoodError(f"{unknown} is an option whose meaning is not known here")
    strange = next((name for name in settings if name not in _ASIDE | _UNWEIGHED | _WEIGHED), "")
    if strange:
        raise _NotUnderstoodError(f"--{strange} is not weighed")


def _asked(settings: Settings, data: tuple[str, ...], patience_s: int | None, unfold: Unfold) -> Ask:
    nodes, tasks = _nodes_and_tasks(settings)
    kind, gpus = _gpus(settings, nodes, tasks)
    cpus = tasks * count_of(settings.get("cpus-per-task", "1"))
    partition = settings.get("partition", "")
    if "," in partition:
        raise _NotUnderstoodError("several partitions may get the job")
    return Ask(
        nodes=nodes,
        gpus=gpus,
        gpu_type=kind,
        cpus=cpus,
        memory_mib=_memory(settings, cpus),
        exclusive=_exclusive(settings),
        partition=partition,
        features=_features(settings.get("constraint", "")),
        excluded=_excluded(settings.get("exclude", ""), unfold),
        array="array" in settings,
        later=_later(settings),
        limit_s=seconds_of(settings["time"]) if settings.get("time", "0") not in {"0", ""} else 0,
        data=data,
        patience_s=patience_s,
        comment=settings.get("comment", ""),
    )


def _nodes_and_tasks(settings: Settings) -> tuple[int, int]:
    """Return nodes, and tasks on each at most."""
    per_node = count_of(settings["ntasks-per-node"]) if "ntasks-per-node" in settings else 0
    if "nodes" not in settings:
        if any(name in settings for name in ("ntasks", "gpus")):
            raise _NotUnderstoodError("how many nodes it gets is left open (say it with -N)")
        return 1, per_node or 1
    nodes = node_count(settings["nodes"])
    if not nodes:
        raise _NotUnderstoodError(f"how many nodes it gets is left open (-N {settings['nodes']})")
    tasks = count_of(settings["ntasks"]) if "ntasks" in settings else nodes * (per_node or 1)
    if tasks < nodes:
        raise _NotUnderstoodError(f"{tasks} tasks need fewer than {nodes} nodes")
    return nodes, per_node or -(-tasks // nodes)


def _gpus(settings: Settings, nodes: int, tasks: int) -> tuple[str, int]:
    """Return the kind and number of GPUs on each node."""
    for name, share in (("gres", 1), ("gpus-per-node", 1), ("gpus", nodes), ("gpus-per-task", 0)):
        if name not in settings:
            continue
        text = settings[name]
        kind, count = gpus_asked(text if name == "gres" else f"gpu:{text}")
        if not share:
            return kind, count * tasks
        if count % share:
            raise _NotUnderstoodError(f"{count} GPUs are not the same number on each of {nodes} nodes")
        return kind, count // share
    return "", 0


def _memory(settings: Settings, cpus: int) -> int:
    if settings.get("mem", "0") not in {"0", ""}:
        return mebibytes(settings["mem"])
    return cpus * mebibytes(settings["mem-per-cpu"]) if settings.get("mem-per-cpu") else 0


def _exclusive(settings: Settings) -> bool:
    if settings.get("exclusive"):
        raise _NotUnderstoodError(f"--exclusive={settings['exclusive']} is not weighed")
    return "exclusive" in settings or settings.get("mem") == "0"


def _features(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    features = tuple(part for part in re.split(r"[&,]", text) if part)
    if not all(re.fullmatch(r"[\w.:=+-]+", part) for part in features):
        raise _NotUnderstoodError(f"--constraint={text} is more than a list of features")
    return features


def _excluded(text: str, unfold: Unfold) -> tuple[NodeName, ...]:
    if "/" in text:
        raise _NotUnderstoodError("the nodes to exclude are in a file")
    if "[" not in text:
        return tuple(NodeName(name) for name in text.split(",") if name)
    try:
        return unfold(text)
    except DeepLinkError as problem:
        raise _NotUnderstoodError(str(problem)) from problem


def _later(settings: Settings) -> str:
    if settings.get("begin", "now") not in {"now", ""}:
        return f"it begins later (--begin={settings['begin']})"
    if settings.get("dependency"):
        return f"it waits for other jobs (--dependency={settings['dependency']})"
    return "it is held" if "hold" in settings else ""


def options_for(ask: Ask, excluded: Collection[NodeName] = ()) -> tuple[str, ...]:
    """Return options of sbatch for a job that asks the same, on other nodes than these.

    >>> options_for(Ask(nodes=2, gpus=4, exclusive=True, features=("fast",)))
    ('--nodes=2', '--ntasks-per-node=1', '--cpus-per-task=1', '--gres=gpu:4', '--exclusive', '--constraint=fast')
    """
    gpus = f"--gres=gpu:{ask.gpu_type}:{ask.gpus}" if ask.gpu_type else f"--gres=gpu:{ask.gpus}"
    avoided = sorted({*ask.excluded, *excluded})
    said = {
        f"--nodes={ask.nodes}": True,
        "--ntasks-per-node=1": True,
        f"--cpus-per-task={ask.cpus}": True,
        gpus: ask.gpus,
        f"--mem={ask.memory_mib}M": ask.memory_mib,
        "--exclusive": ask.exclusive,
        f"--partition={ask.partition}": ask.partition,
        f"--constraint={'&'.join(ask.features)}": ask.features,
        f"--exclude={','.join(avoided)}": avoided,
        f"--time={-(-ask.limit_s // 60)}": ask.limit_s,
    }
    return tuple(option for option, wanted in said.items() if wanted)
