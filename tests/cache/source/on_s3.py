"""Packs from a real S3 server over HTTP (moto's), keeps a home there, and reads a folder that a web server lists.

python -m tests.cache.source.on_s3 FOLDER, with s3fs and moto on PYTHONPATH; exits 0 where all was as it should be.
"""

from __future__ import annotations

import http.server
import os
import sys
import threading
from functools import partial
from pathlib import Path
from unittest import mock

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs
from moto.server import ThreadedMotoServer

from deeplink.cache.packer import PackResult, pack
from deeplink.cache.reader import Reader, ReadStats
from deeplink.cache.source.opening import open_source
from deeplink.cache.source.selection import Selection
from deeplink.cache.source.source import Listing, Source
from tests.cache.agents import config_below, make_tar, small_files, write_tree

ROOT = Path(sys.argv[1])
CONFIG = config_below(ROOT)
FILES = small_files()


def contents(name: str) -> tuple[dict[str, bytes], ReadStats]:
    with Reader.open(name, config=CONFIG) as reader:
        data = [bytes(view) for view in reader.read(range(len(reader)))]
        return dict(zip(reader.index.keys(), data, strict=True)), reader.stats()


def compare(url: str, name: str, files: dict[str, bytes], *, home: str = "") -> PackResult:
    """Pack, and read what was packed: from the store, then, with that wiped, from the home or the source."""
    result = pack(url, name, config=CONFIG, home=home)
    found, stats = contents(name)
    assert found == files
    assert stats.source_samples == 0
    for path in CONFIG.store.glob("*.mdb"):
        path.unlink()
    found, stats = contents(name)
    assert found == files
    assert (stats.home_samples if home else stats.source_samples) == len(files), stats
    return result


def one_request_each(source: Source, listing: Listing) -> None:
    """Read all that is listed; s3fs must not ask how long each is, which would be another request."""
    names, sizes = list(listing.keys), listing.sizes.tolist()
    with mock.patch.object(s3fs.S3FileSystem, "_info", side_effect=AssertionError("asked")):
        full = [row for row, size in enumerate(sizes) if size]
        found = source.read_many([names[row] for row in full], [sizes[row] for row in full])
        assert [source.read(names[row], sizes[row]) for row in full] == found
    assert found == [FILES[names[row]] for row in full]


def on_s3() -> None:
    s3 = fsspec.filesystem("s3")
    s3.mkdir("bucket")
    for key, data in FILES.items():
        s3.pipe_file(f"bucket/small/{key}", data)
    s3.pipe_file("bucket/small/.git/config", b"x")
    s3.pipe_file("bucket/small/folder/", b"")  # as consoles mark a folder
    source = open_source("s3://bucket/small")
    listing = source.listing(Selection(exclude=("test",)))
    assert list(listing.keys) == sorted(key for key in FILES if key.startswith("train/"))
    assert listing.marked
    one_request_each(source, listing)
    compare("s3://bucket/small", "small", FILES, home="s3://bucket/home")
    again = pack("s3://bucket/small", "small", config=CONFIG, home="s3://bucket/home")
    assert (again.unchanged, again.read_files) == (True, 0)
    assert s3.exists(f"bucket/home/small/{again.version}.arrow")
    # One object changes: its shard alone is read again.
    s3.pipe_file(f"bucket/small/{min(FILES)}", b"changed")
    appended = pack("s3://bucket/small", "small", config=CONFIG, home="s3://bucket/home", append=True)
    assert 0 < appended.read_files < len(FILES)
    for number in range(2):
        s3.put_file(str(make_tar(ROOT / f"{number}.tar", FILES)), f"bucket/tars/a-{number}.tar")
    in_tars = {f"a-{number}/{key}": data for number in range(2) for key, data in FILES.items()}
    compare("s3://bucket/tars/a-*.tar", "globbed", in_tars)
    compare("s3://bucket/tars/a-{0..1}.tar", "braced", in_tars)
    images = [bytes([number]) * 5_000 for number in range(50)]
    pq.write_table(pa.table({"image": images}), ROOT / "t.parquet", row_group_size=20)
    s3.put_file(str(ROOT / "t.parquet"), "bucket/t.parquet")
    rows = {f"t/{row:08d}.image": data for row, data in enumerate(images)}
    compare("s3://bucket/t.parquet#columns=image", "table", rows)


def on_the_web() -> None:
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(write_tree(ROOT / "web", FILES)))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        compare(f"http://127.0.0.1:{server.server_port}", "web", FILES)
        server.shutdown()


def main() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    nobody = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(nobody | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"})
    try:
        on_s3()
        on_the_web()
    finally:
        server.stop()


if __name__ == "__main__":
    main()
