"""The demo's command, shortened, under each strategy on four ranks: judged by the timelines that the runs leave."""

import json

import pytest

from rlhf_spmd.runtime.world.trace import Lane, lanes, read_chrome

OPTIONS = ["iterations=2", "num_samples=0"]
ALONE = "strategy.chain=false"  # iterations that end with a meeting
STRATEGIES = ("separation", "flattening", "interleaving1", "interleaving2")


@pytest.fixture(scope="module", params=STRATEGIES)
def timeline(request, warm, tmp_path_factory) -> tuple[str, tuple[Lane, ...]]:
    runs = tmp_path_factory.mktemp("runs")
    own = [ALONE] if request.param == "separation" else []
    words = ["train", "--preset", "tiny", "--strategy", request.param, *OPTIONS, *own, "--runs", str(runs)]
    words += ["--name", "one"]
    status, stdout, stderr = warm.run([*words, "--json"], 4, limit_s=400)
    assert status == 0, stderr
    assert json.loads(stdout.splitlines()[-1])["strategy"] == request.param
    return request.param, lanes(read_chrome(runs / "one" / "timeline.json"))


@pytest.mark.slow
def test_training_begins_while_generation_goes_on(timeline):
    """Under separation rank 0 trains on the first mini-batch before the last one of the same iteration is generated;
    otherwise a training step ends only when all ranks have come to it."""
    strategy, lanes_of_ranks = timeline
    for number in {span.iteration for span in lanes_of_ranks[0].spans}:
        trained = [span for span in lanes_of_ranks[0].spans if (span.name, span.iteration) == ("actor_train", number)]
        spans = [span for lane in lanes_of_ranks for span in lane.spans]
        generated_s = max(s.end_s for s in spans if (s.name, s.iteration) == ("actor_generate", number))
        assert len(trained) == 8  # two epochs of four mini-batches
        if strategy == "separation":
            assert min(span.start_s for span in trained) < generated_s
        else:
            assert min(span.end_s for span in trained) > generated_s


@pytest.mark.slow
def test_generation_goes_on_while_the_critic_trains(warm, tmp_path):
    """In a chain of iterations, by separation; and the actor trains before the last mini-batch is generated."""
    words = ["train", "--preset", "tiny", "--strategy", "separation", *OPTIONS, "strategy.chain=true"]
    status, _, stderr = warm.run([*words, "--runs", str(tmp_path), "--name", "one", "--json"], 4, limit_s=400)
    assert status == 0, stderr
    spans = [span for lane in lanes(read_chrome(tmp_path / "one" / "timeline.json")) for span in lane.spans]
    trained_s = max(span.end_s for span in spans if (span.name, span.iteration) == ("critic_train", 0))
    assert min(s.start_s for s in spans if (s.name, s.iteration) == ("actor_generate", 1)) < trained_s
    generated_s = max(span.end_s for span in spans if (span.name, span.iteration) == ("actor_generate", 0))
    assert min(s.start_s for s in spans if (s.name, s.iteration) == ("actor_train", 0)) < generated_s
