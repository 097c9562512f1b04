"""What calls compute on a rank, besides those that train (optimizer_step.py): generate, infer, compute."""
