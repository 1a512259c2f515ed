"""Convert weights from and to fairseq-signals (and ECG-FM, of the same family), bit for bit. Make a
model folder from a checkpoint of ECG-CPC, or from any other network's weights and its class. Export a
model to ONNX.

    omnilead convert from-fairseq CKPT.pt OUT [--classes LIST|FILE] [--fs HZ] [--input auto|millivolt|zscore|layernorm]
    omnilead convert from-ecg-cpc LAST.ckpt OUT                     its input is 240 Hz, +-3 mV, windows of 2.5 s
    omnilead convert from-torch   WEIGHTS OUT --encoder file.py:Class [--options '{width: 64}'] [--fs HZ] [--input ...]
    omnilead convert to-fairseq   RUN OUT.pt
    omnilead convert to-onnx      RUN OUT.onnx                      for use without PyTorch

OUT/ gets model.safetensors, config.json, preprocessing.json and README.md, a model card. Weights
from and to fairseq-signals keep their values and dtypes; the optimiser's state is dropped. An error
lists all weights that are missing, unexpected or of another shape. Checkpoints are read without
running code that may be pickled in them. They may hold a pre-trained model or a classifier
(ecg_transformer_classifier), such as those of ECG-FM and DeepECG-SSL.

--input: the scale of the training signals. The paper's are in millivolts; ECG-FM's were scaled to
mean 0 and standard deviation 1 in each lead of each record (fairseq-signals
scripts/preprocess/ecg). auto follows the checkpoint's settings: layernorm (over all leads of 5 s)
if they set normalize, zscore if one of their paths names ECG-FM or MIMIC-IV-ECG (printed), else
millivolt. --fs: the sampling rate of the training signals, if the settings lack it (DeepECG-SSL:
250). Inputs are resampled to it. If the settings (or those of the pre-training, in a fine-tuned
checkpoint) state another rate, --fs is used and the difference is printed.

from-torch: WEIGHTS is a state_dict, a checkpoint with one in it, or .safetensors. The class follows
docs/extending.md; adapters for other layouts: docs/foreign_models.md. All of its weights must be in
the file, and its embedding must change by loading them. They get the dtypes of the class: float64
usually becomes float32.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from omnilead.data_tools.ecg.constants import LEADS
from omnilead.data_tools.io.commands import explain_failure, run_as_omnilead, run_command
from omnilead.data_tools.io.errors import UserError
from omnilead.data_tools.io.options import Option
from omnilead.data_tools.io.terminal import echo, tell
from omnilead.downstream.inference.options import Code
from omnilead.engine.settings.commandline import Actions, parse_action, parse_yaml
from omnilead.engine.settings.errors import ConfigError
from omnilead.engine.settings.leads import leads_in_order

OUT_HELP = "where to write it: a new file, or for a model a new folder"
RUN_HELP = "a run or model folder, local or s3://, hf://org/name"
Rate = Annotated[
    float | None,
    Option("sampling rate of the training signals (from the settings, or 500)", "HZ", "--fs"),
]


def from_fairseq(
    source: Annotated[str, Option("a checkpoint, local", "CKPT.pt")],
    out: Annotated[str, Option(OUT_HELP, "OUT")],
    *,
    input: Annotated[
        Literal["auto", "millivolt", "zscore", "layernorm"],
        Option("scale of the training signals (auto)"),
    ] = "auto",
    fs_hz: Rate = None,
    classes: Annotated[
        str, Option("a classifier's outputs in order: A,B,C or a file", "LIST|FILE")
    ] = "",
) -> list[str]:
    from omnilead.downstream.interop import conversion

    return conversion.from_fairseq(require_local(source), Path(out), input, fs_hz, classes)


def from_ecg_cpc(
    source: Annotated[str, Option("a checkpoint, local", "LAST.ckpt")],
    out: Annotated[str, Option(OUT_HELP, "OUT")],
) -> list[str]:
    from omnilead.downstream.interop import ecg_cpc

    return ecg_cpc.from_ecg_cpc(require_local(source), Path(out))


def from_torch(
    source: Annotated[str, Option("a checkpoint, local", "WEIGHTS")],
    out: Annotated[str, Option(OUT_HELP, "OUT")],
    *,
    input: Annotated[
        Literal["millivolt", "zscore", "layernorm"],
        Option("scale of the training signals (millivolt)"),
    ] = "millivolt",
    fs_hz: Rate = None,
    encoder: Annotated[str, Option("the class of the weights", "file.py:Class")],
    band: Annotated[
        tuple[float, float] | None,
        Option("band-pass filter of the training signals: from, to in Hz"),
    ] = None,
    options: Annotated[str, Option("arguments of the class as YAML, such as '{width: 64}'")] = "{}",
    leads: Annotated[str, Option("leads of the training signals in order (12), or I,II,V2")] = "12",
    window: Annotated[float, Option("length of the training signals in seconds (5)")] = 5.0,
    prefix: Annotated[
        str, Option("prefix of the network's weights, if the file holds several networks")
    ] = "",
    map: Annotated[
        Sequence[tuple[str, str]] | None,
        Option(
            "weights that begin with OLD in the file begin with NEW in the class", ("OLD", "NEW")
        ),
    ] = None,
) -> list[str]:
    from omnilead.downstream.interop import conversion

    rate_hz = 500.0 if fs_hz is None else fs_hz
    names = [LEADS[lead] for lead in leads_in_order(leads, "--leads")]
    preprocessing = conversion.preprocessing_document(
        input, rate_hz, names, window, band and list(band)
    )
    arguments = parse_yaml(options, "--options")
    weights, folder = require_local(source), Path(out)
    return conversion.from_torch(
        weights, folder, encoder, arguments, preprocessing, prefix, map or ()
    )


def to_fairseq(
    source: Annotated[str, Option(RUN_HELP, "RUN")], out: Annotated[str, Option(OUT_HELP, "OUT.pt")]
) -> list[str]:
    from omnilead.downstream.interop import conversion

    conversion.to_fairseq(source, Path(out))
    return []


def to_onnx(
    source: Annotated[str, Option(RUN_HELP, "RUN")],
    out: Annotated[str, Option(OUT_HELP, "OUT.onnx")],
    *,
    code: Code = False,
) -> list[str]:
    from omnilead.downstream.inference.trained_model import load
    from omnilead.downstream.interop import onnx

    worst = onnx.to_onnx(load(source, code), Path(out))
    echo(f"onnxruntime and PyTorch differ by {worst:.1g} at most")
    return []


ACTIONS: Actions = {
    "from-fairseq": (
        from_fairseq,
        "convert a checkpoint of fairseq-signals, ECG-FM or DeepECG-SSL to a model folder",
        "CKPT.pt OUT",
    ),
    "from-ecg-cpc": (
        from_ecg_cpc,
        "convert a checkpoint of ECG-CPC to a model folder",
        "LAST.ckpt OUT",
    ),
    "from-torch": (
        from_torch,
        "make a model folder of any network's weights and its class",
        "WEIGHTS OUT",
    ),
    "to-fairseq": (
        to_fairseq,
        "convert a model folder to a checkpoint of fairseq-signals",
        "RUN OUT.pt",
    ),
    "to-onnx": (
        to_onnx,
        "export a model folder to ONNX and check it with onnxruntime",
        "RUN OUT.onnx",
    ),
}


def require_local(source: str) -> Path:
    """Returns the path of a checkpoint; ConfigError if it is an address such as s3://..."""
    if "://" in source:
        raise ConfigError(f"{source}: not a local file: download the checkpoint, and give its path")
    return Path(source)


def main(arguments: Sequence[str] | None = None) -> int:
    action, options = parse_action("convert", __doc__, ACTIONS, arguments)

    def run_action() -> int:
        for note in action(**options):
            tell(f"note: {options['source']}: {note}")
        echo(options["out"])
        return 0

    return run_command("omnilead convert", run_action, partial(explain_error, out=options["out"]))


def explain_error(error: Exception, out: str) -> UserError | None:
    from safetensors import SafetensorError

    if isinstance(error, SafetensorError):
        return ConfigError(str(error))
    return explain_failure(error, "OUT", out)


if __name__ == "__main__":
    run_as_omnilead("convert")
