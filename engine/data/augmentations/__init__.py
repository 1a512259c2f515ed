"""The augmentations of ECG crops. STAGES is the formula, and each stage is a class in a file here;
stage.py says what it must have.

`python -m docs.augmentations augmentations.png --data DATASET` draws them.
"""

from dataclasses import field
from typing import Any

from pydantic.dataclasses import dataclass as checked_dataclass

from ...settings.errors import ConfigError, one_line_errors
from ...settings.files import OWN_CODE
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
    """The section `augment` of the settings: the settings of all stages."""

    # your own function(x_BSLT, draw) as file.py:function, or a list of them, each as file.py:function
    # or with options, {name: file.py:function, strength: 0.1}; applied after the others:
    # omnilead.engine.data.augmenter
    extra: str | tuple[str | dict[str, Any], ...] = field(default="", hash=False)

    def __post_init__(self) -> None:
        for stage in STAGES:
            stage(self).check()
        for name, _ in self.extra_functions:
            if not isinstance(name, str) or not OWN_CODE.fullmatch(name):
                raise ConfigError(
                    f"augment.extra={self.extra!r}: must be file.py:function, or a list of them, such "
                    "as [my.py:gain, {name: my.py:noise, amplitude: 0.1}]"
                )

    @property
    def extra_functions(self) -> list[tuple[str, dict[str, Any]]]:
        """The name and the options of each function in `extra`."""
        functions = (self.extra,) if isinstance(self.extra, str) else self.extra
        named = [
            {"name": function} if isinstance(function, str) else dict(function)
            for function in functions
            if function != ""
        ]
        return [(options.pop("name", ""), options) for options in named]

    @property
    def plugin_settings(self) -> list[tuple[str, str]]:
        """The (setting, value) pairs that name files of code, for
        engine.settings.files.read_plugins."""
        return [("augment.extra", name) for name, _ in self.extra_functions]

    @property
    def stages(self) -> list[Stage]:
        """The stages that these settings switch on."""
        stages = [stage(self) for stage in STAGES]
        return [stage for stage in stages if stage.active]

    @property
    def descriptions(self) -> list[str]:
        """The names of the augmentations that are on, without `extra`."""
        return [stage.description for stage in self.stages if stage.description]

    @property
    def changes_zeros(self) -> bool:
        """True if leads that were not measured must be masked explicitly."""
        return any(stage.changes_zeros for stage in self.stages)
