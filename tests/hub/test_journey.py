"""The workflow of a new user: pull a zipped vault of stock flashbax, train, compare."""

import io
import zipfile
from pathlib import Path

import pytest

from offmarl import vault
from tests.cli.conftest import offmarl  # noqa: F401  (a fixture)
from tests.vault.test_stock import append_with_stock, to_stock

from .conftest import PATH, REPOSITORY, write_card

NAME = "lab/classic/xor"


@pytest.fixture
def published(hub, random_data, tmp_path):
    """A vault of random play, as stock writes it, with nothing of ours in it."""
    from flashbax.vault import Vault as StockVault

    data = vault.open_vault(random_data("classic/xor"))
    rows = data.transitions(0, data.length)
    one = type(rows)(*(_first_row(field) for field in rows))
    stock = StockVault(
        vault_name="xor.vlt",
        experience_structure=to_stock(one),
        rel_dir=str(tmp_path / "stock"),
        vault_uid="Random",
    )
    append_with_stock(stock, one)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((tmp_path / "stock").rglob("*")):
            archive.write(file, file.relative_to(tmp_path / "stock"))
    hub.commit(REPOSITORY, {PATH: buffer.getvalue()})
    write_card(hub.cards, name=NAME)
    return hub


def _first_row(field):
    return type(field)(*(x[:1] for x in field)) if isinstance(field, tuple) else field[:1]


@pytest.mark.nightly
def test_pull_train_compare(offmarl, published):  # noqa: F811
    pulled = offmarl("pull", f"{NAME}/Random", "--json").json
    path = pulled["paths"]["Random"]
    assert "by another program" in offmarl("show", path).out
    brief = ["--updates", 60, "--seeds", 2, "--evaluate-every", 60, "--final-episodes", 8]
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
