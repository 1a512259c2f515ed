"""The model for fine-tuning: an encoder with a head. By default the head is a linear layer on the
mean over time (for identity: cosines to class vectors).

    model = Classifier(encoder, TaskConfig(kind="multilabel"), outputs=26)
    losses = model(x_BSLT, labels_BK, present_BS)              # training
    model(x_BSLT)                                              # what the head takes, for validation: c_RD, or c_RND
    model.logits(c_RD)

Source: paper, section "Fine-tuning"; fairseq-signals
models/classification/ecg_transformer_classifier.py (Xavier-uniform, bias 0),
criterions/binary_cross_entropy_with_logits.py (mean over samples and classes),
models/identification/arcface.py.

Identity is learnt with an angular margin (ArcFace, Deng et al. 2019):

    cosine_RC = unit embeddings @ unit class vectors
    logits    = scale * (cos(theta + margin) for the true class, cos(theta) for the others)

Source: paper, section "Fine-tuning" (scale 192, margin 1.0); fairseq-signals
criterions/arcface_criterion.py:46-66. Beyond theta = pi - margin, cos(theta + margin) would rise
again; there the authors use cos(theta) - margin * sin(margin), which the paper does not mention.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnilead.data_tools.io.plugins import load_plugin
from omnilead.engine.model.encoder import pool
from omnilead.engine.model.encoders import CHECKED_ROWS, build_module, require_parameters
from omnilead.engine.settings.errors import ConfigError, blaming
from omnilead.engine.settings.leads import ALL_LEADS

from .config import TaskConfig
from .kinds import KINDS
from .readout import PAPER_READOUT, Readout, read_out, readout_width

HEADS = {"attention": "omnilead.downstream.tasks.classifier:AttentionHead"}
CHECKED_TOKENS = 7  # number of tokens in the random input with which a new head is checked
COSINE_CLIP = 1e-6  # keeps the cosine away from +-1, where the sine's slope is unbounded
# the logarithm of a learned scale is this many times its parameter, so that it moves faster
SCALE_SPEED = 10


class AttentionHead(nn.Module):
    """Attention over all tokens: each attention head has a learnt query, and the output projection
    gives the logits.

    Source: AI4HealthUOL/ecg-fm-benchmarking, where frozen encoders are compared with it."""

    tokens = True  # the head takes all tokens (c_RND), not their mean (c_RD)

    def __init__(self, width: int, outputs: int, heads: int = 16) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            fits = math.gcd(max(heads, 1), width)
            raise ConfigError(
                f"heads={heads}: does not divide the width: use task.head_options={{heads: {fits}}}"
            )
        self.heads = heads
        self.query = nn.Parameter(torch.randn(width) / math.sqrt(width))
        # The maps to queries, keys and values. Their initial weights are drawn as those of nn.Linear
        maps_3DD = torch.empty(3, width, width).uniform_(-1, 1) / math.sqrt(width)
        self.maps = nn.Parameter(maps_3DD)
        self.linear = nn.Linear(width, outputs, bias=False)

    def forward(self, c_RND: Tensor) -> Tensor:
        query_map_DD, key_map_DD, value_map_DD = self.maps
        keys_HPD = key_map_DD.unflatten(0, (self.heads, -1))
        values_HPD = value_map_DD.unflatten(0, (self.heads, -1))
        # Without biases, products can be reordered to save work: the query is mapped to the space of
        # the tokens, instead of all tokens to keys; and only the weighted mean of the tokens is mapped
        # to values, instead of all tokens
        queries_H1P = (query_map_DD @ self.query).view(self.heads, 1, -1)
        queries_HD = (queries_H1P @ keys_HPD).squeeze(1) / math.sqrt(queries_H1P.shape[2])
        weights_RHN = (queries_HD @ c_RND.transpose(1, 2)).softmax(2)
        means_RHD = weights_RHN @ c_RND
        values_RHP = torch.einsum("rhd,hpd->rhp", means_RHD, values_HPD)
        logits: Tensor = self.linear(values_RHP.flatten(1))
        return logits


def build_head(
    spec: str,
    options: Mapping[str, Any],
    width: int,
    outputs: int,
    generator: torch.Generator | None = None,
    kind: Any = None,
) -> nn.Module:
    """Returns the head that task.head names: "attention", or a Class of the user's, built as
    Class(width, outputs, **task.head_options). A head maps c_RD to logits_RK, or c_RND if it has
    `tokens = True`."""
    setting = f"task.head={spec}" + (f", task.head_options={options}" if options else "")
    with blaming(f"{setting}, {width} wide, {outputs} outputs"):
        made = kind or load_plugin(HEADS.get(spec, spec))
        head = require_parameters(build_module(made, generator, width, outputs, **options))
        inputs = torch.randn(CHECKED_ROWS, CHECKED_TOKENS, width)
        example = inputs if takes_tokens(head) else pool(inputs)
        y = copy.deepcopy(head).eval()(example)
        if list(y.shape) != [CHECKED_ROWS, outputs] or not y.isfinite().all():
            raise ConfigError(
                f"the head returns {list(y.shape)}, or numbers that are not finite, for an input of shape "
                f"{list(example.shape)}: return finite numbers of shape {[CHECKED_ROWS, outputs]}"
            )
        return head


def takes_tokens(head: nn.Module) -> bool:
    return bool(getattr(head, "tokens", False))


class Classifier(nn.Module):
    def __init__(
        self,
        encoder: nn.Module,
        task: TaskConfig,
        outputs: int,
        generator: torch.Generator | None = None,
        frozen: bool = False,
        readout: Readout = (PAPER_READOUT,),
        leads: Sequence[int] = ALL_LEADS,
    ) -> None:
        """Builds the head. `leads`: the leads of the input, for read-outs that measure the
        signal."""
        super().__init__()
        width = int(encoder.width)  # type: ignore[arg-type]
        self.encoder, self.task, self.frozen = encoder, task, frozen
        self.readout, self.leads = readout, leads
        if frozen:
            encoder.requires_grad_(False)
        if task.head not in ("", "start"):
            self.head: Any = build_head(task.head, task.head_options, width, outputs, generator)
            return
        if task.kind == "identity" and task.scale == "learned":
            # initial scale, as in AdaCos (Zhang et al. 2019)
            first = math.sqrt(2) * math.log(max(outputs - 1, 2))
            self.log_scale = nn.Parameter(torch.tensor([math.log(first) / SCALE_SPEED]))
        self.head = nn.Linear(readout_width(readout, width), outputs, bias=task.kind != "identity")
        nn.init.xavier_uniform_(self.head.weight, generator=generator)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def forward(
        self,
        x_BSLT: Tensor,
        labels: Tensor | None = None,
        present_BS: Tensor | None = None,
        weights_BK: Tensor | None = None,
        # the current margin of ArcFace, while it grows to task.margin
        margin: Tensor | None = None,
    ) -> dict[str, Tensor] | Tensor:
        """Returns the losses or, without labels, the input of the head. labels: float [B, K], NaN
        where unknown; for identity int64 [B]. They count for both halves of a crop. present_BS: 0
        for halves that a crop lacks. weights_BK: weights of the labels."""
        c_RD = self.encode(x_BSLT.flatten(0, 1))
        if labels is None:
            return c_RD
        assert present_BS is not None
        # Imported only for training: objectives imports torch's compiler, which inference does not
        # need
        from omnilead.engine.model.objectives import all_gather, sum_over_ranks, world_size

        kind, halves = KINDS[self.task.kind], x_BSLT.shape[1]
        labels_R, present_R = labels.repeat_interleave(halves, 0), present_BS.flatten().float()
        if self.task.kind == "identity":
            loss_R, right_R = self._identity_losses_and_hits(
                c_RD, labels_R, self.task.margin if margin is None else margin
            )
            share_R = torch.ones_like(present_R)
        else:
            logits_RK = self.logits(c_RD)
            weights_RK = None if weights_BK is None else weights_BK.repeat_interleave(halves, 0)
            if self.task.kind == "survival":  # the loss compares the rows of all ranks
                labels_R[present_R == 0] = torch.nan
                gathered = map(all_gather, (logits_RK, labels_R, present_R))
                logits_RK, labels_R, present_R = gathered
            loss_R, share_R = kind.loss_and_known_share(logits_RK, labels_R, weights_RK)
            right_R = kind.are_right(logits_RK, labels_R)
        # The counts are averaged over ranks, so that the mean of the ranks' losses is the loss of
        # the global batch
        counts = torch.stack([(present_R * share_R).sum(), present_R.sum()])
        known, halves_there = sum_over_ranks(counts) / world_size()
        # The clamp avoids a division by zero if a batch has no known label, or no event
        losses = {"loss": (loss_R * present_R).sum() / known.clamp_min(1e-6)}
        if not kind.has_classes:
            return losses
        return losses | {"accuracy": (right_R.float() * present_R).sum().detach() / halves_there}

    def encode(self, x_RLT: Tensor) -> Tensor:
        """Returns the input of the head: the read-out, or all tokens for a head that takes them."""
        c_RND: Tensor = self.encoder(x_RLT)
        if takes_tokens(self.head):
            return c_RND
        return read_out(self.readout, c_RND, x_RLT, self.leads)

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.frozen:
            self.encoder.eval()  # without dropout, and with the running means as they are
        return self

    def logits(self, c_RD: Tensor) -> Tensor:
        logits: Tensor = self.head(c_RD.to(next(self.head.parameters()).dtype)).float()
        return logits

    def _identity_losses_and_hits(
        self, c_RD: Tensor, label_R: Tensor, margin: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        cosine_RC, fixed = cosines(c_RD, self.head.weight), self.task.scale
        scale = (SCALE_SPEED * self.log_scale.float()).exp() if fixed == "learned" else fixed
        logits_RC = arcface_logits(cosine_RC, label_R, scale, margin)
        return F.cross_entropy(logits_RC, label_R, reduction="none"), cosine_RC.argmax(1) == label_R


def lr_shares_and_weights(
    model: Classifier, decay: float
) -> list[tuple[float, list[nn.Parameter]]]:
    """Returns the trained weights in groups, each with its factor on the learning rate: decay ** (L
    - i) for layer i of L, and 1 for the head. Layers are the modules in the encoder's list `layers`
    or `blocks` (the stages of the ResNet) or, without such a list, its top-level modules. Weights
    that are in none of them are layer 0."""
    encoder = model.encoder
    modules: Any = encoder.children()
    for name in ("blocks", "layers"):
        if isinstance(stack := getattr(encoder, name, None), nn.ModuleList | nn.Sequential):
            modules = stack
    layers = [set(module.parameters()) for module in modules]
    layers = [layer for layer in layers if layer]
    if len(layers) < 2:
        raise ConfigError(
            f"encoder.layer_decay={decay}: {type(encoder).__name__} has fewer than two layers: put "
            "its modules in a list `layers` (nn.ModuleList or nn.Sequential), or leave layer_decay out"
        )
    shares = dict.fromkeys(model.parameters(), 1.0)
    shares |= dict.fromkeys(encoder.parameters(), decay ** len(layers))
    for number, layer in enumerate(layers, 1):
        shares |= dict.fromkeys(layer, decay ** (len(layers) - number))
    groups: dict[float, list[nn.Parameter]] = {}
    for p, share in shares.items():
        if p.requires_grad:
            groups.setdefault(share, []).append(p)
    return sorted(groups.items(), key=lambda group: group[0])


def arcface_logits(
    cosine_RC: Tensor,
    label_R: Tensor,
    scale: float | Tensor = 192.0,
    margin: float | Tensor = 1.0,
) -> Tensor:
    """Returns the cosines with the margin, times the scale, in float32: at a scale of 192, bf16 has
    two digits left. `margin` is a tensor while it grows, and `scale` if it is learned."""
    margin = torch.as_tensor(margin, dtype=torch.float64)
    last = (math.pi - margin).cos()
    label_R1 = label_R[:, None]
    cosine_RC = cosine_RC.float().clamp(-1 + COSINE_CLIP, 1 - COSINE_CLIP)
    true_R1 = cosine_RC.gather(1, label_R1)
    sine_R1 = (1 - true_R1.square()).sqrt()
    moved_R1 = true_R1 * margin.cos() - sine_R1 * margin.sin()
    beyond_R1 = true_R1 - margin * margin.sin()
    moved_R1 = torch.where(true_R1 > last, moved_R1, beyond_R1)
    moved_RC = cosine_RC.scatter(1, label_R1, moved_R1)
    return scale * moved_RC


def cosines(x_RD: Tensor, weight_CD: Tensor) -> Tensor:
    x_RD = F.normalize(x_RD.float(), dim=-1)
    weight_CD = F.normalize(weight_CD.float(), dim=-1)
    return x_RD @ weight_CD.t()
