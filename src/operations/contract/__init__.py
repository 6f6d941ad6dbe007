"""What an operation is: its function, its result, its call, and who may call it."""
