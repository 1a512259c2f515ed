"""Many GPUs, by formula: what a step sends, how long that takes, what is left of the speed; and how long trainings take.

ZeRO-1 as configs/deepspeed/zero1.json has it: after the backward pass DeepSpeed all-reduces the bf16 gradients, which is a
scattering and a gathering, after AdamW the bf16 weights are gathered, all in a ring. CMSC gathers the pooled halves of all
crops, float32, and their gradient comes back the same way. Nothing overlaps (overlap_comm is false); with overlap_comm the
all-reduce could hide behind the backward pass, two thirds of a step, and the gathering could not, since the next forward pass
needs it. What grows with the GPUs besides: CMSC's scores, each half against those of all crops, a float32 product and its two
gradients; its softmax is not counted.

Assumed, all on the slow side: 450 GB/s a GPU within a node of 8, 50 GB/s a GPU between nodes for all of a rank's traffic, 5 us
for each hop of a ring, 50 TFLOP/s in float32. Nothing of this was measured on a cluster.
"""

from dataclasses import dataclass

from benchmarks.cost import parameters
from engine.model.config import ModelConfig

NODE, NVLINK_GB_PER_S, NETWORK_GB_PER_S, HOP_S = 8, 450.0, 50.0, 5e-6
FP32_TFLOPS = 50.0
BACKWARD_SHARE = 2 / 3
GRADIENT_BYTES = WEIGHT_BYTES = 2
RANKS = (8, 16, 64, 256, 1024)
BAR_CROPS_PER_S = 2700.0  # one H200
PAPER_CROPS = 200 * 85_000
TEN_MILLION = 10_000_000


@dataclass(frozen=True)
class Step:
    gpus: int
    crops: int  # of a GPU
    compute_s: float
    gradients_s: float
    weights_s: float
    candidates_s: float
    scores_s: float  # more than alone
    megabytes: float  # that a GPU sends

    @property
    def efficiency(self) -> float:
        return self.kept(self.gradients_s)

    @property
    def overlapped(self) -> float:
        return self.kept(max(0.0, self.gradients_s - BACKWARD_SHARE * self.compute_s))

    def kept(self, gradients_s: float) -> float:
        return self.compute_s / (self.compute_s + gradients_s + self.weights_s + self.candidates_s + self.scores_s)


def step(config: ModelConfig, gpus: int, crops: int, crops_per_s: float) -> Step:
    """`crops_per_s` of one GPU alone."""
    weights = parameters(config)
    pooled = gpus * crops * 2 * config.width * 4
    sent = [2 * GRADIENT_BYTES * weights, WEIGHT_BYTES * weights, 2 * pooled]
    passed = [part * (gpus - 1) / gpus for part in sent]
    gradients, back, candidates = (ring_s(part, gpus, rounds) for part, rounds in zip(passed, (2, 1, 2), strict=True))
    own = 2 * crops
    scores = 3 * 2 * own * (gpus - 1) * own * config.width / (FP32_TFLOPS * 1e12)
    return Step(gpus, crops, crops / crops_per_s, gradients, back, candidates, scores, sum(passed) / 1e6)


def ring_s(passed: float, gpus: int, rounds: int) -> float:
    """Seconds for the bytes that a rank passes on."""
    rate = NVLINK_GB_PER_S if gpus <= NODE else NETWORK_GB_PER_S
    return passed / (rate * 1e9) + rounds * (gpus - 1) * HOP_S


def hours(config: ModelConfig, crops: int, gpus: int, batch: int, crops_per_s: float) -> float:
    """`batch`: crops of a GPU."""
    return crops / (gpus * crops_per_s * step(config, gpus, batch, crops_per_s).efficiency) / 3600
