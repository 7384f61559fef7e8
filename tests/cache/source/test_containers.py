"""Tars and tables as sources: what is in them is listed, read, and packed as files of a folder are."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeplink.cache.errors import SourceChangedError, SourceError
from deeplink.cache.source.containers import expanded
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.selection import Selection
from deeplink.cache.source.tables import TableColumns
from tests.cache.agents import make_tar

if TYPE_CHECKING:
    from collections.abc import Callable

Files = dict[str, bytes]


@pytest.fixture
def tars(tmp_path: Path) -> Files:
    rng, found = random.Random(4), {}  # noqa: S311 - test data
    for number in range(3):
        files = {
            f"s{sample:03d}.{part}": rng.randbytes(rng.choice([0, 9, 5_000, 90_000]))
            for sample in range(30)
            for part in ("jpg", "cls")
        }
        make_tar(tmp_path / "tars" / f"x-{number:03d}.tar", {f"./{name}": data for name, data in files.items()})
        found.update({f"x-{number:03d}/{name}": data for name, data in files.items()})
    make_tar(tmp_path / "tars" / "deeper" / "x-000.tar", {"not/this": b"x"})
    return found


def compare(url: str, files: Files, **wanted: Any) -> None:
    """List a source and read all of it, also by another object that has listed nothing, in another order."""
    listing = open_source(url).listing(Selection(**wanted))
    keys = sorted(files, key=str.encode)
    assert list(listing.keys) == keys
    assert listing.sizes.tolist() == [len(files[key]) for key in keys]
    reading = open_source(url)
    back = keys[::-1]
    assert reading.read_many(back, [len(files[key]) for key in back]) == [files[key] for key in back]
    for key in keys[:: max(len(keys) // 7, 1)]:
        assert reading.read(key, len(files[key])) == files[key]
        assert (
            reading.read_range(key, len(files[key]) // 2, 1 if files[key] else 0)
            == (files[key][len(files[key]) // 2 :][:1])
        )
        assert reading.stat(key)[0] == len(files[key])


@pytest.mark.parametrize("names", ["x-*.tar", "x-{000..002}.tar", "{x,y}-*.tar", "x-00[0-2].tar"])
def test_members_of_tars_are_samples(tmp_path: Path, tars: Files, names: str) -> None:
    compare(f"{tmp_path}/tars/{names}", tars)


def test_tars_of_a_url_are_read_by_ranges(tmp_path: Path, tars: Files) -> None:
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "tars").glob("*.tar"):
        memory.pipe_file(f"/bucket/tars/{path.name}", path.read_bytes())
    for names in ("x-{000..002}.tar", "*.tar"):
        compare(f"memory://bucket/tars/{names}", tars)
    memory.rm("/bucket", recursive=True)


def test_one_tar_and_a_part_of_it(tmp_path: Path, tars: Files) -> None:
    url = f"{tmp_path}/tars/x-001.tar"
    compare(url, {key: data for key, data in tars.items() if key.startswith("x-001/")})
    some = {key: data for key, data in tars.items() if key.startswith("x-001/") and key.endswith(".cls")}
    compare(url, some, include=("*.cls",))


def test_links_within_a_tar_and_what_is_bad_in_it(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        for name, kind, target in (
            ("one", tarfile.REGTYPE, ""),
            ("hard", tarfile.LNKTYPE, "one"),
            ("soft", tarfile.SYMTYPE, "one"),
            ("one", tarfile.REGTYPE, ""),
        ):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, target
            entry.size = 3 if kind == tarfile.REGTYPE else 0
            archive.addfile(entry, io.BytesIO(b"abc"))
    with pytest.raises(SourceError, match="2 files cannot be packed") as refused:
        open_source(str(path)).listing()
    assert "twice" in str(refused.value)
    assert "soft" in str(refused.value)
    compare(str(path), {"a/one": b"abc", "a/hard": b"abc"}, skip_bad=True)
    compare(str(path), {"a/hard": b"abc"}, include=("hard",))


def test_a_tar_that_is_none_or_is_compressed_is_said(tmp_path: Path, tars: Files) -> None:
    (tmp_path / "tars" / "x-003.tar").write_bytes(b"no tar at all" * 100)
    make_tar(tmp_path / "tars" / "x-004.tar", {"long": bytes(9000)})
    whole = (tmp_path / "tars" / "x-004.tar").read_bytes()
    (tmp_path / "tars" / "x-004.tar").write_bytes(whole[:5000])
    with pytest.raises(SourceError, match="2 files cannot be packed") as refused:
        open_source(f"{tmp_path}/tars/x-*.tar").listing()
    assert "'x-003.tar' is no tar" in str(refused.value)
    assert "x-004.tar" in str(refused.value)
    with pytest.raises(SourceError, match="compressed"):
        open_source(f"{tmp_path}/tars/x-000.tar.gz")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda whole: whole[:5000], "cut short: it ends at 5,000 bytes"),
        (lambda whole: whole[:300], "cut short: it ends at 300 bytes"),
        (gzip.compress, "compressed"),
        (lambda _: b"", "is empty"),
        (lambda _: b"no tar" * 100, "is no tar"),
    ],
)
def test_what_is_wrong_with_a_tar_is_said(tmp_path: Path, written: Callable[[bytes], bytes], said: str) -> None:
    path = make_tar(tmp_path / "a.tar", {"long": bytes(9000)})
    path.write_bytes(written(path.read_bytes()))
    with pytest.raises(SourceError, match=said) as refused:
        open_source(str(path)).listing()
    assert ("Fetch it again" in refused.value.remedy) == (said.startswith("cut short") or said == "is empty")


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_tar_is_cut_short_wherever_it_is_cut(tmp_path: Path, kind: int) -> None:
    path, name = tmp_path / "a.tar", "é" * 80
    with tarfile.open(path, "w", format=kind) as archive:
        for number in range(2):
            entry = tarfile.TarInfo(f"{name}{number}")
            entry.size = 700
            archive.addfile(entry, io.BytesIO(bytes([65]) * 700))
        end = archive.offset
    whole = path.read_bytes()
    for size in [*range(1, end + 512, 94), *range(512, end + 1, 512)]:
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=f"'a.tar' is cut short: it ends at {size:,} bytes") as refused:
            open_source(str(path)).listing()
        assert refused.value.remedy.startswith("Fetch it again")
    for size in (end + 512, end + 1024):
        path.write_bytes(whole[:size])
        assert len(open_source(str(path)).listing()) == 2


def test_a_tar_without_its_end_is_not_listed_but_what_was_packed_of_it_is_read(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"one": b"1", "two": b"22"})
    path.write_bytes(path.read_bytes()[:2048])
    with pytest.raises(SourceError, match="without the empty blocks"):
        open_source(str(path)).listing()
    assert open_source(str(path)).read("a/two", 2) == b"22"
    with path.open("ab") as file:
        file.write(b"x" * 4096)
    with pytest.raises(SourceError, match="damaged: there is no file's head at 2,048 bytes"):
        open_source(str(path)).listing()


def test_a_tar_that_goes_away_is_said_to_have_gone(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"one": b"1"})
    origin = open_source(str(path))
    origin.listing()
    path.unlink()
    with pytest.raises(SourceError, match="went away") as gone:
        origin.read("a/one", 1)
    assert isinstance(gone.value.__cause__, FileNotFoundError)


def test_a_pattern_that_takes_no_file_is_said(tmp_path: Path, tars: Files) -> None:
    with pytest.raises(SourceError, match=r"no file below it is called y-\*\.tar"):
        open_source(f"{tmp_path}/tars/y-*.tar").listing()


@pytest.mark.parametrize("name", ["../up", "/root", "a//b", "./a/./b", "x" * 300])
def test_a_name_in_a_tar_that_can_be_no_path_is_bad(tmp_path: Path, name: str) -> None:
    path = make_tar(tmp_path / "a.tar", {name: b"1", "good": b"2"})
    with pytest.raises(SourceError, match="part of the path"):
        open_source(str(path)).listing()
    assert list(open_source(str(path)).listing(Selection(skip_bad=True)).keys) == ["a/good"]


def test_a_tar_written_again_is_looked_through_again(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"one": b"1", "two": b"22"})
    origin = open_source(str(path))
    listing = origin.listing()
    assert origin.read("a/two", 2) == b"22"
    make_tar(path, {"before": bytes(5000), "two": b"33"})
    assert origin.read("a/two", 2) == b"33"
    assert origin.stat("a/two")[1] != int(listing.marks[1])
    with pytest.raises(SourceChangedError, match="does not hold it"):
        origin.read("a/one", 1)
    with pytest.raises(SourceError, match="no file of the source"):
        origin.read("a", 1)


def rows(count: int = 40) -> list[dict[str, Any]]:
    rng = random.Random(7)  # noqa: S311 - test data
    return [
        {
            "id": f"k{row * 7 % count:03d}",
            "image": {"bytes": rng.randbytes(100 + row), "path": None},
            "label": row,
            "box": [float(row), 0.5],
            "text": None if row % 2 else "é" * row,
        }
        for row in range(count)
    ]


def as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    return bytes(value["bytes"]) if isinstance(value, dict) else json.dumps(value, separators=(",", ":")).encode()


def parts(table: list[dict[str, Any]], columns: list[str], key: str = "") -> Files:
    found = {}
    for number, row in enumerate(table):
        for column in columns:
            value = row[column]
            if value is not None:
                stem = row[key] if key else f"{number:08d}"
                found[f"t/{stem}.{column}"] = as_bytes(value)
    return found


def write_table(path: Path, table: list[dict[str, Any]] | pa.Table) -> Path:
    data = table if isinstance(table, pa.Table) else pa.Table.from_pylist(table)
    if path.suffix == ".parquet":
        pq.write_table(data, path, row_group_size=7)
        return path
    new = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, data.schema) as writer:
        writer.write_table(data, max_chunksize=9)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_rows_of_tables_are_samples_and_columns_their_parts(tmp_path: Path, suffix: str) -> None:
    table = rows()
    url = str(write_table(tmp_path / f"t.{suffix}", table))
    compare(url, parts(table, ["id", "image", "label", "box", "text"]))
    keyed = TableColumns("id", ("image", "label")).url(url)
    compare(keyed, parts(table, ["image", "label"], "id"))
    compare(TableColumns("id").url(url), parts(table, ["image", "label", "box", "text"], "id"))


def test_what_is_wrong_with_a_table_is_said(tmp_path: Path) -> None:
    url = str(write_table(tmp_path / "t.parquet", rows()))
    for wanted, said in (
        (TableColumns("no", ()), "no column 'no'"),
        (TableColumns("", ("picture",)), "no column 'picture'"),
        (TableColumns("box", ("image",)), None),
    ):
        if said:
            with pytest.raises(SourceError, match=said) as refused:
                open_source(wanted.url(url)).listing()
            assert "id, image, label" in refused.value.remedy
    with pytest.raises(SourceError, match="is not key=COLUMN"):
        open_source(f"{url}#colour=red")
    twice = [{"id": "same", "label": 1}, {"id": "same", "label": 2}]
    with pytest.raises(SourceError, match="twice"):
        open_source(f"{write_table(tmp_path / 'twice.parquet', twice)}#key=id").listing()
    (tmp_path / "none.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(SourceError, match=r"'none.parquet' cannot be read"):
        open_source(f"{tmp_path}/none.parquet").listing()
    paths = [{"image": {"bytes": None, "path": "/somewhere.jpg"}}]
    with pytest.raises(SourceError, match="paths of files, not their bytes"):
        open_source(str(write_table(tmp_path / "paths.parquet", paths))).listing()


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_bytes_and_text_are_packed_as_they_are_however_a_table_holds_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    texts, data = pa.array(["é", None, "é"]), pa.array([b"\xff", b"", None])
    columns = {
        "text": texts.dictionary_encode(),
        "data": data.dictionary_encode(),
        "text_view": texts.cast(pa.string_view()),
        "data_view": data.cast(pa.binary_view()),
    }
    text = {0: "é".encode(), 2: "é".encode()}
    expected = {
        "text": text,
        "text_view": text,
        "data": {0: b"\xff", 1: b""},
        "data_view": {0: b"\xff", 1: b""},
    }
    if suffix == ".feather":  # parquet takes no such column
        views = pa.DictionaryArray.from_arrays(
            pa.array([0, None, 0], pa.int32()), pa.array(["é"], pa.string_view())
        )
        columns["text_views"], expected["text_views"] = views, text
    write_table(path, pa.table(columns))
    found = {f"a/{row:08d}.{name}": part for name, parts in expected.items() for row, part in parts.items()}
    compare(str(path), found)


@pytest.mark.parametrize("suffix", [".parquet", ".feather"])
def test_dictionaries_within_columns_are_read_out_too(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    held = pa.array([b"q", None, b"q"]).dictionary_encode()
    image = pa.StructArray.from_arrays(
        [held, pa.array(["p"] * 3)], ["bytes", "path"], mask=pa.array([False, True, False])
    )
    columns = {"image": image}
    expected = {f"a/{row:08d}.image": b"q" for row in (0, 2)}
    if suffix == ".feather":  # parquet takes no such column
        columns["images"] = pa.DictionaryArray.from_arrays(pa.array([2, 1, 0], pa.int32()), image)
        expected |= {f"a/{row:08d}.images": b"q" for row in (0, 2)}
    write_table(path, pa.table(columns))
    compare(str(path), expected)


@pytest.mark.parametrize("suffix", [".arrow", ".feather"])
def test_dictionaries_that_an_arrow_file_cannot_hold_are_said(tmp_path: Path, suffix: str) -> None:
    inner = pa.array(["a", "b"]).dictionary_encode()
    twice = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), inner)
    within = pa.StructArray.from_arrays([inner], ["bytes"])
    path = write_table(tmp_path / f"a{suffix}", pa.table({"x": twice}))
    with pytest.raises(SourceError) as refused:
        open_source(str(path)).listing()
    said = "a stream with dictionaries" if suffix == ".arrow" else "may have dictionaries of dictionaries"
    assert said in str(refused.value)
    if suffix == ".arrow":
        write_table(path, pa.table({"x": pa.ListArray.from_arrays([0, 2], within)}))
        with pytest.raises(SourceError, match="a stream with dictionaries"):
            open_source(str(path)).listing()


def test_a_table_that_is_damaged_within_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ["k"] * 900, "data": [b"x"] * 900}), path)
    whole = bytearray(path.read_bytes())
    whole[4:100] = b"\xff" * 96
    path.write_bytes(whole)
    for settings in ("", "#key=id&columns=data"):
        with pytest.raises(SourceError, match="cannot be read"):
            open_source(f"{path}{settings}").listing()


def test_braces_are_those_of_the_shell() -> None:
    assert expanded("{2..0}{a,b}") == ["2a", "2b", "1a", "1b", "0a", "0b"]
    assert expanded("{9..10}") == ["9", "10"]
    assert expanded("{x}") == ["{x}"]
    with pytest.raises(SourceError, match="more than 1,000,000 files"):
        expanded("{0..999}{0..999}{0..9}")


@pytest.mark.parametrize("names", ["**/x.tar", "{a/b,c}/x.tar"])
def test_files_that_lie_at_different_depths_are_refused(tmp_path: Path, names: str) -> None:
    with pytest.raises(SourceError, match="equally deep"):
        open_source(f"{tmp_path}/{names}")


def test_a_folder_called_like_a_tar_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.tar").mkdir()
    (tmp_path / "a.tar" / "x").write_bytes(b"1")
    assert list(open_source(str(tmp_path / "a.tar")).listing().keys) == ["x"]


@pytest.mark.parametrize(("problem", "is_bad"), [(ConnectionError("reset"), False), (PermissionError(13), True)])
def test_a_tar_that_was_not_had_is_not_left_out_as_bad(
    tars: Files, tmp_path: Path, problem: OSError, is_bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "tars").glob("*.tar"):
        memory.pipe_file(f"/shaky/{path.name}", path.read_bytes())
    memory.pipe_file("/shaky/x-999.tar", b"no tar" * 1000)
    real = memory.cat_file

    def cat_file(path: str, **options: Any) -> bytes:
        if path.endswith("x-001.tar"):
            raise problem
        return real(path, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(memory, "cat_file", cat_file)
    try:
        source, wanted = open_source("memory://shaky/*.tar"), Selection(skip_bad=True)
        if is_bad:
            assert set(source.listing(wanted).bad) == {"x-001.tar", "x-999.tar"}
        else:
            with pytest.raises(SourceError, match=r"x-001\.tar"):
                source.listing(wanted)
    finally:
        memory.rm("/shaky", recursive=True)


def test_a_folder_that_was_not_reached_is_not_left_out_as_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a/one", "b/two"):
        memory.pipe_file(f"/shaky/{name}", b"abc")
    real = memory.ls

    def ls(path: str, **options: Any) -> Any:
        if path.endswith("/b"):
            raise ConnectionError("reset")
        return real(path, **options)

    monkeypatch.setattr(memory, "ls", ls)
    try:
        with pytest.raises(SourceError, match="cannot be listed"):
            open_source("memory://shaky").listing(Selection(skip_bad=True))
    finally:
        memory.rm("/shaky", recursive=True)
