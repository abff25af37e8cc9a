"""Temperature, effort and seed: distributions, from the seed and the prompt's id alone."""

from collections import Counter

from drafthead.config.responses import ResponsesConfig
from drafthead.generation.draw import draw_sampling

IDS = [f"{i:016x}" for i in range(2000)]


def settings(**more) -> ResponsesConfig:
    return ResponsesConfig(max_tokens=8, **more)


def test_the_draw_follows_from_seed_and_prompt_alone():
    wide = settings(temperature={0.5: 1, 1.0: 1}, reasoning_efforts=("low", "high"))
    drawn = [draw_sampling(wide, i, 0, greedy=False) for i in IDS]
    assert drawn == [draw_sampling(wide, i, 0, greedy=False) for i in IDS]
    other = wide.model_copy(update={"seed": 1})
    assert drawn != [draw_sampling(other, i, 0, greedy=False) for i in IDS]
    assert len({s.seed for s in drawn}) == len(IDS)


def test_shares_are_the_weights_and_the_draws_are_independent():
    wide = settings(temperature={0.0: 1, 0.7: 3}, reasoning_efforts={"low": 1, "high": 4})
    pairs = Counter((s.temperature, s.effort) for s in (draw_sampling(wide, i, 0, greedy=False) for i in IDS))
    expected = {(t, e): a * b / 20 for t, a in ((0.0, 1), (0.7, 3)) for e, b in (("low", 1), ("high", 4))}
    assert set(pairs) == set(expected)
    for pair, share in expected.items():
        # Four standard deviations of a share over 2,000 draws; the draws are fixed, so this never flickers.
        assert abs(pairs[pair] / len(IDS) - share) < 4 * (share * (1 - share) / len(IDS)) ** 0.5


def test_turns_share_temperature_and_effort_but_not_the_seed():
    wide = settings(temperature={0.5: 1, 1.0: 1}, reasoning_efforts=("low", "medium", "high"))
    first, second = (draw_sampling(wide, IDS[7], turn, greedy=False) for turn in (0, 1))
    assert (first.temperature, first.effort) == (second.temperature, second.effort)
    assert first.seed != second.seed
    assert draw_sampling(wide, IDS[7], 0, greedy=True).temperature == 0.0
