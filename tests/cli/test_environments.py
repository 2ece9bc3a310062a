import pytest


def test_environments_are_listed_with_their_traits(offmarl):
    done = offmarl("envs", "--json")
    listed = done.json["environments"]
    tag = listed["jaxmarl/mpe/simple_tag_v3"]
    assert (tag["agents"], tag["traits"], tag["extra"]) == (
        "any",
        ["adversarial", "heterogeneous"],
        "envs",
    )
    assert listed["swarm/coverage-N"]["state"] == "native"
    text = offmarl("envs").out
    assert "jaxmarl/mpe/simple_speaker_listener_v4" in text
    assert "pip install 'offmarl[envs]'" in text.replace("\n", " ")


def test_a_part_of_the_list(offmarl):
    assert "one of: 2s3z, 3m" in offmarl("envs", "jaxmarl/smax/MAP").out
    listed = offmarl("envs", "probe/", "--json").json["environments"]
    assert len(listed) == 5


def test_one_environment_is_described_and_measured(offmarl):
    done = offmarl("envs", "classic/xor:time_limit=7", "--seconds", "0", "--json")
    data = done.json
    assert data["spec"]["time_limit"] == 7
    assert data["about"]["summary"].startswith("a matrix game")
    assert data["steps_per_second"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [("classic/xro", "did you mean classic/xor"), ("swarm/coverage-N", "whole number")],
)
def test_an_environment_that_is_not_there(offmarl, name, message):
    done = offmarl("envs", name)
    assert done.code == 2
    assert message in done.err
