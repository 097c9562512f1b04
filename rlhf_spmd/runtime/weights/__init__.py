"""The weights of a rank: models in training, frozen copies, and reallocation between layouts."""
