"""Plans: what a file asks for, and what is wrong with it."""

import pytest

from offmarl.benchmark import read_plan, require_fit
from offmarl.benchmark.plan import PLANS
from offmarl.benchmark.tasks import preparation, record_vaults, recorded_vaults
from offmarl.errors import OptionError, UnknownNameError

PLAN = """
name = "small"
[training]
seeds = 3
updates = 20
[record.coverage]
program = "random"
env = "swarm/coverage-3"
[datasets]
"coverage random" = { record = "coverage", tier = "random" }
"mine" = { vault = "a.vlt", env = "none", updates = 30 }
"3m good" = "og_marl/smac_v1/3m/Good"
[baselines]
bc = {}
"deep bc" = { program = "bc", layers = 3, updates = 40, datasets = ["mine"] }
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return file


def test_cells_are_baselines_on_datasets_with_the_options_of_both(path, tmp_path):
    plan = read_plan(path, tmp_path / "out")
    options = {cell.label: dict(cell.options) for cell in plan.cells}
    assert options == {
        "bc on coverage random": {"seeds": 3, "updates": 20},
        "bc on mine": {"seeds": 3, "updates": 30, "env": "none"},
        "deep bc on mine": {"seeds": 3, "updates": 40, "env": "none", "layers": 3},
        "bc on 3m good": {"seeds": 3, "updates": 20},
    }
    assert [cell.slug for cell in plan.cells][2] == "mine--deep_bc"
    assert plan.out == tmp_path / "out" and plan.name == "small"
    assert read_plan(path).out.parts[-2:] == ("runs", "small")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("[training]", "[trainig]", "did you mean training"),
        ("updates = 20", "update = 20", r"bc on coverage random.*did you mean updates"),
        ("seeds = 3", "seeds = 0", "seeds must be at least 1"),
        ("seeds = 3", 'vault = "x"', "vault is set by the benchmark"),
        ('record = "coverage"', 'record = "cover"', "did you mean coverage"),
        (', tier = "random"', "", r'{ record = "RECIPE", tier = "medium" }'),
        ('program = "random"', "", "names no recorder"),
        ('datasets = ["mine"]', 'datasets = ["min"]', "did you mean mine"),
        ("bc = {}", "bc = 3", "must be a table"),
        ('datasets = ["mine"]', 'datasets = "mine"', "datasets cannot be"),
        ("[datasets]", "[datasets]\nx = 3", "must be the path or name of a vault.*not 3"),
        *(
            ('name = "small"', f"name = {name!r}", "name must be a text without slashes")
            for name in ("../x", "..", "/", ".", " ", "...", "a\\\\b", "")
        ),
        ('name = "small"', "name = 3", "name cannot be 3"),
        ('name = "small"', "out = 3", "out cannot be 3"),
        ('name = "small"', 'out = ["a"]', r"out cannot be \['a'\]"),
        ('name = "small"', 'out = "a\\u0000b"', "cannot be a path"),
        ('program = "random"', "program = 3", r"record.coverage.*program cannot be 3"),
        ('program = "bc"', "program = [1]", r"deep bc.*program cannot be \[1\]"),
        ('datasets = ["mine"]', "datasets = [[1]]", "datasets cannot be"),
        ("updates = 30", 'partners = "a"', "mine.*partners cannot be 'a'"),
        ('"deep bc"', '"deep/bc" = { program = "bc" }\n"deep bc"', "two names become the file"),
        ("[datasets]", '[datasets]\n"a b" = "a.vlt"\n"a_b" = "b.vlt"', "become the file a_b"),
        ("[datasets]", "[datasets", "is not valid TOML"),
        ('tier = "random"', "tier = 5", "coverage random.*tier cannot be 5"),
        ('vault = "a.vlt"', "vault = 5", "mine.*vault cannot be 5"),
        ('program = "random"', 'program = "mappo"\nseeds = 2', "seeds = 2 makes as many vaults"),
        ('env = "swarm/coverage-3"', "envs = 3", r"record.coverage.*did you mean env"),
    ],
)
def test_what_is_wrong_is_named(path, before, after, message):
    path.write_text(PLAN.replace(before, after, 1))
    with pytest.raises(OptionError, match=message.replace("{", r"\{")):
        read_plan(path)


def test_unknown_programs_are_named(path):
    path.write_text(PLAN.replace("bc = {}", "bcc = {}"))
    with pytest.raises(UnknownNameError, match="did you mean bc"):
        read_plan(path)


@pytest.mark.parametrize("name", sorted(path.stem for path in PLANS.glob("*.toml")))
def test_plans_that_come_with_offmarl_are_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()  # a directory does not hide it
    plan = read_plan(name)
    assert plan.name == name and len(plan.cells) >= 9
    (tmp_path / name).rmdir()
    (tmp_path / name).write_text(PLAN)
    assert read_plan(name).name == "small"  # a file takes precedence


MIXED = "mixed=medium:0.5+expert:0.5"


@pytest.mark.parametrize(
    ("tiers", "tier", "message"),
    [
        ("", "medum", "coverage random.*did you mean medium"),
        ("", "medium,expert", "a dataset of each tier of 'medium,expert'"),
        ("", "mixed=medium:0.5+expert", "is not a mixture"),
        ('tiers = "random,expert"', "medium", "has tiers = 'random,expert', without"),
        (f'tiers = "{MIXED}"', "mixed=medium:1+expert:2", "without mixed=medium:1"),
    ],
)
def test_a_tier_that_the_recipe_does_not_record_is_named(path, tiers, tier, message):
    content = PLAN.replace('program = "random"', f'program = "mappo"\n{tiers}')
    path.write_text(content.replace('tier = "random"', f'tier = "{tier}"'))
    with pytest.raises(OptionError, match=message):
        read_plan(path)


def test_a_mixture_of_the_recipe_may_be_named_without_its_shares(path):
    content = PLAN.replace('program = "random"', f'program = "mappo"\ntiers = "random,{MIXED}"')
    path.write_text(content.replace('tier = "random"', 'tier = "mixed"'))
    assert read_plan(path).datasets["coverage random"].tier == "mixed"


def test_a_vault_that_an_unfinished_cell_needs_and_that_is_not_there_is_named(
    path, monkeypatch, capsys
):
    monkeypatch.setenv("OFFMARL_QUIET", "0")
    require_fit(read_plan(path))
    err = capsys.readouterr().err
    assert "mine will fail: " in err and "there is no vault at" in err
    path.write_text(PLAN.replace('"mine" = { vault = "a.vlt"', '"mine" = { vault = "s3://a/b.vlt"'))
    require_fit(read_plan(path))
    assert not capsys.readouterr().err  # looked up when it is due


def test_an_environment_that_there_is_not_is_found_before_anything_runs(path):
    path.write_text(PLAN.replace('env = "swarm/coverage-3"', 'env = "swarm/covrage-3"'))
    with pytest.raises(UnknownNameError, match="did you mean"):
        require_fit(read_plan(path))


def test_a_baseline_for_other_data_is_found_before_anything_runs(path, random_data):
    both = PLAN + "maicq = {}\n"
    path.write_text(both)
    require_fit(read_plan(path))  # of the vault that is not there, nothing is known
    recorded = both.replace("coverage-3", "coverage-3:action=continuous")
    local = both.replace("a.vlt", str(random_data("swarm/coverage-2:action=continuous")))
    for content, label in ((recorded, "coverage random"), (local, "mine")):
        path.write_text(content)
        message = f"maicq on {label}: .* needs discrete ones.* maicq a list of `datasets`"
        with pytest.raises(OptionError, match=message):
            require_fit(read_plan(path))
    path.write_text(PLAN.replace("bc = {}", "cfcql = { behaviour_updates = 30 }"))
    with pytest.raises(
        OptionError,
        match="cfcql on coverage random: --updates 20 is 20 updates",
    ):
        require_fit(read_plan(path))


def test_all_faults_of_a_plan_are_named_together(path, random_data):
    local = str(random_data("swarm/coverage-2:action=continuous"))
    content = PLAN.replace("a.vlt", local).replace("swarm/coverage-3", "swarm/covrage-3")
    path.write_text(content + "maicq = {}\n")
    with pytest.raises(UnknownNameError) as raised:
        require_fit(read_plan(path))
    first, *others = str(raised.value).splitlines()
    assert "covrage-3" in first and ["maicq on mine" in text for text in others] == [True]


def test_data_of_several_teams_is_found_before_anything_runs(path):
    path.write_text(PLAN.replace("swarm/coverage-3", "swarm/pursuit-2-1:evaders=learned"))
    with pytest.raises(OptionError, match="coverage random has a return for each team, and no"):
        require_fit(read_plan(path))


def test_a_mixture_is_found_among_the_vaults_of_its_recipe(path):
    content = PLAN.replace('program = "random"', 'program = "mappo"')
    path.write_text(content.replace('tier = "random"', f'tier = "{MIXED}"'))
    plan = read_plan(path)
    job = preparation(plan, plan.datasets["coverage random"])
    assert job.source.options["tiers"] == MIXED
    vault = path.parent / "mixed"
    vault.mkdir()
    record_vaults(job, [("medium", "medium"), ("mixed", str(vault))])
    assert recorded_vaults(job) == {"coverage random": str(vault)}


def test_a_missing_plan_names_those_that_come_with_offmarl():
    with pytest.raises(OptionError, match=r"no benchmark file sx: .*first-hour, full, six"):
        read_plan("sx")
