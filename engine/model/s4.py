"""The encoder S4, a structured state space (Gu et al. 2022), as in ECG-CPC. `model.encoder: s4` chooses it.

    x_RLT -> stem: convolutions, each with a norm and ReLU -> z_RND                                (features)
          -> layers x [y = drop(GELU(state space(x))), x = norm(x + drop(GLU(linear(y))))] -> c_RND (context)

`drop` has one mask for all times of a channel. Each channel of a layer is a linear system of n
states s, which its input u drives and y reads:

    ds/dt = A s + B u                  A, B: HiPPO-LegS
    s_t = A' s_(t-1) + B' u_t          bilinear: A' = (1 - A dt/2)^-1 (1 + A dt/2), B' = (1 - A dt/2)^-1 B dt
    y_t = C s_t + D u_t                = sum over l of k_l u_(t-l), where k_l = C A'^l B', and k_0 has D too

C and D are learnt; A, B, and the step dt of each channel are frozen. A's eigenvalues are -1, -2, ..., -n,
so with its eigenvectors V, A'^l = V diag(((1 - m dt/2) / (1 + m dt/2))^l) V^-1, m = 1 .. n: computed once, in
float64, because V's condition is 8e4. From then on states are in LegS's own basis, where float32 is enough.

The sum over l is made of products for each channel, a chunk of T tokens at a time:

    y = K u                                  K_ij = k_(i-j)
    v = sum over j of A'^(T-1-j) B' u_j      what a chunk leaves
    s_(c+1) = A'^T s_c + v_c                 the state before each chunk, in float32
    y_i += C A'^(i+1) s_c                    what the chunks before add

which is the same for any T. In code: k_l, out_i = C A'^(i+1), left_j = A'^(T-1-j) B', step = A'^T. A CPU
takes chunks of 32 tokens, as matrix products; a GPU chunks of 2, with the states in registers
(engine.model.s4_kernels). The authors have a kernel as long as the input and multiply spectra. They
train C (1 - A'^L), L tokens long, as complex numbers in the basis where A + P P^T is diagonal and states
are conjugate pairs, and keep one of each pair. We store the same numbers, so that AdamW takes the same
steps.

Source: arXiv 2111.00396 (S4), 2509.25095 (ECG-CPC), 2605.12241; AI4HealthUOL/ecg-fm-benchmarking. Shapes:
engine.model.config; C chunks, T tokens of a chunk, n states.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omnilead.data_tools.io.terminal import tell

from ..settings.errors import ConfigError
from .encoder import Dropout

# Tokens of a chunk on a CPU. Chunks of 16 tokens take 1.2 times as long as these, chunks of 64 tokens as long
# or 1.2 times as long, chunks of 128 tokens twice as long
CHUNK_TOKENS = 32
# On an H200, chunks of 1 token take 1.02 times as long as these, chunks of 4 tokens 1.2 times
GPU_CHUNK_TOKENS = 2
DT_RANGE = 0.001, 0.1  # smallest and largest step dt that is drawn for a channel
STEM_NORMS = ("layer", "batch", "group")
STEM_NORM_GROUPS = 8  # groups of each group norm in the stem, for norm=group
# More states would lose precision: the matrix V of A's eigenvectors has a condition number of 8e4 with 8
# states and 8e10 with 16
MAX_STATES = 16


def hippo_legs_matrices(states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices (A [n, n], B [n]) of HiPPO-LegS."""
    root_n = np.sqrt(2 * np.arange(states) + 1)
    a_nn = -np.tril(np.outer(root_n, root_n), -1) - np.diag(np.arange(states) + 1.0)
    return a_nn, root_n


def conjugate_pair_basis(states: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (eigenvalues [n / 2], P [n / 2], matrix [n, n]) of the basis in which ECG-CPC stores C.

    In this basis A + P P^T is diagonal, and its eigenvalues are conjugate pairs; one of each pair is
    returned. The phases of the eigenvectors are chosen so that P is real and positive. The matrix maps C
    from this basis, as the real and imaginary parts of each pair, to LegS's basis."""
    a_nn, b_n = hippo_legs_matrices(states)
    p_n = b_n / math.sqrt(2)
    skew_nn = a_nn + np.outer(p_n, p_n) + np.eye(states) / 2
    frequencies, vectors = np.linalg.eigh(-1j * skew_nn)
    # selects the positive frequencies, the highest first: one of each conjugate pair
    kept = slice(None, states // 2 - 1, -1)
    vectors, along = vectors[:, kept], p_n @ vectors[:, kept].conj()
    vectors = vectors * along / np.abs(along)
    to_legs_nn = 2 * np.stack([vectors.real.T, vectors.imag.T], 1).reshape(states, states)
    return -0.5 + 1j * frequencies[kept], np.abs(along), to_legs_nn


class DiscretisedSystem:
    """A' and B' of each channel, in float64: the matrices A and B discretised with the channel's step dt."""

    def __init__(self, dt_D: Tensor, states: int) -> None:
        a_nn, b_n = hippo_legs_matrices(states)
        # numpy 2.5 returns even real eigenvalues and eigenvectors as complex numbers
        eigenvalues_n, vectors_nn = (values.real for values in np.linalg.eig(a_nn))
        self.vectors_nn = torch.from_numpy(vectors_nn).to(dt_D.device)
        self.inverse_nn = torch.from_numpy(np.linalg.inv(vectors_nn)).to(dt_D.device)
        half_Dn = dt_D[:, None] / 2 * torch.from_numpy(eigenvalues_n).to(dt_D.device)
        self.poles_Dn = (1 + half_Dn) / (1 - half_Dn)
        b_of_dt_Dnn = self.with_eigenvalues(dt_D[:, None] / (1 - half_Dn))
        self.b_Dn = b_of_dt_Dnn @ torch.from_numpy(b_n).to(dt_D.device)

    def with_eigenvalues(self, eigenvalues: Tensor) -> Tensor:
        """Return the matrices [..., n, n] that have A's eigenvectors and the given eigenvalues [..., n]."""
        return self.vectors_nn * eigenvalues[..., None, :] @ self.inverse_nn

    def powers(self, first: int, count: int) -> Tensor:
        """Return the powers A'^first, A'^(first + 1), ... of A', `count` of them: [D, count, n, n]."""
        exponents_T1 = torch.arange(first, first + count, device=self.b_Dn.device)[:, None]
        return self.with_eigenvalues(self.poles_Dn[:, None] ** exponents_T1)


class StateSpace(nn.Module):
    """A linear state space for each channel, u_RND -> y_RND. Instead of C, C (1 - A'^L) is stored, where L,
    a number of tokens, is `length`. With `bidirectional`, a second system runs backwards over the tokens
    that follow, and a second C reads its states."""

    log_dt: Tensor
    read_Dnn: Tensor
    driven_DTn: Tensor
    powers_DnTn: Tensor

    def __init__(self, width: int, states: int, length: int, bidirectional: bool = False) -> None:
        super().__init__()
        self.states, self.length, self.chunk = states, length, CHUNK_TOKENS
        shape = 1 + bidirectional, width, states // 2, 2
        self.C = nn.Parameter(torch.randn(shape) / math.sqrt(2))
        self.D = nn.Parameter(torch.randn(width))
        low, high = map(math.log, DT_RANGE)
        self.register_buffer("log_dt", low + (high - low) * torch.rand(width))
        self.compute_frozen_buffers()
        if not self.C.is_meta:
            # replaces the drawn C by C (1 - A'^L), which is what is stored
            to_legs_nn = torch.from_numpy(conjugate_pair_basis(states)[2]).to(self.C)
            stored_Dnn = to_legs_nn @ torch.linalg.inv(self.read_Dnn)
            drawn = self.C.data.flatten(2)[:, :, None]
            self.C.data.copy_((drawn @ stored_Dnn).view(shape))

    def compute_frozen_buffers(self) -> None:
        """Compute the buffers that depend on dt and not on trained weights."""
        self.in_registers = self.D.is_cuda and triton_kernels_compile()
        if self.log_dt.is_meta:
            return
        discrete = DiscretisedSystem(self.log_dt.double().exp(), self.states)
        to_legs_nn = torch.from_numpy(conjugate_pair_basis(self.states)[2]).to(self.log_dt.device)
        powers_DTnn = discrete.powers(0, self.chunk + 1)
        driven_DTn = (powers_DTnn[:, :-1] @ discrete.b_Dn[:, None, :, None])[..., 0]
        true_from_stored = discrete.with_eigenvalues(1 / (1 - discrete.poles_Dn**self.length))
        frozen = {
            # maps the stored C (1 - A'^L) to C in LegS's basis
            "read_Dnn": to_legs_nn @ true_from_stored,
            "driven_DTn": driven_DTn,  # A'^l B'
            "powers_DnTn": powers_DTnn[:, 1:].transpose(1, 2),  # A'^(i+1)
        }
        for name, values in frozen.items():
            self.register_buffer(name, values.float().contiguous(), persistent=False)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.compute_frozen_buffers()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "StateSpace":
        """Move the module to a device and cast its weights, for example to bfloat16. The frozen buffers
        are moved, but stay float32."""
        frozen = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, values in frozen.items():
            assert values is not None
            self._buffers[name] = values.to(self.D.device)
        self.in_registers = self.D.is_cuda and triton_kernels_compile()
        return self

    def forward(self, u_RND: Tensor) -> Tensor:
        y_RND = self.filter_by(u_RND, self.C[0], self.D)
        if len(self.C) == 1:
            return y_RND
        following_RND = F.pad(u_RND[:, 1:].flip(1), (0, 0, 1, 0))
        return y_RND + self.filter_by(following_RND, self.C[1], torch.zeros_like(self.D)).flip(1)

    def filter_by(self, u_RND: Tensor, c_Dh2: Tensor, d_D: Tensor) -> Tensor:
        """Return y_RND of the system with these C and D, running forwards over the tokens."""
        tokens, dtype = u_RND.shape[1], u_RND.dtype
        with torch.autocast(u_RND.device.type, enabled=False):
            if self.in_registers:
                weights = self.chunk_weights(c_Dh2, d_D, GPU_CHUNK_TOKENS)
                y_RND: Tensor = GPUChunkedConvolution.apply(u_RND, *weights)
                return y_RND
            k_DT, out_DTn, left_DTn, step_Dnn = self.chunk_weights(c_Dh2, d_D, self.chunk)
            y_RND = ChunkedConvolution.apply(
                F.pad(u_RND, (0, 0, 0, -tokens % self.chunk)),
                toeplitz(k_DT).to(dtype),
                out_DTn.transpose(1, 2).to(dtype),
                left_DTn.to(dtype),
                step_Dnn.transpose(1, 2).contiguous(),
            )
        return y_RND[:, :tokens]

    def chunk_weights(
        self, c_Dh2: Tensor, d_D: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what a chunk of T tokens is multiplied by (see the docstring of this file): (k_DT, the
        kernel k_l; out_DTn, C A'^(i+1) for token i; left_DTn, A'^(T-1-j) B' for token j; step_Dnn, A'^T)."""
        c_D1n = c_Dh2.float().flatten(1)[:, None] @ self.read_Dnn
        driven_DTn = self.driven_DTn[:, :chunk]
        k_DT = (driven_DTn * c_D1n).sum(2) + F.pad(d_D.float()[:, None], (0, chunk - 1))
        powers_DnTn = self.powers_DnTn[:, :, :chunk]
        out_DTn = (c_D1n @ powers_DnTn.flatten(2)).view(-1, chunk, self.states)
        return k_DT, out_DTn, driven_DTn.flip(1), powers_DnTn[:, :, -1]


def toeplitz(kernel_DT: Tensor) -> Tensor:
    """Return the transposed Toeplitz matrices [D, T, T] of the kernels, so that a row vector u times the
    matrix is K u: the entry (j, i) is k_(i-j), or 0 if i < j. Each kernel is padded to 2T numbers,
    repeated, and read at a stride of 2T - 1, which shifts each row by one."""
    channels, chunk = kernel_DT.shape
    rows_DT2T = F.pad(kernel_DT, (0, chunk))[:, None].expand(-1, chunk, -1)
    skewed_DX = rows_DT2T.reshape(channels, -1)[:, : chunk * (2 * chunk - 1)]
    return skewed_DX.view(channels, chunk, -1)[:, :, :chunk]


def states_before_chunks(left_DRCn: Tensor, step_Dnn: Tensor) -> Tensor:
    """Return the state before each chunk [D, R, C, n]. `left_DRCn` is the state that each chunk leaves if it
    starts from a state of zeros."""
    states = [torch.zeros_like(left_DRCn[:, :, 0])]
    for c in range(left_DRCn.shape[2] - 1):
        states.append(torch.baddbmm(left_DRCn[:, :, c], states[-1], step_Dnn))
    return torch.stack(states, 2)


def chunks_by_channel(x_RND: Tensor, chunk: int) -> Tensor:
    """Return the chunks of each channel, [D, R * C, T]. Rows and tokens are flattened first, because
    torch transposes two axes ten times as fast as three."""
    width = x_RND.shape[2]
    return x_RND.reshape(-1, width).t().contiguous().view(width, -1, chunk)


class ChunkedConvolution(torch.autograd.Function):
    """The sum over l of k_l u_(t-l), by the products for chunks in the docstring of this file. Row
    vectors are multiplied by matrices from the right. torch's own backward takes twice as long,
    because it copies operands that are not laid out as matrices, one matrix after another."""

    @staticmethod
    def forward(
        ctx: Any, u_RND: Tensor, k_DTT: Tensor, out_DnT: Tensor, left_DTn: Tensor, step_Dnn: Tensor
    ) -> Tensor:
        rows, chunk = u_RND.shape[0], k_DTT.shape[1]
        u_DXT = chunks_by_channel(u_RND, chunk)
        left_DRCn = torch.bmm(u_DXT, left_DTn).float().unflatten(1, (rows, -1))
        s_DXn = states_before_chunks(left_DRCn, step_Dnn).flatten(1, 2)
        y_DXT = torch.bmm(u_DXT, k_DTT).baddbmm_(s_DXn.to(u_DXT.dtype), out_DnT)
        ctx.save_for_backward(u_DXT, s_DXn, k_DTT, out_DnT, left_DTn, step_Dnn)
        return y_DXT.flatten(1).t().contiguous().view_as(u_RND)

    @staticmethod
    @once_differentiable  # the saved tensors have no graph, so a second derivative would be wrong
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        u_DXT, s_DXn, k_DTT, out_DnT, left_DTn, step_Dnn = ctx.saved_tensors
        grad_RND = grads[0]
        g_DXT = chunks_by_channel(grad_RND, k_DTT.shape[1])
        grad_k_DTT = torch.bmm(u_DXT.transpose(1, 2), g_DXT)
        grad_out_DnT = torch.bmm(s_DXn.to(g_DXT.dtype).transpose(1, 2), g_DXT)
        # What a chunk leaves affects all later chunks, so its gradient is summed from the last
        # chunk to the first
        grad_s_DXn = torch.bmm(g_DXT, out_DnT.transpose(1, 2)).float()
        later_DRCn = grad_s_DXn.unflatten(1, (grad_RND.shape[0], -1)).flip(2)
        later_DRCn = states_before_chunks(later_DRCn, step_Dnn.transpose(1, 2)).flip(2)
        grad_left_DXn = later_DRCn.flatten(1, 2).to(g_DXT.dtype)
        grad_u_DXT = torch.bmm(g_DXT, k_DTT.transpose(1, 2))
        grad_u_DXT = grad_u_DXT.baddbmm_(grad_left_DXn, left_DTn.transpose(1, 2))
        grad_u_RND = grad_u_DXT.flatten(1).t().contiguous().view_as(grad_RND)
        return grad_u_RND, grad_k_DTT, grad_out_DnT, None, None


class GPUChunkedConvolution(torch.autograd.Function):
    """The sum over l of k_l u_(t-l) on a GPU, in chunks of two tokens (engine.model.s4_kernels)."""

    @staticmethod
    def forward(
        ctx: Any, u_RND: Tensor, k_DT: Tensor, out_DTn: Tensor, left_DTn: Tensor, step_Dnn: Tensor
    ) -> Tensor:
        ctx.save_for_backward(u_RND, k_DT, out_DTn, left_DTn, step_Dnn)
        y_RND: Tensor = filter_chunks(u_RND, k_DT, out_DTn, left_DTn, step_Dnn, False)
        return y_RND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        u_RND, k_DT, out_DTn, left_DTn, step_Dnn = ctx.saved_tensors
        reverse = left_DTn.flip(1), out_DTn.flip(1)
        grad_u_RND = filter_chunks(grads[0], k_DT, *reverse, step_Dnn, True)
        return grad_u_RND, *weight_gradients(u_RND, grads[0], left_DTn, step_Dnn), None, None


# torch.compile treats these two custom operations as black boxes. They import s4_kernels inside, because
# it needs Triton, which torch for CPUs comes without.
@torch.library.custom_op("omnilead::s4_filter", mutates_args=())
def filter_chunks(
    u_RND: Tensor, k_DT: Tensor, out_DTn: Tensor, left_DTn: Tensor, step_Dnn: Tensor, back: bool
) -> Tensor:
    from . import s4_kernels

    with torch.cuda.device_of(u_RND):  # Triton would otherwise run on the current device
        return s4_kernels.filter_chunks(u_RND, k_DT, out_DTn, left_DTn, step_Dnn, back)


@torch.library.custom_op("omnilead::s4_weight_gradients", mutates_args=())
def weight_gradients(
    u_RND: Tensor, g_RND: Tensor, left_DTn: Tensor, step_Dnn: Tensor
) -> tuple[Tensor, Tensor]:
    from . import s4_kernels

    with torch.cuda.device_of(u_RND):
        return s4_kernels.weight_gradients(u_RND, g_RND, left_DTn, step_Dnn)


@filter_chunks.register_fake
def _(u_RND: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(u_RND, memory_format=torch.contiguous_format)


@weight_gradients.register_fake
def _(u_RND: Tensor, g_RND: Tensor, left_DTn: Tensor, step_Dnn: Tensor) -> tuple[Tensor, Tensor]:
    return left_DTn.new_empty(left_DTn.shape[:2]), left_DTn.new_empty(left_DTn.shape)


@cache
def triton_kernels_compile() -> bool:
    """Return True if Triton can compile for this GPU; if not, print the reason and return False."""
    try:
        u_RND, weights = torch.zeros(1, 1, 1, device="cuda"), torch.zeros(1, 2, 2, device="cuda")
        filter_chunks(u_RND, weights[..., 0], weights, weights, weights, False)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        tell(
            f"S4 runs slower: Triton does not compile for this GPU: {reason}: install gcc and python3-dev"
        )
        return False
    return True


class ChannelDropout(Dropout):
    """Dropout of whole channels: a channel that is dropped is zero in all tokens of the row."""

    def forward(self, x_RND: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x_RND
        return x_RND * F.dropout(torch.ones_like(x_RND[:, :1]), self.p)


class S4Layer(nn.Module):
    def __init__(self, space: StateSpace, width: int, dropout: float) -> None:
        super().__init__()
        self.space = space
        self.dropout = ChannelDropout(dropout, "auto")
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x_RND: Tensor) -> Tensor:
        y_RND = self.dropout(F.gelu(self.space(x_RND)))
        y_RND = self.dropout(F.glu(self.linear(y_RND)))
        z_RND: Tensor = self.norm(x_RND + y_RND)
        return z_RND


class StemBlock(nn.Module):
    """A convolution, a norm and a ReLU: [R, T, C] -> [R, N, D], time before channels."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, norm: str) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        bound = 1 / math.sqrt(inputs * kernel)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel).uniform_(-bound, bound))
        norms = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
        self.norm: nn.Module = nn.GroupNorm(STEM_NORM_GROUPS, outputs)
        if norm in norms:
            self.norm = norms[norm](outputs)

    def forward(self, x_RTC: Tensor) -> Tensor:
        edge = (self.kernel - 1) // 2
        patches_RNCK = F.pad(x_RTC, (0, 0, edge, edge)).unfold(1, self.kernel, self.stride)
        y_RND = F.linear(patches_RNCK.flatten(2), self.weight.flatten(1))
        if isinstance(self.norm, nn.BatchNorm1d):
            y_RND = self.norm(y_RND.flatten(0, 1)).view_as(y_RND)
        elif isinstance(self.norm, nn.GroupNorm):
            y_RND = self.norm(y_RND.transpose(1, 2)).transpose(1, 2)
        else:
            y_RND = self.norm(y_RND)
        return F.relu(y_RND)


class S4(nn.Module):
    """a structured state space after Gu et al. 2022, as in ECG-CPC"""

    def __init__(
        self,
        leads: int = 12,
        width: int = 512,
        layers: int = 4,
        states: int = 8,
        bidirectional: bool = False,
        kernels: Sequence[int] = (3, 1, 1, 1),
        strides: Sequence[int] = (2, 1, 1, 1),
        norm: str = "layer",
        dropout: float = 0.2,
        length: int = 300,
    ) -> None:
        """`norm` is the norm in the stem: `layer`; `batch`, as in the code of ECG-CPC's authors, for training
        on one rank; or `group`, which takes means over time and so looks ahead. `length` is the number of
        tokens L in C (1 - A'^L), which is stored instead of C."""
        super().__init__()
        check_options(width, layers, states, kernels, strides, norm, dropout, length)
        self.width = self.feature_width = width
        self.causal = not bidirectional and norm != "group"
        self.stem = nn.ModuleList()
        inputs = leads
        for kernel, stride in zip(kernels, strides, strict=True):
            self.stem.append(StemBlock(inputs, width, kernel, stride, norm))
            inputs = width
        self.layers = nn.ModuleList()
        for _ in range(layers):
            space = StateSpace(width, states, length, bidirectional)
            self.layers.append(S4Layer(space, width, dropout))

    def features(self, x_RLT: Tensor) -> tuple[Tensor, Tensor]:
        first: Any = self.stem[0]
        z_RND = x_RLT.transpose(1, 2).to(first.weight.dtype)
        for block in self.stem:
            z_RND = block(z_RND)
        return z_RND, z_RND.float().square().mean()

    def context(self, z_RND: Tensor, mask_RN: Tensor | None) -> Tensor:
        """Return c_RND from the features; those of masked tokens are replaced by zeros."""
        x_RND = z_RND if mask_RN is None else z_RND.masked_fill(mask_RN[..., None], 0.0)
        for layer in self.layers:
            x_RND = layer(x_RND)
        return x_RND

    def forward(self, x_RLT: Tensor) -> Tensor:
        return self.context(self.features(x_RLT)[0], None)

    @staticmethod
    def select_leads(
        weights: Mapping[str, Tensor], rows: Sequence[int], of: int
    ) -> dict[str, Tensor]:
        """Return the weights of a model of fewer leads: the input channels `rows` of the full model. Its
        output is the same as that of the full model if all other channels are zero."""
        first = "stem.0.weight"
        return {**weights, first: weights[first][:, list(rows)].contiguous()}


def check_options(
    width: int,
    layers: int,
    states: int,
    kernels: Sequence[int],
    strides: Sequence[int],
    norm: str,
    dropout: float,
    length: int,
) -> None:
    if states < 2 or states % 2:
        raise ConfigError(
            f"states={states}: must be even and at least 2: states are conjugate pairs"
        )
    if states > MAX_STATES:
        raise ConfigError(
            f"states={states}: must be at most {MAX_STATES}: more states would lose precision"
        )
    if len(kernels) != len(strides) or not kernels or min(*kernels, *strides) < 1:
        raise ConfigError(
            f"kernels={list(kernels)}, strides={list(strides)}: give each convolution a kernel and a stride of at least 1"
        )
    if norm not in STEM_NORMS:
        raise ConfigError(f"norm={norm!r}: use {', '.join(STEM_NORMS)}")
    if norm == "group" and width % STEM_NORM_GROUPS:
        raise ConfigError(f"width={width}: must be a multiple of {STEM_NORM_GROUPS} for norm=group")
    if min(width, layers, length) < 1 or not 0 <= dropout < 1:
        raise ConfigError(
            f"width={width}, layers={layers}, length={length}, dropout={dropout}: width, layers and "
            "length must be at least 1, and dropout from 0 to less than 1"
        )
