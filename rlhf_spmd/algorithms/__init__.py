"""The algorithms: a workflow that reads like a paper (`ppo`), the tensor math (`ppo_math`), the order (`order`)."""
