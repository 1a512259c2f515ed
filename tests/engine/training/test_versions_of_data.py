"""A run goes on with the version of a dataset that it was begun with."""

import pytest
from ranks import curve, pretrain

from omnilead.__main__ import main
from omnilead.data_tools.dataset import Dataset
from omnilead.data_tools.sharding.removal import remove
from omnilead.data_tools.sharding.shard import ShardOptions, shard
from omnilead.data_tools.sources.detect import open_sources
from omnilead.data_tools.synthetic.archive import synthesise
from omnilead.engine.data.config import LoaderConfig
from omnilead.engine.data.loader import order_of
from omnilead.engine.training.checkpoint_files import read_state
from omnilead.engine.training.run_folder import RunFolder

HOW = {"train__schedule": "fixed", "train__save_every_steps": 1, "train__validate_every": 0}


def append(archive, out, more=True):
    return shard(open_sources(str(archive)), ShardOptions(str(out), quiet=True, append=more))


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_run_goes_on_with_its_version_until_patients_are_removed(
    blocks, archive, tmp_path, capsys
):
    out = tmp_path / "data"
    first = append(archive, out, False)
    how = HOW | {"pipeline__block_shards": blocks}
    pretrain(tmp_path, str(out), "whole", train__steps=4, **how).good()
    pretrain(tmp_path, str(out), "begun", train__steps=2, **how).good()
    order = order_of(LoaderConfig(batch_crops=8, block_shards=blocks), [first], pretrain=True)
    rows = order.places(0, 100).row
    more = tmp_path / "more"
    synthesise(more, patients=4, two_sessions=1, seed=8, progress=False)
    made = append(more, out)
    old = Dataset.open(str(out), version=1)
    assert old.fingerprint == first.fingerprint != made.fingerprint
    again = order_of(LoaderConfig(batch_crops=8, block_shards=blocks), [old], pretrain=True)
    assert (again.places(0, 100).row == rows).all()
    said = pretrain(tmp_path, str(out), "begun", train__steps=4, **how).good()
    assert said.count("the run goes on with version 1") == 1
    assert curve(tmp_path / "begun") == curve(tmp_path / "whole")
    said = pretrain(tmp_path, str(out), "new", train__steps=2, **how).good()
    assert "version" not in said
    assert read_state(RunFolder(tmp_path / "new").newest())["datasets"] == [made.fingerprint]
    assert main(["seen", str(tmp_path / "begun")]) == 0
    assert "crops drawn: 32" in capsys.readouterr().out
    (tmp_path / "w").write_text(next(filter(None, made.column("patient"))))
    remove(str(out), str(tmp_path / "w"))
    line = pretrain(tmp_path, str(out), "begun", train__steps=5, **how).one_line()
    assert "version 1 cannot be opened or trained on" in line and "--out NEW" in line
    assert main(["seen", str(tmp_path / "begun")]) == 0
    assert "removing patients" in capsys.readouterr().err
