"""Pages of users: algorithms of one file each, which no other file of the program mentions."""
