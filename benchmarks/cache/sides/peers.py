"""The peers, each with the best settings that its documents name. They live in the peers' virtual environment."""

from __future__ import annotations

import importlib
import importlib.machinery
import itertools
import sys
import types
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from benchmarks.cache.order import BATCH, batches
from benchmarks.cache.sides.base import Side, paths_of, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.cache.sides.base import Batches

SHARD = 64 << 20


def _as_it_is(batch: list[bytes]) -> list[bytes]:
    return batch


def _copied(batch: list[memoryview]) -> list[bytes]:
    """Return samples that can be sent between processes: litdata's own cannot."""
    return [bytes(sample) for sample in batch]


def _data_column(batch: list[dict[str, bytes]]) -> list[bytes]:
    return [item["data"] for item in batch]


def _in_batches(samples: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class HuggingFace(Side):
    """Hugging Face datasets: Arrow files, mapped."""

    name = "HF datasets"
    kept = "hf"
    is_peer = is_listed = True
    settings = 'Dataset.from_file, batches of 256: ds[rows]["data"]'

    def __init__(self) -> None:
        self._data: Any = None

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        datasets = importlib.import_module("datasets")
        datasets.disable_progress_bars()
        features = datasets.Features({"data": datasets.Value("large_binary")})
        writer = importlib.import_module("datasets.arrow_writer")
        packed.mkdir()
        with writer.ArrowWriter(features=features, path=str(packed / "all.arrow"), writer_batch_size=1000) as out:
            for path in paths_of(source):
                out.write({"data": read_file(path)})
            out.finalize()

    @override
    def open(self, source: Path, packed: Path) -> None:
        datasets = importlib.import_module("datasets")
        self._data = datasets.Dataset.from_file(str(packed / "all.arrow"))

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            yield self._data[rows]["data"]

    @override
    def epoch(self, seed: int) -> Batches:
        return self.read(batches(seed, len(self._data), len(self._data)))

    @override
    def close(self) -> None:
        self._data = None

    @override
    def loader(self, seed: int, workers: int, *, decode: bool) -> Callable[[], Batches]:
        if decode:
            raise NotImplementedError
        torch = importlib.import_module("torch")
        loader = torch.utils.data.DataLoader(
            self._data,
            BATCH,
            shuffle=True,
            num_workers=workers,
            collate_fn=_data_column,
            generator=torch.Generator().manual_seed(seed),
        )
        return lambda: iter(loader)


class HuggingFaceByHand(HuggingFace):
    """The same, with the objects of Arrow taken apart by hand; no document of theirs says so."""

    name = "HF datasets, Arrow buffers by hand"
    is_listed = False
    settings = 'with_format("arrow")[rows]; each sample a slice of the batch\'s buffer, which no document shows'

    @override
    def open(self, source: Path, packed: Path) -> None:
        super().open(source, packed)
        self._data = self._data.with_format("arrow")

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            column = self._data[rows].column("data").combine_chunks()
            offsets = memoryview(column.buffers()[1]).cast("q")[column.offset : column.offset + len(column) + 1]
            data = memoryview(column.buffers()[2])
            yield [data[start:stop] for start, stop in itertools.pairwise(offsets)]


class ArrayRecord(Side):
    """ArrayRecord, as Grain reads it."""

    name = "ArrayRecord"
    kept = "array_record"
    is_peer = is_listed = True
    settings = "group_size:1, uncompressed; ArrayRecordDataSource.__getitems__ of 256"

    def __init__(self) -> None:
        self._data: Any = None

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        module = importlib.import_module("array_record.python.array_record_module")
        packed.mkdir()
        writer = module.ArrayRecordWriter(str(packed / "all.array_record"), "group_size:1,uncompressed")
        for path in paths_of(source):
            writer.write(read_file(path))
        writer.close()

    @override
    def open(self, source: Path, packed: Path) -> None:
        module = importlib.import_module("array_record.python.array_record_data_source")
        self._data = module.ArrayRecordDataSource(str(packed / "all.array_record"))
        self._data[0]

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        for rows in wanted:
            yield self._data.__getitems__(rows)

    @override
    def epoch(self, seed: int) -> Batches:
        return self.read(batches(seed, len(self._data), len(self._data)))

    @override
    def close(self) -> None:
        self._data = None


class _Unused(types.ModuleType):
    """Stands for a module that MosaicML Streaming imports and that nothing here uses: any name is a class."""

    @override
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _streaming() -> Any:
    """Import MosaicML Streaming without torchvision and transformers, which only its ready-made datasets use."""
    unused = ["streaming.text", "streaming.vision", "streaming.multimodal", "transformers"]
    unused += ["transformers.feature_extraction_utils", "transformers.tokenization_utils_base"]
    for name in unused:
        if name not in sys.modules:
            module = _Unused(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
    return importlib.import_module("streaming")


class Mosaic(Side):
    """MosaicML Streaming: MDS shards."""

    name = "MosaicML Streaming"
    kept = "mds"
    is_peer = is_listed = True
    settings = (
        "MDSWriter, shards of 64 MiB, no compression; random: LocalDataset[i]; epoch: StreamingDataset, py1e"
    )
    samples_per_s = 15_000

    def __init__(self) -> None:
        self._data: Any = None
        self._packed: Path | None = None

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        with _streaming().MDSWriter(out=str(packed), columns={"data": "bytes"}, size_limit=SHARD) as out:
            for path in paths_of(source):
                out.write({"data": read_file(path)})

    @override
    def open(self, source: Path, packed: Path) -> None:
        self._packed = packed
        self._data = _streaming().LocalDataset(str(packed))

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        data = self._data
        for rows in wanted:
            yield [data[row]["data"] for row in rows]

    def _stream(self, seed: int) -> Any:
        streaming = _streaming()
        streaming.base.util.clean_stale_shared_memory()
        return streaming.StreamingDataset(
            local=str(self._packed), shuffle=True, shuffle_seed=seed, batch_size=BATCH, num_canonical_nodes=1
        )

    @override
    def epoch(self, seed: int) -> Batches:
        return _in_batches(sample["data"] for sample in self._stream(seed))

    @override
    def close(self) -> None:
        self._data = None


class Litdata(Side):
    """litdata: chunks."""

    name = "litdata"
    kept = "litdata"
    is_peer = is_listed = True
    settings = "optimize() into chunks of 64 MB, 2 workers (1 where rows must keep their order); StreamingDataset"
    lingers = True
    samples_per_s = 1000

    def __init__(self) -> None:
        self._packed = ""
        self._data: Any = None

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        litdata = importlib.import_module("litdata")
        workers = {"num_workers": 1, "reorder_files": False} if ordered else {"num_workers": 2}
        litdata.optimize(
            fn=read_file,
            inputs=paths_of(source),
            output_dir=str(packed),
            chunk_bytes="64MB",
            verbose=False,
            **workers,
        )

    @override
    def open(self, source: Path, packed: Path) -> None:
        self._packed = str(packed)
        self._data = importlib.import_module("litdata").StreamingDataset(self._packed)

    @override
    def read(self, wanted: Sequence[Sequence[int]]) -> Batches:
        data = self._data
        for rows in wanted:
            yield [data[row] for row in rows]

    @override
    def epoch(self, seed: int) -> Batches:
        data = importlib.import_module("litdata").StreamingDataset(self._packed, shuffle=True, seed=seed)
        return _in_batches(iter(data))

    @override
    def loader(self, seed: int, workers: int, *, decode: bool) -> Callable[[], Batches]:
        if decode:
            raise NotImplementedError
        litdata = importlib.import_module("litdata")
        data = litdata.StreamingDataset(self._packed, shuffle=True, seed=seed, drop_last=False)
        options: dict[str, Any] = {"persistent_workers": True} if workers else {}
        loader = litdata.StreamingDataLoader(
            data,
            batch_size=BATCH,
            num_workers=workers,
            collate_fn=_copied if workers else _as_it_is,
            drop_last=False,
            **options,
        )
        return lambda: iter(loader)

    @override
    def close(self) -> None:
        self._data = None


class WebDataset(Side):
    """WebDataset: tar shards, read in sequence."""

    name = "WebDataset"
    kept = "wds"
    is_peer = is_listed = True
    settings = "ShardWriter, shards of 64 MiB; WebDataset(...).shuffle(1000), shards shuffled, nothing decoded"

    def __init__(self) -> None:
        self._shards: list[str] = []

    @override
    def pack(self, source: Path, packed: Path, *, ordered: bool) -> None:
        webdataset = importlib.import_module("webdataset")
        packed.mkdir()
        with webdataset.ShardWriter(str(packed / "%06d.tar"), maxsize=SHARD, maxcount=10**9, verbose=0) as out:
            for row, path in enumerate(paths_of(source)):
                out.write({"__key__": f"{row:08d}", "bin": read_file(path)})

    @override
    def open(self, source: Path, packed: Path) -> None:
        self._shards = sorted(map(str, packed.glob("*.tar")))

    @override
    def epoch(self, seed: int) -> Batches:
        webdataset = importlib.import_module("webdataset")
        data = webdataset.WebDataset(self._shards, shardshuffle=len(self._shards), seed=seed)
        return _in_batches(sample["bin"] for sample in data.shuffle(1000))
