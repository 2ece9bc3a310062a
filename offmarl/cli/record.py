"""``offmarl record``."""

from pathlib import Path

from offmarl.cli import programs as runner
from offmarl.cli.data import show
from offmarl.cli.output import Report, records
from offmarl.cli.parse import parse
from offmarl.paths import below
from offmarl.tracking import read_run

_USAGE = """\
offmarl record NAME ...           train agents online and record them
offmarl record --policy RUN ...   record a trained policy; see `offmarl record --policy --help`
"""


def record(arguments: list[str]) -> Report:
    """Train agents online and record them at several tiers, or record a trained policy."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return runner.overview("recorder", _USAGE)
    if arguments[0].startswith("-"):
        helped = {"-h", "--help"}.intersection(arguments)
        asked = ["--help"] if helped else arguments  # `--policy --help` is no policy
        return parse(record_policy, "record", "Record a trained policy.", asked)
    name, *rest = arguments
    recorded = runner.run("recorder", name, rest)
    title = "{run}: {outcome}".format(**recorded.data)
    return Report(recorded.data, records(recorded.data["vaults"], title))


def record_policy(
    policy: Path,
    steps: int,
    out: Path = Path("vaults"),
    name: str | None = None,
    env: str | None = None,
    num_envs: int = 64,
    seed: int = 0,
    training_seed: int | None = None,
    greedy: bool = False,
    program: Path | None = None,
) -> Report:
    """Record a trained policy; the same command resumes a recording that was stopped.

    Parameters
    ----------
    policy
        Directory of the run that trained it.
    steps
        Total number of environment steps to record, rounded up to a multiple of --num-envs.
    out
        Directory for the vault ENV.vlt/NAME.
    name
        Name of the recording; by default that of the program that trained the policy.
    env
        Environment to record in; by default the one of the run.
    num_envs
        Number of environments that run side by side.
    seed
        Random seed of the recording.
    training_seed
        The training seed whose policy is recorded; by default the run's first.
    greedy
        Take the best action instead of drawing one from the policy.
    program
        Python file of the program that trained the run, if the program is not one of offmarl's. The
        file's code is run.
    """
    from offmarl import programs
    from offmarl.cli.policies import make_environment

    trained = read_run(policy)["seeds"][0] if training_seed is None else training_seed
    loaded = programs.load_policy(policy, trained, greedy, program)
    environment = make_environment(env, loaded)
    named = below(f"{environment.spec.name}.vlt", option="--env")
    path = out / named / (name or below(loaded.name, option="--name"))
    origin = {"program": loaded.name, "run": str(policy), "training_seed": trained}
    programs.record_policy(
        environment, loaded.policy, loaded.params, path, steps, num_envs, seed, {"policy": origin}
    )
    return show(str(path))
