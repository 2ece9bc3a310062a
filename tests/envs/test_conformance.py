import re

import pytest

from offmarl import envs

from .conformance import EnvironmentConformance

EXAMPLES = [
    re.sub(r"-[A-Z]\b", "-3", name) for name, about in envs.describe().items() if not about.extra
]


@pytest.mark.parametrize(
    "env",
    [*EXAMPLES, "swarm/coverage-1", "swarm/coverage-8:time_limit=7"],
    indirect=True,
)
class TestRegistered(EnvironmentConformance):
    @pytest.fixture
    def env(self, request):
        return envs.make(request.param)
