"""The text is the same every time, and what is held out is never trained on."""

from pathlib import Path

import pytest
import torch

from residency._demo._corpus import heldout_batch, read_corpus, training_batch
from residency._errors import RefusedError


def write_files(root: Path, *, num_files: int) -> None:
    # In reverse, so that the order of creation cannot be the order of reading.
    for index in reversed(range(num_files)):
        path = root / f"package_{index % 3}" / f"file_{index:02}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([index]) * 50)


def test_the_standard_library_gives_the_same_text_twice() -> None:
    one, other = read_corpus(), read_corpus()
    assert one.train_files == other.train_files
    assert torch.equal(one.train, other.train)
    assert torch.equal(one.heldout, other.heldout)


def test_no_file_is_both_trained_on_and_held_out() -> None:
    corpus = read_corpus()
    assert corpus.train_files
    assert corpus.heldout_files
    assert not set(corpus.train_files) & set(corpus.heldout_files)


def test_files_are_read_in_the_order_of_their_paths(tmp_path: Path) -> None:
    write_files(tmp_path, num_files=25)
    corpus = read_corpus(tmp_path)
    every = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py"))
    assert list(corpus.heldout_files) == every[9::10]
    assert list(corpus.train_files) == [file for file in every if file not in every[9::10]]


def test_reading_stops_at_the_size_asked_for(tmp_path: Path) -> None:
    write_files(tmp_path, num_files=25)
    corpus = read_corpus(tmp_path, max_bytes=600)
    assert corpus.train.numel() + corpus.heldout.numel() == 600


def test_installed_packages_and_empty_files_are_left_out(tmp_path: Path) -> None:
    write_files(tmp_path, num_files=20)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x")
    (tmp_path / "empty.py").touch()
    corpus = read_corpus(tmp_path)
    assert len(corpus.train_files) + len(corpus.heldout_files) == 20


def test_too_little_text_is_refused_with_the_directory(tmp_path: Path) -> None:
    write_files(tmp_path, num_files=5)
    with pytest.raises(RefusedError, match="has 5 text files"):
        read_corpus(tmp_path)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    corpus = read_corpus()

    def batch(seed: int, step: int) -> torch.Tensor:
        return training_batch(corpus, seed=seed, step=step, rows=2, columns=16)

    assert batch(0, 1).shape == (2, 16)
    assert batch(0, 1).dtype == torch.int64
    assert torch.equal(batch(0, 1), batch(0, 1))
    assert not torch.equal(batch(0, 1), batch(0, 2))
    assert not torch.equal(batch(0, 1), batch(1, 1))


def test_text_shorter_than_a_row_still_fills_it(tmp_path: Path) -> None:
    write_files(tmp_path, num_files=10)
    corpus = read_corpus(tmp_path)
    assert heldout_batch(corpus, rows=3, columns=200).shape == (3, 200)
    assert training_batch(corpus, seed=0, step=1, rows=3, columns=999).shape == (3, 999)
