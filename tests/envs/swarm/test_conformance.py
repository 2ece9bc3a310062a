"""Protocol tests of option combinations that cover each feature of the suite."""

import pytest

from offmarl import envs
from offmarl.testing import EnvironmentConformance


@pytest.mark.nightly
@pytest.mark.parametrize(
    "env",
    [
        "swarm/coverage-1",
        "swarm/coverage-8:time_limit=7",
        "swarm/search-3:dims=3,comm=status,randomise=all,action=continuous",
        "swarm/delivery-2:dynamics=unicycle,comm=learned,obstacles=0.1,comm_dropout=0.5",
        "swarm/pursuit-3-2:evaders=learned,dynamics=acceleration,heterogeneous=true,time_limit=20",
        "swarm/flock-3:dims=3,dynamics=unicycle,action=continuous,comm=learned",
        "swarm/coverage-3:dynamics=acceleration,randomise=full,collisions=inelastic",
        "swarm/pursuit-3-2:evaders=learned,obstacles=0.1,opaque=true,comm=status,"
        "collisions=elastic,randomise=delay+dropout",
        "swarm/search-3:dims=3,dynamics=quadrotor,action=continuous,control=motors,comm=learned,"
        "obstacles=0.05,opaque=true,randomise=full",
    ],
    indirect=True,
)
class TestOptions(EnvironmentConformance):
    @pytest.fixture
    def env(self, request):
        return envs.make(request.param)
