import re

import pytest

from offmarl import envs

from .conformance import EnvironmentConformance

EXAMPLES = [
    re.sub(r"-[A-Z]\b", "-3", name) for name, about in envs.describe().items() if not about.extra
]
MANY = {
    "probe/observation",
    "probe/two-step",
    "swarm/search-3",
    "swarm/delivery-3",
    "swarm/pursuit-3-3",
    "swarm/flock-3",
}
"""Like others of their suites, and it takes long to compile all of them."""


@pytest.mark.parametrize(
    "env",
    [pytest.param(name, marks=[pytest.mark.slow] if name in MANY else []) for name in EXAMPLES],
    indirect=True,
)
class TestRegistered(EnvironmentConformance):
    @pytest.fixture
    def env(self, request):
        return envs.make(request.param)
