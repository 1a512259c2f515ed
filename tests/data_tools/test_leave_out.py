"""shard --leave-out-flags: which crops are not for pre-training."""

import json

import numpy as np
import pytest
from handmade import ecg

from omnilead.data_tools.dataset import Dataset, DatasetFacts, flag_mask
from omnilead.data_tools.sharding.roles import PAPER_SOURCES, RoleSources
from omnilead.data_tools.sharding.verify import verify
from omnilead.data_tools.sources.detect import open_sources

ARRAYS = ("--source", "arrays", "--fs", "500", "--unit", "uV", "--leads", "12")
# Of the records e_1, e_2, ...; e_0 has none
FLAGS = (
    ["einthoven"],
    ["flat:V3"],
    ["flat:V3", "einthoven"],
    ["large", "einthoven", "implausible"],
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    uv = np.stack([ecg(seed=number) for number in range(5)]).astype("i4")
    uv[1, 2] += 60
    uv[3, 2] += 60
    uv[2, 8] = uv[3, 8] = 7
    uv[4] *= 8
    uv[4, 2] += 60
    place = tmp_path_factory.mktemp("arrays") / "e.npy"
    np.save(place, uv)
    return place


@pytest.fixture
def built(archive, shell):
    """-> the dataset, and what is said."""

    def built(out, *options):
        said = shell.shard(archive.parent, out, *ARRAYS, "--plan", "all", *options)
        return Dataset.open(str(out)), said

    return built


@pytest.mark.parametrize(
    "flags, pretrained, counts",
    [
        ("einthoven,flat,implausible", "0", {"einthoven": 3, "flat": 2, "implausible": 1}),
        ("flat", "0 1 4", {"flat": 2}),
        ("none", "0 1 2 3 4", {}),
    ],
)
def test_crops_with_these_flags_are_not_for_pre_training(
    flags, pretrained, counts, archive, built, tmp_path, shell
):
    made, said = built(tmp_path / "out", "--leave-out-flags", flags)
    rows = sorted(made.table(["record", "flags", "pretrain"]).to_pylist(), key=str)
    assert [row["flags"] for row in rows] == [[], *FLAGS]
    assert [row["record"] for row in rows if row["pretrain"]] == [
        f"e_{number}" for number in pretrained.split()
    ]
    assert made.meta["left_out"] == counts
    assert made.meta["leave_out_flags"] == sorted(counts)
    for flag, count in counts.items():
        crops = f"note: {count} crop{'s' * (count > 1)} left out of pre-training: "
        assert crops in said and flag in said
    assert said.count("left out of pre-training") == len(counts)
    facts = {"fs_hz": "500", "unit": "uV", "leads": "12"}
    sources = open_sources(str(archive.parent), "arrays", arrays=facts)
    assert verify(made, sources) == []
    assert built(tmp_path / "out", "--leave-out-flags", flags)[0].meta == made.meta
    again = ("shard", archive.parent, "--out", tmp_path / "out", *ARRAYS, "--plan", "all")
    assert "only roles differ" in shell.run(*again)[1]
    assert "left_out" not in Dataset.open(str(tmp_path / "out")).meta


def test_the_default_is_not_written_down(built, tmp_path):
    usual, said = built(tmp_path / "usual")
    named, _ = built(tmp_path / "named", "--leave-out-flags", "implausible")
    assert "note: 1 crop left out of pre-training: no heart has such an amplitude" in said
    assert usual.meta == named.meta and not {"left_out", "leave_out_flags"} & usual.meta.keys()
    assert usual.column("pretrain").sum() == 4


@pytest.mark.parametrize("plan", ["paper", "paper-split"])
def test_diagnosis_keeps_its_roles(plan, built, tmp_path):
    roles = {}
    for flags in ("none", "einthoven,flat"):
        out = tmp_path / flags
        options = "--dx-sources", "e", "--plan", plan, "--leave-out-flags", flags
        made, _ = built(out, *options)
        assert verify(made) == []
        table = made.table(["record", "dx_role", "id_role", "pretrain", "flags"])
        roles[flags] = table["dx_role"].to_pylist()
        crops = flag_mask(table, ["einthoven", "flat"])
        assert crops.sum() == 4
        out_of_all = (made.column("pretrain") | table["id_role"].is_valid().to_numpy())[crops]
        assert out_of_all.any() == (flags == "none")
    assert roles["none"] == roles["einthoven,flat"]


def test_an_unknown_flag_and_the_old_option_are_one_line(archive, tmp_path, shell):
    command = ("shard", archive.parent, "--out", tmp_path / "out", *ARRAYS)
    for option, said in (
        (("--leave-out-flags", "flat,einthove"), "no flag is called 'einthove': use flat, satur"),
        (("--leave-out-flags", ""), "no flag is called '': use flat"),
        (("--leave-out-flags", "none,flat"), "no flag is called 'none'"),
    ):
        assert said in shell.error(*command, *option)


def test_datasets_of_the_old_option_keep_their_roles(built, tmp_path):
    meta = built(tmp_path / "out")[0].meta

    def stated(entries):
        return RoleSources.from_facts(DatasetFacts.model_validate(meta | entries))

    assert stated({}) == PAPER_SOURCES
    assert stated({"pretrain_implausible": True}).leave_out == ()
    for chosen in (PAPER_SOURCES, RoleSources(leave_out=("flat",), id_share=0.5, dx=("a",))):
        for plan in ("paper", "paper-split"):
            assert stated(json.loads(json.dumps(chosen.to_meta(plan)))) == chosen
    assert RoleSources(leave_out=()).to_meta("all") == {"leave_out_flags": []}
