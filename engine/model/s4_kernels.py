"""Triton kernels for S4 (engine.model.s4) on a GPU. A thread keeps the states of one channel of one row
in registers and goes from chunk to chunk, so that the input u is read once and the output y is written
once.

    y_i = sum over j <= i of k_(i-j) u_j + out_i s        within a chunk
    s   = step s + sum over j of left_j u_j               from chunk to chunk

    grad_u_j = sum over i >= j of k_(i-j) g_i + left_j r  backward, from the last chunk to the first
    r        = step^T r + sum over i of out_i g_i

So the gradient of u is computed by the same kernel, with `out` and `left` exchanged and their tokens
reversed. The kernel for the gradients of k and `out` computes s again instead of storing it, and writes a
sum for each row; torch adds the rows, without atomics, so two runs agree bit for bit. `step` is lower
triangular in LegS's basis, which saves half of the multiplications by it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS_PER_PROGRAM = 128  # a Triton program computes this many channels, one in each thread
PREFETCHED_CHUNKS = 4  # chunks of input that are loaded before the first of them is computed


@triton.jit
def load_channel_values(place, exists, count: tl.constexpr):
    """Load `count` numbers for each channel, as a tuple of `count` vectors over the channels. Channels for
    which `exists` is false get zeros."""
    numbers = ()
    for i in tl.static_range(count):
        numbers = numbers + (tl.load(place + i, exists, 0.0),)
    return numbers


@triton.jit
def zero_channel_values(count: tl.constexpr, channels: tl.constexpr):
    """Return `count` zeros for each channel, as a tuple of `count` vectors over the channels."""
    numbers = ()
    for _ in tl.static_range(count):
        numbers = numbers + (tl.zeros([channels], tl.float32),)
    return numbers


@triton.jit
def next_state(s, step, left, u, chunk: tl.constexpr, states: tl.constexpr, back: tl.constexpr):
    """Return the states after a chunk, from the states `s` before it and its inputs `u`. With `back`, `s`
    is multiplied by the transposed `step`."""
    sums = ()
    for i in tl.static_range(states):
        total = left[i] * u[0]
        for j in tl.static_range(1, chunk):
            total += left[j * states + i] * u[j]
        for j in tl.static_range(states):
            if back:
                if j >= i:
                    total += step[j * states + i] * s[j]
            elif j <= i:
                total += step[i * states + j] * s[j]
        sums = sums + (total,)
    return sums


@triton.jit
def filter_kernel(
    u,
    y,
    k,
    out,
    left,
    step,
    width,
    tokens,
    chunk: tl.constexpr,
    states: tl.constexpr,
    back: tl.constexpr,
    channels: tl.constexpr,
    ahead: tl.constexpr,
):
    """Compute y from u, chunk by chunk. With `back`, `u` holds the gradient of y, `y` receives the
    gradient of u, and the chunks are taken from the last to the first."""
    row, d = tl.program_id(0), tl.program_id(1) * channels + tl.arange(0, channels)
    exists = d < width
    k_T = load_channel_values(k + d * chunk, exists, chunk)
    out_Tn = load_channel_values(out + d * chunk * states, exists, chunk * states)
    left_Tn = load_channel_values(left + d * chunk * states, exists, chunk * states)
    step_nn = load_channel_values(step + d * states * states, exists, states * states)
    s = zero_channel_values(states, channels)
    base = row.to(tl.int64) * tokens * width + d
    count = tl.cdiv(tokens, chunk)
    for first in range(0, count, ahead):
        inputs = ()
        for c in tl.static_range(ahead):
            for i in tl.static_range(chunk):
                t = (count - first - c) * chunk - 1 - i if back else (first + c) * chunk + i
                at = base + tl.cast(t, tl.int64) * width
                value = tl.load(u + at, exists & (t >= 0) & (t < tokens), 0.0)
                inputs = inputs + (value.to(tl.float32),)
        for c in tl.static_range(ahead):
            u_T = inputs[c * chunk : (c + 1) * chunk]
            for i in tl.static_range(chunk):
                t = (count - first - c) * chunk - 1 - i if back else (first + c) * chunk + i
                total = k_T[0] * u_T[i]
                for j in tl.static_range(i):
                    total += k_T[i - j] * u_T[j]
                for n in tl.static_range(states):
                    total += out_Tn[i * states + n] * s[n]
                at = base + tl.cast(t, tl.int64) * width
                tl.store(y + at, total.to(y.dtype.element_ty), exists & (t >= 0) & (t < tokens))
            s = next_state(s, step_nn, left_Tn, u_T, chunk, states, back)


@triton.jit
def gradient_kernel(
    u,
    g,
    k_gradient,
    out_gradient,
    left,
    step,
    width,
    tokens,
    chunk: tl.constexpr,
    states: tl.constexpr,
    channels: tl.constexpr,
    ahead: tl.constexpr,
):
    """Compute the gradients of k and `out` for each row from u and the gradient g of y."""
    row, d = tl.program_id(0), tl.program_id(1) * channels + tl.arange(0, channels)
    exists = d < width
    left_Tn = load_channel_values(left + d * chunk * states, exists, chunk * states)
    step_nn = load_channel_values(step + d * states * states, exists, states * states)
    s = zero_channel_values(states, channels)
    k_T, out_Tn = (
        zero_channel_values(chunk, channels),
        zero_channel_values(chunk * states, channels),
    )
    base = row.to(tl.int64) * tokens * width + d
    count = tl.cdiv(tokens, chunk)
    for first in range(0, count, ahead):
        inputs, grads = (), ()
        for i in tl.static_range(ahead * chunk):
            t = first * chunk + i
            at, there = base + tl.cast(t, tl.int64) * width, exists & (t < tokens)
            inputs = inputs + (tl.load(u + at, there, 0.0).to(tl.float32),)
            grads = grads + (tl.load(g + at, there, 0.0).to(tl.float32),)
        for c in tl.static_range(ahead):
            u_T, g_T = inputs[c * chunk : (c + 1) * chunk], grads[c * chunk : (c + 1) * chunk]
            k_sums, out_sums = (), ()
            for lag in tl.static_range(chunk):
                total = k_T[lag]
                for j in tl.static_range(chunk - lag):
                    total += g_T[j + lag] * u_T[j]
                k_sums = k_sums + (total,)
            for i in tl.static_range(chunk):
                for n in tl.static_range(states):
                    out_sums = out_sums + (out_Tn[i * states + n] + g_T[i] * s[n],)
            k_T, out_Tn = k_sums, out_sums
            s = next_state(s, step_nn, left_Tn, u_T, chunk, states, False)
    place = row.to(tl.int64) * width + d
    for i in tl.static_range(chunk):
        tl.store(k_gradient + place * chunk + i, k_T[i], exists)
    for i in tl.static_range(chunk * states):
        tl.store(out_gradient + place * chunk * states + i, out_Tn[i], exists)


def filter_chunks(
    u_RND: Tensor, k_DT: Tensor, out_DTn: Tensor, left_DTn: Tensor, step_Dnn: Tensor, back: bool
) -> Tensor:
    """Return y [R, N, D] for the input u. With `back`, `u_RND` is the gradient of y, and the gradient of u is
    returned; `out_DTn` must then be `left` with its tokens reversed, and `left_DTn` likewise `out`."""
    rows, tokens, width = u_RND.shape
    u_RND = u_RND.contiguous()
    y_RND = torch.empty_like(u_RND)
    filter_kernel[rows, triton.cdiv(width, CHANNELS_PER_PROGRAM)](
        u_RND,
        y_RND,
        k_DT.contiguous(),
        out_DTn.contiguous(),
        left_DTn.contiguous(),
        step_Dnn.contiguous(),
        width,
        tokens,
        *out_DTn.shape[1:],
        back,
        CHANNELS_PER_PROGRAM,
        PREFETCHED_CHUNKS,
        num_warps=CHANNELS_PER_PROGRAM // 32,
    )
    return y_RND


def weight_gradients(
    u_RND: Tensor, g_RND: Tensor, left_DTn: Tensor, step_Dnn: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k_DT and of out_DTn, for the gradient g_RND of y."""
    (rows, tokens, width), (_, chunk, states) = u_RND.shape, left_DTn.shape
    k_RDT = torch.empty(rows, width, chunk, device=u_RND.device)
    out_RDTn = torch.empty(rows, width, chunk, states, device=u_RND.device)
    gradient_kernel[rows, triton.cdiv(width, CHANNELS_PER_PROGRAM)](
        u_RND.contiguous(),
        g_RND.contiguous(),
        k_RDT,
        out_RDTn,
        left_DTn.contiguous(),
        step_Dnn.contiguous(),
        width,
        tokens,
        chunk,
        states,
        CHANNELS_PER_PROGRAM,
        PREFETCHED_CHUNKS,
        num_warps=CHANNELS_PER_PROGRAM // 32,
    )
    return k_RDT.sum(0), out_RDTn.sum(0)
