"""The workflow of a new user: pull a zipped vault of stock flashbax, train, compare."""

from pathlib import Path

import pytest

from .conftest import PATH, REPOSITORY, write_card
from .stock import stock_archive

NAME = "lab/classic/xor"


@pytest.fixture
def published(hub, random_data, tmp_path):
    """A vault of random play, as stock writes it."""
    archive = stock_archive(random_data("classic/xor"), "xor", "Random", tmp_path / "stock")
    hub.commit(REPOSITORY, {PATH: archive})
    write_card(hub.cards, name=NAME)
    return hub


@pytest.mark.nightly
def test_pull_train_compare(offmarl, published):
    pulled = offmarl("pull", f"{NAME}/Random", "--json").json
    path = pulled["paths"]["Random"]
    assert "another program, without" in offmarl("show", path).out
    brief = ["--updates", 60, "--seeds", 2, "--eval-every", 60, "--final-episodes", 8]
    for program in ("bc", "maicq"):
        common = ["train", program, "--vault", path, *brief]
        trained = offmarl(*common, "--env", "classic/xor", "--out", f"with/{program}")
        assert trained.code == 0 and "episode return" in trained.out, trained.err
    compared = offmarl("compare", "with/bc", "with/maicq", "--html", "with.html")
    assert compared.code == 0 and "Episode return: xor/Random" in compared.out
    assert offmarl("split", path, "-o", "parts.vlt", "--validation", 0.2).code == 0
    for program in ("bc", "maicq"):
        data = ["--vault", "parts.vlt/train", "--validation", "parts.vlt/validation"]
        trained = offmarl("train", program, *data, *brief, "--env", "none", "--out", program)
        assert trained.code == 0 and "agreement with held-out actions" in trained.out, trained.err
    compared = offmarl("compare", "bc", "maicq", "--html", "without.html")
    assert compared.code == 0, compared.err
    assert "Agreement with held-out actions: parts/train" in compared.out
    assert "policy_loss" in compared.out
    assert "agreement with held-out actions" in Path("without.html").read_text().lower()
    both = offmarl("compare", "bc", "with/bc")
    assert both.code == 1 and "cannot be compared" in both.err
