"""A second, slow implementation of training on given responses: one row, one token after the other.

It shares no code with rlhf_spmd (and must not). No padding, no masks, no batches, no ranks. Models are functions from a
list of tokens to logits [tokens, vocabulary] or to numbers [tokens].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Model = Callable[[list[int]], Tensor]


@dataclass
class Row:
    prompt: list[int]
    responses: list[list[int]]
    marks: list[int]  # 1 for each token of the only response that is learned
    margin: float = 0.0


def logprobs(model: Model, prompt: list[int], response: list[int]) -> list[Tensor]:
    rows = model(prompt + response)
    return [rows[len(prompt) + t - 1].log_softmax(0)[token] for t, token in enumerate(response)]


def rounded(x: Tensor) -> float:
    """Rounds as the runtime stores the logprobs of a reference."""
    return x.detach().float().item()


def likelihood(model: Model, rows: list[Row]) -> tuple[Tensor, dict[str, float]]:
    losses, right, entropies = [], 0, []
    for row in rows:
        logits = model(row.prompt + row.responses[0])
        for t, (token, mark) in enumerate(zip(row.responses[0], row.marks, strict=True)):
            if mark:
                p = logits[len(row.prompt) + t - 1].softmax(0)
                losses.append(-p[token].log())
                p = p.detach()
                right += int(p.argmax()) == token
                entropies.append(-sum(float(q) * math.log(float(q)) for q in p if q > 0))
    num = len(losses)
    log = {"token_accuracy": right / num, "entropy": sum(entropies) / num, "trained_tokens": num / len(rows)}
    return sum(losses) / num, log


def bradley_terry(
    model: Model, rows: list[Row], *, centering_coef: float, foresight_coef: float
) -> tuple[Tensor, dict[str, float]]:
    losses, differences, scores = [], [], []
    for row in rows:
        outputs = [model(row.prompt + response) for response in row.responses]
        chosen, rejected = (output[-1] for output in outputs)
        losses.append(torch.log(1 + torch.exp(-(chosen - rejected - row.margin))))
        losses[-1] = losses[-1] + centering_coef * (chosen + rejected) ** 2
        for output in outputs:
            earlier = [output[place] for place in range(len(row.prompt) - 1, len(output) - 1)]
            errors = [(value - output[-1].item()) ** 2 for value in earlier]
            losses[-1] = losses[-1] + foresight_coef * sum(errors) / len(errors)
        differences.append((chosen - rejected).item())
        scores += [chosen.item(), rejected.item()]
    log = {
        "accuracy": sum((d > 0) + (d == 0) / 2 for d in differences) / len(rows),
        "margin": sum(differences) / len(rows),
    }
    log |= {"score_mean": sum(scores) / len(scores), "score_min": min(scores), "score_max": max(scores)}
    return sum(losses) / len(rows), log


def preference(
    model: Model,
    reference: Model,
    rows: list[Row],
    *,
    loss: str,
    beta: float,
    label_smoothing: float,
    per_token: bool,
    nll_coef: float,
    target_margin: float,
) -> tuple[Tensor, dict[str, float]]:
    losses, log = [], dict.fromkeys(("accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob"), 0.0)
    for row in rows:
        ours = [logprobs(model, row.prompt, response) for response in row.responses]
        theirs = [[rounded(x) for x in logprobs(reference, row.prompt, response)] for response in row.responses]
        ratios = [sum(a - b for a, b in zip(one, other, strict=True)) for one, other in zip(ours, theirs, strict=True)]
        if loss in ("simpo", "orpo"):
            ratios = [sum(one) / len(one) for one in ours]
        chosen, rejected = (beta * ratio.item() for ratio in ratios)
        log["accuracy"] += ((chosen > rejected) + (chosen == rejected) / 2) / len(rows)
        log["margin"] += (chosen - rejected) / len(rows)
        log["chosen_reward"] += chosen / len(rows)
        log["rejected_reward"] += rejected / len(rows)
        log["chosen_logprob"] += sum(ours[0]).item() / len(rows)
        if per_token:
            ratios = [ratio / len(response) for ratio, response in zip(ratios, row.responses, strict=True)]
        likelihood = sum(ours[0]) / len(ours[0])
        losses.append(pair(*ratios, loss, beta, label_smoothing, target_margin) - nll_coef * likelihood)
    return sum(losses) / len(rows), log


def pair(c: Tensor, r: Tensor, loss: str, beta: float, wrong: float, target_margin: float) -> Tensor:
    sigmoid, log = torch.sigmoid, torch.log
    if loss == "ipo":
        return (c - r - 1 / (2 * beta)) ** 2
    if loss == "hinge":
        return max(1 - beta * (c - r), 0 * c)
    if loss == "apo_zero":
        return (1 - sigmoid(beta * c)) + sigmoid(beta * r)
    if loss == "apo_down":
        return sigmoid(beta * c) + (1 - sigmoid(beta * (c - r)))
    if loss == "simpo":
        return -log(sigmoid(beta * (c - r) - target_margin))
    if loss == "orpo":
        odds = [torch.exp(x) / (1 - torch.exp(x)) for x in (c, r)]
        return -beta * log(sigmoid(log(odds[0] / odds[1])))
    right = sigmoid(beta * (c - r))
    if loss == "robust":
        return (-(1 - wrong) * log(right) + wrong * log(1 - right)) / (1 - 2 * wrong)
    return -(1 - wrong) * log(right) - wrong * log(1 - right)
