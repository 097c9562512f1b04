"""Episodes of several turns: tools and environments of the user, their processes, answers and journal."""
