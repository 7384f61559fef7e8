"""What strangers say to ranks that save together is not executed, and leads nowhere."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch

from deeplink.checkpoints import CheckpointError, sharded
from deeplink.checkpoints import multirank_save as messages
from deeplink.checkpoints.agents import JobAgents
from deeplink.checkpoints.found import SHARDED, NoStateError, UnmatchedStatesError
from deeplink.checkpoints.multirank_save import FOLDER, Board, Exchange, SaveGroup, collect_parts
from deeplink.core import plainpickle
from deeplink.core.clock import SystemClock
from deeplink.core.types import Attempt
from deeplink.rpc.grpc_server import PlainClients, bound_server
from deeplink.rpc.plain import PlainRefusedError
from deeplink.v1 import keep_pb2, saving_pb2
from tests.deeplink.checkpoints.nodes import Nodes
from tests.pickled import running, unpickled

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST = Attempt(17, 0, 0)
STATE = {"model": {"w": torch.arange(6.0), "steps": 3}}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    job = Nodes(tmp_path, 2)
    yield job
    job.close()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What a stranger's code makes where it runs."""
    return tmp_path / "it-ran"


def board(nodes: Nodes, rank: int, *, at: str = "") -> Board:
    env = nodes.env(FIRST, f"n{rank}", ["n0", "n1"])
    if at:
        env["DEEPLINK_MEMBERS"] = env["DEEPLINK_MEMBERS"].replace(nodes.members("n0")[0].address, at)
    agents = JobAgents.of_environment(env, nodes.root, FIRST, SystemClock())
    assert agents is not None
    return Board(
        nodes.root / f"draft-{rank}",
        SaveGroup(rank, 2),
        SystemClock(),
        lambda: None,
        20.0,
        agents=agents,
        name="save",
    )


def liar(words: bytes) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Return what has an answer to everything."""

    def hear(request: Any, _context: Any) -> Any:
        return keep_pb2.HearReply(spoke=[0, 1], words=[words] * len(request.ranks))

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Tell": grpc.unary_unary_rpc_method_handler(
            lambda _request, _context: keep_pb2.TellReply(),
            keep_pb2.TellRequest.FromString,
            keep_pb2.TellReply.SerializeToString,
        ),
        "Hear": grpc.unary_unary_rpc_method_handler(
            hear, keep_pb2.HearRequest.FromString, keep_pb2.HearReply.SerializeToString
        ),
    }
    return methods


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("knows_token", [True, False])
def test_code_in_the_answer_of_a_server_that_lies_does_not_run(
    nodes: Nodes, mark: Path, rank: int, *, knows_token: bool
) -> None:
    token = nodes.token if knows_token else "another"

    def register(server: grpc.Server) -> list[str]:
        server.add_registered_method_handlers("deeplink.v1.Keep", liar(running(mark)))
        return []

    server = bound_server("127.0.0.1:0", token, register, plain=PlainClients(node="n0", token=token))
    server.server.start()
    refusal = (
        pytest.raises(CheckpointError, match="is not usable") if knows_token else pytest.raises(PlainRefusedError)
    )
    try:
        with refusal, board(nodes, rank, at=f"127.0.0.1:{server.port}") as met:
            sharded.write(STATE, met)
    finally:
        server.server.stop(None).wait(10)
    assert not mark.exists()


def test_code_that_a_holder_of_the_token_posts_at_an_honest_agent_does_not_run(nodes: Nodes, mark: Path) -> None:
    hostile = board(nodes, 1)
    hostile.put("plan", running(mark))
    with pytest.raises(CheckpointError, match="what rank 1 said"), board(nodes, 0) as met:
        sharded.write(STATE, met)
    assert not mark.exists()
    with pytest.raises(plainpickle.PickleError, match="it names"):
        plainpickle.loaded(running(mark), {})
    assert not mark.exists()
    unpickled(running(mark))  # it would: its absence says something
    assert mark.exists()


def exchanged(tmp_path: Path, kind: str, words: bytes) -> Exchange:
    """Return rank 0's side of a save whose rank 1 has said something."""
    first, second = (
        Exchange(tmp_path / "d", SaveGroup(rank, 2), SystemClock(), lambda: None, 5.0) for rank in (0, 1)
    )
    with first, second:
        second.put(kind, words)
    return first


def plan(**changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "key": "model.w",
        "path": [saving_pb2.PathStep(name="model"), saving_pb2.PathStep(name="w")],
        "dtype": "float32",
        "is_shard": True,
        "size": [6],
        "offsets": [0],
        "lengths": [6],
    } | changes
    return saving_pb2.RankPlan(items=[saving_pb2.PlannedItem(**fields)]).SerializeToString()


@pytest.mark.parametrize(
    "words",
    [
        b"no message",
        plan(dtype="load"),
        plan(dtype="__name__"),
        plan(size=[6, 1]),
        plan(size=[1] * 65, offsets=[0] * 65, lengths=[1] * 65),
        plan(key="model.other"),
        plan(path=[saving_pb2.PathStep(name="model")]),
        plan(path=[]),
        plan(key="model.4000000000", path=[*messages.path_message(("model", 4000000000))]),
        plan(key="5", path=messages.path_message((5,))),
        plan(size=[1 << 63], lengths=[1 << 63]),
        saving_pb2.RankPlan(items=[*saving_pb2.RankPlan.FromString(plan()).items] * 2).SerializeToString(),
        plan(offsets=[3]),
        plan(size=[8], lengths=[8]),  # rank 0 has another
    ],
)
def test_a_plan_that_is_none_ends_the_save(tmp_path: Path, words: bytes) -> None:
    with (
        pytest.raises((CheckpointError, UnmatchedStatesError), match=r"is not usable|do not make a whole"),
        exchanged(tmp_path, "plan", words) as first,
    ):
        sharded.write(STATE, first)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("items", [[7], [0, 0], [2]])
def test_a_rank_writes_no_items_that_it_has_not(items: list[int]) -> None:
    with pytest.raises(CheckpointError, match="items to write, of 2"):
        messages.assigned(saving_pb2.AssignedItems(items=items).SerializeToString(), 2)


@pytest.mark.parametrize(
    ("item", "file"), [(0, "../__1_0.distcp"), (0, "/etc/passwd"), (0, "__0_0.distcp"), (1, "__1_0.distcp")]
)
def test_what_a_rank_wrote_is_what_it_was_to_write_in_a_file_of_its_own(item: int, file: str) -> None:
    told = saving_pb2.WrittenItems(items=[saving_pb2.WrittenItem(item=item, file=file, length=1)])
    with pytest.raises(CheckpointError, match=r"rank 1 said .* is not usable"):
        messages.written(told.SerializeToString(), 1, [0])


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "", "a/../../b"])
def test_files_that_a_rank_names_lie_in_the_checkpoint(tmp_path: Path, path: str) -> None:
    told = saving_pb2.RankFiles(files=[saving_pb2.RankFile(path=path, bytes=1, xxh3_64="0" * 16)])
    first = exchanged(tmp_path, "done", told.SerializeToString())
    first.put("done", messages.files_message([]))
    with pytest.raises(CheckpointError, match="rank 1"), first:
        collect_parts(first)


@pytest.mark.parametrize("name", ["../other", "/tmp/x", "step-0000000001.a1/../../x", "", ".draft-x"])
def test_nodes_publish_checkpoints_alone(name: str) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint's name"):
        messages.publication(saving_pb2.Publication(name=name, manifest="{}").SerializeToString())


def test_the_words_of_earlier_versions_are_refused_as_words(tmp_path: Path) -> None:
    first = exchanged(tmp_path, "done", json.dumps([{"path": "a", "bytes": 1, "xxh3_64": "0" * 16}]).encode())
    first.put("done", messages.files_message([]))
    with pytest.raises(CheckpointError, match="is not usable"), first:
        collect_parts(first)
    assert not (first.draft / FOLDER).exists()


# -- files


def saved(folder: Path) -> Path:
    with Exchange(folder, SaveGroup(0, 1), SystemClock(), lambda: None) as alone:
        sharded.write(STATE, alone)
    return folder


class Takes:
    def __init__(self) -> None:
        self.state = {"w": torch.zeros(6), "steps": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_code_in_the_index_of_a_sharded_checkpoint_does_not_run(tmp_path: Path, mark: Path) -> None:
    folder, part = saved(tmp_path / "c"), Takes()
    sharded.restore({"model": part}, folder)
    assert part.state["steps"] == 3
    assert torch.equal(part.state["w"], STATE["model"]["w"])  # type: ignore[arg-type]
    (folder / SHARDED).write_bytes(running(mark))
    with pytest.raises(NoStateError, match="cannot be used: it names"):
        sharded.restore({"model": part}, folder)
    assert not mark.exists()


def test_code_in_a_plain_value_of_a_sharded_checkpoint_does_not_run(
    tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    whole = io.BytesIO()
    torch.save(mark, whole)  # a path: an object that is no plain value
    monkeypatch.setattr(DefaultSavePlanner, "transform_object", lambda _self, _item, found: found_or(found, whole))
    folder = saved(tmp_path / "c")
    with pytest.raises(plainpickle.PickleError):
        sharded.restore({"model": Takes()}, folder)


def found_or(found: Any, instead: io.BytesIO) -> Any:
    return found if isinstance(found, torch.Tensor) else instead


def test_an_index_that_leads_outside_of_its_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = saved(tmp_path / "c")
    found = sharded._Reader(known, None).read_metadata()
    for stored in found.storage_data.values():
        object.__setattr__(stored, "relative_path", "../elsewhere")
    monkeypatch.setattr(plainpickle, "loaded", lambda _data, _known: found)
    with pytest.raises(NoStateError, match="elsewhere"):
        sharded.restore({"model": Takes()}, known)
