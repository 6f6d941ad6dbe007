"""Workers: running the calls of other processes."""
