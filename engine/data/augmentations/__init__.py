"""The augmentations of ECG crops. STAGES is the formula, and each stage is a class in a file here;
stage.py says what it must have.

`python -m docs.augmentations augmentations.png --data DATASET` draws them.
"""

from pydantic.dataclasses import dataclass as checked_dataclass

from ...settings.errors import ConfigError, one_line_errors
from ...settings.files import OWN
from .gain import Gain, GainSettings
from .leads import Leads, RandomLeads, RandomLeadSettings
from .noise import Emg, LimbLeads, NoiseSettings, Powerline, Shift, Wander
from .stage import STRICT, Stage
from .threekg import Rotation, ThreeKGSettings, TimeMask

# In the order in which they are applied. What follows noise must be linear, because torch adds white
# noise to DALI's output; what follows RandomLeads must leave zeros as they are.
STAGES: tuple[type[Stage], ...] = (
    Rotation,
    Leads,
    Powerline,
    Emg,
    Wander,
    Shift,
    LimbLeads,
    TimeMask,
    RandomLeads,
    Gain,
)


@one_line_errors
@checked_dataclass(frozen=True, config=STRICT)
class AugmentConfig(GainSettings, ThreeKGSettings, NoiseSettings, RandomLeadSettings):
    """The section `augment` of the settings: those of all stages."""

    # your own function(x_BSLT, generator) as file.py:function, applied after the others:
    # omnilead.engine.data.augmenter
    extra: str = ""

    def __post_init__(self) -> None:
        for stage in STAGES:
            stage(self).check()
        if self.extra and not OWN.fullmatch(self.extra):
            raise ConfigError(f"augment.extra={self.extra!r}: must be file.py:function")

    @property
    def stages(self) -> list[Stage]:
        """The active ones."""
        stages = [stage(self) for stage in STAGES]
        return [stage for stage in stages if stage.active]

    @property
    def described(self) -> list[str]:
        """The augmentations that are on, `extra` aside."""
        return [stage.described for stage in self.stages if stage.described]

    @property
    def changes_zeros(self) -> bool:
        """Whether leads that were not measured must be masked explicitly."""
        return any(stage.changes_zeros for stage in self.stages)
