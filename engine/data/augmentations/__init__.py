"""The augmentations of ECG crops. STAGES lists them in the order in which they are applied. Each is
a class in a file of this folder; stage.py says what such a class must have.

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

# All stages, in the order in which they are applied. Stages after the noise must be linear, because
# torch adds white noise to DALI's output. Stages after RandomLeads must leave zeros as they are.
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

    # your own function(x_BSLT, draw), given as file.py:function, or a list of such functions, each
    # given as file.py:function or, with options, as {name: file.py:function, strength: 0.1}. They
    # are applied after all other augmentations (omnilead.engine.data.augmenter.ExtraAugmentation)
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
        """Returns the name and the options of each function in `extra`."""
        functions = (self.extra,) if isinstance(self.extra, str) else self.extra
        named = [
            {"name": function} if isinstance(function, str) else dict(function)
            for function in functions
            if function != ""
        ]
        return [(options.pop("name", ""), options) for options in named]

    @property
    def plugin_settings(self) -> list[tuple[str, str]]:
        """Returns a pair (setting, value) for each file of code that these settings name, as
        engine.settings.files.read_plugin_files takes them."""
        return [("augment.extra", name) for name, _ in self.extra_functions]

    @property
    def stages(self) -> list[Stage]:
        """Returns the stages that these settings switch on."""
        stages = [stage(self) for stage in STAGES]
        return [stage for stage in stages if stage.active]

    @property
    def descriptions(self) -> list[str]:
        """Returns the names of the augmentations that these settings switch on, without the
        functions in `extra`."""
        return [stage.description for stage in self.stages if stage.description]

    @property
    def changes_zeros(self) -> bool:
        """True if a stage may change zeros. Leads that were not measured must then be zeroed
        again."""
        return any(stage.changes_zeros for stage in self.stages)
