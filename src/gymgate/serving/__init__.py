"""Policy servers that gymgate starts: their commands, the nodes they run on, and who looks after them."""
