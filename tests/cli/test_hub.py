"""The verbs that have to do with the hub."""

import subprocess
from pathlib import Path

import pytest

from tests.hub.conftest import NAME, UIDS, hub  # noqa: F401  (a fixture)

pytestmark = pytest.mark.usefixtures("hub")


def test_pull_look_verify_remove(offmarl):
    planned = offmarl("pull", NAME, "--dry-run")
    assert planned.code == 0 and "601.0 kB" in planned.out
    pulled = offmarl("pull", f"{NAME}/Good")
    assert pulled.code == 0 and "data CC0-1.0" in pulled.out and "nobody" in pulled.out
    again = offmarl("pull", f"{NAME}/Good", "--json").json
    assert again["fetched"] == 0 and again["paths"]["Good"] in pulled.out
    listed = offmarl("cache", "ls", "--json").json["datasets"]
    (name,) = listed
    assert name.startswith(f"{NAME}@") and list(listed[name]["uids"]) == ["Good"]
    for verify in (["cache", "verify", NAME], ["verify", NAME], ["verify", name]):
        assert "4 files are as published" in offmarl(*verify).out
    (Path(listed[name]["uids"]["Good"]) / "d" / "0").write_bytes(b"other")
    damaged = offmarl("verify", NAME)
    assert damaged.code == 1 and "1 of 4 files" in damaged.err
    assert "1 removed" in offmarl("cache", "rm", name).out
    assert "nothing was pulled yet" in offmarl("cache", "ls").out
    assert "nothing was pulled yet" in offmarl("cache", "verify", "--all").out
    assert f"run `offmarl pull {NAME}`" in offmarl("verify", NAME).err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pull"], 2, "Missing"),
        (["pull", "lab/suite/smalll"], 2, "did you mean lab/suite/small"),
        (["pull", f"{NAME}@v9"], 1, "no revision 'v9'"),
        (["cache", "rm", "lab"], 2, "no pulled dataset named 'lab'"),
        (["cache", "rm"], 2, "name the datasets, or say --all"),
        (["push", "nothing.vlt", "--to", "org/x", "--licence", "mit"], 1, "there is no vault at"),
        (["push", "nothing.vlt", "--to", "org/x"], 2, "licence"),
        (["push", "--to", "org/x", "--licence", "mit"], 1, "nothing to push"),
    ],
)
def test_mistakes(offmarl, arguments, code, message):
    outcome = offmarl(*arguments)
    assert outcome.code == code and message in outcome.err and "Traceback" not in outcome.err
    assert code == 2 or outcome.err.count("\n") == 1


def test_ls_remote(offmarl):
    found = offmarl("ls", "--remote", "--env", "suite/small", "--agents", 2, "--json").json[
        "datasets"
    ]
    assert [one["name"] for one in found] == [NAME] and tuple(found[0]["uids"]) == UIDS
    assert "no dataset of the catalogue" in offmarl("ls", "--remote", "--agents", 3).out


def test_doctor(offmarl, hub):  # noqa: F811
    facts = offmarl("doctor", "--json").json
    assert facts["hub"] == {hub.url: "answers"}
    assert facts["devices"] == ["cpu (cpu)"] and facts["jax"] != "missing"
    assert "python" in offmarl("doctor").out


def test_completion(offmarl, tmp_path):
    script = tmp_path / "offmarl.bash"
    script.write_text(offmarl("completion", "bash").out)

    def complete(*words):
        line = f"source {script}; COMP_WORDS=(offmarl {' '.join(words)}); "
        line += f"COMP_CWORD={len(words)}; _tyro_offmarl; printf '%s\\n' ${{#COMPREPLY[*]}} "
        line += '"${COMPREPLY[@]}"; complete -p offmarl | grep -q "o default"'
        ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        count, *found = ended.stdout.split()
        assert int(count) == len(found)
        return found

    assert complete("pu") == ["pull", "push"]
    assert "--vault" in complete("train", "maicq", "--va")
    assert sorted(complete("recode", "A.vlt", "--codec", "''")) == ["raw", "zstd"]
    assert complete("show", "vau") == complete("cat", "A.vlt", "-o", "vau") == []  # bash's own
    zsh = offmarl("completion", "zsh").out
    assert zsh.startswith("#compdef offmarl") and '[[ -z "$completions" ||' in zsh
