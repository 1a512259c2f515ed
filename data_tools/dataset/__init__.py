"""The dataset format, version 1. `dataset.py` reads a dataset, `facts.py` says what its files hold,
`paths.py` finds the datasets that a command is given.

    DATASET/dataset.json      preprocessing, sources, roles, shards, and a fingerprint of all entries
            samples.parquet   one row per crop, in shard order
            README.md         data card; croissant.json is the same for programs
            rejects.csv       every record, lead or crop that was refused, repaired or flagged
            shards/00000.tar  <key>.ecg = int16 [12, 5000] in microvolts, <key>.json; .idx for DALI
            store.zarr/       optional copy: int16 [crops, 12, 5000]

The engine uses datasets through the names that this package exports.
"""

from ..ecg.constants import CROP_BYTES as CROP_BYTES
from ..ecg.constants import CROP_SHAPE as CROP_SHAPE
from ..ecg.constants import VENDORS as VENDORS
from ..io.errors import ChunkError as ChunkError
from ..io.errors import DataError as DataError
from ..io.errors import DatasetError as DatasetError
from .dataset import Dataset as Dataset
from .dataset import Ecg as Ecg
from .dataset import crc_and_waveform_hash as crc_and_waveform_hash
from .dataset import flag_mask as flag_mask
from .dataset import label_names as label_names
from .facts import CLASSES as CLASSES
from .facts import COLUMNS as COLUMNS
from .facts import FORMAT_MINOR as FORMAT_MINOR
from .facts import FORMAT_VERSION as FORMAT_VERSION
from .facts import META as META
from .facts import NAME_KEY as NAME_KEY
from .facts import REJECTS as REJECTS
from .facts import SAMPLES as SAMPLES
from .facts import SHARD_CROPS as SHARD_CROPS
from .facts import STORE as STORE
from .facts import DatasetFacts as DatasetFacts
from .facts import FileFacts as FileFacts
from .facts import RoleFacts as RoleFacts
from .facts import ShardFacts as ShardFacts
from .facts import fingerprint as fingerprint
from .paths import Data as Data
from .paths import as_list as as_list
from .paths import dataset_paths as dataset_paths
from .paths import open_all as open_all
