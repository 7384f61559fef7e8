"""The nodes of an attempt agree, through their agents, on what they go on from, and claim the run.

The first rank of the first node decides. It asks every agent of the job what its node has, own checkpoints and
copies for others, looks into the shared folder if that answers, and takes the newest checkpoint that is whole
somewhere, to the last byte, or in parts on several nodes. It claims the shared folder as ever; where that does not
answer the claim lies with the agents alone, and is made up for later (`FolderOwnership.refuse_if_fenced`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from deeplink.checkpoints import manifest as manifests
from deeplink.checkpoints.agents import choose, place
from deeplink.checkpoints.claims import (
    APART_GAP,
    NO_CLAIM,
    CheckpointName,
    Claim,
    entries,
    fresh_names,
    gone,
    highest,
    in_order,
    why_not,
)
from deeplink.checkpoints.manifest import CheckpointDamagedError, CheckpointError
from deeplink.core.text import listed
from deeplink.rpc.plain import PlainCallError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deeplink.checkpoints.agents import Holding, JobAgents, RunOwner, There
    from deeplink.checkpoints.ownership import FolderOwnership
    from deeplink.core.clock import Clock

log = logging.getLogger(__name__)

GATHER_S: Final = 10.0
"""How long ranks of other nodes may take to say where their checkpoints lie, if their agents do not know yet."""
AGREE_S: Final = 600.0
"""How long ranks wait for the one that decides: it may have to read large checkpoints."""
SILENCE_S: Final = 60.0
PERSIST_S: Final = 60.0
"""How long the shared folder is asked again, where only it can say what the newest checkpoint is."""
LOOK_S: Final = 600.0
"""The longest that reading one checkpoint on shared storage may take before another is looked at."""
_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_MOST_TRIES = 100
SHARED: Final = "the shared folder"


def no_agreement(why: str) -> CheckpointError:
    """Return the error of ranks that could not agree on what they go on from."""
    return CheckpointError(
        f"nobody said which checkpoint this attempt goes on from: {why}",
        remedy="Is shared storage in order? Rank 0 must call `latest` (or `resume`, `over`), too.",
    )


class RunView:
    """The claims and checkpoints of a run that the deciding rank knows, on shared storage and on nodes."""

    def __init__(
        self, claims: Sequence[Claim], shared: Sequence[CheckpointName], holdings: Sequence[Holding], problem: str
    ) -> None:
        self.claims, self.shared, self.problem = claims, shared, problem
        self.unread = [unread for holding in holdings for unread in holding.unread]
        self.holdings = holdings

    @property
    def is_readable(self) -> bool:
        """Whether the shared folder answered."""
        return not self.problem

    def entries(self) -> list[CheckpointName]:
        """Return every checkpoint that is anywhere, whole or not, newest first."""
        names = {name for name, _, _ in self.unread}
        for holding in self.holdings:
            names |= {there.name for there in holding.whole} | {name for name, _, _ in holding.torn}
        return sorted({*self.shared, *filter(None, map(CheckpointName.parse, names))}, reverse=True)

    def places(self, name: str) -> list[There]:
        """Return where something of a checkpoint lies on nodes."""
        return [there for holding in self.holdings for there in holding.whole if there.name == name]

    def torn(self, name: str) -> list[tuple[str, str, str]]:
        """Return the places where it is not what was saved, with reasons."""
        return [torn for holding in self.holdings for torn in holding.torn if torn[0] == name]

    def is_lost_above(self, newest: CheckpointName | None, claim: Claim) -> bool:
        """Tell whether the shared folder has something newer than `newest` that counts, and cannot be read."""
        above = (entry for entry in self.shared if newest is None or entry > newest)
        return not self.is_readable and any(entry.counts(claim) for entry in above)

    def unread_above(self, newest: CheckpointName | None, claim: Claim) -> list[str]:
        """Return what nodes cannot read that may be newer than `newest` and count under `claim`."""
        found = []
        for name, where, why in self.unread:
            entry = CheckpointName.parse(name)
            if entry is None or (entry.counts(claim) and (newest is None or entry > newest)):
                found.append(f"{where}: {why}")
        return found


class RecoveryAgreement:
    """The agreement of an attempt's ranks on their claim."""

    def __init__(
        self, hold: FolderOwnership, local: Path, agents: JobAgents, env: Mapping[str, str], clock: Clock
    ) -> None:
        self._hold, self._local, self._agents, self._clock = hold, local, agents, clock
        self.is_first_here = env.get("LOCAL_RANK", "0") == "0"
        group = env.get("GROUP_RANK", "0") if self.is_first_here else "-"
        self._decides = (env.get("RANK") or group) == "0"
        self._nodes = int(env.get("GROUP_WORLD_SIZE") or 1)
        self._shared: list[CheckpointName] = []  # as last seen

    def agree(self) -> Claim:
        """Return the claim of this attempt, made now if this rank decides."""
        if self.is_first_here:
            self._agents.judge(self._asked(self._agents.here, folder=self._local), None)
        claim = self._announced(self._decided()) if self._decides else self._awaited()
        if self.is_first_here:
            self._asked(self._agents.here, claim=claim)
        return claim

    def _announced(self, claim: Claim) -> Claim:
        """Tell the agent that the others ask; return the claim it has, should another rank have decided, too."""
        return self._known_at_first(claim) or claim

    def _known_at_first(self, claim: Claim | None = None) -> Claim | None:
        owner = self._asked(self._agents.first, claim=claim)
        self._agents.judge(owner, None)
        return owner.claim if owner.claim and owner.claim.attempt == self._agents.attempt else None

    def _asked(self, address: str, *, folder: Path | None = None, claim: Claim | None = None) -> RunOwner:
        """Ask an agent until it answers, or has been silent for too long."""
        until = self._clock.monotonic() + SILENCE_S
        while True:
            try:
                return self._agents.hold(address, folder=folder, claim=claim)
            except (PlainCallError, OSError) as problem:
                if self._clock.monotonic() > until or getattr(problem, "code", None) is not None:
                    raise
                log.debug("the agent at %s: %s", address, problem)
            self._clock.sleep(_LONGEST_PAUSE_S)

    def _awaited(self) -> Claim:
        began, pause = self._clock.monotonic(), _PAUSE_S
        while self._clock.monotonic() - began < AGREE_S:
            if claim := self._known_at_first():
                return claim
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        raise no_agreement(f"the first rank did not within {AGREE_S:g} s")

    # -- deciding

    def _decided(self) -> Claim:
        self._gather()
        holdings = self._agents.held()
        until = self._clock.monotonic() + PERSIST_S
        void, after, tries = 0, NO_CLAIM, 0
        while tries < _MOST_TRIES:
            view = self._look(holdings)
            found = self._hold.own_claim(view.claims)
            if found is not None and found.number != void:
                return found
            if found is None:
                after = view.claims[-1] if view.claims else NO_CLAIM
            made, source = self._proposed_of(view, after)
            if self._is_in_doubt(view, made, after, until):
                self._clock.sleep(_LONGEST_PAUSE_S)
                holdings = self._agents.held() if view.is_readable else holdings
                continue
            self._hold.refuse_if_nothing_is_whole(made.recognised, made.skipped)
            self._say(made, source, view)
            if not view.is_readable:
                self._hold.is_apart = True
                return made
            tries += 1
            published = self._published(made, source)
            if published:
                return made
            if published is False:
                void = made.number
        raise no_agreement("the shared folder changed again and again")

    def _published(self, made: Claim, source: str) -> bool | None:
        """Claim the shared folder; None where that has to be tried again, False where the claim is void.

        Its holder may have saved once more, and removed what is claimed: claimed again, that counts.
        """
        try:
            if not self._hold.shared.ask(lambda: self._hold.claims.publish(made)):
                return None
            return source != SHARED or made.recognised[0] in self._hold.shared.ask(
                lambda: fresh_names(self._hold.folder)
            )
        except OSError as problem:
            log.warning("%s: %s", SHARED, problem)
            return None

    def _is_in_doubt(self, view: RunView, made: Claim, after: Claim, until: float) -> bool:
        """Tell whether something newer may lie where it cannot be read, and that is looked at again."""
        doubt, goes_on = self._doubt(view, made, after)
        if doubt and self._clock.monotonic() <= until:
            return True
        if doubt and not goes_on:
            raise no_agreement(doubt)
        if doubt:
            log.warning("going on without what may be newer: %s", doubt)
        return False

    def _proposed_of(self, view: RunView, after: Claim) -> tuple[Claim, str]:
        """Return the claim to make; what of the shared folder cannot be read makes all of it unreadable."""
        try:
            return self._proposed(view, after)
        except OSError as problem:
            view.problem = str(problem)  # what the folder is known to have is kept
            return self._proposed(view, after)

    def _doubt(self, view: RunView, made: Claim, after: Claim) -> tuple[str, bool]:
        """Return why something newer may lie where it cannot be read, and whether the ranks go on without it.

        They do without a node's disk, as without a node that is lost; but never begin at zero for it.
        """
        newest = CheckpointName.parse(made.recognised[0]) if made.recognised else None
        is_known = newest is not None and self._is_known_here(after) and not view.is_lost_above(newest, after)
        if not view.is_readable and not is_known:
            return f"{SHARED} cannot be used ({view.problem}), and may have newer ones than these nodes", False
        if unread := view.unread_above(newest, after):
            return "; ".join(unread), bool(made.recognised)
        if not made.recognised and len(view.holdings) < len(self._agents.members):
            return "nodes that do not say what they have may have some", True
        return "", True

    def _is_known_here(self, claim: Claim) -> bool:
        """Tell whether these nodes had every checkpoint first: an attempt before ran in this allocation.

        A job that was started again elsewhere may have had newer ones than the nodes that it comes back to.
        """
        newest, ours = claim.attempt, self._agents.attempt
        return newest is not None and (newest.job, newest.restart) == (ours.job, ours.restart)

    def _gather(self) -> None:
        """Wait for the nodes whose agents do not know yet where their checkpoints lie."""
        began = self._clock.monotonic()
        waiting = list(self._agents.members[: self._nodes])
        while waiting and self._clock.monotonic() - began < GATHER_S:
            for member in list(waiting):
                try:
                    owner = self._agents.hold(member.address)
                except (PlainCallError, OSError) as problem:
                    log.debug("the agent of %s: %s", member.name, problem)
                    continue
                self._agents.judge(owner, None)
                if owner.has_own or owner.said_by == self._agents.attempt:
                    waiting.remove(member)
            if waiting:
                self._clock.sleep(_PAUSE_S)
        if waiting:
            log.warning(
                "%s did not say within %g s where checkpoints lie: let each node's first rank call `latest` (or"
                " `resume`, `over`), else this is waited for, and what its disk alone holds is not gone on from",
                listed([member.name for member in waiting]),
                GATHER_S,
            )

    def _look(self, holdings: Sequence[Holding]) -> RunView:
        on_nodes = (self._agents.owner(holding.hold).claim for holding in holdings)
        known = {claim.number: claim for claim in on_nodes if claim is not None}
        problem = ""
        try:
            self._hold.shared.ask(lambda: self._hold.folder.mkdir(parents=True, exist_ok=True))
            claims = self._hold.shared.ask(self._hold.claims.all)
            self._shared = self._hold.shared.ask(lambda: entries(self._hold.folder))
            known |= {claim.number: claim for claim in claims}
        except OSError as failed:
            problem = str(failed)
        return RunView(in_order(known.values()), self._shared, holdings, problem)

    def _proposed(self, view: RunView, newest: Claim) -> tuple[Claim, str]:
        """Return the claim to make, of what `newest` left, and where its first checkpoint lies."""
        recognised: list[str] = []
        skipped: list[tuple[str, str]] = []
        source = ""
        for entry in view.entries():
            if not entry.counts(newest):
                skipped.append((entry.name, why_not(entry, newest)))
                continue
            reasons: list[str] = []
            found = self._whole_at(entry, view, reasons, contents=not recognised)
            skipped.extend((entry.name, reason) for reason in reasons)
            if found:
                source = source or found
                recognised.append(entry.name)
        if not recognised:
            skipped.extend(gone(newest, view.entries()))
        claim = Claim(
            number=max((highest(view.entries()), *(claim.number for claim in view.claims)))
            + (1 if view.is_readable else APART_GAP),
            attempt=self._agents.attempt,
            holder=self._hold.holder,
            recognised=tuple(recognised),
            skipped=tuple(skipped),
            created_unix=self._clock.unix(),
        )
        return claim, source

    def _whole_at(self, entry: CheckpointName, view: RunView, reasons: list[str], *, contents: bool) -> str:
        """Return where a checkpoint is whole; empty, and why, where it is not."""
        places = view.places(entry.name)
        torn = [*view.torn(entry.name), *(unread for unread in view.unread if unread[0] == entry.name)]
        if contents and places:
            members = {member.name: member for member in self._agents.members}
            nodes = sorted({there.node for there in places})
            asked = [members[node] for node in members if node in nodes]
            checked = self._agents.held(name=entry.name, contents=True, among=asked)
            places = [there for holding in checked for there in holding.whole]
            unread = [reason for holding in checked for reason in holding.unread]
            torn = [*unread, *(reason for holding in checked for reason in holding.torn)]
            view.unread += unread
        reasons.extend(f"{where}: {why}" for _, where, why in torn)
        if places and (plan := choose(entry.name, places[0].manifest.files, places)) is not None:
            return ", ".join(place(there.node, there.origin) for there, _ in plan) or "every node"
        if entry not in view.shared:
            if places and not reasons:
                reasons.append("parts of it are on no node that answers")
            return ""
        if not view.is_readable:
            return "" if contents else SHARED
        try:
            path = self._hold.folder / entry.name
            self._hold.shared.ask(lambda: manifests.check(path, contents=contents), LOOK_S)
        except CheckpointDamagedError as damaged:
            reasons.append(damaged.reason)
            return ""
        except OSError as problem:
            if contents:
                raise
            log.warning("%s counts, though it cannot be looked at now: %s", entry.name, problem)
        return SHARED

    def _say(self, claim: Claim, source: str, view: RunView) -> None:
        if not view.is_readable:
            log.warning("%s cannot be used now: %s", SHARED, view.problem)
        if not claim.recognised:
            return
        name = claim.recognised[0]
        newest = view.shared[0].name if view.shared else "none"
        if source == SHARED:
            log.info("going on from %s, which %s has", name, SHARED)
        elif not view.is_readable:
            log.warning("going on from %s on %s: the newest that is whole on any node", name, source)
        elif name in {entry.name for entry in view.shared}:
            log.info("going on from %s on %s", name, source)
        else:
            log.warning("going on from %s on %s: newer than all in %s (newest: %s)", name, source, SHARED, newest)
