"""Adapters (LoRA) as files: peft's folders, and merging them into whole models."""
