"""What a critic's last layer says of a state's value: h(V), or a histogram of it. h is a value transform."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_rl.errors import SettingError, check_range
from lightning_rl.losses.policy_gradient import value_loss
from lightning_rl.value_transforms import ValueTransform, make_value_transform, scalar_to_support, support_to_scalar


class ScalarValue(nn.Module):
    """h(V), with the squared error."""

    atoms = 1

    def __init__(self, transform: ValueTransform) -> None:
        super().__init__()
        self.transform = transform

    def value(self, z: Tensor) -> Tensor:
        """V `[..., S]` of what the critic puts out."""
        return self.transform.inverse(z)

    def loss(self, z: Tensor, returns: Tensor) -> Tensor:
        """For each row and stream `[..., S]`."""
        return value_loss(z, self.transform(returns))


class TwoHotValue(nn.Module):
    """A histogram of h(V) over the integers low … high, with the cross-entropy to the two-hot target (Schrittwieser et al. 2020, app. F).
    Returns beyond its ends are cut."""

    def __init__(self, transform: ValueTransform, low: int, high: int) -> None:
        super().__init__()
        self.transform, self.low, self.high, self.atoms = transform, low, high, high - low + 1

    def value(self, z: Tensor) -> Tensor:
        """V `[..., S]` of what the critic puts out, `[..., S · Z]`."""
        return self.transform.inverse(support_to_scalar(z.unflatten(-1, (-1, self.atoms)), self.low, self.high))

    def loss(self, z: Tensor, returns: Tensor) -> Tensor:
        """For each row and stream `[..., S]`."""
        target = scalar_to_support(self.transform(returns).clamp(self.low, self.high), self.low, self.high)
        return -(target * z.unflatten(-1, (-1, self.atoms)).log_softmax(-1)).sum(-1)


def make_value_head(value_transform: str, value_support: Sequence[int] | None) -> ScalarValue | TwoHotValue:
    """The head for the settings of an algorithm.

    Raises:
        SettingError: no such transform, or a support that is none.
    """
    transform = make_value_transform(value_transform)
    if value_support is None:
        return ScalarValue(transform)
    if len(value_support) != 2:
        raise SettingError(f"value_support must be two integers, low and high, got {list(value_support)}")
    for each in value_support:
        check_range("value_support", each, -100_000, 100_000, whole=True)
    low, high = value_support
    if low >= high:
        raise SettingError(f"value_support: low {low} must be below high {high}")
    return TwoHotValue(transform, low, high)
