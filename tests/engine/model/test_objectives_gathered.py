"""Two processes with half of the batch each give the loss and gradients of one process with the
whole batch."""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing import assert_close

from omnilead.engine.model.config import ObjectiveConfig
from tests.engine.model.tiny import keys, seeded, waves

CROPS, WORLD = 6, 2
OBJECTIVES = {
    "w2v_cmsc": ObjectiveConfig(),
    "simclr": ObjectiveConfig(local=0, method="simclr"),
    "3kg": ObjectiveConfig(local=0, method="3kg"),
    "attributes": ObjectiveConfig(local=0, attributes={"age": 1.0, "sex": 0.5}),
}
# The ranks know different numbers of them, the second no age at all
NAN = torch.nan
LABELS = [[0.5, 1.0], [-1.0, 0.0], [1.5, NAN], [NAN, NAN], [NAN, 0.0], [NAN, NAN]]


def losses_and_gradients(name, part):
    model = seeded(objective=OBJECTIVES[name])
    ids = torch.tensor([0, 1, 2, 3, 0, 0])
    more = {"ids_B": ids[part], "attributes_B2": torch.tensor(LABELS)[part]}
    out = model(waves(CROPS)[part], keys(CROPS)[part], torch.tensor(1.5), **more)
    out["loss"].backward()
    losses = {name: value.detach() for name, value in out.items() if name != "masked"}
    return [losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}]


def work(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600)
    )
    half = CROPS // WORLD
    part = slice(rank * half, (rank + 1) * half)
    results = {name: losses_and_gradients(name, part) for name in OBJECTIVES}
    for losses, grads in results.values():
        for value in (*losses.values(), *grads.values()):
            dist.all_reduce(value)
            value /= WORLD
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_process(tmp_path):
    mp.start_processes(work, (str(tmp_path),), WORLD, start_method="forkserver")
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    for name, (two_losses, two_grads) in results.items():
        losses, grads = losses_and_gradients(name, slice(None))
        assert_close(two_losses, losses, rtol=1e-5, atol=1e-6)
        assert two_grads.keys() == grads.keys()
        for key, expected in grads.items():
            atol = 1e-6 + 1e-5 * float(expected.abs().max())
            assert_close(two_grads[key], expected, rtol=1e-4, atol=atol)
