"""The checks of a node: their list, looks on a schedule from threads of their own, and what they find now.

A look that hangs hangs in its own thread, which is left alone: no other check and no heartbeat waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deeplink.core import metrics
from deeplink.core.finding import HEALTH, Finding, Severity
from deeplink.scheduler.node.check_result import (
    COULD_NOT_TELL,
    CheckState,
    Look,
    LookTime,
    NodeCheck,
    Timetable,
    findings,
    folded,
    one_line,
)
from deeplink.scheduler.node.command_checks import SiteCheck, site_checks
from deeplink.scheduler.node.disk import DiskCheck, MountCheck
from deeplink.scheduler.node.gpu import GpuCheck, GpuTools, tools_here
from deeplink.scheduler.node.host_checks import ClockCheck, Compared, MemoryCheck, ProcessCheck, XidCheck
from deeplink.scheduler.node.network_check import NetworkCheck
from deeplink.scheduler.node.reading import HighWaterMarks, file_in
from deeplink.scheduler.node.settings import REFUSED, HealthSettings, Off, load_settings
from deeplink.scheduler.node.slurmd import SlurmdCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from deeplink.core.clock import Clock
    from deeplink.core.config import Config
    from deeplink.scheduler.node.settings import CheckTiming

OF_A_JOB = frozenset({"disk", "memory", "clock", "network", "gpu", "xid", "slurmd", "processes"})
"""What a job's agent looks at. A child that hangs on a mount would keep its step from ending."""
_LONGEST_ID = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck:
    """A check of this node, as the schedule sees it."""

    name: str  # of the findings
    look: Callable[[], Look]  # called from one thread at a time; what it raises means that it could not tell
    timing: CheckTiming
    hung: Callable[[float], Look | None] | None = None  # says, at once, how a look is that is so old
    about: str = ""  # what it looks at, for people
    close: Callable[[], None] = lambda: None  # ends what a look may have left behind
    absent: str = ""  # why there is nothing for it to look at on this node; empty where there is


def hung_look(check: HealthCheck, age_s: float) -> Look:
    """Return what a look of a check says that has not ended for so many seconds."""
    said = f"the check has not ended for {age_s:.0f} s"
    try:
        return (check.hung(age_s) if check.hung else None) or Look((), said)
    except Exception as problem:  # noqa: BLE001 - as with a look: that it fails says nothing of the node
        return Look((), f"{said}; {type(problem).__name__}: {problem}")


def closed(checks: Iterable[HealthCheck], longest_s: float) -> None:
    """Have the checks end what their looks left behind, all at the same time; return within `longest_s`."""
    threads = []
    for check in checks:
        name = f"deeplink-close-{check.name}"[:60]
        thread = threading.Thread(target=_close, args=(check,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: what there is to end is no less there
            _close(check)
        else:
            threads.append(thread)
    end = time.monotonic() + longest_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _close(check: HealthCheck) -> None:
    with contextlib.suppress(OSError, ValueError):  # a look of it may still be waiting for the same child
        check.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPaths:
    """Where the checks look."""

    node: str  # this node's name
    store: Path  # the folder of the shards
    of_job: bool = False  # for a job's agent: the cheap ones, and nothing is kept or started again
    # they are looked at by a command that ends: nothing is started again, and a store that never was is nothing
    # to look at
    once: bool = False
    gpus: GpuTools | None = None  # which tools for GPUs there are; looked for when not given
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)  # the environment; our own when not given
    # where it is left how far this clock is from the watchdog's
    compared: Compared = field(default_factory=Compared)


def checks_of(config: Config, place: CheckPaths, clock: Clock) -> list[HealthCheck]:
    """Return the checks of this node, with those for which there is nothing here, and the site's own."""
    settings = load_settings(config.health_file)
    if not place.of_job:
        return [*_built_in(config, settings, place, clock), *_sites(config, settings, clock)]
    return [check for check in _built_in(config, settings, place, clock) if check.name in OF_A_JOB]


def boot_id_of(config: Config) -> str:
    """Return what names this boot of the node's kernel; empty where it cannot be read."""
    try:
        with config.boot_id_file.open(encoding="ascii", errors="replace") as file:
            return file.read(_LONGEST_ID).strip()
    except OSError:
        return ""


def _built_in(config: Config, settings: HealthSettings, place: CheckPaths, clock: Clock) -> Iterator[HealthCheck]:
    # A job's task may see its own share of the GPUs and links alone: the next job's may be another one.
    is_share = place.of_job or (place.once and "SLURM_PROCID" in place.env)
    seen = HighWaterMarks(None if is_share else file_in(config.state))
    disk = DiskCheck(place.store, settings.disk, clock, seen)
    no_store = place.once and not disk.known and not place.store.exists()
    tools = place.gpus or tools_here(place.env.get("PATH", ""))
    no_gpus = "" if tools.any else "neither nvidia-smi nor NVML is here"
    xid = XidCheck(clock)
    no_log = "" if no_gpus or xid.log.may_read() else "the kernel's log may not be read"
    slurmd = SlurmdCheck(
        settings.slurmd,
        clock,
        place.node,
        restart=config.slurmd_restart if not (place.once or place.of_job) else "",
        expected="SLURM_JOB_ID" in place.env and bool(place.env.get("SLURMD_NODENAME")),
    )
    yield _check(
        "disk",
        disk,
        settings.disk,
        f"{place.store}: space, takes writes, gives back what was written, in time",
        f"there is no {place.store} yet" if no_store else "",
    )
    memory = MemoryCheck(settings.memory, clock)
    yield _check("memory", memory, settings.memory, "available memory, OOM kills, ECC")
    synchronised = ClockCheck(clock, compared=place.compared)
    yield _check("clock", synchronised, settings.clock, "synchronised, has not jumped, is where the watchdog's is")
    yield _check("mount", MountCheck(settings.mount, clock), settings.mount, "shared file systems answer")
    about = "links up, as fast as they were, without errors; InfiniBand ports"
    yield _check("network", NetworkCheck(settings.network, clock, seen), settings.network, about)
    about = "all there, ECC, retired and remapped memory, clocks, NVLink"
    yield _check("gpu", GpuCheck(settings.gpu, clock, seen, tools), settings.gpu, about, no_gpus)
    yield _check("xid", xid, settings.xid, "GPUs' errors in the kernel's log", no_gpus or no_log)
    yield _check("slurmd", slurmd, settings.slurmd, "lives; started again where slurmd_restart is set")
    processes = ProcessCheck(settings.processes, clock)
    yield _check("processes", processes, settings.processes, "zombies, uninterruptible sleep")


def _check(name: str, check: NodeCheck, timing: CheckTiming, about: str, absent: str = "") -> HealthCheck:
    return HealthCheck(
        name=name, look=check.look, timing=timing, hung=check.hung, about=about, close=check.close, absent=absent
    )


def _sites(config: Config, settings: HealthSettings, clock: Clock) -> Iterator[HealthCheck]:
    found = site_checks(config.health_folder, settings.site)
    for name, one in found.checks.items():
        yield _check(name, SiteCheck(one, clock), one, " ".join(one.command))
    if found.refused:
        look = Look((), "; ".join(found.refused))
        about = "programs that cannot be checks"
        yield HealthCheck(name=REFUSED, look=lambda: look, timing=settings.processes, about=about)


log = logging.getLogger(__name__)

MOST_FINDINGS = 16
"""Findings that an agent tells at once, the gravest first: a heartbeat of 1,000 nodes stays small."""
MOST_ENDED = 256  # findings that ended are remembered until they were told, the newest so many
SWITCH_S = 5.0  # how often the kill switch is looked at
STOP_S = 0.5
_SWITCH = "(switch)"

Key = tuple[str, str, float]  # names a finding: check, subject, and when it began


@dataclass(frozen=True, slots=True)
class Ended:
    """A finding that is over; `number` counts them."""

    number: int
    key: Key
    finding: Finding


class HealthWatch:
    """Looks after a node's checks from `start` to `stop`. Thread-safe; answers at once."""

    def __init__(
        self,
        checks: Iterable[HealthCheck],
        *,
        switch: Callable[[], Off] = Off,
        clock: Clock,
        spread: str = "",
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.checks = {check.name: check for check in checks if not check.absent and not check.timing.off}
        self.changed = changed
        self._switch, self._clock = switch, clock
        rows = [(one.name, one.timing.interval_s, one.timing.deadline_s) for one in self.checks.values()]
        self._timetable = Timetable([*rows, (_SWITCH, SWITCH_S, SWITCH_S)], clock.monotonic(), spread=spread)
        self._results: queue.SimpleQueue[tuple[str, Look | Off | None]] = queue.SimpleQueue()
        self._states = {name: CheckState() for name in self.checks}
        self._lock = threading.Lock()
        self._found: dict[tuple[str, str], Finding] = {}
        self._ended: deque[Ended] = deque(maxlen=MOST_ENDED)
        self._count = 0
        self._off = Off()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deeplink-health", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._off = self._first_switch()
        self._thread.start()

    def stop(self) -> None:
        """Return once no look begins any more, within about a second; looks that hang are left behind."""
        self._ending.set()
        self._results.put((_SWITCH, None))
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        closed(self.checks.values(), STOP_S)

    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong now, the gravest first, at most `MOST_FINDINGS`."""
        with self._lock:
            return tuple(self._gravest_first().values())[:MOST_FINDINGS]

    def _gravest_first(self) -> dict[Key, Finding]:
        found = sorted(self._found.items(), key=lambda one: (-one[1].severity, one[1].since_unix, one[0]))
        return {(check, subject, finding.since_unix): finding for (check, subject), finding in found}

    def news(self, after: int) -> tuple[dict[Key, Finding], list[Ended]]:
        """Return what is wrong now, the gravest first, and findings that ended, oldest first, at one instant."""
        with self._lock:
            return self._gravest_first(), [one for one in self._ended if one.number > after]

    @property
    def off(self) -> Off:
        """What the kill switch turns off now."""
        return self._off

    def _first_switch(self) -> Off:
        """Read the switch before the first look, if it can be read at once."""
        answers: queue.SimpleQueue[Off] = queue.SimpleQueue()
        threading.Thread(
            target=lambda: answers.put(self._switch()), name="deeplink-health-switch", daemon=True
        ).start()
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            log.warning("the folder of the switch %s does not answer", _SWITCH)
            return Off()

    def _run(self) -> None:
        while not self._ending.is_set():
            now = self._clock.monotonic()
            for name in self._timetable.begin(now):
                self._begin(name)
            for name, age_s in self._timetable.hanging(now):
                if name != _SWITCH:
                    self._fold(name, hung_look(self.checks[name], age_s))
            try:
                name, result = self._results.get(timeout=self._timetable.wait_s(self._clock.monotonic()) or 0.01)
            except queue.Empty:
                continue
            self._timetable.ended(name)
            if isinstance(result, Off):
                self._turn_off(result)
            elif result is not None:
                self._fold(name, result)

    def _begin(self, name: str) -> None:
        if name != _SWITCH and name in self._off:
            self._timetable.ended(name)
            return
        work = self._switch if name == _SWITCH else self.checks[name].look
        try:
            threading.Thread(
                target=self._look, args=(name, work), name=f"deeplink-health-{name}"[:60], daemon=True
            ).start()
        except RuntimeError as problem:  # no more threads: the node is in trouble
            self._timetable.ended(name)
            log.warning("health check %s: %s", name, problem)

    def _look(self, name: str, work: Callable[[], Look | Off]) -> None:
        began = self._clock.monotonic()
        try:
            result: Look | Off | None = work()
        except Exception as problem:  # whatever a check stumbles over says nothing of the node
            log.info("health check %s", name, exc_info=True)
            result = None if name == _SWITCH else Look((), one_line(f"{type(problem).__name__}: {problem}"))
        if name != _SWITCH:
            metrics.HEALTH_LOOK_SECONDS.labels(name).set(self._clock.monotonic() - began)
        self._results.put((name, result))

    def _fold(self, name: str, look: Look) -> None:
        if name in self._off:
            return
        answer = "bad" if look.complaints else "unknown" if look.unknown else "good"
        metrics.HEALTH_LOOKS.labels(name, answer).inc()
        now = LookTime(self._clock.unix(), self._clock.monotonic())
        self._states[name] = folded(self._states[name], look, self.checks[name].timing, now)
        self._tell(name)

    def _turn_off(self, off: Off) -> None:
        if off == self._off:
            return
        log.warning(
            "health checks turned off: %s", "all" if off.everything else ", ".join(sorted(off.names)) or "none"
        )
        self._off = off
        for name in self.checks:
            if name in off:
                self._states[name] = CheckState()
                self._tell(name)

    def _tell(self, name: str) -> None:
        rule = self.checks[name].timing
        now = {(name, subject): one for subject, one in findings(name, self._states[name], rule).items()}
        with self._lock:
            before = {key: one for key, one in self._found.items() if key[0] == name}
            for key, one in before.items():
                if key not in now or now[key].since_unix != one.since_unix:
                    self._note_ended(key, one)
                del self._found[key]
            self._found |= now
        for severity in HEALTH:
            count = sum(one.severity is severity for one in now.values())
            metrics.HEALTH_FINDINGS.labels(name, severity.action).set(count)
        if _severities(before) != _severities(now):
            _log_changes(before, now)
            self.changed()

    def _note_ended(self, key: tuple[str, str], finding: Finding) -> None:
        if key[1] != COULD_NOT_TELL:
            self._count += 1
            self._ended.append(Ended(self._count, (*key, finding.since_unix), finding))


def _severities(found: dict[tuple[str, str], Finding]) -> dict[tuple[str, str], Severity]:
    return {key: finding.severity for key, finding in found.items()}


def _log_changes(before: dict[tuple[str, str], Finding], now: dict[tuple[str, str], Finding]) -> None:
    for key, finding in now.items():
        if key not in before or before[key].severity is not finding.severity:
            log.warning("health: %s: %s: %s", finding.check, finding.severity.action, finding.text)
    for key, finding in before.items():
        if key not in now:
            log.warning("health: %s: over: %s", finding.check, finding.text)


@dataclass(frozen=True, slots=True)
class Looked:
    """What a check saw, and how long that took; `took_s` is None for one that did not end."""

    check: HealthCheck
    look: Look
    took_s: float | None


def looked_at(checks: Iterable[HealthCheck], clock: Clock, longest_s: float) -> list[Looked]:
    """Return what each check sees, within `longest_s`; one that has not ended by then hangs."""
    answers: queue.SimpleQueue[tuple[str, Look, float]] = queue.SimpleQueue()
    began = clock.monotonic()
    waiting = {check.name: check for check in checks}
    for check in waiting.values():
        threading.Thread(
            target=_look, args=(check, clock, answers), name=f"deeplink-{check.name}", daemon=True
        ).start()
    done: list[Looked] = []
    while waiting:
        latest = began + min(longest_s, max(check.timing.deadline_s for check in waiting.values()))
        try:
            name, look, took_s = answers.get(timeout=max(0.0, latest - clock.monotonic()))
        except queue.Empty:
            break
        check = waiting.pop(name)
        done.append(Looked(check, look.bounded(), took_s))
    passed = clock.monotonic() - began
    return [*done, *(Looked(check, hung_look(check, passed), None) for check in waiting.values())]


def _look(check: HealthCheck, clock: Clock, answers: queue.SimpleQueue[tuple[str, Look, float]]) -> None:
    began = clock.monotonic()
    try:
        look = check.look()
    except Exception as problem:  # noqa: BLE001 - whatever a check stumbles over says nothing of the node
        look = Look((), one_line(f"{type(problem).__name__}: {problem}"))
    answers.put((check.name, look, clock.monotonic() - began))


def found_by(looked: Iterable[Looked], unix: float) -> list[Finding]:
    """Return the findings of looks at a time, the gravest first; a check's UNKNOWN only where it found nothing."""
    found = []
    for one in looked:
        name, look = one.check.name, one.look
        rule = one.check.timing
        severities = [(min(complaint.severity, rule.most), complaint.problem) for complaint in look.complaints]
        if look.unknown and not severities:
            severities.append((Severity.UNKNOWN, look.unknown))
        found += [Finding(check=name, severity=how, text=said, since_unix=unix) for how, said in severities]
    return sorted(found, key=lambda finding: (-finding.severity, finding.check, finding.text))
