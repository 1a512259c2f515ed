"""What a GPU would see of the training loop, on a CPU: the host never waits for it in a step, and
few graphs are compiled, once each."""

import gc
import os
import traceback
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omnilead.engine.training import distributed
from omnilead.engine.training.loop import Loop

# operations whose results have sizes or values that the host must know
WAIT = {
    "_local_scalar_dense.default",  # item(), float(), bool(), if
    "nonzero.default",
    "masked_select.default",
    "equal.default",
    "_unique2.default",
    "unique_dim.default",
    "bincount.default",
    "repeat_interleave.Tensor",
}


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_names_its_gpu(world, monkeypatch):
    """Also a single one: otherwise NCCL guesses it at the first collective, and warns."""
    monkeypatch.setattr(os, "environ", os.environ | {"OMP_NUM_THREADS": "1"})
    os.environ.update({"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"})
    joined = mock.Mock()
    monkeypatch.setattr(distributed.dist, "init_process_group", joined)
    monkeypatch.setattr(distributed.dist, "new_group", mock.Mock())
    answers = {"is_available": True, "device_count": 1, "set_device": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    with distributed.process_state_restored():
        distributed.start_ranks(1.0)
    assert joined.call_args.args == ("nccl",)
    assert joined.call_args.kwargs["device_id"] == torch.device("cuda", 0)


class Waits(TorchDispatchMode):
    """Notes where the host would wait for a GPU. It does not wait for what is made in here from
    nothing that was there before, such as a zero."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        inputs = tensors((arguments, named or {}))
        on_host = all(getattr(each, "on_host", False) for each in inputs)
        name = operation.__name__
        by_mask = name == "index.Tensor" and any(each.dtype == torch.bool for each in inputs[1:])
        if (name in WAIT or by_mask) and not on_host:
            stack = traceback.extract_stack()[:-1]
            where = next(each for each in reversed(stack) if "/torch/" not in each.filename)
            self.found.append(f"{name}: {where.filename}:{where.lineno} {where.line}")
        result = operation(*arguments, **named or {})
        for each in tensors(result):
            each.on_host = on_host
        return result


def tensors(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_step_waits_for_the_device(stage, training, monkeypatch):
    """DeepSpeed's part included. Of five steps, the first and the last are logged; in the first,
    ZeRO 3 learns the order of the layers."""
    from deepspeed.accelerator import get_accelerator

    found, seen, waits = [], [], []

    def watched(method):
        def call(self, *arguments):
            with Waits(waits):
                result = method(self, *arguments)
            if 1 < self.progress.step < 5:
                found.extend(waits)
            waits.clear()
            seen.append(self.progress.step)
            return result

        return call

    gc.collect()  # engines of other tests, which wait when they are destroyed
    monkeypatch.setattr(Loop, "_step", watched(Loop._step))
    monkeypatch.setattr(Loop, "_after_step", watched(Loop._after_step))
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *_: waits.append("synchronize"))
    how = {"train__steps": 5, "train__micro_batch": 4, "train__save_every_steps": 100}
    training(train__zero_stage=stage, train__log_every=100, **how).good()
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5] and not found


def test_a_wait_is_found():
    found, x = [], torch.ones(3)
    with Waits(found):
        x[x > 0]
        float(x.sum() + torch.zeros(()))
        float(torch.zeros(()) + 1)
    names = [each.partition(":")[0] for each in found]
    assert names == ["index.Tensor", "_local_scalar_dense.default"]


def count_graphs():
    """Says when the compiler makes a graph, and runs it as it is."""
    from omnilead.engine.training import train

    def counted(graph, inputs):
        print("compiled a graph", flush=True)
        return graph.forward

    train.compile_model = partial(train.compile_model, backend=counted)


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_compiles_six_graphs_and_none_again(world, training):
    """Layers are identical: one graph for all. The others: features, enter, draw, compare, pool.
    Validation, checkpoints and later steps compile nothing."""
    how = {"train__steps": 5, "train__validate_every": 2, "train__save_every_steps": 2}
    how |= {"train__compile": "layers", "model__layers": 3}
    output = training("run", world, count_graphs, **how).good()
    assert output.count("compiled a graph") == 6 * world
