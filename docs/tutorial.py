# %% [markdown]
"""
# Tutorial: from a folder of ECGs and a table of labels to predictions

Run it as a script, `python docs/tutorial.py`, or cell by cell in VS Code, Spyder or Jupyter (with
jupytext). It takes a few minutes on two CPU cores and writes into the folder tutorial/. The ECGs
are synthetic; put your own in their place. Every command can be typed in a shell as it stands, and
every command for training is also a function.
"""

# %%
import json
import os
import shlex
from pathlib import Path

import numpy as np

import omnilead
from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.io.spreadsheet import csv_text

# Small numbers, for speed: a hospital has thousands of patients, and the paper trains for 200 epochs
PATIENTS, STEPS = 600, 150
Path("tutorial").mkdir(exist_ok=True)
os.chdir("tutorial")


def run(command: str) -> None:
    """Runs a command line like a shell, but in this Python process."""
    print(f"\n$ {command}")
    if code := main(shlex.split(command)[1:]):
        raise SystemExit(code)


# %% [markdown]
"""
## 1. Data

`synth` writes a folder of synthetic ECGs, two of some patients, as WFDB files. With real data you
begin at `shard`: any folder of WFDB records, a public archive, or your own format becomes a
dataset: crops of 10 s, 12 leads, 500 Hz, int16 microvolts, with a checksum each. If it is
interrupted, run it again. `--plan all`: everything may be learnt from; without it some records are
kept for the paper's tests. `verify` compares every sample with the folder.
"""
# %%
run(f"omnilead synth archive --patients {PATIENTS} --seed 1")
# Without --workers, a command uses all cores
run("omnilead shard archive --out dataset --plan all --workers 1")
run("omnilead verify dataset --archive archive --workers 1")

# %% [markdown]
""" Always look at the data. A dataset is a sequence of ECGs; in a notebook, `dataset[0]` shows one
on ECG paper. What was refused or repaired, and why, is in dataset/rejects.csv.
"""
# %%
dataset = Dataset.open("dataset")
ecg = dataset[0]
print(dataset)
print(
    f"{ecg.record}: {ecg.signal_mv.shape} in millivolts, {ecg.age} years, {ecg.sex}, "
    f"{', '.join(ecg.labels)}"
)
ecg.plot().savefig("ecg.png")

# %% [markdown]
"""
## 2. Pre-training

W2V + CMSC + random lead masking, the paper's method, with a small model (the config `quickstart`).
On GPUs use `w2v_cmsc_rlm` and the command: `deepspeed --module omnilead.engine.pretrain --config
w2v_cmsc_rlm --data dataset --out pretrained`. A twentieth of the patients is held out to validate
on. Called again with the same `out`, it resumes from its last checkpoint.

The loss falls, and the share of codes guessed behind the mask rises (`accuracy_local`). The report
has the curves; a notebook shows it when a cell ends with `pretrained`.
"""
# %%
held_out = {"data.hold_out": 0.05, "train.validate_every": STEPS}
pretrained = omnilead.pretrain(
    "quickstart", data=dataset, out="pretrained", **held_out, **{"train.steps": STEPS}
)
print(
    f"loss: {pretrained.metrics[0]['loss']:.2f} at the first step, "
    f"{pretrained.metrics[-1]['loss']:.2f} at the last"
)
print(f"report: {pretrained.report}")

# %% [markdown]
"""
## 3. Fine-tuning on your labels

Labels are a table beside the dataset: a column `record`, and one for each label. Here one is
written from what the synthetic archive knows. 0 and 1 make a binary task; text, numbers or several
columns make others. An empty cell is unknown. Patients are drawn 8:1:1 for training, validation and
test, unless a column `fold` or `split` says otherwise.

Batch, steps and learning rate suit the data; training ends when validation gets no better. The
exported model is the best step. `augment.rlm` masks random leads in training, so that the model may
later be shown ECGs with fewer leads.
"""
# %%
first_crops = (ecg for ecg in dataset if ecg.start_s == 0)  # one for each record
labels = [(ecg.source, ecg.record, int("NSR" not in ecg.labels)) for ecg in first_crops]
Path("labels.csv").write_text(csv_text([("source", "record", "abnormal"), *labels]))
settings = {"train.steps": STEPS, "augment.rlm": 0.5}
tuned = omnilead.finetune(pretrained, data=dataset, labels="labels.csv", out="tuned", **settings)
print(f"validation: {tuned.validation[-1]}")

# %% [markdown]
"""
## 4. Scores and predictions

`evaluate` scores the test patients: AUROC, AUPRC, F measure at the threshold chosen in validation,
with 95 % intervals; scores.html has the curves, groups by age and sex, and the ECGs that were read
most wrongly. From so little data the scores mean nothing. `predict` writes a probability and a
decision for each record of a dataset, or of a folder of ECGs.
"""
# %%
run("omnilead evaluate --model tuned --data dataset --json scores.json --report scores.html")
print("AUROC:", json.loads(Path("scores.json").read_text())["metrics"]["auroc"])
run("omnilead predict --model tuned --data dataset --out predictions.csv")
print(Path("predictions.csv").read_text()[:200])

# %% [markdown]
""" In Python, for an ECG of any length from 5 s, sampling rate, leads and unit: its probabilities,
and its embedding by the model before fine-tuning. `omnilead hub push tuned NAME/MODEL` shares a
model; `omnilead.load("hf://NAME/MODEL")` loads it.
"""
# %%
# Noise in place of an ECG of 10 s at 250 Hz: put your own ECG here
two_leads_mv = np.random.default_rng(0).normal(0, 0.2, (2, 2500))
print("prediction:", tuned.model().predict(two_leads_mv, fs_hz=250, leads=["II", "V1"], unit="mV"))
print(
    "embedding:",
    omnilead.load("pretrained").embed(two_leads_mv, fs_hz=250, leads=["II", "V1"], unit="mV").shape,
)
