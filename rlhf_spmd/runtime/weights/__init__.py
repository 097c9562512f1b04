"""The weights of a rank: models in training, copies, and how weights move between layouts."""
