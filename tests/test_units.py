"""Sizes are read to the last whole byte, and what can be read in two ways is refused."""

import pytest
from hypothesis import given, strategies as st

from residency._errors import InvalidArgumentError, ResidencyError
from residency._units import format_bytes, format_figure, parse_bytes, spell_bytes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096B", 4096),
        ("0", 0),
        ("0.0", 0),
        ("512 B", 512),
        ("1KiB", 2**10),
        ("512MiB", 512 * 2**20),
        (" 1.5 GiB ", 3 * 2**29),
        ("2TiB", 2**41),
        ("0.5KiB", 512),
        ("22.3GiB", 223 * 2**30 // 10),
        ("0.001KiB", 1),
        (f"{2**53 + 1}.0B", 2**53 + 1),
    ],
)
def test_a_size_is_read(size: int | str, num_bytes: int) -> None:
    assert parse_bytes(size) == num_bytes


@pytest.mark.parametrize(
    "size",
    [
        "",
        "MiB",
        "1 GB",
        "24",
        "0.5",
        "4096",
        "1g",
        "1mib",
        "-1MiB",
        "1e3",
        "1,5GiB",
        "0.3B",
        "1.5B",
        "0.0009KiB",
        "1 2",
        "1MiBs",
        "nan",
        "inf",
    ],
)
def test_a_size_that_could_be_misread_is_refused(size: str) -> None:
    with pytest.raises(InvalidArgumentError, match="bucket is"):
        parse_bytes(size, name="bucket")


@pytest.mark.parametrize(
    ("size", "hint"),
    [
        ("24GB", " Did you mean '24GiB'?"),
        ("24g", " Did you mean '24GiB'?"),
        ("24", " Did you mean '24GiB' or '24B'?"),
        ("8589934592", " Did you mean '8589934592B'?"),
        ("24 parsecs", ""),
    ],
)
def test_what_may_have_been_meant_is_named(size: str, hint: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_bytes(size)
    assert str(caught.value).partition("such as '512MiB'.")[2] == hint


@pytest.mark.parametrize("size", [None, 1.5, True, b"1MiB", [1]])
def test_something_that_is_no_size_is_refused_with_its_type(size: object) -> None:
    with pytest.raises(InvalidArgumentError, match=type(size).__name__):
        parse_bytes(size)  # type: ignore[arg-type]


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be negative"):
        parse_bytes(-1)


def test_a_refusal_is_a_value_error_and_one_of_ours() -> None:
    assert issubclass(InvalidArgumentError, ValueError)
    assert issubclass(InvalidArgumentError, ResidencyError)


@given(st.integers(min_value=0, max_value=2**60))
def test_whole_numbers_of_bytes_survive_both_ways_of_writing(num_bytes: int) -> None:
    assert parse_bytes(num_bytes) == parse_bytes(f"{num_bytes}B") == num_bytes


@given(st.integers(min_value=0, max_value=2**30), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_a_unit_multiplies_exactly(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count * parse_bytes(f"1{unit}")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**10, "1.00 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (-2 * 2**30, "-2.00 GiB"),
        (5 * 2**40, "5.00 TiB"),
    ],
)
def test_a_size_is_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**44))
def test_what_is_written_can_be_read_again_within_its_precision(num_bytes: int) -> None:
    written = format_bytes(num_bytes)
    precision = parse_bytes(f"1{written.split()[1]}") / 100
    assert abs(parse_bytes(written) - num_bytes) <= precision


@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_that_is_spelled_is_read_again_as_it_was(num_bytes: int) -> None:
    assert parse_bytes(spell_bytes(num_bytes)) == num_bytes
    assert spell_bytes(3 * 2**19) == "1536KiB"


@pytest.mark.parametrize(
    ("name", "figure", "text"),
    [
        ("home_bytes", 3 * 2**19, "1.50 MiB"),
        ("to_host_bytes_per_second", 2.0**31, "2.00 GiB/s"),
        ("exposed_seconds", 0.0005, "0.500 ms"),
        ("write_seconds", 12.345, "12.35 s"),
        ("num_steps", 7, "7"),
        ("exposed_seconds", None, "-"),
    ],
)
def test_a_figure_has_the_unit_of_its_name(name: str, figure: float | None, text: str) -> None:
    assert format_figure(name, figure) == text
