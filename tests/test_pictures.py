"""The pictures of the README: each is what its command draws, and says the figures in bytes."""

import re
from pathlib import Path

from benchmarks.picture import Transition, card_picture, draw_transitions, panels

from residency._units import MIB

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


def test_the_picture_of_a_card_is_drawn_from_the_report() -> None:
    assert (IMAGES / "card.svg").read_text() == card_picture(None)


def test_a_panel_has_the_figure_of_its_row() -> None:
    report = """
| fp32, stock, fused / foreach, state on the device | 9.1 / 24.3 | - |
| fp32, `offload_optimizer`, foreach, 3 x 128 MiB | 174.5 | 1.03 | 448 MiB |
| a serial swap, parameter by parameter | 334.4 | 1.97 |
| torchao 0.18 `CPUOffloadOptimizer` | 364.7 | 2.15 |
| a step on the host, 16 threads | 431.6 | 2.5 |
| `Checkpointer.save`, after `prepare` | 0 | 72 to 104 ms | at once |
| `dcp.async_save` with its pinned stager | 0 | 188 ms | after 2,267 ms |
| `.cpu()` in the call | 0 | 4,591 ms | |
| `get_state_dict`, `dcp.load` | 6,228 MiB | 4,548 MiB |
| `TrainState` | 0 | 0 |
| after that | 51.0, 93 % of the link | 53.1, 96 % |
| `.cpu()`, `.to(device)` | 1.5 | 6.2 |
"""
    step, save, resume, park = ([size for *_, size in panel.bars] for panel in panels(report))
    assert step == [174.5, 334.4, 364.7, 431.6, 24.3]
    assert save == [104, 2267, 4591]
    assert resume == [0, 6228]
    assert park == [51.0, 1.5]


def test_a_column_of_a_transition_ends_above_the_line_only_if_it_does_not_fit() -> None:
    each = Transition(("resume", "from a save"), 42 * MIB, 93 * MIB, 40 * MIB)
    drawn = draw_transitions([each], "a card")
    (line,) = re.findall(r"<line class='card'[^>]* y1='([\d.]+)'", drawn)
    stock, ours = (
        float(re.findall(rf"<rect class='{name}' x='[\d.]+' y='([\d.]+)' width='54'", drawn)[0])
        for name in ("stock", "ours")
    )
    assert stock < float(line) < ours
    for text in (">93.0<", ">40.0<", "of 42.0 MiB", "from a save"):
        assert text in drawn


def test_a_run_that_the_capacity_ended_takes_more_than_the_capacity() -> None:
    each = Transition(("saves",), 42 * MIB, 45 * MIB, 40 * MIB, is_least=True)
    assert ">&gt; 42.0<" in draw_transitions([each], "a card")


def test_the_picture_of_the_transitions_has_a_pair_of_columns_and_a_capacity_for_each_case() -> (
    None
):
    drawn = (IMAGES / "transitions.svg").read_text()
    capacities = re.findall(r"of ([\d.]+) MiB<", drawn)
    assert len(capacities) == 6
    assert drawn.count("class='inside'") == 6
