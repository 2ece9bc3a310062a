"""A program that learns nothing, with the policy of a `PolicyConfig`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from offmarl import programs
from offmarl.networks import AgentId, PolicyConfig, init_policy, make_policy


@dataclass(frozen=True)
class Args(programs.Args):
    """A policy."""

    kind: str = "feedforward"
    """As in `PolicyConfig`, like the others."""
    head: str = "softmax"
    hidden: int = 64
    agent_id: AgentId = "onehot"


def make(spec, args, dataset):
    """Build the program."""
    config = PolicyConfig(args.kind, args.head, args.hidden, args.agent_id)

    def init(key, hyper):
        return init_policy(config, spec, key)

    def update(params, batch, key, hyper):
        return params, {}

    return programs.Program(
        init,
        (programs.Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda params: params,
    )


def main(args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)
