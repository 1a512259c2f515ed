"""Settings of the loader, and the shape of a crop."""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from omnilead.data_tools.ecg.constants import CROP as CROP
from omnilead.data_tools.ecg.constants import FS_HZ as DATASET_HZ
from omnilead.data_tools.ecg.constants import HALF as HALF

from ..settings.errors import one_line_errors
from ..settings.resuming import MayChange
from .augmentations import AugmentConfig
from .augmentations.stage import STRICT

FS_HZ = float(DATASET_HZ)
MV_PER_UV = 1e-3
Views = Literal["halves", "window"]


@one_line_errors
@checked_dataclass(frozen=True, config=STRICT)
class PipelineConfig:
    """The section `pipeline` of the settings: how crops are loaded."""

    # where the augmentations run; auto: dali on a GPU, torch without one
    backend: Literal["auto", "dali", "torch"] = "auto"
    # the pair to contrast: the two halves of a crop, or two views of one window
    views: Views = "halves"
    # 0: shuffle the whole dataset; G: shuffle G shards at a time, for remote data and slow disks
    block_shards: Annotated[int, Field(ge=0)] = 0
    # sampling weight of each dataset; None: its number of selected crops
    weights: tuple[float, ...] | None = None
    # format to read; null: tar if the dataset has it, else zarr
    source: MayChange[Literal["tar", "zarr"] | None] = None
    # verify a crop's checksum at its first read, at every read, or never
    check: MayChange[Literal["first", "always", "never"]] = "first"
    # stop: raise an error at a crop that cannot be read; skip: read another crop instead, and count
    # it
    on_corrupt: MayChange[Literal["stop", "skip"]] = "stop"
    # number of threads that read crops; None: 1 on a CPU, 2 on a GPU
    threads: MayChange[Annotated[int | None, Field(ge=1)]] = None
    read_ahead: MayChange[Annotated[int, Field(ge=1)]] = 2  # minimum number of prefetched batches
    cache_dir: MayChange[str | None] = None  # local cache folder for datasets on s3://
    cache_bytes: MayChange[int] = 100 * 2**30  # size limit of cache_dir in bytes


@one_line_errors
@checked_dataclass(frozen=True, config=STRICT)
class LoaderConfig(PipelineConfig):
    """The section `pipeline` and the settings of other sections that the loader needs."""

    batch_crops: int = 512  # crops in a batch, over all ranks
    # number of crops of a rank that are contrasted at a time; None: all crops of the rank
    micro_batch: Annotated[int | None, Field(ge=1)] = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    # 0: random lead masking is drawn for each half of a crop. n > 0: the model's input will cut
    # each crop into n windows, and Batch.keep_BSL1 has a mask for each window, because leads must
    # be masked after the windows are filtered
    windows: Annotated[int, Field(ge=0)] = 0
