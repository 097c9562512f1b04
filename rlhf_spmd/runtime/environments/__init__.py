"""Episodes of several turns: tools and environments of the user, their processes and answers."""
