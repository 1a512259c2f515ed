"""The leads that a model uses: its input has only these, or the others as zeros (RandomLeads)."""

from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as checked_dataclass

from omnilead.engine.common import ALL, parse_leads
from omnilead.engine.data.augmentations.stage import STRICT, Node, Nodes, Stage

# in YAML, 3 is a number
AsText = BeforeValidator(lambda value: str(value) if type(value) is int else value)


@checked_dataclass(frozen=True, config=STRICT)
class LeadSettings:
    leads: Annotated[str | tuple[str, ...], AsText] = "12"  # leads that the model uses
    padded: bool = True  # keep the other leads as zeros; false: leave them out

    @property
    def seen(self) -> tuple[int, ...]:
        return parse_leads(self.leads, "augment.leads")

    @property
    def output_leads(self) -> tuple[int, ...]:
        return ALL if self.padded else self.seen

    @property
    def noise_leads(self) -> tuple[int, ...]:
        """Leads that get noise: all of them if some are later computed from others."""
        return self.output_leads


def limb_leads(one: Node, two: Node) -> list[Node]:
    """I, II, III, aVR, aVL and aVF from I and II (Einthoven, Goldberger)."""
    return [one, two, two - one, (one + two) * -0.5, one - two * 0.5, two - one * 0.5]


class Leads(Stage):
    """Leave the other leads out: before the noise, unless LimbLeads needs them after it."""

    settings: LeadSettings
    examples = ({"leads": "3", "padded": False},)
    changes_zeros = False

    @property
    def active(self) -> bool:
        return self.settings.noise_leads != ALL

    def check(self) -> None:
        parse_leads(self.settings.leads, "augment.leads")

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        return ops.cat([ops.lead(x, lead) for lead in self.settings.output_leads])
