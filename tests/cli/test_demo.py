"""The demo, in a smaller version."""

import pytest

from offmarl.cli import demo
from offmarl.programs.recording.tiers import Ladder


@pytest.mark.slow
def test_the_demo_goes_all_the_way(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_ENV", "swarm/coverage-2:time_limit=6")
    sizes = {"num_envs": 4, "num_steps": 6, "hidden": 8, "total_steps": 480, "steps": 240}
    monkeypatch.setattr(demo, "_RECORDER", sizes | {"evaluations": 4, "eval_episodes": 8})
    monkeypatch.setattr(Ladder, "check", lambda *_: None)  # so few steps need not be enough
    small = {"batch_size": 4, "length": 5, "final_episodes": 4, "eval_episodes": 4, "hidden": 8}
    monkeypatch.setattr(demo, "_BASELINE", small)
    monkeypatch.setattr(demo, "_BASELINES", {"bc": {"updates": 20}})
    report = demo.demo(tmp_path, seeds=2)
    assert list(report.data["recorded"]) == ["random", "medium", "expert", "replay"]
    assert {tier: list(rows) for tier, rows in report.data["trained"].items()} == {
        "medium": ["bc (greedy)", "bc (sampled)"],
        "expert": ["bc (greedy)", "bc (sampled)"],
    }
    assert report.data["trained"]["medium"]["bc (greedy)"]["low"] is None  # of two seeds
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert report.data["film"] == tmp_path / "demo.gif"
    assert (tmp_path / "demo.gif").read_bytes().startswith(b"GIF89a")
    page = (tmp_path / "demo.html").read_text()
    assert page.count("data:image/gif;base64,") == 1 and 'src="http' not in page
    again = demo.demo(tmp_path, seeds=2)  # everything is there already
    assert again.data == report.data
