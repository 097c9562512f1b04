"""Makes the embedded model, its reward model and their prompts."""
