"""The initialisation of all weights.

| weights | drawn from | source in fairseq-signals |
|---|---|---|
| convolutions | N(0, 2 / (inputs * kernel)) | modules/conv_feature_extraction.py:34, kaiming_normal_ |
| projections: to the encoder's width; of contexts and targets | U(+-1 / sqrt(inputs)), bias too | nn.Linear |
| mask embedding | U(0, 1) | models/transformer.py:184 |
| positional convolution | N(0, 4 / (kernel * width)), bias 0; gain = its norm | modules/conv_positional_encoding.py:15 |
| its bias, if features are as wide as the encoder and not projected | U(+-1 / sqrt(width)) | |
| linear maps of the transformer | N(0, 0.02^2), bias 0 | modules/transformer_encoder.py:17-45 |
| quantiser's logits | N(0, 1), bias 0 | modules/gumbel_vector_quantizer.py:60 |
| codebook | U(0, 1) | modules/gumbel_vector_quantizer.py:40 |
| every norm | gain 1, bias 0 | |

Without that bias, an ECG of zeros would be zeros in every layer. A layer norm of zeros multiplies
the gradient by 316, and five of them overflow float32.
"""

import math

import torch
from torch import nn

from omnilead.engine.model.encoder import ConvBlock, Encoder, Layer, PositionalConvolution
from omnilead.engine.model.quantizer import Quantizer

Generator = torch.Generator | None


@torch.no_grad()
def initialise(model: nn.Module, generator: Generator = None) -> None:
    """Draw all weights in the order of the modules: the same generator gives the same weights."""
    _initialise_layers(model, generator)
    _initialise_transformer(model, generator)


def _initialise_layers(model: nn.Module, generator: Generator) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator)
            if module.bias is not None:
                nn.init.uniform_(module.bias, -bound, bound, generator)
        elif isinstance(module, ConvBlock):
            inputs = module.weight.shape[1]
            spread = math.sqrt(2 / inputs)
            nn.init.normal_(module.weight, 0, spread, generator)
        elif isinstance(module, PositionalConvolution):
            kernel, width = module.gain.numel(), len(module.bias)
            spread = math.sqrt(4 / (kernel * width))
            nn.init.normal_(module.direction, 0, spread, generator)
            squares = module.direction.square().sum((0, 1), keepdim=True)
            module.gain.copy_(squares.sqrt())
            nn.init.zeros_(module.bias)


def _initialise_transformer(model: nn.Module, generator: Generator) -> None:
    """Overwrites what _initialise_layers drew for the linear layers of these modules."""
    for module in model.modules():
        if isinstance(module, Encoder):
            if module.mask_embedding is not None:
                nn.init.uniform_(module.mask_embedding, 0, 1, generator)
            if isinstance(module.project, nn.Identity):
                bound = 1 / math.sqrt(module.width)
                nn.init.uniform_(module.position.bias, -bound, bound, generator)
        elif isinstance(module, Layer):
            attention = module.attention
            linears = [attention.qkv, attention.out, module.fc1, module.fc2]
            for linear in linears:
                nn.init.normal_(linear.weight, 0, 0.02, generator)
                nn.init.zeros_(linear.bias)
        elif isinstance(module, Quantizer):
            nn.init.normal_(module.logits.weight, 0, 1, generator)
            nn.init.zeros_(module.logits.bias)
            nn.init.uniform_(module.codebook, 0, 1, generator)
