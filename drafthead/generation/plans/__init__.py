"""What answers and states will take, before anything is spent."""
