"""What people read of an evaluation by one reward function, and by several."""

from rlhf_spmd.runtime.records.evaluation_text import titled, told


def test_people_see_which_number_is_of_what():
    """8.3% of right answers were shown as mean@1 0.2833."""
    texts = {"mean@1": "0.2833", "right/mean@1": "0.0833", "right/pass@1": "0.0833", "form/mean@1": "1"}
    assert told(texts) == "mean@1 right 0.0833, form 1 (weighted sum 0.2833), pass@1 right 0.0833, form none"
    assert titled(texts | {"mean@1/x": "0.2", "right/mean@1/x": "0"} | {"iteration": 1}).keys() == {
        *("mean@1 (weighted sum)", "right/mean@1", "right/pass@1", "form/mean@1"),
        *("mean@1/x (weighted sum)", "right/mean@1/x", "iteration"),
    }
    one = {"mean@1": "0.5", "pass@1": "0.5", "mean@1/x": "0.2"}
    assert titled(one) == one, "a single function is the score"
    assert told({"mean@1": "0.5", "pass@1": "0.5"}) == "mean@1 0.5, pass@1 0.5"
    assert told({"loss": "1 -> 2", "accuracy": "3 -> 4"}) == "loss 1 -> 2, accuracy 3 -> 4"
