"""Which noise levels are trained how often, and how much each counts.

A position is a quantile: uniform in (0, 1), turned into a time ``t`` of the wanted distribution, and
that into a noise level by the model's own schedule or by a given shift. Drawing quantiles keeps the
random numbers of a training the same whatever the distribution is.

Sources: logit-normal times and the shift, arXiv:2403.03206 (sections 3.1 and 5.3.2); min-SNR weights,
arXiv:2303.09556.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import RequestError
from .number_ranges import Range, check_numbers

TIMESTEP_SAMPLINGS = ("uniform", "logit_normal")
LOSS_WEIGHTINGS = ("none", "min_snr")
MIN_SNR_GAMMA = 5.0
"""The value that the paper recommends."""
_LEVELS = {"lowest": Range(0, 1, name="lowest_noise"), "highest": Range(0, 1, name="highest_noise")}
_SHIFT = {"shift": Range(0, without_ends=True, name="timestep_shift")}


@dataclass(frozen=True)
class NoiseLevels:
    """The distribution of noise levels.

    Attributes:
        sampling: ``uniform`` times, or ``logit_normal``: a sigmoid of a standard normal, most in the middle.
        shift: Bends times towards noise: ``s t / (1 + (s - 1) t)``; None takes the model's own schedule.
        lowest: Levels below are not trained; a flow's noise level is 0 to 1.
        highest: Levels above are not trained.
        weighting: ``none``, or ``min_snr``: losses of nearly clean samples count less.
    """

    sampling: str = "uniform"
    shift: float | None = None
    lowest: float = 0.0
    highest: float = 1.0
    weighting: str = "none"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("timestep_sampling", self.sampling, TIMESTEP_SAMPLINGS),
            ("loss_weighting", self.weighting, LOSS_WEIGHTINGS),
        ):
            if value not in known:
                raise RequestError(
                    f"{name}={value!r} was asked",
                    limit=f"Known are {list(known)}",
                    way_out=f"Set {name} to one of them",
                )
        check_numbers(self, _LEVELS if self.shift is None else _LEVELS | _SHIFT)
        if not self.lowest < self.highest:
            raise RequestError(
                f"noise levels from {self.lowest} to {self.highest} were asked",
                limit="The lowest must be below the highest",
                way_out="Correct the range",
            )

    @property
    def is_whole(self) -> bool:
        """Whether every level is trained."""
        return self.lowest == 0.0 and self.highest == 1.0

    def time(self, quantile: float) -> float:
        """Return the time below which the share ``quantile`` of all times lies."""
        if self.sampling == "uniform" or not 0.0 < quantile < 1.0:
            return quantile
        normal = torch.special.ndtri(torch.tensor(quantile, dtype=torch.float64))
        return float(torch.sigmoid(normal))

    def quantile(self, time: float) -> float:
        """Return the share of all times that lies below ``time``."""
        if self.sampling == "uniform" or not 0.0 < time < 1.0:
            return time
        normal = torch.special.logit(torch.tensor(time, dtype=torch.float64))
        return float(torch.special.ndtr(normal))


def shifted(time: float, shift: float) -> float:
    """Return the noise level of a flow at ``time``."""
    return shift * time / (1.0 + (shift - 1.0) * time)
