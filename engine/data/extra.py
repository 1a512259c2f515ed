"""Your own augmentation, `augment.extra: file.py:function`. The backend torch applies it
after all others.

    def dim(x_BSLT, generator):                          # float32 millivolts; may be changed in place
        gain = torch.rand(x_BSLT.shape[0], 1, 1, 1, generator=generator, device=x_BSLT.device)
        return x_BSLT * (0.5 + gain)

Masked and missing leads stay zeros. The generator is seeded from the run's seed, the step and the
rank: a resumed run draws the same numbers; another number of ranks draws different ones, as with
dropout.
"""

import torch
from torch import Tensor

from omnilead.engine.common import ConfigError, blaming, plugin
from omnilead.engine.data.counter import RandomStream, bits


class ExtraAugmentation:
    def __init__(self, spec: str, seed: int, rank: int, device: torch.device) -> None:
        self.spec, self.seed, self.rank, self.generator = spec, seed, rank, torch.Generator(device)
        with blaming(f"augment.extra={spec}"):
            self.function = plugin(spec)

    def __call__(self, x_BSLT: Tensor, step: int) -> Tensor:
        self.generator.manual_seed(int(bits(self.seed, RandomStream.EXTRA, step, self.rank)) >> 1)
        absent_BSL1 = ~x_BSLT.any(-1, keepdim=True)
        with blaming(f"augment.extra={self.spec}"):
            y_BSLT: Tensor = self.function(x_BSLT, self.generator)
            if (y_BSLT.shape, y_BSLT.dtype, y_BSLT.device) != (
                x_BSLT.shape,
                x_BSLT.dtype,
                x_BSLT.device,
            ):
                made = f"{list(y_BSLT.shape)} {y_BSLT.dtype} on {y_BSLT.device}"
                raise ConfigError(
                    f"{list(x_BSLT.shape)} became {made}: keep its shape, type and device"
                )
            return y_BSLT.masked_fill_(absent_BSL1, 0.0)
