"""``offmarl record``."""

from pathlib import Path

from offmarl.cli import programs
from offmarl.cli.data import show
from offmarl.cli.output import Report

_USAGE = """\
offmarl record NAME ...            train agents online, and record them at several tiers
offmarl record --policy RUN ...    record a policy that is trained; `--policy RUN --help` says more
"""


def record(arguments: list[str]) -> Report:
    """Run a recorder by name, or record a trained policy."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return programs.overview("recorder", _USAGE)
    if arguments[0].startswith("-"):
        import tyro

        report: Report = tyro.cli(record_policy, prog="offmarl record", args=arguments)
        return report
    name, *rest = arguments
    recorded = programs.run("recorder", name, rest)
    return Report(recorded.data, recorded.view)


def record_policy(
    policy: Path,
    steps: int,
    out: Path = Path("vaults"),
    name: str | None = None,
    env: str | None = None,
    num_envs: int = 64,
    seed: int = 0,
    training_seed: int | None = None,
    sample: bool = False,
) -> Report:
    """Record a policy that is trained; a recording that was stopped goes on.

    Parameters
    ----------
    policy
        Directory of the run that trained it.
    steps
        Environment steps to record in all.
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
    sample
        Draw actions as in training, rather than always take the best.
    """
    from offmarl import envs, evaluation, recording

    loaded = evaluation.load_policy(policy, training_seed, greedy=not sample)
    environment = envs.make(env or loaded.spec.name)
    path = out / f"{environment.spec.name}.vlt" / (name or loaded.name)
    provenance = {"program": loaded.name, "run": policy, "training_seed": training_seed}
    recording.record_policy(
        environment, loaded.policy, loaded.params, path, steps, num_envs, seed, provenance
    )
    return show(path)
