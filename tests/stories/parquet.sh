# Images in parquet files, packed as they are, and read by a job on a node where they were not packed.
deeplink demo --write-digits digits
mkdir tables
python - <<'PYTHON'
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

files = [path for path in sorted(Path("digits").rglob("*")) if path.is_file()]
for number, first in enumerate(range(0, len(files), 600)):
    some = files[first : first + 600]
    columns = {
        "name": [path.stem for path in some],
        "image": [path.read_bytes() for path in some],
        "label": [path.parent.name for path in some],
    }
    pq.write_table(pa.table(columns), f"tables/digits-{number}.parquet", row_group_size=100)
PYTHON
salloc -N1 -w n0 --exclusive deeplink pack "$PWD/tables/digits-{0..2}.parquet" digits --key name --columns image
salloc -N1 -w n1 --exclusive deeplink run --nproc-per-node 1 -- python epochs.py digits 3
