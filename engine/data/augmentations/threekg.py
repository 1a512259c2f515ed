"""3KG, an augmentation that shows the heart from another angle (Gopal et al. 2021;
fairseq-signals perturb_ecg_dataset.py:120-199)."""

from typing import Annotated, Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from .leads import LeadSettings, limb_leads
from .stage import ONE_DRAW_FOR_ALL_LEADS, STRICT, Node, Nodes, Params, Random, Stage

# Maps I, II and V1 to V6 to Frank's X (left), Y (inferior) and Z (posterior): Edenbrandt and Pahlm
# 1988. The pseudo-inverse, DOWER, equals Dower's matrix to within 0.005. INVERSE_DOWER inverts DOWER
# exactly, so the dipole of a view is exactly the rotated dipole.
INVERSE_DOWER = np.array(
    [
        [0.156, -0.010, -0.172, -0.074, 0.122, 0.231, 0.239, 0.194],
        [-0.227, 0.887, 0.057, -0.019, -0.106, -0.022, 0.041, 0.048],
        [0.022, 0.102, -0.229, -0.310, -0.246, -0.063, 0.055, 0.108],
    ]
)
DOWER = np.linalg.pinv(INVERSE_DOWER)
INDEPENDENT_LEADS = (0, 1, 6, 7, 8, 9, 10, 11)
TO_DIPOLE = np.zeros((3, 12))  # [3, 12]
TO_DIPOLE[:, INDEPENDENT_LEADS] = INVERSE_DOWER
FROM_DIPOLE = np.concatenate([limb_leads(*DOWER[:2]), DOWER[2:]])  # [12, 3]


@checked_dataclass(frozen=True, config=STRICT)
class ThreeKG:
    """Settings of 3KG, the section augment.threekg."""

    # largest angle in degrees of the dipole's three rotations; each angle is uniform between minus
    # this and this
    angle_deg: Annotated[float, Field(ge=0, le=180)] = 45.0
    # largest scale factor; each axis has its own factor, uniform from 1 to this
    scale: Annotated[float, Field(ge=1, le=10)] = 1.5
    # share of the samples to zero, in one cyclic window per lead
    time_mask: Annotated[float, Field(ge=0, le=0.99)] = 0.5


@checked_dataclass(frozen=True, config=STRICT)
class ThreeKGSettings(LeadSettings):
    threekg: ThreeKG | None = None


class Rotation(Stage):
    """Computes the dipole from twelve leads, rotates and scales it, and computes twelve leads
    from it."""

    settings: ThreeKGSettings
    stream = 10
    examples = ({"threekg": {"time_mask": 0.0}},)

    description = "3KG"

    @property
    def active(self) -> bool:
        return self.settings.threekg is not None

    def draw(self, random: Random) -> Params:
        threekg = self.settings.threekg
        assert threekg
        u = random.uniform(self.stream, ONE_DRAW_FOR_ALL_LEADS, range(6))[:, :, 0]
        angle_rad = np.deg2rad(threekg.angle_deg) * (2 * u[..., :3] - 1)
        scale = 1 + (threekg.scale - 1) * u[..., 3:]
        return {"matrix": threekg_matrix(angle_rad, scale)}

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        return ops.matmul(p["matrix"], x)


class TimeMask(Stage):
    """Zeroes one random window of each lead. The window is cyclic: it may begin near the end and
    continue at the start."""

    settings: ThreeKGSettings
    stream = 11
    examples = ({"threekg": {"time_mask": 0.25}},)
    changes_zeros = False

    @property
    def active(self) -> bool:
        return self.settings.threekg is not None and self.settings.threekg.time_mask > 0

    @property
    def description(self) -> str:
        assert self.settings.threekg
        return f"time mask {self.settings.threekg.time_mask}"

    def draw(self, random: Random) -> Params:
        assert self.settings.threekg
        place = random.uniform(self.stream, self.settings.output_leads)
        start = np.floor(place * random.samples)
        stop = start + np.floor(self.settings.threekg.time_mask * random.samples)
        wrap = stop - random.samples
        return {"window_start": start, "window_stop": stop, "window_wrap": wrap}

    def apply(self, x: Node, p: Nodes, ops: Any) -> Node:
        sample = ops.sample
        before = (sample < p["window_start"]) & (sample >= p["window_wrap"])
        return ops.multiply(x, before | (sample >= p["window_stop"]))


def threekg_matrix(angle_rad: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns float64 [..., 12, 12]: the product of the matrices that turn twelve leads into a
    dipole, rotate it, scale it along each axis, and turn it into twelve leads.

    The dipole has only three components, so even angle 0 with scale 1 is a projection, not the
    identity.
    """
    stretched = scale[..., None] * rotation_matrix(angle_rad)
    return np.asarray(FROM_DIPOLE @ stretched @ TO_DIPOLE)


def rotation_matrix(angle_rad: np.ndarray) -> np.ndarray:
    """Returns matrices [..., 3, 3] that rotate by the angles [..., 3] about the fixed axes z,
    then y, then x (scipy's Rotation.from_euler("zyx"))."""
    turned = np.eye(3)
    for axis in range(3):
        angle = angle_rad[..., 2 - axis]
        i, j = (axis + 1) % 3, (axis + 2) % 3
        about = np.zeros((*angle.shape, 3, 3))
        about[..., axis, axis] = 1
        about[..., i, i] = np.cos(angle)
        about[..., j, j] = np.cos(angle)
        about[..., j, i] = np.sin(angle)
        about[..., i, j] = -np.sin(angle)
        turned = turned @ about
    return turned
