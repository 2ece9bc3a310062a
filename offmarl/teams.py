"""Teams of agents: which agents play together, and what each team earns.

``EnvSpec.teams`` has the team of each agent; None stands for one team of all agents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from offmarl.errors import OptionError

if TYPE_CHECKING:
    from offmarl.types import EnvSpec


def require_one_team(spec: EnvSpec, program: str) -> None:
    """Check that all agents are in one team, as programs that factorise a joint value need.

    Parameters
    ----------
    spec
        The environment or dataset.
    program
        Name of the program, for the message.

    Raises
    ------
    OptionError
        The agents are in several teams.
    """
    if spec.teams is not None and len(set(spec.teams)) > 1:
        raise OptionError(
            f"{program} learns one value for all agents together, but {spec.name or 'the data'} "
            f"has {len(set(spec.teams))} teams with rewards of their own (teams {spec.teams}): use "
            "a program whose agents have values of their own, such as mappo, ippo, iql or maddpg "
            "(offline: bc or iql_cql), or let one team learn against a fixed opponent."
        )
