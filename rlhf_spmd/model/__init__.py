"""The language model: one Llama-family definition for training and generation, and Hugging Face folders in and out."""
