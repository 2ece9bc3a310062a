"""Arguments whose types determine the valid values."""

from dataclasses import dataclass, replace

import pytest

from offmarl.config import (
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Role,
    Seed,
    Validated,
    option,
    with_role,
)
from offmarl.errors import OptionError


@dataclass(frozen=True)
class Base(Validated):
    steps: PositiveInt = option(1, Role.SHAPES | Role.FREE)
    every: PositiveInt | None = None


@dataclass(frozen=True)
class Args(Base):
    steps: PositiveInt = 2
    seed: Seed = option(0, Role.CASE)
    gamma: Fraction = 1.0
    rate: Positive = 1e-9
    weight: NonNegative = 0.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1, not 0"),
        ("every", -1, "every must be at least 1, not -1"),
        ("seed", -1, "seed must be from 0 to 2,147,483,647, not -1"),
        ("seed", 2**31, "seed must be from 0 to 2,147,483,647, not 2147483648"),
        ("gamma", -0.01, "gamma must be from 0 to 1, not -0.01"),
        ("gamma", 1.01, "gamma must be from 0 to 1, not 1.01"),
        ("rate", 0.0, "rate must be above 0 and finite, not 0.0"),
        ("rate", float("inf"), "rate must be above 0 and finite, not inf"),
        ("weight", -1e-9, "weight must be at least 0 and finite, not -1e-09"),
        ("weight", float("inf"), "weight must be at least 0 and finite, not inf"),
        ("weight", float("nan"), "weight must be at least 0 and finite, not nan"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_said(name, value, message):
    with pytest.raises(OptionError, match=message):
        replace(Args(), **{name: value})


def test_the_ends_of_ranges_are_in_them():
    Args(steps=1, every=1, seed=2**31 - 1, gamma=0.0, weight=0.0)


def test_a_field_that_replaces_another_keeps_its_roles():
    assert Args().steps == 2
    names = [with_role(Args, role) for role in (Role.SHAPES, Role.CASE | Role.FREE, Role.TRACED)]
    assert names == [{"steps"}, {"steps", "seed"}, set()]
