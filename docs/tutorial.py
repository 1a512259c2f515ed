# %% [markdown]
"""
# Tutorial: from an archive of ECGs to a fine-tuned model, on synthetic data

Run it as a script, `python docs/tutorial.py`, or cell by cell in VS Code, Spyder or Jupyter (with jupytext). It takes
a few minutes on two CPU cores and writes into the folder tutorial/. Every command can be typed in a shell as it stands.
"""

# %%
import importlib
import json
import os
import shlex
from pathlib import Path

import numpy as np

import engine
from data_tools.dataset import Dataset
from engine.config import CONFIGS

PATIENTS, STEPS = 600, 150  # a real archive has thousands of patients; the paper trains for 200 epochs
Path("tutorial").mkdir(exist_ok=True)
os.chdir("tutorial")


def run(command: str) -> None:
    """The same as in a shell, but without a process of its own."""
    print(f"\n$ {command}")
    module, *words = shlex.split(command.removeprefix("python -m "))
    program = importlib.import_module("data_tools.__main__" if module == "data_tools" else module)
    if code := program.main(words):
        raise SystemExit(code)


# %% [markdown]
"""
## 1. Data

`synth` writes synthetic ECGs in the layout of the PhysioNet/CinC 2021 Challenge: two sessions of each PTB-XL patient, and
records of the other databases. With real data you begin at `shard`, which turns archives into a dataset: crops of 10 s, 12
leads, 500 Hz, int16 microvolts, and for each crop its roles (pre-training, diagnosis train/valid/test, identification
gallery/probe), drawn by patient. If it is interrupted, run it again. `verify` compares every sample with the archive.
"""
# %%
run(f"python -m data_tools synth archive --patients {PATIENTS} --seed 1")
run("python -m data_tools shard archive --out dataset --workers 1")  # in a shell: all cores
run("python -m data_tools verify dataset --archive archive --workers 1")

# %% [markdown]
"""
Always look at the data: one crop on ECG paper. What was refused or repaired, and why, is in dataset/rejects.csv. In Python a
dataset is an indexed table of checked crops.
"""
# %%
run("python -m data_tools show dataset --crop 0 --png ecg.png")
dataset = Dataset.open("dataset")
rows = dataset.select(dx="test")
print(f"{len(dataset)} crops, {len(rows)} to test diagnosis; the first: {dataset.read(rows[0]).shape}, in microvolts")

# %% [markdown]
"""
## 2. Pre-training

W2V + CMSC + random lead masking, the paper's method, with a small model (configs/pretrain/quickstart.yaml). On GPUs use
configs/pretrain/w2v_cmsc_rlm.yaml and type `deepspeed engine/pretrain.py` in place of `python -m engine.pretrain`. Started
again with the same `run` it resumes from its last checkpoint.

The loss falls, and the share of codes guessed behind the mask rises (`accuracy_local`). Curves and their meaning:
tutorial/pretrained/report.html.
"""
# %%
run(
    f"python -m engine.pretrain --config {CONFIGS}/pretrain/quickstart.yaml --set data.datasets=[dataset] --set run=pretrained "
    f"--set train.steps={STEPS} --set train.validate_every={STEPS}"
)
losses = [json.loads(line)["loss"] for line in Path("pretrained/metrics.jsonl").read_text().splitlines()]
print(f"loss: {losses[0]:.2f} at the first step, {losses[-1]:.2f} at the last")

# %% [markdown]
"""
## 3. Fine-tuning and evaluation

Diagnosis: 26 classes of the Challenge, by a linear layer on the encoder's mean over time. The exported model is the step with
the best validation AUROC. Add `--set augment.leads=I,II,V2` to train for three leads.

`evaluate` scores the test role: the Challenge's score, AUROC and more, with 95 % intervals over patients; scores.html has the
curves. From so little data the scores mean nothing.
"""
# %%
run(
    f"python -m engine.finetune --config {CONFIGS}/finetune/diagnosis.yaml --set start=pretrained --set run=diagnosis "
    f"--set data.datasets=[dataset] --set train.epochs=null --set train.steps={STEPS} --set train.batch_crops=16 "
    f"--set train.lr=1e-3 --set train.precision=fp32 --set train.validate_every={STEPS}"
)
run("python -m engine.evaluate --model diagnosis --data dataset --json scores.json --report scores.html")
print("AUROC:", json.loads(Path("scores.json").read_text())["metrics"]["auroc"])

# %% [markdown]
"""
## 4. Embeddings

One vector for each crop of a dataset, as parquet; or, in Python, for an ECG of any length from 5 s, sampling rate, leads and
unit.
"""
# %%
run("python -m engine.embed --model pretrained --data dataset --out embeddings.parquet")
model = engine.load("pretrained")
two_leads_mv = np.random.default_rng(0).normal(0, 0.2, (2, 2500))  # 10 s at 250 Hz: put your own here
print("embedding:", model.embed(two_leads_mv, fs_hz=250, leads=["II", "V1"], unit="mV").shape)
