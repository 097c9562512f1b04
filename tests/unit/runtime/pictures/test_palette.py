"""Colours differ where their meanings do."""

from itertools import combinations

import pytest

from rlhf_spmd.runtime.pictures import palette


def apart(one: str, other: str) -> float:
    """Returns how far two colours are from each other, from 0 to 3."""
    pairs = [(int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return sum(abs(a - b) for a, b in pairs) / 255


@pytest.mark.parametrize("name", ["MODELS", "STRATEGIES", "SYSTEMS", "RANKS", "RUNS"])
def test_colours_of_a_palette_differ(name):
    assert min(apart(*pair) for pair in combinations(getattr(palette, name), 2)) > 0.2


def test_shades_of_a_model_differ_and_so_does_what_is_no_call():
    def brightness(colour: str) -> int:
        return sum(int(colour[i : i + 2], 16) for i in (1, 3, 5))

    for hue in palette.MODELS:
        shades = [palette.shade(hue, kind) for kind in ("train", "generate", "infer")]
        assert sorted(shades, key=brightness) == shades
        assert min(apart(*pair) for pair in combinations([*shades, palette.IDLE, palette.INK], 2)) > 0.25
    styles = (palette.WAITING, palette.IDLE_STYLE, palette.CONTROL, palette.TRANSFER)
    assert len({style.colour for style in styles}) == len({style.label for style in styles}) == 4
    assert palette.WAITING.hatch and not any(style.hatch for style in styles[1:])


def test_each_run_has_its_colour():
    assert len(set(palette.run_colours(40))) == 40 and palette.run_colours(2) == list(palette.RUNS[:2])
