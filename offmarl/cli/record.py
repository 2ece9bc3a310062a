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
offmarl record --policy RUN ...   record a trained policy, as `--policy --help` says
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
        Environment steps to record in all, rounded up to whole steps of all environments.
    out
        Directory for the vault, which is put in ENV.vlt/NAME.
    name
        What to call the recording; by default as the program that trained the policy.
    env
        Environment to record in; by default the one of the run.
    num_envs
        Environments side by side.
    seed
        Decides everything random in the recording.
    training_seed
        Which of the run's seeds; the first by default.
    greedy
        Always take the best action, rather than draw one as in training.
    program
        File of the program that trained the run, where it is a file of your own. Its code runs.
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
