"""What the invariance tests say about a token that another placement draws: it must name the token and its distance."""

import copy

from tests.edges import Replay, closest, explain_flips
from tests.folders import write_all
from tests.runs import RunOf, load


def test_a_flip_is_explained(tmp_path):
    for more in ([], ["generation.top_k=7", "generation.top_p=0.9", "generation.min_new_tokens=2"]):
        config = load(write_all(tmp_path), "iterations=2", "generation.temperature=0.8", *more)
        run, replay = RunOf(config), Replay(config)
        run.iterations()
        replay.iterations()
        assert replay.responses == run.responses
        assert explain_flips(config, run.responses) == "no token differs"
        distances = [row for iteration in replay.distances for row in iteration.values()]
        assert all(distance > -1e-6 for row in distances for distance in row)
        assert 0 < sum(distance < 0.01 for row in distances for distance in row) < sum(map(len, distances)) / 2
        assert closest(config) == [min(map(min, rows.values())) for rows in replay.distances]

        flipped = copy.deepcopy(run.responses)
        name = next(iter(flipped[1]))
        tokens = flipped[1][name]
        tokens[2:] = [tokens[2] + 1]
        text = explain_flips(config, flipped)
        assert text.count("\n") == 0
        assert f"iteration 1, prompt {name[0]}, sample {name[1]}, position 2: token {tokens[2] - 1} on one rank" in text
        assert f"was {replay.distances[1][name][2]:.1e} from the edge" in text
