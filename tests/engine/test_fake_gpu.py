"""Every configuration's training step on a fake GPU (fake_gpu.py) stays on the device and does not
wait for it."""

import json

from tests.forks import started


def steps_on_a_fake_gpu(out):
    import fake_gpu

    fake_gpu.errors(out)


def test_steps_stay_on_the_device_and_do_not_wait_for_it(tmp_path):
    started(steps_on_a_fake_gpu, tmp_path / "errors.json", out=tmp_path / "out.txt").join()
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert "DataDependentOutput" in errors.pop("wait") and "cpu" in errors.pop("leave behind")
    assert len(errors) > 20 and not any(errors.values()), errors
