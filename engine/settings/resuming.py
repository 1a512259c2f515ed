"""Marks the settings that may change when a run is resumed; all others must stay as they were.

log_every: MayChange[int] = Field(default=10, ge=1)      # a field of a section
changeable_settings(Config)                                       # {"train.log_every", ...}
"""

from typing import Annotated, Any, TypeVar, get_args

T = TypeVar("T")


class ChangeableMark:
    """Annotates a setting that may change when a run is resumed."""


MayChange = Annotated[T, ChangeableMark()]


def changeable_settings(section: type, prefix: str = "") -> set[str]:
    """Returns the dotted names of the settings that may change when a run is resumed, in one
    section or in all sections of a run's settings."""
    names = set()
    fields: dict[str, Any] = getattr(section, "__pydantic_fields__", {})
    for name, field in fields.items():
        if any(isinstance(mark, ChangeableMark) for mark in field.metadata):
            names.add(f"{prefix}{name}")
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type):
                names |= changeable_settings(kind, f"{prefix}{name}.")
    return names
