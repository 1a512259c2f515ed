"""What one training step must cost: operations and bytes of each stage by formula, and the time that a machine needs for them.

    stages(ModelConfig(), batch=256, precision="bf16") -> [Stage("convolution 1", ...), ...]
    stage.ms(MACHINES["h200"], "bf16")                    the longer of operations / peak and bytes / bandwidth

Operations are those of matrix products, two for a multiply-add, backward twice forward: together flops_per_crop, 175.9 GFLOP
for the paper's model. Bytes are the least that a stage run by itself can move: each tensor that enters or leaves is read or
written once, weights and their gradients too, nothing stays in a cache between stages, random bits and dropout masks cost
nothing. The backward pass of an element-wise stage reads its gradient and what forward kept. Attention is that of a fused
kernel, whose scores never reach memory; the positional convolution is a plain one, however it is computed. `python -m
benchmarks.run step --explain` sets this beside measured times. Shapes: engine.model.config.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.config import ModelConfig, masked_share

BYTES = {"fp32": 4, "autocast": 2, "bf16": 2}  # of an activation
SAMPLES, HALVES = 2500, 2
STATE_BYTES = 12  # of a parameter: float32 master and Adam's two moments


@dataclass(frozen=True)
class Machine:
    name: str
    tflops: dict[str, float]
    gb_per_s: float
    source: str  # of both figures


MACHINES = {
    "h200": Machine("NVIDIA H200", {"fp32": 67, "autocast": 790, "bf16": 790}, 4800, "bf16 measured, else data sheet"),
    "a100": Machine("NVIDIA A100 80 GB", {"fp32": 19.5, "autocast": 312, "bf16": 312}, 2039, "data sheet"),
}

Traffic = tuple[float, float]  # bytes forward, bytes backward


@dataclass(frozen=True)
class Stage:
    name: str
    flops: float  # forward, of one time
    forward_bytes: float
    backward_bytes: float
    times: int = 1  # layers

    @property
    def all_flops(self) -> float:
        return 3 * self.flops * self.times

    @property
    def all_bytes(self) -> float:
        return (self.forward_bytes + self.backward_bytes) * self.times

    def ms(self, machine: Machine, precision: str) -> float:
        peak, bandwidth = machine.tflops[precision] * 1e9, machine.gb_per_s * 1e6  # a millisecond
        forward = max(self.flops / peak, self.forward_bytes / bandwidth)
        return self.times * (forward + max(2 * self.flops / peak, self.backward_bytes / bandwidth))

    def bound(self, machine: Machine, precision: str) -> str:
        by_bytes = self.all_bytes / machine.gb_per_s > self.all_flops / machine.tflops[precision] / 1e3
        return "memory" if by_bytes else "compute"


def product(m: float, k: float, n: float, size: int, first: bool = False) -> Traffic:
    """[m, k] @ [k, n], and the gradients of both; `first`: nothing before it wants a gradient."""
    once = size * (m * k + k * n + m * n)
    return once, once if first else 2 * once


def touches(elements: float, size: int, forward: float, backward: float) -> Traffic:
    """So many reads and writes of all elements."""
    return elements * size * forward, elements * size * backward


def stage(name: str, flops: float, *traffic: Traffic, times: int = 1) -> Stage:
    return Stage(name, flops, sum(t[0] for t in traffic), sum(t[1] for t in traffic), times)


def stages(
    config: ModelConfig,
    batch: int,
    precision: str,
    samples: int = SAMPLES,
    negatives: int = 100,
    local: bool = True,
    halves: int = HALVES,
) -> list[Stage]:
    """In the order of the forward pass; then the optimiser."""
    rows = batch * halves
    found = convolutions(config, rows, BYTES[precision], samples)
    found += context(config, rows, config.tokens(samples), BYTES[precision])
    if local:
        found += objective(config, rows, config.tokens(samples), BYTES[precision], negatives)
    c = rows * config.tokens(samples) * config.width
    found.append(stage("global loss", 0, touches(c, BYTES[precision], 1, 1)))
    weights = parameters(config, local)
    gradient, copy = (4, 0) if precision != "bf16" else (2, 2)
    found.append(stage("gradient norm, AdamW", 0, (weights * (2 * gradient + 2 * STATE_BYTES + copy), 0)))
    return found


def convolutions(config: ModelConfig, rows: int, size: int, samples: int) -> list[Stage]:
    found, length, width = [], samples, config.leads
    for i, (out, kernel) in enumerate(config.conv):
        length //= kernel
        m, k = rows * length, width * kernel
        over_time = config.conv_norm == "group" and i == 0  # its statistics are a pass of their own, both ways
        traffic = [product(m, k, out, size, first=i == 0), touches(m * out, size, 3 if over_time else 2, 5 if over_time else 3)]
        if i == 0:
            traffic.append((m * k * (4 + size), 0))  # float32 millivolts [R, L, T] to [R, T, L]
        found.append(stage(f"convolution {i + 1}", 2 * m * k * out, *traffic))
        width = out
    return found


def context(config: ModelConfig, rows: int, tokens: int, size: int) -> list[Stage]:
    d, f, n = config.width, config.feature_width, rows * tokens
    each = d // config.position_groups
    taps = d * each * config.position_kernel
    found = [stage("feature norm and penalty", 0, touches(n * f, size, 3, 3))]
    if f != d:
        found.append(stage("projection", 2 * n * f * d, product(n, f, d, size)))
    found += [
        stage("dropout and mask", 0, touches(n * d, size, 2, 2)),
        stage(
            "positional convolution",
            2 * n * each * config.position_kernel * d,
            (size * (2 * n * d + taps), 2 * size * (2 * n * d + taps)),
            touches(taps, size, 3, 4),  # its weight norm
            touches(n * d, size, 2, 3),  # GELU
        ),
        stage("norm before the layers", 0, touches(n * d, size, 3, 3)),
    ]
    parts = (
        ("qkv", 2 * n * d * 3 * d, product(n, d, 3 * d, size)),
        ("attention", 4 * n * tokens * d, touches(n * d, size, 4, 8)),
        ("attention out", 2 * n * d * d, product(n, d, d, size)),
        ("dropout, residual, norm 1", 0, touches(n * d, size, 3, 4)),
        ("fc1", 2 * n * d * config.ffn, product(n, d, config.ffn, size)),
        ("GELU", 0, touches(n * config.ffn, size, 2, 3)),
        ("fc2", 2 * n * d * config.ffn, product(n, config.ffn, d, size)),
        ("dropout, residual, norm 2", 0, touches(n * d, size, 3, 4)),
    )
    return found + [stage(name, flops, traffic, times=config.layers) for name, flops, traffic in parts]


def objective(config: ModelConfig, rows: int, tokens: int, size: int, negatives: int) -> list[Stage]:
    each = tokens * masked_share(config, tokens)  # masked tokens of a row
    m, f, p, codes = rows * each, config.feature_width, config.projection, config.codebooks * config.codes
    book = config.code_width // config.codebooks
    return [
        stage("draws", 0, (4 * (rows * each * each + m * codes), 0)),
        stage(
            "quantiser",
            2 * m * (f * codes + codes * book),
            touches(m * f, size, 2, 2),  # tokens into slots
            product(m, f, codes, size),
            touches(m * codes, 4, 3, 4),  # two softmaxes, one of them with noise
            touches(m * config.code_width, size, 1, 2),
        ),
        stage(
            "projections",
            2 * m * (config.width + config.code_width) * p,
            touches(m * config.width, size, 2, 2),
            product(m, config.width, p, size),
            product(m, config.code_width, p, size),
        ),
        stage("local loss", 2 * m * (1 + negatives) * p, touches(m * p, 4, 2, 4), touches(m * each, 4, 2, 2)),
    ]


def parameters(config: ModelConfig, local: bool = True) -> int:
    d, f, width, count = config.width, config.feature_width, config.leads, 0
    for i, (out, kernel) in enumerate(config.conv):
        count += width * kernel * out + (2 * out if config.conv_norm == "layer" or i == 0 else 0)
        width = out
    count += 2 * f + (f * d + d if f != d else 0) + 2 * d
    count += config.position_kernel + d * (d // config.position_groups) * config.position_kernel + d
    count += config.layers * (4 * d * d + 4 * d + 2 * d * config.ffn + config.ffn + d + 4 * d)
    if local:
        codes, p = config.codebooks * config.codes, config.projection
        count += d + f * codes + codes + codes * (config.code_width // config.codebooks)
        count += config.code_width * p + p + d * p + p
    return count


def total_ms(chosen: Sequence[Stage], machine: Machine, precision: str) -> float:
    return sum(one.ms(machine, precision) for one in chosen)
