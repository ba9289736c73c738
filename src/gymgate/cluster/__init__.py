"""Policy servers that gymgate starts: their commands, the nodes they run on, and the supervisor that keeps them up."""
