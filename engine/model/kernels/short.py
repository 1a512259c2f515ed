"""Attention over at most 256 tokens on a GPU, in Triton: one program computes one head of one row,
forward and backward.

    y_RND = attention(qkv, heads, dropout_p)    qkv [R, N, 3 D]: queries, keys and values, each with its heads side by side

Kernels for long rows waste work on 156 tokens: two blocks of 128 in each direction compute up to
2.6 times as many scores, the gradients of queries are summed in memory, and those of q, k and v
must be copied together for the preceding linear layer. Here blocks have 64, 64 and 32 tokens, and
one pass over the scores, which stay on the chip, writes all gradients in place.

Dropout is a hash of a score's position, four scores to a hash, recomputed for the gradient; its
probability is rounded to a multiple of 1/256, as in flash attention.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, KEYS, WARPS = (
    64,
    32,
    4,
)  # tokens; keys in the backward pass; derived from counts for an H200: benchmarks/LOG.md
LOG2_E = tl.constexpr(1.4426950408889634)


def attention(qkv: Tensor, heads: int, dropout_p: float = 0.0) -> Tensor:
    dropped = round(dropout_p * 256)
    draw = {"dtype": torch.int32, "device": qkv.device}
    seeds = torch.randint(-(2**31), 2**31, (2,), **draw) if dropped else torch.zeros(2, **draw)
    y_RND: Tensor = ShortAttention.apply(qkv.contiguous(), heads, dropped, seeds)[0]
    return y_RND


class ShortAttention(torch.autograd.Function):
    """Saves qkv, y and the log-sum-exp of each row of scores for the backward pass."""

    @staticmethod
    def forward(qkv: Tensor, heads: int, dropped: int, seeds: Tensor) -> tuple[Tensor, Tensor]:
        rows, tokens, width = qkv.shape
        y_RND = qkv.new_empty(rows, tokens, width // 3)
        sums_RHN = qkv.new_empty(rows, heads, tokens, dtype=torch.float32)
        forward_kernel[(rows * heads,)](
            qkv, y_RND, sums_RHN, seeds, **constants(qkv, heads, dropped)
        )
        return y_RND, sums_RHN

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, int, int, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        qkv, ctx.heads, ctx.dropped, seeds = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(qkv, *output, seeds)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, *others = ctx.saved_tensors
        grad = torch.empty_like(qkv)
        sizes = constants(qkv, ctx.heads, ctx.dropped)
        backward_kernel[(len(qkv) * ctx.heads,)](qkv, grad, grads[0].contiguous(), *others, **sizes)
        return grad, None, None, None


def constants(qkv: Tensor, heads: int, dropped: int) -> dict[str, int]:
    _, tokens, width = qkv.shape
    sizes = {
        "N": tokens,
        "H": heads,
        "d": width // 3 // heads,
        "dropped": dropped,
        "BLOCK": BLOCK,
        "KEYS": KEYS,
    }
    return sizes | {"num_warps": WARPS, "num_stages": 1}


@triton.jit
def forward_kernel(
    qkv, y, sums, seeds,
    N: tl.constexpr, H: tl.constexpr, d: tl.constexpr, dropped: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    qkv += offset(program, N, H, 3 * H * d, d)
    y += offset(program, N, H, H * d, d)
    sums += program * N
    place, seed = program * 128 * 128 + tl.load(seeds), tl.load(seeds + 1)
    to_base_2: tl.constexpr = LOG2_E * d**-0.5  # exp(score) = exp2(product * this)
    k, v = (), ()
    for j in tl.static_range(0, N, BLOCK):
        k += (read(qkv + H * d, tokens(j, N, BLOCK), N, 3 * H * d, d),)
        v += (read(qkv + 2 * H * d, tokens(j, N, BLOCK), N, 3 * H * d, d),)
    for i in tl.static_range(0, N, BLOCK):
        queries = tokens(i, N, BLOCK)
        q = read(qkv, queries, N, 3 * H * d, d)
        highest = tl.full(queries.shape, -float("inf"), tl.float32)
        scores = ()
        for j in tl.static_range(0, N, BLOCK):
            s = tl.dot(q, k[j // BLOCK].T, input_precision="ieee")
            s = tl.where(tokens(j, N, BLOCK)[None, :] < N, s, -float("inf"))
            highest = tl.maximum(highest, tl.max(s, 1))
            scores += (s,)
        highest *= to_base_2
        total = tl.zeros(queries.shape, tl.float32)
        mixed = tl.zeros(q.shape, tl.float32)
        for j in tl.static_range(0, N, BLOCK):
            shares = tl.exp2(scores[j // BLOCK] * to_base_2 - highest[:, None])
            total += tl.sum(shares, 1)
            if dropped:
                shares = tl.where(
                    kept(place, seed, queries, tokens(j, N, BLOCK), dropped), shares, 0
                )
            mixed = tl.dot(shares.to(q.dtype), v[j // BLOCK], mixed, input_precision="ieee")
        write(y, mixed * (256 / (256 - dropped) / total)[:, None], queries, N, H * d, d)
        tl.store(sums + queries, highest + tl.log2(total), mask=queries < N)


@triton.jit
def backward_kernel(
    qkv, grad, y_grad, y, sums, seeds,
    N: tl.constexpr, H: tl.constexpr, d: tl.constexpr, dropped: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Reads zeros beyond the last token. As queries they add nothing to a sum; as keys they are
    masked, as their share could be infinite. Their gradients are not written."""
    program = tl.program_id(0)
    qkv += offset(program, N, H, 3 * H * d, d)
    grad += offset(program, N, H, 3 * H * d, d)
    y += offset(program, N, H, H * d, d)
    y_grad += offset(program, N, H, H * d, d)
    sums += program * N
    place, seed = program * 128 * 128 + tl.load(seeds), tl.load(seeds + 1)
    to_base_2: tl.constexpr = LOG2_E * d**-0.5
    scale: tl.constexpr = 256 / (256 - dropped)
    q, dy, dq, total, mean = (), (), (), (), ()
    for i in tl.static_range(0, N, BLOCK):
        queries = tokens(i, N, BLOCK)
        wide = read(y_grad, queries, N, H * d, d).to(tl.float32)
        q += (read(qkv, queries, N, 3 * H * d, d),)
        dy += (read(y_grad, queries, N, H * d, d),)
        dq += (tl.zeros(wide.shape, tl.float32),)
        total += (tl.load(sums + queries, mask=queries < N, other=0),)
        mean += (tl.sum(wide * read(y, queries, N, H * d, d), 1) / scale,)
    for start in range(0, N, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = read(qkv + H * d, keys, N, 3 * H * d, d)
        v = read(qkv + 2 * H * d, keys, N, 3 * H * d, d)
        dk = tl.zeros((KEYS, d), tl.float32)
        dv = tl.zeros((KEYS, d), tl.float32)
        for i in tl.static_range(0, N, BLOCK):
            scores = tl.dot(q[i // BLOCK], k.T, input_precision="ieee")
            scores = tl.where(keys[None, :] < N, scores, -float("inf"))
            shares = tl.exp2(scores * to_base_2 - total[i // BLOCK][:, None])
            given = tl.dot(dy[i // BLOCK], v.T, input_precision="ieee")
            used = shares
            if dropped:
                used = tl.where(kept(place, seed, tokens(i, N, BLOCK), keys, dropped), shares, 0)
            dv = tl.dot(used.to(k.dtype).T, dy[i // BLOCK], dv, input_precision="ieee")
            slope = (used * given - shares * mean[i // BLOCK][:, None]).to(k.dtype)
            dk = tl.dot(slope.T, q[i // BLOCK], dk, input_precision="ieee")
            moved = tl.dot(slope, k, dq[i // BLOCK], input_precision="ieee")
            dq = dq[: i // BLOCK] + (moved,) + dq[i // BLOCK + 1 :]  # noqa: RUF005
        write(grad + H * d, dk * (scale * d**-0.5), keys, N, 3 * H * d, d)
        write(grad + 2 * H * d, dv * scale, keys, N, 3 * H * d, d)
    for i in tl.static_range(0, N, BLOCK):
        write(grad, dq[i // BLOCK] * (scale * d**-0.5), tokens(i, N, BLOCK), N, 3 * H * d, d)


@triton.jit
def offset(program, N: tl.constexpr, H: tl.constexpr, stride: tl.constexpr, d: tl.constexpr):
    """Offset of the program's first token; more than 32 bits in large batches."""
    return (program // H).to(tl.int64) * (N * stride) + program % H * d


@triton.jit
def tokens(start: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """The block that starts here, or half a block if the remaining tokens fit."""
    SIZE: tl.constexpr = BLOCK if N - start > BLOCK // 2 else BLOCK // 2
    return start + tl.arange(0, SIZE)


@triton.jit
def read(at, rows, N: tl.constexpr, stride: tl.constexpr, d: tl.constexpr):
    return tl.load(
        at + rows[:, None] * stride + tl.arange(0, d)[None, :], mask=rows[:, None] < N, other=0
    )


@triton.jit
def write(at, x, rows, N: tl.constexpr, stride: tl.constexpr, d: tl.constexpr):
    tl.store(
        at + rows[:, None] * stride + tl.arange(0, d)[None, :],
        x.to(at.dtype.element_ty),
        mask=rows[:, None] < N,
    )


@triton.jit
def kept(place, seed, queries, keys, dropped: tl.constexpr):
    """Whether scores are kept. Two keys in each of two rows, all in one thread, use a byte each of
    one hash."""
    row, column = queries[:, None], keys[None, :]
    bits = (place + (row // 16 * 8 + row % 8) * 128 + column // 2).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D ^ seed.to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x2C1B3C6D
    bits = (bits ^ (bits >> 16)) * 0x297A2D39
    bits ^= bits >> 16
    return bits << (row // 8 % 2 * 16 + column % 2 * 8) >= dropped << 24
