"""The model of a pre-training step, from a batch x_BSLT to losses.

    model = Pretrainer(ModelConfig(), ObjectiveConfig())
    keys_BS = torch.from_numpy(row_keys(seed, epoch_B, crop_B, halves=2))       # engine.model.draws
    losses = model(x_BSLT, keys_BS, torch.tensor(temperature(config, updates)))  # engine.model.quantizer
    losses["loss"].backward()

All halves and views go through the encoder in one batch. Shapes depend only on the input's shape
and nothing waits for the device, so the step compiles once. Other encoders can replace the
authors': one with `features` and `context` (MaskedEncoder) for every objective; one with only a
`width` that maps x_RLT to c_RND for the global ones.

`objective.method: file.py:Class` replaces the global objective:

    class Mine(nn.Module):                            # Mine(encoder, **objective.options)
        def forward(self, encoder, x_BSLT, keys_BS):  # its loss, or {name: loss}: scalars; or these,
            ...                                       # and {name: value} for the log
        def after_step(self, encoder): ...            # if it keeps an average, say; after each step

Source: paper, section "Pre-training"; fairseq-signals models/wav2vec2/wav2vec2.py (project_q,
final_proj), wav2vec2_cmsc.py. Shapes: engine.model.config.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..settings.errors import ConfigError
from .config import ATTRIBUTES, ModelConfig, ObjectiveConfig
from .draws import Draws, draw_for_step
from .encoder import Dropout, MaskedEncoder, pool, take_tokens
from .encoders import build_encoder, build_objective, initialise
from .objectives import (
    attribute_losses,
    authors_cmsc_loss,
    diversity_loss_and_perplexities,
    local_loss,
    nt_xent,
    threekg_loss,
)
from .quantizer import Quantized, Quantizer


class LocalHeadOutput(NamedTuple):
    """What LocalHead returns for the masked tokens of a batch."""

    context_RMP: Tensor
    target_RMP: Tensor
    quantized: Quantized


class LocalHead(nn.Module):
    """The modules that the local objective needs in addition to the encoder. They return projections of the
    contexts and of the quantised features of masked tokens."""

    def __init__(self, config: ModelConfig, width: int, feature_width: int) -> None:
        super().__init__()
        self.dropout = Dropout(config.feature_dropout, config.kernels)
        self.quantizer = Quantizer(config, feature_width)
        self.target = nn.Linear(config.code_width, config.projection)
        self.context = nn.Linear(width, config.projection)

    def forward(self, c_RND: Tensor, z_RNF: Tensor, draws: Draws, tau: Tensor) -> LocalHeadOutput:
        z_RMF = self.dropout(take_tokens(z_RNF, draws.slot_RM))
        quantized = self.quantizer(z_RMF, draws.valid_RM, tau, draws.noise_RMGV)
        return LocalHeadOutput(
            self.context(take_tokens(c_RND, draws.slot_RM)),
            self.target(quantized.values_RMP),
            quantized,
        )


class Pretrainer(nn.Module):
    # The local objective needs a MaskedEncoder; for global objectives, any module with a `width` and
    # forward(x_RLT) -> c_RND will do
    encoder: Any

    def __init__(
        self,
        config: ModelConfig,
        objective: ObjectiveConfig,
        encoder: nn.Module | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """`encoder` is an initialised encoder; without it, the encoder that `config` names is built.
        `generator` draws all weights that are not in `encoder`."""
        super().__init__()
        self.config, self.objective = config, objective
        self.needs_patient_ids = objective.needs_patient_ids
        # stored in self, so that training can replace these two functions by compiled versions
        self.draw, self.pool = draw_for_step, pool
        local = objective.local > 0
        # a class of the user's, file.py:Class, may mask tokens, too
        mask = local or objective.method == "jepa" or ":" in objective.method
        self.encoder = build_encoder(config, mask, generator) if encoder is None else encoder
        if local and not isinstance(self.encoder, MaskedEncoder):
            raise ConfigError(
                f"objective.local={objective.local}: {type(self.encoder).__name__} lacks features(), context() "
                "or feature_width: implement them (engine.model.encoder.MaskedEncoder), or set "
                "objective.local=0"
            )
        self.local = (
            LocalHead(config, self.encoder.width, self.encoder.feature_width) if local else None
        )
        if self.local is not None:
            initialise(self.local, generator)
        # The weights of `plugin` are trained and stored in checkpoints, but not exported
        self.plugin = (
            build_objective(objective, self.encoder, generator)
            if objective.method_is_class
            else None
        )
        # The weights of `attributes` are not exported either. They are drawn last, so that all other weights
        # are the same without them
        self.attributes = nn.Linear(self.encoder.width, 2) if objective.attributes else None
        if self.attributes is not None:
            initialise(self.attributes, generator)

    def forward(
        self,
        x_BSLT: Tensor,
        keys_BS: Tensor | None = None,
        tau: Tensor | None = None,
        ids_B: Tensor | None = None,
        attributes_B2: Tensor | None = None,
        draws: Draws | None = None,
    ) -> dict[str, Tensor]:
        """Return losses and metrics by name, all scalars; only `loss` has a gradient.

        `keys_BS` are int64 keys for the random draws, which `draws` replaces (rows ordered by crop, then
        half). `tau` is the Gumbel temperature, a scalar tensor. `ids_B` are the patients, for objectives
        that need them (ObjectiveConfig.needs_patient_ids). `attributes_B2` are age and sex as from
        engine.data.patients.age_and_sex_targets, for ObjectiveConfig.attributes. In eval mode, codes are not
        sampled and there is no dropout.
        """
        views, objective = x_BSLT.shape[1], self.objective
        x_RLT = x_BSLT.flatten(0, 1)
        parts: dict[str, Tensor] = {}
        loss = torch.zeros((), device=x_BSLT.device)
        if self.local is not None:
            parts, c_RND = self._local_losses_and_contexts(x_RLT, keys_BS, tau, draws)
            for name in ("local", "diversity", "features"):
                loss = loss + getattr(objective, name) * parts[f"loss_{name}"]
        elif self.plugin is None or self.attributes is not None:
            c_RND = self.encoder(x_RLT)
        if self.plugin is not None:
            plugged_losses, logged = self.class_losses_and_logs(x_BSLT, keys_BS)
            parts |= {f"loss_{name}": value for name, value in plugged_losses.items()} | logged
            loss = loss + objective.contrast * sum(plugged_losses.values())
        elif objective.contrast > 0:
            g_BSD = self.pool(c_RND).unflatten(0, (-1, views))
            parts["loss_global"], parts["accuracy_global"] = self._global_loss_and_accuracy(
                g_BSD, ids_B
            )
            loss = loss + objective.contrast * parts["loss_global"]
        if self.attributes is not None:
            parts |= self._attribute_losses(c_RND, attributes_B2)
            for name, weight in objective.attributes.items():
                loss = loss + weight * parts[f"loss_{name}"]
        return {"loss": loss} | {name: value.detach() for name, value in parts.items()}

    def _attribute_losses(self, c_RND: Tensor, attributes_B2: Tensor | None) -> dict[str, Tensor]:
        if self.attributes is None or attributes_B2 is None:
            raise ValueError(
                "objective.attributes is set, but age and sex are missing: pass attributes_B2"
            )
        y_R2 = attributes_B2.repeat_interleave(len(c_RND) // len(attributes_B2), 0)
        logits_R2 = self.attributes(self.pool(c_RND).to(self.attributes.weight.dtype))
        losses_2 = attribute_losses(logits_R2.float(), y_R2)
        return {
            f"loss_{name}": losses_2[ATTRIBUTES.index(name)] for name in self.objective.attributes
        }

    def _local_losses_and_contexts(
        self, x_RLT: Tensor, keys_BS: Tensor | None, tau: Tensor | None, draws: Draws | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        assert self.local is not None
        z_RNF, penalty = self.encoder.features(x_RLT)
        if draws is None:
            assert keys_BS is not None, "the local objective needs keys or draws"
            draws = self.draw(
                self.config,
                keys_BS.flatten(),
                z_RNF.shape[1],
                self.objective.negatives,
                self.training,
            )
        c_RND = self.encoder.context(z_RNF, draws.mask_RN)
        tau = torch.ones((), device=z_RNF.device) if tau is None else tau
        loss, accuracy, q = self.local_objective(c_RND, z_RNF, draws, tau)
        unused, prob_perplexity, code_perplexity = diversity_loss_and_perplexities(
            q.share_GV, q.hard_GV, q.tokens, self.objective.gathered
        )
        return {
            "loss_local": loss,
            "loss_diversity": unused,
            "loss_features": penalty,
            "accuracy_local": accuracy,
            "prob_perplexity": prob_perplexity,
            "code_perplexity": code_perplexity,
            "masked": q.tokens,
            "masked_share": q.tokens / draws.mask_RN.numel(),
        }, c_RND

    def class_losses_and_logs(
        self, x_BSLT: Tensor, keys_BS: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (losses by name, other values for the log) of a global objective that is a class."""
        assert self.plugin is not None
        losses = self.plugin(self.encoder, x_BSLT, keys_BS)
        losses, logged = losses if isinstance(losses, tuple) else (losses, {})
        return losses if isinstance(losses, dict) else {"global": losses}, logged

    def after_step(self) -> None:
        """Call after_step of a global objective that is a class and has this method."""
        plugin: Any = self.plugin
        if hasattr(plugin, "after_step"):
            plugin.after_step(self.encoder)

    def local_objective(
        self, c_RND: Tensor, z_RNF: Tensor, draws: Draws, tau: Tensor
    ) -> tuple[Tensor, Tensor, Quantized]:
        """Return (loss, accuracy, quantised targets) of the local objective."""
        assert self.local is not None
        context_RMP, target_RMP, q = self.local(c_RND, z_RNF, draws, tau)
        negatives = draws.times_RMM, draws.valid_RM, q.codes_RMG
        return *local_loss(context_RMP, target_RMP, *negatives, self.objective.temperature), q

    def _global_loss_and_accuracy(
        self, g_BSD: Tensor, ids_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        o = self.objective
        if not self.needs_patient_ids:
            return nt_xent(g_BSD, o.temperature, o.gathered, o.detach_norm)
        if ids_B is None:
            raise ValueError(
                f"objective.method={o.method!r} with form={o.form!r} needs the patient of each crop: pass ids_B"
            )
        if o.method == "3kg":
            return threekg_loss(g_BSD, ids_B, o.temperature, o.gathered, o.detach_norm)
        return authors_cmsc_loss(g_BSD, ids_B, o.temperature)
