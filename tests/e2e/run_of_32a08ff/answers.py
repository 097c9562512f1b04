"""The reward function of the run."""


def score(prompts, responses, answer):
    return [float(one in response) + len(response) / 50 for response, one in zip(responses, answer, strict=True)]
