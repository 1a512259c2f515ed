"""Options that several commands of data_tools have, and the types of their arguments."""

import os
from collections.abc import Sequence
from typing import Annotated, Any

from .options import Option

CORES = os.cpu_count() or 1
Workers = Annotated[int | None, Option("worker processes (all cores)", low=1)]
Anonymous = Annotated[bool, Option("read public buckets without credentials")]
# Any stands for Dataset, which is not imported here: that would take longer than all of --help
DatasetPath = str | os.PathLike[str] | Any
DatasetPaths = Sequence[DatasetPath] | DatasetPath
SOURCE_KINDS = (
    "auto, physionet2021, ptbxl, mimic-iv-ecg, code15, ecg-arrhythmia, physionet2011, wfdb, "
    "hospital (any mix of the following), muse-xml, dicom, "
)
SOURCE_KINDS += (
    "philips-xml, cardiosoft-xml, hl7-aecg, scp-ecg, edf, arrays (.npy, .npz, HDF5, zarr), "
)
SOURCE_KINDS += "or your own file.py:Class (auto)"
Paths = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
Format = Annotated[str, Option(f"format of SRC: {SOURCE_KINDS}", "KIND", "--source")]
Patients = Annotated[
    str | None,
    Option(
        "the patient of each record: CSV or parquet with columns record and patient, or "
        "ptbxl_database.csv",
        "FILE",
    ),
]
Rate = Annotated[
    str | float | None,
    Option("sampling rate of --source arrays without arrays.yaml", "HZ", "--fs"),
]
Unit = Annotated[
    str | None, Option("unit of these arrays: mV, uV, V, or how many microvolts one step is")
]
Leads = Annotated[
    str | Sequence[str] | None,
    Option("leads of these arrays: 12, or their names in order, such as I,II,V1"),
]
