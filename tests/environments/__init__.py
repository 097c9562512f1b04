"""Environments as users of several programs write them, with stand-ins for what they import of these programs."""
