"""Two processes with half of the batch each give the loss and gradients of one process with the
whole batch."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from omnilead.engine.model.config import ModelConfig, ObjectiveConfig
from omnilead.engine.model.draws import row_keys
from omnilead.engine.model.pretrainer import Pretrainer

CROPS, WORLD = 6, 2
CONFIG = ModelConfig(
    conv=((16, 4), (16, 4)), width=32, layers=1, heads=2, ffn=32, position_kernel=8, codes=8, code_width=16, projection=16,
    dropout=0, attention_dropout=0, input_dropout=0, feature_dropout=0,
)  # fmt: skip
OBJECTIVES = {
    "w2v_cmsc": ObjectiveConfig(),
    "simclr": ObjectiveConfig(local=0, method="simclr"),
    "3kg": ObjectiveConfig(local=0, method="3kg"),
}


def losses_and_gradients(name: str, part: slice) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = Pretrainer(CONFIG, OBJECTIVES[name], generator=torch.Generator().manual_seed(0))
    x = torch.randn(CROPS, 2, 12, 640, generator=torch.Generator().manual_seed(1))[part]
    keys = torch.from_numpy(row_keys(5, 0, torch.arange(CROPS).numpy()))[part]
    ids = torch.tensor([0, 1, 2, 3, 0, 0])[part]
    out = model(x, keys, torch.tensor(1.5), ids_B=ids)
    out["loss"].backward()
    return {k: v.detach() for k, v in out.items()}, {
        k: p.grad for k, p in model.named_parameters() if p.grad is not None
    }


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=600)
    )
    half = CROPS // WORLD
    results = {}
    for name in OBJECTIVES:
        losses, grads = losses_and_gradients(name, slice(rank * half, (rank + 1) * half))
        for value in (*losses.values(), *grads.values()):
            dist.all_reduce(value)
            value /= WORLD
        results[name] = (losses, grads)
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, (str(folder),), WORLD, start_method="forkserver")
    loaded: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = torch.load(
        folder / "results.pt", weights_only=True
    )
    return loaded


@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_equal_one_process(
    name: str, of_two: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> None:
    losses, grads = losses_and_gradients(name, slice(None))
    two_losses, two_grads = of_two[name]
    for key in losses.keys() - {"masked"}:
        torch.testing.assert_close(two_losses[key], losses[key], rtol=1e-5, atol=1e-6)
    assert two_grads.keys() == grads.keys()
    for key, expected in grads.items():
        torch.testing.assert_close(
            two_grads[key], expected, rtol=1e-4, atol=1e-6 + 1e-5 * float(expected.abs().max())
        )
