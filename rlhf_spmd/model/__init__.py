"""The language model: one Llama-family definition for training and generation; Hugging Face folders."""
