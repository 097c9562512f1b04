"""The first minutes on a GPU: what is checked and measured there, in order."""
