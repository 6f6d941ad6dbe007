"""What happened: the tree of calls, audit lines and logs."""
